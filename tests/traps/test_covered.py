"""Has every known mistake a test that would notice it, wherever that test stands?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from offenders import assert_none, at, line_of

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "traps" / "covered.yaml"
TRAPS: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_mistake_stands_there_once() -> None:
    ids = [trap["id"] for trap in TRAPS]
    assert len(ids) == len(set(ids)) == 57
    assert ids == sorted(ids, key=lambda name: int(name[1:]))


def flaws(trap: dict[str, Any]) -> Iterator[str]:
    """What a row lacks, and the tests that it names and that are not there."""
    if set(trap) not in ({"id", "mistake", "right", "tests"}, {"id", "mistake", "no_program"}):
        yield f"its keys are {sorted(trap)}"
    if not trap["mistake"].strip():
        yield "does not say what the mistake is"
    if "tests" in trap and not trap["tests"]:
        yield "names no test"
    for test in trap.get("tests", ()):
        file, _, name = test.partition("::")
        if not (TESTS / file).is_file() or name not in functions(file):
            yield f"there is no test {test}"


def test_every_mistake_has_a_test_or_says_why_none_is_possible() -> None:
    text = TABLE.read_text(encoding="utf-8")
    places = {trap["id"]: at(TABLE, line_of(text, text.find(f"- id: {trap['id']}\n"))) for trap in TRAPS}
    assert_none(f"{places[trap['id']]} {trap['id']}: {flaw}" for trap in TRAPS for flaw in flaws(trap))


def test_every_test_of_this_folder_is_in_the_table() -> None:
    named = {test for trap in TRAPS for test in trap.get("tests", [])}
    for file in ("traps/test_training.py", "traps/test_configuration.py"):
        mine = {f"{file}::{name}" for name in functions(file) if name.startswith("test_")}
        free = {f"{file}::{name}" for name in FEATURES}
        assert mine - free <= named


FEATURES = (
    "test_every_number_of_the_optimizer_is_that_of_the_recipe",
    "test_rewards_and_advantages_stay_on_the_cpu",
    "test_the_advantages_that_are_logged_are_those_that_are_trained_on",
    "test_weights_are_cut_over_rows_of_processes_or_refused",
)
"""They prove a feature, and no mistake is known that they prevent."""
