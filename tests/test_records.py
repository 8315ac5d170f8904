"""Can the nouns of a rollout be put together wrongly?"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from oncurve.records import Completion, FinishReason, Group, Mean, Prompt, Reward, mean_of


def completion(prompt_ids: tuple[int, ...] = (1, 2), *, finish_reason: FinishReason = "stop") -> Completion:
    return Completion(prompt_ids, (5, 6), "ab", (-0.5, -1.0), finish_reason, policy_version=3, index=0)


def test_a_completion_has_a_log_probability_for_every_token() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        replace(completion(), sampler_logprobs=(-0.5,))


def test_a_completion_of_another_prompt_is_refused_by_the_group() -> None:
    prompt = Prompt("q", (1, 2), index=7)
    with pytest.raises(ValueError, match="completion 1 of prompt 7 was sampled from another prompt"):
        Group(prompt, (completion((1, 2)), completion((1, 2, 2))))


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True), ("abort", True)])
def test_only_a_completion_that_ended_by_itself_is_not_truncated(reason: FinishReason, truncated: bool) -> None:
    assert completion(finish_reason=reason).is_truncated is truncated


def test_a_reward_is_either_a_value_or_an_error() -> None:
    assert Reward(0.0).error is None
    assert Reward(None, error="timeout").value is None
    with pytest.raises(ValueError, match="either a value or an error"):
        Reward(None)
    with pytest.raises(ValueError, match="either a value or an error"):
        Reward(0.0, error="crashed")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Reward(value)


def test_records_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        completion().text = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Reward(1.0).value = 2.0  # type: ignore[misc]


def test_means_add_up_to_the_mean_of_everything() -> None:
    values = [3.0, -1.0, 4.0, 1.0, 5.0]
    whole = mean_of(values)
    parts = mean_of(values[:1]) + mean_of(values[1:4]) + mean_of(values[4:])
    assert parts == whole
    assert whole.value == pytest.approx(sum(values) / len(values))


def test_the_mean_of_nothing_is_not_a_number_and_adds_nothing() -> None:
    assert math.isnan(mean_of([]).value)
    assert (mean_of([]) + Mean(6.0, 3)).value == 2.0


def test_records_need_no_torch() -> None:
    code = "import sys, oncurve.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
