"""Does the page of the doctor show the checks that there are, and do the checks read numbers that there are?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from record import read_result
from tables.doctor import doctor_markdown

from oncurve.doctor import grading, hacking, policy_health, rollouts, throughput
from oncurve.doctor.diagnose import CHECKS, check_names
from oncurve.observe.metrics import GLOSSARY
from oncurve.recipe.messages import known_keys

ROOT = Path(__file__).resolve().parents[2]
RESULTS = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("doctor_runs", "reward_holes")]


def constants() -> set[str]:
    """Every string in the checks, parts of joined strings included."""
    found: set[str] = set()
    for module in (grading, hacking, policy_health, rollouts, throughput):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        found |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    return found


def test_the_page_is_up_to_date() -> None:
    results = (read_result(path, rows="runs") if path.is_file() else None for path in RESULTS)
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert page == doctor_markdown(*results), "run `make docs`"


def test_the_page_has_a_row_with_texts_for_every_check() -> None:
    rows = {
        line.split("|")[1].strip(" `"): line.split(" | ")
        for line in doctor_markdown().splitlines()
        if line[:3] == "| `"
    }
    assert set(rows) == set(check_names())
    for cells in rows.values():
        assert len(cells[1].strip()) > 10, cells


def test_every_metric_that_a_check_reads_is_in_the_glossary() -> None:
    read = {text for text in constants() if re.fullmatch(r"[a-z]+/[a-z_]+", text)}
    assert len(read) > 25
    exact = {metric.key for metric in GLOSSARY}
    assert read <= exact, read - exact


def test_every_setting_that_a_check_reads_or_names_is_a_key_of_recipes() -> None:
    known = set(known_keys()) | {"algorithm.type"}
    sections = r"(?:data|algorithm|rollouts|optimizer|policy|evaluation|run)"
    named = {key for text in constants() for key in re.findall(rf"\b{sections}\.[a-z_]+(?:\.[a-z_]+)?", text)}
    assert len(named) > 20
    assert named <= known, named - known


def test_the_results_are_shown_with_their_counts() -> None:
    runs = [
        {"planted": "p", "is_found": True, "false_alarms": []},
        {"planted": "p", "is_found": False, "false_alarms": ["too_hard"]},
        {"planted": "", "is_found": False, "false_alarms": ["too_hard"]},
    ]
    checks = {
        "too_easy": {"planted": 2, "found": 1, "false_alarms": 0},
        "too_hard": {"planted": 0, "found": 0, "false_alarms": 2},
    }
    page = doctor_markdown({"runs": runs, "checks": checks})
    words = " ".join(page.split())
    assert "3 short runs" in words
    assert "named the fault in 1 of 2." in words
    assert "wrong in 1 of the healthy runs and in 1 of the others" in words
    rows = {line.split("|")[1].strip(" `"): line.split("|")[3:5] for line in page.splitlines() if line[:3] == "| `"}
    assert [cell.strip() for cell in rows["too_easy"]] == ["1 of 2", ""]
    assert [cell.strip() for cell in rows["too_hard"]] == ["", "2"]


def test_all_checks_are_found_in_a_section_of_the_page() -> None:
    modules = {module.__name__ for module in (grading, hacking, policy_health, rollouts, throughput)}
    assert {check.function.__module__ for check in CHECKS} == modules
