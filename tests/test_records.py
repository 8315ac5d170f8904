"""Can the nouns of a rollout be put together wrongly?"""

from __future__ import annotations

import copy
import math
import pickle
import struct
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from oncurve.core.records import Completion, FinishReason, Group, Mean, Prompt, Reward, mean_of, packed


def completion(prompt_ids: tuple[int, ...] = (1, 2), *, finish_reason: FinishReason = "stop") -> Completion:
    return Completion(prompt_ids, (5, 6), "ab", (-0.5, -1.0), finish_reason, policy_version=3, index=0)


@pytest.mark.proves("D45", "D52")
def test_a_completion_has_a_log_probability_for_every_token() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        replace(completion(), sampler_logprobs=(-0.5,))


@pytest.mark.proves("D0")
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e15, -1e20])
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
    code = "import sys, oncurve.core.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_numbers_of_a_completion_take_four_bytes_and_equal_their_tuple() -> None:
    ids, logprobs = [1, 70_000, 3], [-0.5, -1.25, 0.0]
    one = Completion((5,), ids, "", logprobs, "stop", 0, 0)
    assert (one.token_ids, one.sampler_logprobs) == ((1, 70_000, 3), (-0.5, -1.25, 0.0))
    assert one.token_ids == one.token_ids[:] == replace(one).token_ids
    assert (*one.token_ids, 4) == (1, 70_000, 3, 4)
    assert {one.token_ids} == {(1, 70_000, 3)}
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == replace(one, token_ids=tuple(ids))
    assert one != replace(one, token_ids=(1, 70_000, 4))
    assert [packed(numbers).itemsize for numbers in (one.token_ids, one.sampler_logprobs)] == [4, 4]
    long = Completion((5,), range(4096), "", [-1.5] * 4096, "length", 0, 0)
    assert len(pickle.dumps(long)) < 9 * 4096


def test_a_log_probability_that_four_bytes_would_round_keeps_eight() -> None:
    exact = Completion((5,), (1, 2), "", (-0.1, -0.5), "stop", 0, 0)
    assert exact.sampler_logprobs == (-0.1, -0.5)
    rounded = [struct.unpack("f", struct.pack("f", -0.1))[0]]
    assert packed(Completion((5,), (1,), "", rounded, "stop", 0, 0).sampler_logprobs).itemsize == 4
    with pytest.raises(OverflowError):
        Completion((5,), (2**31,), "", (-1.0,), "stop", 0, 0)
