"""Does the page of the doctor show the checks that there are, and do the checks read numbers that there are?"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from tables.doctor import doctor_markdown

from oncurve.doctor import grading, groups, lengths, policy_health, throughput, tool_use
from oncurve.doctor.diagnose import CHECKS, check_names
from oncurve.observe.metrics import GLOSSARY
from oncurve.recipe.messages import known_keys

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "doctor_runs.json"


def constants() -> set[str]:
    """Every string in the checks, parts of joined strings included."""
    found: set[str] = set()
    for module in (grading, groups, lengths, policy_health, throughput, tool_use):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        found |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    return found


def test_the_page_is_up_to_date() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else None
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert page == doctor_markdown(results), "run `make docs`"


def test_the_page_has_a_row_with_texts_for_every_check() -> None:
    rows = {
        line.split("|")[1].strip(" `"): line.split(" | ")
        for line in doctor_markdown().splitlines()
        if line[:3] == "| `"
    }
    assert set(rows) == set(check_names())
    for cells in rows.values():
        assert all(len(cell.strip()) > 10 for cell in cells[1:3]), cells


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
    run = {"planted": "p", "overrides": ["a=1"], "correct_before_and_after": [0.1, 0.9]}
    severe = [{"check": "too_easy", "severity": "severe", "what": "w"}]
    results = {
        "runs": [
            {**run, "run": "one", "expected": ["too_easy"], "findings": severe, "is_right": True},
            {**run, "run": "two", "expected": [], "findings": severe, "is_right": False},
        ],
        "run": {"hardware": {"cpu_cores": 2, "cpu": "a CPU"}, "code": {"commit": "0123456789abcdef"}},
    }
    page = doctor_markdown(results)
    assert "in 1 of 1 such runs" in page
    assert "in 0 of 1 healthy ones" in page


def test_all_checks_are_found_in_a_section_of_the_page() -> None:
    modules = {module.__name__ for module in (grading, groups, lengths, policy_health, throughput, tool_use)}
    assert {check.function.__module__ for check in CHECKS} == modules
