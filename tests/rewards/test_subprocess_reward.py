"""A function in its own process: it may hang, crash or exit, and only its own group knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.grading import RewardFunction
from oncurve.core.records import Reward
from oncurve.rewards.section import RunLength
from oncurve.rewards.subprocess_reward import SubprocessReward

SOURCE = """
import os, time

def pays(completion, answer):
    match completion:
        case "hang":
            while True:
                pass
        case "exit":
            os._exit(1)
        case "memory":
            return len(bytearray(8 * 2**30))
        case "raise":
            raise ValueError("no")
        case "secret":
            return float("SECRET_TOKEN" in os.environ)
        case "none":
            return None
    return {"reward": float(completion == answer), "format": 1.0}

def longest(completions, **kwargs):
    most = max(map(len, completions))
    return [float(len(text) == most) for text in completions]


def knows(completion, step, trainer_state, log_metric):
    log_metric("letters", len(completion))
    return step + trainer_state.max_steps + trainer_state.epoch
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("isolated") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def function(source: Path) -> Iterator[SubprocessReward]:
    made = SubprocessReward(f"{source}:pays", timeout_seconds=0.5, memory_gib=1.0)
    yield made
    made.close()


def graded(function: RewardFunction, *texts: str) -> list[Reward]:
    prompts = [prompt_of(index=index) for index in range(len(texts))]
    return function(prompts, [completion_of(text) for text in texts])


def test_rewards_come_back_with_their_parts(function: SubprocessReward) -> None:
    assert isinstance(function, RewardFunction)
    assert function.name == "pays"
    assert graded(function, "5", "6") == [
        Reward(value=1.0, parts={"format": 1.0}),
        Reward(value=0.0, parts={"format": 1.0}),
    ]
    assert function([], []) == []


def test_it_knows_the_step_and_what_it_logs_comes_back(source: Path) -> None:
    with closing(SubprocessReward(f"{source}:knows", length=RunLength(50, 4.0))) as function:
        [reward] = function([prompt_of()], [replace(completion_of("abc"), policy_version=3)])
    assert (reward.value, reward.parts) == (53.75, {"letters": 3.0})


@pytest.mark.proves("D54")
def test_what_the_function_breaks_is_an_error_of_its_kind(
    function: SubprocessReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    rewards = graded(function, "5", "hang", "exit", "memory", "raise", "none", "secret", "5")
    errors = [reward.error for reward in rewards]
    assert errors == [None, "timeout", "crashed", "crashed", "crashed", "not_applicable", None, None]
    assert [rewards[index].value for index in (0, 6, 7)] == [1.0, 0.0, 1.0]


def test_a_group_stays_together_and_groups_stay_apart(source: Path) -> None:
    function = SubprocessReward(f"{source}:longest")
    prompts = [prompt_of(index=index) for index in (0, 0, 1, 1)]
    rewards = function(prompts, [completion_of(text) for text in ("a", "bb", "c", "c")])
    assert [reward.value for reward in rewards] == [0.0, 1.0, 1.0, 1.0]
    function.close()


def test_a_function_that_does_not_exist_is_an_error_that_says_so(source: Path) -> None:
    function = SubprocessReward(f"{source}:absent")
    assert "has no 'absent'" in graded(function, "5")[0].detail
    function.close()


def test_a_file_is_found_from_the_folder_of_the_trainer(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    function = SubprocessReward("mine.py:pays")
    monkeypatch.chdir("/")
    assert [reward.value for reward in graded(function, "5", "6")] == [1.0, 0.0]
    function.close()
