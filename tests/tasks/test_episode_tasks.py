"""Are the problems, games and mazes right, apart between splits, and taught as imperfectly as they should be?"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oncurve.core.errors import DataError
from oncurve.episodes.calculator import evaluate
from oncurve.episodes.environments import Kind
from oncurve.tasks.calculator_problems import calculator_demonstrations, calculator_lessons, calculator_problems

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(EXAMPLES / "maze"), str(EXAMPLES / "guess_number")]
import guess_number  # noqa: E402
import maze as maze_example  # noqa: E402
from guess_number import HIGHEST, GuessNumber, number_games  # noqa: E402
from maze import SIZE, Maze, distance, mazes  # noqa: E402

chain_problems = partial(calculator_problems, operations=2)
chain_demonstrations = partial(calculator_demonstrations, operations=2)
chain_lessons = partial(calculator_lessons, operations=2)
MAKERS: tuple[Callable[..., Any], ...] = (calculator_problems, chain_problems, number_games, mazes)


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_seed_makes_the_same_rows_and_the_splits_share_no_question(make: Callable[..., Any]) -> None:
    rows = {split: make(split, 200, seed=1) for split in ("train", "validation", "test")}
    assert rows["test"] == make("test", 200, seed=1) != make("test", 200, seed=2)
    questions = [{row.question for row in rows[split]} for split in rows]
    assert not questions[0] & questions[1]
    assert not questions[0] & questions[2]
    with pytest.raises(DataError, match="no split 'dev'"):
        make("dev", 1)


@pytest.mark.parametrize("make", MAKERS[:2])
def test_the_expression_of_a_problem_has_its_answer(make: Callable[..., Any]) -> None:
    for problem in make("train", 200):
        assert evaluate(problem.expression) == problem.answer
        numbers = re.findall(r"\d+", problem.expression)
        assert all(number in problem.question for number in numbers)


def test_the_second_call_of_a_chain_takes_the_result_of_the_first() -> None:
    right = 0
    for _, parts in chain_demonstrations(400):
        text = "".join(text for text, _ in parts)
        called = re.findall(r"<tool>([^<]+)</tool><result>([^<]+)</result>", text)
        assert all(evaluate(expression) == result for expression, result in called)
        if len(called) == 2:
            assert called[1][0].startswith(called[0][1])
            right += text.endswith(f"<answer>{called[1][1]}</answer>")
    assert 80 < right < 200, "neither never nor mostly"


@pytest.mark.parametrize(
    "make",
    [calculator_demonstrations, chain_demonstrations, guess_number.demonstrations, maze_example.demonstrations],
)
def test_what_is_told_is_never_learned_from(make: Callable[..., Any]) -> None:
    for _, parts in make(100):
        for text, is_learned in parts:
            assert is_learned == (not text.startswith("<result>"))


@pytest.mark.parametrize("make", [calculator_lessons, chain_lessons, guess_number.lessons, maze_example.lessons])
def test_lessons_teach_no_call(make: Callable[..., Any]) -> None:
    for prompt, parts in make(100):
        assert "<tool>" not in prompt + "".join(text for text, is_learned in parts if is_learned)
        assert any(is_learned for _, is_learned in parts)


@pytest.mark.parametrize("make", [calculator_lessons, chain_lessons])
def test_lessons_copy_numbers_of_every_length_and_none_is_the_answer_of_its_story(make: Callable[..., Any]) -> None:
    solved, lengths = 0, Counter[int]()
    for prompt, parts in make(400):
        text = "".join(text for text, _ in parts)
        copied = re.findall(r"<result>(\d+)</result><answer>(\d+)</answer>", text)
        assert copied
        assert all(told == answer for told, answer in copied)
        lengths.update(len(told) for told, _ in copied)
        written = re.findall(r"(\d+[+*-]\d+)(?: gives (\d+), \2\.|</tool><result>(\d+)</result>)", text)
        for expression, *_ in written:
            assert re.split("[+*-]", expression)[0] in prompt + text.replace(expression, "")
        expression, *given = written[-1]
        solved += evaluate(expression) in (*given, *(told for told, _ in copied))
    assert solved == 0
    assert sorted(lengths) == [2, 3, 4, 5, 6]
    assert min(lengths.values()) > 0.5 * max(lengths.values())


def test_results_are_copied_into_calls_where_there_are_two() -> None:
    texts = ["".join(text for text, _ in parts) for _, parts in chain_lessons(400)]
    copied = [re.findall(r"<result>(\d+)</result><tool>(\d+)[+-]\d+</tool>", text) for text in texts]
    assert 240 < sum(map(bool, copied)) < 320
    assert all(told == left for found in copied for told, left in found)


def test_every_secret_comes_as_often_as_any_other() -> None:
    counts = Counter(game.secret for game in number_games("test", 480))
    assert counts == dict.fromkeys(range(HIGHEST + 1), 15)


def test_a_search_by_halves_wins_every_game_but_one_in_32() -> None:
    won, guesses = 0.0, 0
    for secret in range(HIGHEST + 1):
        game, low, high = GuessNumber(), 0, HIGHEST
        game.reset(secret=secret)
        while not game.done:
            middle = (low + high) // 2
            told = game.guess(middle)
            low, high = (middle + 1, high) if told == "higher" else (low, middle - 1)
        won += game.get_reward()
        guesses += len(game.guesses)
    assert won == HIGHEST
    assert guesses / (HIGHEST + 1) == pytest.approx(4.22, abs=0.005)


def test_mazes_have_a_way_out_and_the_shortest_one_pays() -> None:
    moves = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
    for problem in mazes("train", 60):
        maze = Maze()
        maze.reset(start=problem.start, exit=problem.exit, walls=problem.walls)
        while not maze.done:
            left = distance(maze.place, maze.exit, maze.walls)
            ahead = {
                way: (maze.place[0] + right, maze.place[1] + down)
                for way, (right, down) in moves.items()
            }  # fmt: skip
            way = next(
                way
                for way, place in ahead.items()
                if place not in maze.walls
                and all(0 <= number < SIZE for number in place)
                and distance(place, maze.exit, maze.walls) == left - 1
            )
            assert maze.go(way) in ("out", f"{ahead[way][0]},{ahead[way][1]}")
        assert maze.get_reward() == 1.0


def test_a_maze_does_not_pay_for_wandering_and_tells_of_walls() -> None:
    maze = Maze()
    maze.reset(start="0,0", exit="0,3", walls="1,0")
    assert [maze.go("east"), maze.go("north"), maze.go("west")] == ["wall"] * 3
    with pytest.raises(ValueError, match="no direction 'up'"):
        maze.go("up")
    for way in ("south", "north") * 3 + ("south",) * 3:
        maze.go(way)
    assert maze.done
    assert maze.get_reward() == 0.0


@pytest.mark.parametrize("environment", [GuessNumber, Maze])
def test_the_environments_answer_alike_and_say_so(environment: type) -> None:
    kind = Kind.of("game", environment)
    assert kind.is_deterministic
    assert kind.gives_reward
    assert len(kind.tools) == 1
