"""On data that this project did not write: every reference answer earns full reward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_records import completion_of, prompt_of

from oncurve.rewards.mathematics import AnswerChecker, Mathematics
from oncurve.rewards.r1_zero import R1Zero

FOLDER = Path(__file__).parents[3] / "shared" / "data"
UNPAID_MATH: dict[str, str] = {}
"""Reference answers of MATH-500 that do not earn full reward as ``\\boxed{answer}``, and why: none."""


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    made = AnswerChecker()
    yield made
    made.close()


def rows_of(name: str) -> list[dict[str, str]]:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip("the public data sets are not at ../shared/data beside the project")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def gsm8k_answers() -> list[str]:
    rows = rows_of("gsm8k_train.jsonl") + rows_of("gsm8k_test.jsonl")
    return [row["answer"].rpartition("####")[2].strip() for row in rows]


@pytest.mark.proves("D31")
@pytest.mark.parametrize("form", ["{}", "{}.00", "${}", "{} dollars", r"\boxed{{{}}}", "The answer is {}.", "**{}**"])
def test_every_gsm8k_reference_earns_full_reward(form: str, checker: AnswerChecker) -> None:
    golds = gsm8k_answers()
    assert len(golds) == 8792
    prompts = [prompt_of(gold) for gold in golds]
    texts = [form.format(gold.replace(",", "") if form == "{}.00" else gold) for gold in golds]
    completions = [completion_of(f"So. </think> <answer> {text} </answer>") for text in texts]
    rewards = R1Zero(checker=checker)(prompts, completions)
    unpaid = [text for text, gold, reward in zip(texts, golds, rewards, strict=True) if reward.value != 1.0]
    if form == "{}.00":
        unpaid = [text for text in unpaid if text.count(".") == 1]  # 12.5.00 is no number
    assert unpaid == []


def test_no_other_answer_of_gsm8k_is_paid(checker: AnswerChecker) -> None:
    golds = gsm8k_answers()
    others = [golds[(index + 1) % len(golds)] for index in range(len(golds))]
    verdicts = checker.check(list(zip(others, golds, strict=True)))
    plain = [(other.replace(",", ""), gold.replace(",", "")) for other, gold in zip(others, golds, strict=True)]
    assert [verdict == "right" for verdict in verdicts] == [float(other) == float(gold) for other, gold in plain]


def test_the_reference_solution_of_gsm8k_earns_full_reward_as_it_is(checker: AnswerChecker) -> None:
    rows = rows_of("gsm8k_test.jsonl")
    prompts = [prompt_of(row["answer"].rpartition("####")[2].strip()) for row in rows]
    completions = [completion_of(row["answer"]) for row in rows]
    for source in ("hash", "prose"):
        rewards = Mathematics(answer_from=source, checker=checker)(prompts, completions)
        assert all(reward.value == 1.0 for reward in rewards)


@pytest.mark.proves("D29")
def test_math_500_references_earn_full_reward(checker: AnswerChecker) -> None:
    golds = [row["answer"] for row in rows_of("math500.jsonl")]
    completions = [completion_of(rf"Therefore $\boxed{{{gold}}}$.") for gold in golds]
    rewards = Mathematics(answer_from="boxed", checker=checker)([prompt_of(gold) for gold in golds], completions)
    unpaid = [gold for gold, reward in zip(golds, rewards, strict=True) if reward.value != 1.0]
    assert len(unpaid) <= 0.03 * len(golds)
    assert set(unpaid) == set(UNPAID_MATH)


def test_math_500_solutions_earn_full_reward_as_they_are(checker: AnswerChecker) -> None:
    rows = rows_of("math500.jsonl")
    completions = [completion_of(row["solution"]) for row in rows]
    rewards = Mathematics(checker=checker)([prompt_of(row["answer"]) for row in rows], completions)
    unpaid = [row["answer"] for row, reward in zip(rows, rewards, strict=True) if reward.value != 1.0]
    assert len(unpaid) <= 0.03 * len(rows), unpaid


def test_no_other_answer_of_math_500_is_paid(checker: AnswerChecker) -> None:
    golds = list(dict.fromkeys(row["answer"] for row in rows_of("math500.jsonl")))
    pairs = [(golds[index - shift], gold) for shift in (1, 2) for index, gold in enumerate(golds)]
    verdicts = checker.check(pairs)
    paid = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != "wrong"]
    assert paid == []
