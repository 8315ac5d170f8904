"""Does a lost process end the others, by its name and soon? And is work divided as it should be?"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
import workers

from oncurve.core.errors import SamplerError
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest
from oncurve.policy import heartbeat
from oncurve.policy.distributed import Processes, own_rows
from oncurve.rewards.foreign_code import limited
from oncurve.run.data_parallel import ShardedRewards, ShardedSampler, own_indices, together
from oncurve.run.interruption import Interruption
from oncurve.run_errors import LostProcess


def die(processes: Processes, *, how: str) -> None:
    """Process 1 ends in the middle of the run; process 0 waits for it."""
    processes.all_gather(0)
    if processes.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("no such reward")
    processes.all_gather(1)


@pytest.mark.parametrize(
    ("how", "said"), [("killed", "process 1 is gone"), ("failed", "process 1 failed (ValueError: no such reward)")]
)
def test_the_others_end_and_name_the_process_that_is_lost(how: str, said: str, tmp_path: Path) -> None:
    started = workers.launch(2, die, tmp_path, how=how)
    assert all(process.exitcode for process in started)
    assert said in (tmp_path / "0.error").read_text()


def test_a_process_that_hangs_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started = workers.launch(2, die, tmp_path, how="stopped", silent_seconds=4.0, grace_seconds=40)
    assert started[0].exitcode == LostProcess.exit_code
    assert "process 1 of 2 is silent" in capfd.readouterr().err


def work_long(processes: Processes, *, how: str) -> list[str]:
    """Process 1 does something for more than ``timeout_seconds``; process 0 waits for it."""
    if processes.rank == 1:
        if how == "naps":
            for _ in range(20):
                time.sleep(0.2)
        elif how == "limited":
            with limited(30):
                time.sleep(4)
        else:
            threading.Event().wait(1000)
    return processes.all_gather(how)


@pytest.mark.parametrize("how", ["naps", "limited"])
def test_who_works_or_has_a_limit_of_its_own_is_waited_for_beyond_the_timeout(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "NOTICE_SECONDS", 1.0)
    assert workers.run(2, work_long, tmp_path, how=how, timeout_seconds=2.0) == [[how] * 2] * 2
    assert re.search(
        r"process 0 has waited \d s for process 1 at test_lost_process.py:\d+ in work_long", capfd.readouterr().err
    )


def test_a_process_that_is_stuck_ends_the_run_with_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started = workers.launch(2, work_long, tmp_path, how="stuck", timeout_seconds=2.0, grace_seconds=40)
    assert started[0].exitcode == LostProcess.exit_code
    said = capfd.readouterr().err
    assert "policy.timeout_seconds is 2): process 1 at test_lost_process.py" in said
    assert "Traceback" not in said


def test_rows_are_divided_without_rest_and_evenly() -> None:
    batch = tasks.batch_of(one_row=False)
    for share_prompts in (True, False):
        for count in (2, 3, 7):
            parts = [own_rows(batch, Processes(rank, count), share_prompts=share_prompts) for rank in range(count)]
            assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
            lengths = batch.completion_lengths if share_prompts else batch.row_lengths
            costs = [int(lengths[rows].sum()) for rows in parts]
            assert max(costs) - min(costs) <= 2 * int(batch.row_lengths.max())


def test_a_prompt_that_occurs_twice_stays_with_one_process() -> None:
    prompts = [Prompt("", (1,), index) for index in (5, 7, 5, 9, 7)]
    shares = [own_indices(prompts, Processes(rank, 2)) for rank in range(2)]
    assert shares == [[0, 2, 3], [1, 4]]


class Counting:
    """A sampler and a reward function that say who was asked."""

    name = "counting"

    def __init__(self, rank: int) -> None:
        self.rank, self.asked = rank, 0

    def sample(self, request: SamplingRequest) -> list[Group]:
        self.asked += len(request.prompts)
        return [
            Group(
                p,
                tuple(
                    Completion(p.prompt_ids, (p.index, g), "", (-1.0, -1.0), "stop", 0, g)
                    for g in range(request.group_size)
                ),
            )
            for p in request.prompts
        ]

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> list[Reward]:
        self.asked += len(completions)
        return [
            Reward(float(p.index * 10 + c.index), {"by": self.rank}) for p, c in zip(prompts, completions, strict=True)
        ]

    def close(self) -> None:
        pass


def sample_and_grade(processes: Processes) -> dict[str, Any]:
    """Groups and rewards as every process gets them."""
    prompts = [Prompt("", (1, 2), index, {"answer": "x"}) for index in range(5)]
    sampler, rewards = Counting(processes.rank), Counting(processes.rank)
    groups = ShardedSampler(sampler, processes).sample(SamplingRequest(prompts, 3))  # type: ignore[arg-type]
    flat = [(group.prompt, completion) for group in groups for completion in group.completions]
    graded = ShardedRewards(rewards, processes)([p for p, _ in flat], [c for _, c in flat])  # type: ignore[arg-type]
    return {
        "tokens": [[c.token_ids for c in group.completions] for group in groups],
        "values": [reward.value for reward in graded],
        "by": [reward.parts["by"] for reward in graded],
        "asked": (sampler.asked, rewards.asked),
    }


def fail_in_one(processes: Processes) -> str:
    """Process 1 cannot sample; what each of them hears."""

    def work() -> list[int]:
        if processes.rank == 1:
            raise SamplerError("no server answers")
        return [1]

    try:
        together(work, processes, Interruption(is_alone=False))
    except SamplerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_in_one_share_is_raised_in_all_and_said_once(tmp_path: Path) -> None:
    assert workers.run(2, fail_in_one, tmp_path) == ["SamplerError: ", "SamplerError: no server answers"]


@pytest.mark.proves("F69", "D12")
def test_each_process_samples_and_grades_its_share_and_has_all(tmp_path: Path) -> None:
    first, second = workers.run(2, sample_and_grade, tmp_path)
    assert first["tokens"] == second["tokens"] == [[(p, g) for g in range(3)] for p in range(5)]
    assert first["values"] == second["values"] == [10.0 * p + g for p in range(5) for g in range(3)]
    assert first["by"] == [p % 2 for p in range(5) for _ in range(3)]
    assert (first["asked"], second["asked"]) == ((3, 9), (2, 6))
