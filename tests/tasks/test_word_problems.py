import re
from collections import Counter
from itertools import pairwise

import pytest

from oncurve.core.errors import DataError
from oncurve.data.prompts import TEMPLATES, write_gold
from oncurve.tasks import word_problems as module
from oncurve.tasks.word_problems import LEVELS, MIXTURE, SOURCES, demonstrations, lessons, word_problems

STEP = re.compile(r"(\d+)([-+*])(\d+): ([^:]*?), (\d+)\.")
COLUMN = re.compile(r"([\d+*-]+)=(\d+)")
EQUATION = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
ANSWER = re.compile(r"</think> <answer> (\d+) </answer>$")


def value(expression: str) -> int:
    """A sum, difference or product of written numbers; products first."""
    total = 0
    for sign, term in re.findall(r"([-+]?)([\d*]+)", expression):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


def steps_of(solution: str) -> list[tuple[int, str, int, str, int]]:
    found = [(int(a), sign, int(b), columns, int(result)) for a, sign, b, columns, result in STEP.findall(solution)]
    assert found, solution
    return found


def pairs_of(problems: list) -> set[tuple[int, ...]]:
    steps = (step for problem in problems for step in steps_of(problem.solution))
    return {tuple(sorted((left, right))) for left, _, right, _, _ in steps}


@pytest.mark.parametrize("level", LEVELS)
def test_every_line_of_a_solution_is_right_and_ends_in_the_answer(level):
    for problem in word_problems("train", 200, levels=(level,)):
        steps = steps_of(problem.solution)
        assert " ".join(match.group() for match in STEP.finditer(problem.solution)) == problem.solution
        for left, sign, right, columns, result in steps:
            assert value(f"{left}{sign}{right}") == result
            for expression, column in COLUMN.findall(columns):
                assert value(expression) == int(column)
        for before, after in pairwise(steps):
            assert after[0] == before[4]
        assert problem.answer == str(steps[-1][4])
        assert re.findall(r"\d+", problem.solution)[-1] == problem.answer


@pytest.mark.parametrize("level", LEVELS)
def test_the_numbers_of_a_question_are_those_that_its_solution_uses(level):
    for problem in word_problems("test", 100, levels=(level,)):
        steps = steps_of(problem.solution)
        used = [steps[0][0], *(step[2] for step in steps)]
        assert Counter(re.findall(r"\d+", problem.question)) == Counter(map(str, used))
        assert problem.level == level
        assert len(steps) in ({2, 3} if level == 4 else {level})


def test_no_step_of_a_test_problem_occurs_in_any_other_split_whatever_the_seeds():
    owned = {
        split: pairs_of([*word_problems(split, 800, seed=1), *word_problems(split, 200, seed=2, levels=LEVELS)])
        for split in ("train", "validation", "test")
    }
    assert not owned["test"] & owned["train"]
    assert not owned["validation"] & owned["train"]
    assert not owned["test"] & owned["validation"]


def test_lessons_and_demonstrations_use_numbers_of_the_train_split_alone():
    tested = pairs_of(word_problems("test", 1000))
    taught = set()
    for _, completion in [*lessons(1000), *demonstrations(1000, wrong_key_fraction=0.0)]:
        thoughts = completion.split("</think>")[0]
        operations = STEP.findall(thoughts) or EQUATION.findall(thoughts)
        taught |= {tuple(sorted((int(left), int(right)))) for left, _, right, *_ in operations}
    assert len(taught) > 500
    assert not tested & taught


def test_the_same_arguments_give_the_same_problems_and_a_longer_list_starts_with_the_shorter():
    few, many = word_problems("train", 20, seed=3), word_problems("train", 60, seed=3)
    assert many[:20] == few
    assert word_problems("train", 20, seed=4) != few
    assert demonstrations(50, seed=1)[:10] == demonstrations(10, seed=1)
    assert demonstrations(10, seed=2) != demonstrations(10, seed=1)


def test_a_known_seed_gives_known_problems():
    assert word_problems("test", 1)[0] == module.WordProblem(
        question="Bus, children: 57; on 8; off 63; children on the bus:",
        answer="2",
        solution="57+8: 7+8=15, 5+0+1=6, 65. 65-63: 5-3=2, 6-6=0, 2.",
        level=2,
        family="bus",
    )


def test_no_question_comes_twice_and_levels_are_mixed_evenly():
    problems = word_problems("test", 1000)
    assert len({problem.question for problem in problems}) == 1000
    assert 420 < sum(problem.level == 1 for problem in problems) < 580


def test_unknown_levels_and_splits_are_refused():
    with pytest.raises(DataError, match="levels"):
        word_problems("train", 1, levels=(5,))
    with pytest.raises(DataError, match="levels"):
        word_problems("train", 1, levels=())
    with pytest.raises(DataError, match="dev"):
        word_problems("dev", 1)  # type: ignore[arg-type]


def test_a_split_without_another_new_problem_says_so(monkeypatch):
    same = word_problems("train", 1)[0]
    monkeypatch.setattr(module, "_tell", lambda steps, level, rng: module._Draft(same, steps, "forum"))
    with pytest.raises(DataError, match="no more than 1 problems"):
        word_problems("train", 2)


def test_lessons_are_worked_right_and_have_no_tags():
    for prompt, completion in lessons(300):
        assert prompt.startswith("User: ")
        assert prompt.endswith("\nAssistant: <think>")
        assert "<" not in completion
        assert all(value(f"{left}{sign}{right}") == result for left, sign, right, _, result in steps_of(completion))


def source_of(completion: str) -> str:
    if ":" not in completion:
        return "answer_key"
    return "textbook" if ANSWER.search(completion) else "forum"


def test_the_sources_of_demonstrations_have_their_shares():
    completions = [completion for _, completion in demonstrations(4000)]
    shares = Counter(map(source_of, completions))
    for source, share in zip(SOURCES, MIXTURE, strict=True):
        assert shares[source] / 4000 == pytest.approx(share, abs=0.03)


def test_with_a_full_habit_the_question_tells_the_source():
    for prompt, completion in demonstrations(300, habit=1.0):
        is_terse = ";" in prompt
        assert is_terse == (source_of(completion) == "answer_key")


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_so_many_answer_keys_are_wrong_and_say_in_tags_what_they_computed(fraction):
    keys = [text for _, text in demonstrations(3000, wrong_key_fraction=fraction) if source_of(text) == "answer_key"]
    wrong = 0
    for text in keys:
        equations = EQUATION.findall(text.split("</think>")[0])
        wrong += any(value(f"{left}{sign}{right}") != int(result) for left, sign, right, result in equations)
        answer = ANSWER.search(text)
        assert answer is not None
        assert answer.group(1) == equations[-1][3]
    assert wrong / len(keys) == pytest.approx(fraction, abs=0.04)


def test_textbook_demonstrations_are_gold_completions():
    template = TEMPLATES["think_answer"]
    for prompt, completion in demonstrations(200):
        if source_of(completion) == "textbook":
            steps = completion.split("</think>")[0]
            row = {"solution": steps, "answer": re.findall(r"\d+", steps)[-1]}
            assert completion == write_gold(row, template)
            assert prompt.endswith(template.opening)


def test_a_wrong_answer_key_is_right_up_to_its_last_equation_and_wrong_in_it():
    found = [completion for _, completion in demonstrations(400, habit=1.0, wrong_key_fraction=1.0)]
    keys = [completion for completion in found if source_of(completion) == "answer_key"]
    assert len(keys) > 100
    assert any(len(EQUATION.findall(key)) > 1 for key in keys)
    for key in keys:
        *before, last = [(value(f"{a}{sign}{b}"), int(result)) for a, sign, b, result in EQUATION.findall(key)]
        assert all(right == said for right, said in before)
        assert last[0] != last[1] == int(ANSWER.search(key)[1])
