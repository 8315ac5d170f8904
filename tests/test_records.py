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

from oncurve.core.records import (
    NOT_APPLICABLE,
    RAW_ANSWER,
    SOURCE_ROW,
    Completion,
    DecodeCall,
    FinishReason,
    Group,
    Mean,
    Prompt,
    Reward,
    SamplingParams,
    Segment,
    html_table,
    mean_of,
    packed,
)


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


def test_an_episode_counts_what_the_policy_wrote_in_its_branches_too() -> None:
    parts = (Segment(True, 0, 1, "a"), Segment(False, 1, 3, "answer"), Segment(True, 3, 5, "b"))
    episode = Completion((1,), (7, 8, 9, 10, 11), "a answer b", (-1.0, 0.0, 0.0, -1.0, -1.0), "done", 0, 0, parts)
    assert episode.written == (True, False, False, True, True)
    assert (tuple(episode.written_ids), episode.num_tokens, episode.num_turns) == ((7, 10, 11), 3, 2)
    assert episode.as_graded().text == "a\nb"
    forked = replace(episode, branches=(completion(), episode))
    assert (forked.num_tokens, forked.num_turns) == (3 + 2 + 3, 2 + 1 + 2)
    plain = completion()
    assert (plain.written, plain.num_tokens, plain.num_turns, plain.as_graded()) == ((True, True), 2, 1, plain)
    for wrong in (parts[1:], parts[:2], (parts[0], parts[2])):
        with pytest.raises(ValueError, match="do not cover its 5 tokens in order"):
            replace(episode, segments=wrong)
    for reason, is_cut in (("done", False), ("malformed", False), ("turns", True), ("failed", True)):
        assert replace(episode, finish_reason=reason).is_truncated == is_cut
    own = replace(completion((3,)), own_prompt="another")
    assert Group(Prompt("q", (1, 2), index=7), (own,)).completions == (own,)
    shown = Group(Prompt("<q>", (1, 2), index=7), (completion(), replace(completion(), text="c")))._repr_html_()
    assert "&lt;q&gt;" in shown
    assert [shown.count(f">{cell}<") for cell in ("ab", "c", "2", "0", "1")] == [1, 1, 2, 1, 1]


def test_a_row_is_shown_to_rewards_as_it_was_given() -> None:
    assert Prompt("q", (1,), 0, {"answer": "5"}).source_row == {"answer": "5"}
    assert Prompt("q", (1,), 0, {"answer": "5", SOURCE_ROW: {"x": 1}}).source_row == {"x": 1}
    assert Prompt("q", (1,), 0, {"answer": "5", RAW_ANSWER: 5}).source_row == {"answer": 5, RAW_ANSWER: 5}


def test_sampling_says_what_it_leaves_out_and_how_much_room_is_left() -> None:
    params = SamplingParams(max_completion_tokens=9, min_completion_tokens=4)
    assert (params.active_cuts, params.cuts, params.room(2)) == ((), False, 7)
    for key, value in (("top_p", 0.99), ("top_k", 1), ("min_p", 0.01)):
        assert (replace(params, **{key: value}).active_cuts, replace(params, **{key: value}).cuts) == ((key,), True)
    for tokens, least in ((3, 3), (4, 4), (5, 4)):
        limited = params.limited_to(tokens)
        assert (limited.max_completion_tokens, limited.min_completion_tokens) == (tokens, least)


def test_prompts_are_held_for_the_rows_that_run_and_for_as_many_that_come() -> None:
    call = DecodeCall(num_prompts=7, group_size=3, prompt_tokens=1, completion_tokens=1)
    assert call.rows == 21
    assert [(rows, call.groups(rows), call.prompts(rows)) for rows in (1, 3, 4, 6, 7, 9, 10)] == [
        (1, 1, 3), (3, 1, 3), (4, 2, 5), (6, 2, 5), (7, 3, 7), (9, 3, 7), (10, 4, 7)
    ]  # fmt: skip
    assert replace(call, is_open=True).prompts(9) == 9


def test_a_table_of_a_notebook_shows_text_as_it_is() -> None:
    assert html_table(("<a", "b"), [("1 < 2", 3)], is_styled=False) == (
        "<table><tr><th>&lt;a</th><th>b</th></tr><tr><td>1 &lt; 2</td><td>3</td></tr></table>"
    )
    assert html_table((), [(1,)]).count('<td style="text-align: left;') == 1


def test_a_reward_that_does_not_apply_is_no_failure_and_a_prompt_has_room_for_what_is_left() -> None:
    cases = [Reward(1.0), Reward(None, error=NOT_APPLICABLE), Reward(None, error="timeout")]
    assert [reward.is_failure for reward in cases] == [False, False, True]
    assert [Reward(value).value for value in (9.9e14, -9.9e14)] == [9.9e14, -9.9e14]
