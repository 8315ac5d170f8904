"""Has every known mistake a test that would notice it, wherever that test stands?"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

TESTS = Path(__file__).resolve().parents[1]
TRAPS: list[dict[str, Any]] = yaml.safe_load((TESTS / "traps" / "covered.yaml").read_text(encoding="utf-8"))


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_mistake_stands_there_once() -> None:
    ids = [trap["id"] for trap in TRAPS]
    assert len(ids) == len(set(ids)) == 57
    assert ids == sorted(ids, key=lambda name: int(name[1:]))


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap["id"])
def test_it_has_a_test_or_says_why_none_is_possible(trap: dict[str, Any]) -> None:
    assert set(trap) == {"id", "mistake", "right", "tests"} or set(trap) == {"id", "mistake", "no_program"}
    assert trap["mistake"].strip()
    for test in trap.get("tests", ["no"]):
        if test != "no":
            file, _, name = test.partition("::")
            assert name in functions(file), test


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
)
"""They prove a feature, and no mistake is known that they prevent."""
