"""Do probes leave a sound reward alone and find the holes of weak ones?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from oncurve.core.errors import RewardError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Prompt, Reward
from oncurve.data.prompts import TEMPLATES, write_gold
from oncurve.rewards.custom import from_function
from oncurve.rewards.formats import TagFormat
from oncurve.rewards.mathematics import AnswerChecker, Mathematics
from oncurve.rewards.probes import PROBES, ProbeResult, describe_probes, run_probes, suspicious
from oncurve.rewards.r1_zero import R1Zero
from oncurve.rewards.shaping import LengthWindow
from oncurve.rewards.weighted_sum import Term, WeightedSum

SEED = 3
OPEN_HOLES: set[str] = set()
"""The symbolic grader adds up numbers that stand side by side."""


def prompts() -> list[Prompt]:
    rows = [
        {
            "question": f"Tom has {a} pears and buys {b} more. How many has he?",
            "answer": str(a + b),
            "solution": f"{a} + {b} = {a + b}",
        }
        for a, b in ((3, 4), (12, 9), (20, 35), (7, 8), (11, 2), (40, 41))
    ]
    return [
        Prompt(f"User: {row['question']}\nAssistant: <think>", (1, index), index, row) for index, row in enumerate(rows)
    ]


def gold(row: Mapping[str, Any], template: str = "think_answer") -> str:
    return write_gold(row, TEMPLATES[template])


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    checker = AnswerChecker()
    yield checker
    checker.close()


def found(function: RewardFunction, write: Callable[[Mapping[str, Any]], str] = gold) -> set[str]:
    pays = partial(grade, function)
    best, *results = run_probes(pays, prompts(), gold=write, seed=SEED)
    assert best.mean_reward > 0
    assert [result.name for result in (best, *results)] == list(PROBES)
    return {result.name for result in suspicious(results, best.mean_reward)}


@pytest.mark.proves("D5")
def test_sound_rewards_pay_no_probe(checker: AnswerChecker) -> None:
    assert found(R1Zero(checker=checker)) <= OPEN_HOLES
    for source in ("prose", "answer_tag"):
        assert found(Mathematics(answer_from=source, checker=checker)) <= OPEN_HOLES
    assert found(Mathematics(answer_from="boxed", checker=checker), partial(gold, template="boxed")) <= OPEN_HOLES
    assert found(Mathematics(answer_from="hash", checker=checker), partial(gold, template="gsm8k")) <= OPEN_HOLES


def test_a_small_share_for_form_and_length_is_no_hole(checker: AnswerChecker) -> None:
    terms = [Term(R1Zero(checker=checker)), Term(TagFormat(), 0.1), Term(LengthWindow(5, 100), 0.05)]
    assert found(WeightedSum(terms)) <= OPEN_HOLES


def test_a_reward_for_tags_is_caught() -> None:
    def tags(completion: str) -> float:
        return float("</think>" in completion) + float("<answer>" in completion)

    caught = found(from_function(tags))
    assert {"tags_only", "tags_repeated", "form_without_answer", "other_answer"} <= caught
    assert not {"empty", "question_repeated"} & caught


def test_a_reward_for_length_is_caught() -> None:
    def length(completion: str) -> float:
        return min(len(completion.split()), 200) / 200

    assert {"long_repetition", "filler", "long_form"} <= found(from_function(length))


def test_a_reward_for_tokens_is_caught() -> None:
    assert "long_repetition" in found(LengthWindow(1, 5_000))


@pytest.mark.proves("F113")
def test_a_reward_for_any_number_is_caught() -> None:
    def number(completion: str, answer: str) -> float:
        return float(any(sign.isdigit() for sign in completion))

    assert {"numbers_listed", "always_0", "always_1", "other_answer", "hedge"} <= found(from_function(number))


def test_a_reward_for_the_answer_anywhere_is_caught() -> None:
    def anywhere(completion: str, answer: str) -> float:
        return float(answer in completion)

    caught = found(from_function(anywhere))
    assert {"gold_quoted", "hedge"} <= caught
    assert "other_answer" not in caught


def test_gold_that_earns_nothing_makes_what_earns_more_suspicious() -> None:
    results = [
        ProbeResult("nothing", -1.0, -1.0, ""),
        ProbeResult("half", 0.5, 0.5, ""),
        ProbeResult("failed", math.nan, math.nan, ""),
    ]
    assert [result.name for result in suspicious(results, -1.0)] == ["half"]
    assert [result.name for result in suspicious(results, 0.0)] == ["half"]
    assert suspicious(results, 1.0, max_share=0.5) == []


def test_completions_that_cannot_be_graded_are_counted_apart() -> None:
    def picky(completion: str, answer: str) -> float:
        if not completion:
            raise RewardError("nothing to read")
        return 1.0

    results = {
        result.name: result
        for result in run_probes(partial(grade, from_function(picky)), prompts(), gold=gold, seed=SEED)
    }
    assert results["empty"].num_failed == 6
    assert math.isnan(results["empty"].mean_reward)
    assert results["filler"].num_failed == 0


def test_a_reward_that_fails_on_every_right_answer_is_not_asked_about_wrong_ones() -> None:
    def broken(completion: str, answer: str) -> float:
        raise RewardError(f"{completion[:0]}always")

    results = run_probes(partial(grade, from_function(broken)), prompts(), gold=gold, seed=SEED)
    assert [(result.name, result.num_failed, result.num_tried) for result in results] == [("gold", 4, 4)]


def test_the_sample_follows_from_the_seed() -> None:
    seen: list[str] = []

    def watch(prompts: list[Prompt], completions: list[Any]) -> list[Reward]:
        seen.append(",".join(str(prompt.index) for prompt in prompts))
        return [Reward(0.0)] * len(completions)

    for seed in (1, 1, 2):
        run_probes(watch, prompts(), gold=gold, seed=seed, max_rows=3)  # type: ignore[arg-type]
    first, again, other = seen[:: len(PROBES) + 1]  # a trial, and the probes
    assert first == again != other
    assert first.count(",") == 2


def test_a_single_row_is_enough() -> None:
    assert len(run_probes(partial(grade, TagFormat()), prompts()[:1], gold=gold, seed=0)) == len(PROBES)


def test_the_table_has_a_column_for_each_part_of_the_reward() -> None:
    def two(completion: str, answer: str) -> dict[str, float]:
        return {"reward": 1.5, "correct": 1.0, "shape": 0.5} if completion else {"reward": 0.5, "shape": 0.5}

    pays = partial(grade, from_function(two))
    best, *results = run_probes(pays, prompts(), gold=gold, seed=SEED)
    table = describe_probes(results, best).splitlines()[3:]
    assert table[0].split()[-2:] == ["correct", "shape"]
    assert table[1].split()[:7] == ["gold", "1.500", "1.500", "0", "0", "1.000", "0.500"]
    assert table[2].split()[:7] == ["empty", "0.500", "0.500", "0", "0", "-", "0.500"]


def test_the_table_marks_what_is_suspicious() -> None:
    table = describe_probes(
        [ProbeResult("empty", 0.9, 1.0, "text"), ProbeResult("hedge", 0.0, 0.0, "")], ProbeResult("gold", 1.0, 1.0, "")
    )
    legend, lines = table.splitlines()[:3], table.splitlines()[3:]
    assert "marks" in legend[-1]
    assert len(lines) == 4
    assert [line.endswith("<- 'text'") for line in lines] == [False, False, True, False]
