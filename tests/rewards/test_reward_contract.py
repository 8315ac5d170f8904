"""One suite for every reward function of the package."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from reward_records import completion_of, prompt_of

from oncurve.rewards.base import RewardFunction, Term, WeightedSum, categorize
from oncurve.rewards.custom import from_function
from oncurve.rewards.formats import BoxedFormat, HashFormat, StepFormat, TagFormat
from oncurve.rewards.mathematics import Mathematics
from oncurve.rewards.r1_zero import R1Zero
from oncurve.rewards.shaping import CosineLength, LengthWindow, Overlong, Repetition, correctness_format_length

ONE = Term(from_function(lambda completion: 1.0, name="one"))
BOXED, TAGGED, HASHED = r"So \boxed{5}", "<think> a </think> <answer> 5 </answer>", "a\n#### 5"
FUNCTIONS: dict[str, tuple[Callable[[], RewardFunction], str]] = {
    "mathematics": (lambda: Mathematics(timeout_seconds=0.5), BOXED),
    "mathematics, signed": (lambda: Mathematics(answer_from="hash", scale="signed"), HASHED),
    "mathematics, any": (lambda: Mathematics(answer_from="any", scale="graded"), "5"),
    "r1_zero": (R1Zero, TAGGED),
    "tags": (TagFormat, TAGGED),
    "per tag": (lambda: TagFormat(per_tag=True), TAGGED),
    "boxed": (BoxedFormat, BOXED),
    "hash": (HashFormat, HASHED),
    "steps": (StepFormat, "1. a\n2. b"),
    "length": (lambda: LengthWindow(1, 10), "5"),
    "overlong": (lambda: WeightedSum([Term(Overlong(10, 2)), ONE]), "5"),
    "repetition": (lambda: WeightedSum([Term(Repetition(2)), ONE]), "5"),
    "cosine": (lambda: CosineLength(Mathematics(), max_tokens=1_000_000), BOXED),
    "shaped": (
        lambda: correctness_format_length(
            Mathematics(), BoxedFormat(), LengthWindow(1, 10), weights=(0.8, 0.1, 0.1), only_if_correct=True
        ),
        BOXED,
    ),
    "custom": (lambda: from_function(lambda completion, answer: float(completion == answer), name="custom"), "5"),
}
ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "\u202e5",
    "é" * 100,
    "<answer>" * 1000,
    r"\boxed{" * 1000,
    "a" * 10**6,
    "5" * 10**5,
]


@pytest.fixture(params=FUNCTIONS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[RewardFunction, str]]:
    make, gold = FUNCTIONS[request.param]
    function = make()
    yield function, gold
    function.close()


def test_it_has_the_protocol(case: tuple[RewardFunction, str]) -> None:
    assert isinstance(case[0], RewardFunction)
    assert case[0].name


def test_a_good_completion_earns_full_reward(case: tuple[RewardFunction, str]) -> None:
    function, gold = case
    reward = function([prompt_of(text="Q:")], [completion_of(gold)])[0]
    assert reward.value == pytest.approx(1.0, abs=1e-6)
    assert categorize(reward) in ("correct", "wrong")


def test_rewards_are_aligned_with_completions(case: tuple[RewardFunction, str]) -> None:
    function, gold = case
    texts = [gold, "", "nothing", gold, "x"]
    together = function([prompt_of(text="Q:")] * len(texts), [completion_of(text) for text in texts])
    alone = [function([prompt_of(text="Q:")], [completion_of(text)])[0] for text in texts]
    assert together == alone
    assert function([], []) == []


@pytest.mark.parametrize("text", ODD_TEXTS, ids=lambda text: ascii(text[:8]) + f" {len(text)}")
def test_odd_texts_neither_fail_nor_last(text: str, case: tuple[RewardFunction, str]) -> None:
    function, _ = case
    started = time.process_time()
    reward = function([prompt_of()], [completion_of(text)])[0]
    assert reward.error is None
    assert time.process_time() - started < 1.0


def test_closing_twice_is_harmless(case: tuple[RewardFunction, str]) -> None:
    case[0].close()
    case[0].close()
