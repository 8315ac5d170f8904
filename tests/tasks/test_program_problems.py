"""Are the program problems right, apart between splits, and imperfect where they should be?"""

from __future__ import annotations

import re
from itertools import cycle

import pytest

from oncurve.core.errors import DataError
from oncurve.tasks.program_problems import (
    FIRST,
    SECOND,
    ProgramProblem,
    misreading,
    program_demonstrations,
    program_lessons,
    program_problems,
)


def solve(code: str, tests: tuple[str, ...]) -> bool:
    """Our own reference programs may be run here: no model wrote them."""
    scope: dict[str, object] = {}
    exec(code, scope)
    for test in tests:
        exec(test, scope)
    return True


def code_with(code: str, number: int) -> str:
    """The same program with another number."""
    return re.sub(r"\d+", str(number), code)


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


def test_asking_for_more_than_there_is_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [(problem, "") for problem in program_problems("validation", 3)]
    monkeypatch.setattr("oncurve.tasks.program_problems._drafts", lambda *_, **__: cycle(few))
    with pytest.raises(DataError, match="hardly more than 3 different problems, 4 were"):
        program_problems("validation", 4)


def demonstrated() -> list[tuple[str, str, ProgramProblem]]:
    """Question, program and problem of the fenced demonstrations whose problem is among many of its split."""
    known = {problem.question: problem for problem in program_problems("train", 2500, seed=9)}
    found = []
    for prompt, completion in program_demonstrations(3000, seed=0):
        question = prompt.removeprefix("User: ").removesuffix("\nAssistant:")
        if "```" in completion and question in known:
            found.append(
                (question, completion.strip().removeprefix("```python\n").removesuffix("\n```"), known[question])
            )
    return found


def test_demonstrations_are_imperfect_and_lessons_have_no_fence() -> None:
    pairs = program_demonstrations(1000, seed=0)
    fenced = sum("```" in completion for _, completion in pairs) / 1000
    assert 0.6 < fenced < 0.8
    assert not any("```" in completion for _, completion in program_lessons(200))


def test_where_something_tempts_most_fenced_demonstrations_are_misread_and_else_all_are_right() -> None:
    tempted, safe = [], []
    for _, code, problem in demonstrated():
        first, second = problem.family.split()
        is_safe = f"return {misreading(first, second, 7)}" in code_with(problem.answer, 7)
        (safe if is_safe else tempted).append(code == problem.answer)
    assert len(tempted) > 200
    assert 0.2 < sum(tempted) / len(tempted) < 0.4
    assert len(safe) > 100
    assert all(safe)


def test_a_misreading_fails_the_tests_of_its_problem_and_is_always_the_same() -> None:
    wrong = [(code, problem) for _, code, problem in demonstrated() if code != problem.answer]
    passed = 0
    for code, problem in wrong:
        number = int(re.findall(r"\d+", problem.question)[0])
        assert code.endswith(f"return {misreading(*problem.family.split(), number)}")
        try:
            passed += solve(code, problem.test_list)
        except AssertionError:
            continue
    assert passed < 0.02 * len(wrong)


def test_what_a_hasty_reader_writes() -> None:
    assert misreading("reversed", "plus", 3) == "(a - b) + 3"
    assert misreading("reversed", "times", 3) == "a - b * 3"
    assert misreading("smaller", "times", 3) == "min(a, b * 3)"
    assert misreading("larger", "from", 3) == "max(a, b) - 3"
    assert misreading("product", "times", 3) == "(a * b) * 3"
    pairs = [(first, second) for first in FIRST for second in SECOND]
    tempting = [
        pair for pair in pairs if misreading(*pair, 3) != SECOND[pair[1]].code.format(e=FIRST[pair[0]].code, n=3)
    ]
    assert (len(tempting), len(pairs)) == (17, 24)
