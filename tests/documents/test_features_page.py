"""Is every feature still where its page says, and is the test that proves it still there?"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml
from offenders import assert_none, at, line_of

from oncurve.cli.app import app
from oncurve.core.errors import OncurveError
from oncurve.doctor.diagnose import check_names
from oncurve.observe.metrics import explain
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, parse_config

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("features.yaml")
TEXT = TABLE.read_text(encoding="utf-8")
SECTIONS = yaml.safe_load(TEXT)
ROWS: list[dict[str, Any]] = [row for section in SECTIONS for row in section["rows"]]
COUNT = 157
BASE = "{model: embedded, data: {type: word_problems}}"
TOGETHER = (
    ("algorithm.reference=", ["algorithm.kl_coef=0.04"]),
    ("policy.deepspeed=", ["policy.parallel=deepspeed"]),
    ("rollouts.vllm_servers=", ["rollouts.type=servers"]),
    ("rollouts.servers=", ["rollouts.type=servers"]),
)
"""Keys that a recipe takes only beside others."""


def stands(text: str) -> str:
    """Where a text first stands in the table of features."""
    return at(TABLE, line_of(TEXT, TEXT.find(text)))


def places(kind: str) -> list[str]:
    """What a kind of place is named by in the table; at least one."""
    found = (place.partition(" ") for row in ROWS for place in row["where"])
    named = sorted({what for name, _, what in found if name == kind})
    assert named
    return named


def refused(kind: str, take: Callable[[str], object]) -> list[str]:
    """The places of a kind that are not taken, with what was said to it."""
    wrong: list[str] = []
    for name in places(kind):
        try:
            take(name)
        except (OncurveError, AssertionError, ImportError, AttributeError, LookupError) as error:
            said = str(error).splitlines() or [type(error).__name__]
            wrong.append(f"{stands(f'{kind} {name}')} {kind} {name}: {said[0]}")
    return wrong


def test_every_feature_has_its_row_and_every_row_a_place_and_a_test() -> None:
    assert [row["number"] for row in ROWS] == list(range(1, COUNT + 1))
    for row in ROWS:
        assert set(row) <= {"number", "feature", "where", "tests", "note", "is_page"}
        assert row["feature"].strip()
        assert row["where"]
        assert row["tests"]
    kinds = {place.partition(" ")[0] for row in ROWS for place in row["where"]}
    assert kinds <= {"key", "reward", "command", "recipe", "metric", "doctor", "page", "file", "python"}


def test_a_row_is_marked_as_a_page_if_a_document_is_all_that_proves_it() -> None:
    wrong: list[str] = []
    for row in ROWS:
        where = stands(f"- number: {row['number']}\n")
        only_documents = all(test.startswith("documents/") for test in row["tests"])
        if row.get("is_page", False) != only_documents:
            wrong.append(f"{where} is_page should be {only_documents}")
        if only_documents:
            others = [place for place in row["where"] if place.split()[0] not in ("page", "file")]
            wrong += [f"{where} no document can prove: {place}" for place in others]
    assert_none(wrong)


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_test_is_there() -> None:
    tests = sorted({test for row in ROWS for test in row["tests"]})
    assert_none(f"{stands(test)} there is no test {test}" for test in tests if not is_test(test))


def is_test(words: str) -> bool:
    """Whether ``folder/file.py::test_name`` names a test."""
    file, _, name = words.partition("::")
    return name.startswith("test_") and (ROOT / "tests" / file).is_file() and name in functions(file)


def test_every_key_takes_its_value() -> None:
    def take(override: str) -> None:
        with_it = next((words for start, words in TOGETHER if override.startswith(start)), [])
        parse_config(BASE, [override, *(word for word in with_it if not word.startswith(override))])

    assert_none(refused("key", take))


def test_every_reward_takes_its_keys() -> None:
    def take(words: str) -> None:
        kind, *pairs = re.split(r" (?=\w+=)", words)
        given = {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in pairs)}
        reward = {"type": kind, **given}
        beside = [{"type": "r1_zero"}] if reward.get("held_out") else []
        if "rotate_every_steps" in reward:
            beside = [reward | {"name": "other", "answer_from": "boxed"}]
        parse_config(BASE, [f"rewards={json.dumps([reward, *beside])}"])

    assert_none(refused("reward", take))


def test_every_command_has_its_options() -> None:
    def take(words: str) -> None:
        command: Any = typer.main.get_command(app)
        for word in words.split():
            if word.startswith("--"):
                assert word in {name for parameter in command.params for name in parameter.opts}, f"no option {word}"
            else:
                assert word in command.commands, f"no command {word}"
                command = command.commands[word]

    assert_none(refused("command", take))


def test_every_recipe_loads() -> None:
    assert_none(refused("recipe", lambda name: load_config(find_recipe(name))))


def test_every_metric_is_in_the_glossary() -> None:
    assert_none(f"{stands(f'metric {name}')} no metric {name}" for name in places("metric") if explain(name) is None)


def test_every_check_is_one_of_the_doctors() -> None:
    known = check_names()
    assert_none(f"{stands(f'doctor {name}')} no check {name}" for name in places("doctor") if name not in known)


def test_every_function_can_be_imported() -> None:
    def take(name: str) -> None:
        module, _, function = name.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), "cannot be called"

    assert_none(refused("python", take))


def anchors(page: Path) -> Iterator[str]:
    """What links to the titles of a page end in."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def test_every_page_has_its_section() -> None:
    def take(name: str) -> None:
        path, _, anchor = name.partition("#")
        assert (ROOT / path).is_file(), "no such file"
        assert not anchor or anchor in set(anchors(ROOT / path)), "no such section"

    assert_none([*refused("page", take), *refused("file", take)])


def test_the_notebook_is_python_that_uses_what_is_there() -> None:
    cells = json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sources
    commands = [line for source in sources for line in source.splitlines() if re.match(r"\s*[!%]", line)]
    for source in sources:
        ast.parse("\n".join("pass" if re.match(r"\s*[!%]", line) else line for line in source.splitlines()))
    used = {word for line in commands for word in re.findall(r"\boncurve ([a-z]+)\b", line)}
    assert used <= known
