"""What is written of a step is what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.core.errors import DataError
from oncurve.core.records import Completion, Group, Prompt, Reward, Segment, ToolCall
from oncurve.observe.step_record import read_step, recorded_steps, step_path, write_step


def completion(index: int, **more: object) -> Completion:
    return Completion((1, 2), (5, 6, 7), "a \u20ac", (-0.1, -1e-30, 0.0), "stop", 3, index, **more)  # type: ignore[arg-type]


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    branch = Completion((1, 9), (4,), "b", (-0.5,), "length", 3, 0, own_prompt="other")
    episode = completion(
        1,
        segments=(Segment(True, 0, 2, "call"), Segment(False, 2, 3, "told")),
        calls=(ToolCall("f", "{}", "1", "raised", 1),),
        own_prompt="own",
        failure="crashed",
        failure_detail="why",
        environment_reward=Reward(0.25, {"win": 1.0}, detail="x"),
        branches=(branch,),
    )
    prompt = Prompt("2?", (1, 2), 7, {"answer": ["4", None], "n": 1.5}, ({"role": "user", "content": "2?"},))
    groups = (Group(prompt, (completion(0), episode)),)
    rewards = ((Reward(0.1 + 0.2, {"correct": 1.0}, detail="d"), Reward(None, error="timeout", detail="t")),)
    advantages = ((0.70710678, -0.70710678),)
    write_step(step_path(tmp_path, 12), groups, rewards, advantages)
    found = read_step(tmp_path, 12)
    assert found.groups == groups
    assert found.rewards == rewards
    assert found.advantages == advantages
    assert recorded_steps(tmp_path) == [12]


def test_a_broken_or_missing_record_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no record of step 3. Runs with run.record=all have one"):
        read_step(tmp_path, 3)
    step_path(tmp_path, 4).parent.mkdir()
    step_path(tmp_path, 4).write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="the record cannot be read"):
        read_step(tmp_path, 4)
