"""Are the program problems right, apart between splits, and imperfect where they should be?"""

from __future__ import annotations

import re

import pytest

from oncurve.data.program_problems import program_demonstrations, program_lessons, program_problems
from oncurve.errors import DataError


def solve(code: str, tests: tuple[str, ...]) -> bool:
    """Our own reference programs may be run here: no model wrote them."""
    scope: dict[str, object] = {}
    exec(code, scope)
    for test in tests:
        exec(test, scope)
    return True


def test_every_reference_program_passes_its_own_tests() -> None:
    for problem in program_problems("train", 200, seed=3):
        assert solve(problem.answer, problem.test_list)


def test_the_same_seed_gives_the_same_problems_and_no_question_twice() -> None:
    problems = program_problems("test", 150, seed=1)
    assert problems == program_problems("test", 150, seed=1)
    assert len({problem.question for problem in problems}) == 150


def test_no_combination_is_in_two_splits() -> None:
    def combinations(split: str) -> set[tuple[str, str]]:
        problems = program_problems(split, 300)  # type: ignore[arg-type]
        return {(p.family, re.findall(r"\d+", p.question)[0]) for p in problems}

    assert not combinations("train") & combinations("test")
    assert not combinations("validation") & combinations("test")


def test_asking_for_more_than_there_is_says_so() -> None:
    with pytest.raises(DataError, match="hardly more than"):
        program_problems("validation", 1_500)


def test_demonstrations_are_imperfect_and_lessons_have_no_fence() -> None:
    pairs = program_demonstrations(1000, seed=0)
    fenced = sum("```" in completion for _, completion in pairs) / 1000
    assert 0.6 < fenced < 0.8
    assert not any("```" in completion for _, completion in program_lessons(200))
