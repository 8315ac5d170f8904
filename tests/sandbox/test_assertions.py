"""Test code is taken apart into single tests, and the names that it expects of the program are found."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from oncurve.sandbox.inside.assertions import (
    RECORD,
    free_names,
    imported_from_solution,
    result_per_assertion,
    shadowed_builtin,
)


def results_of(source: str, **names: Any) -> list[str]:
    """How each test of a piece of code ends."""
    results: list[str] = []

    @contextmanager
    def record(_number: int) -> Any:
        try:
            yield
            results.append("passed")
        except (AssertionError, ArithmeticError) as error:
            results.append(type(error).__name__)

    tree, _ = result_per_assertion(source)
    exec(compile(tree, "<tests>", "exec"), {RECORD: record, **names})
    return results


def test_every_assertion_gives_one_result_and_a_failed_one_ends_nothing() -> None:
    assert results_of("assert 1 == 2\nassert 1 / 0\nassert True") == ["AssertionError", "ZeroDivisionError", "passed"]


def test_assertions_in_loops_and_functions_count_as_often_as_they_run() -> None:
    code = "def check(f):\n    for n in range(3):\n        if n:\n            assert f(n) == 1\ncheck(lambda n: n)"
    assert results_of(code) == ["passed", "AssertionError"]


def test_a_try_with_an_assertion_is_one_test() -> None:
    code = "try:\n    int('x')\n    assert False\nexcept ValueError:\n    assert True"
    assert result_per_assertion(code)[1] == 1
    assert results_of(code) == ["passed"]


def test_a_try_without_an_assertion_is_left_as_it_is() -> None:
    code = "try:\n    x = int('x')\nexcept ValueError:\n    x = 0\nassert x == 0"
    assert result_per_assertion(code)[1] == 1
    assert results_of(code) == ["passed"]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("assert add(1, 2) == 3", {"add"}),
        ("def check(candidate):\n    assert candidate(poly) == len(x)", {"poly", "x"}),
        ("import math\nfrom os import path as p\nassert math.pi < f(p)", {"f"}),
        ("class T(Base):\n    y = 1\n    def test(self):\n        assert y == self.y == g()", {"Base", "y", "g"}),
        ("xs = [f(i) for i in range(3)]\nassert xs", {"f"}),
        ("def a():\n    global counter\n    counter = 1\nassert counter", set()),
        ("try:\n    f(1)\nexcept Bad as e:\n    print(e)", {"f", "Bad"}),
        ("assert __name__", set()),
    ],
)
def test_free_names(code: str, names: set[str]) -> None:
    assert free_names(code) == names


def test_a_builtin_that_a_test_calls_first_may_be_the_program_s() -> None:
    assert shadowed_builtin("assert sum(10, 15) == 25") == "sum"
    assert shadowed_builtin("assert add(10, 15) == 25") is None
    assert shadowed_builtin("x = 1") is None


def test_imports_from_the_program_are_found_by_name() -> None:
    code = "from solution import f, Stack as S\nfrom math import pi\nimport solution"
    assert imported_from_solution(code) == {"f", "Stack"}
