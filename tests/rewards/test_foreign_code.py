"""Reward functions that exit, hang, fork, change what belongs to everybody, or give nothing at all."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from custom_examples import Native
from reward_records import completion_of, prompt_of

import oncurve
from oncurve.core.errors import RewardError
from oncurve.core.grading import grade
from oncurve.core.records import Reward
from oncurve.rewards.custom import from_function
from oncurve.run.interruption import Interruption

ROW = {"answer": "5", "level": 1}
QUICK: dict[str, Any] = {
    "algorithm": {"group_size": 2},
    "rollouts": {"max_completion_tokens": 4},
    "evaluation": {"num_prompts": 2},
}
ROWS = [{"question": f"{n}+1?", "answer": n + 1} for n in range(12)]


def graded(function: Any, *texts: str, timeout_seconds: float = 0.3, **options: Any) -> list[Reward]:
    return grade(
        from_function(function, timeout_seconds=timeout_seconds, **options),
        [prompt_of(row=ROW)] * len(texts),
        [completion_of(text) for text in texts],
    )


def exits(completion: str, answer: str) -> float:
    return sys.exit(0) if completion == "bad" else 1.0


def exits_at_once(completion: str, answer: str) -> float:
    return os._exit(0) if completion == "bad" else 1.0


def hangs(completion: str, answer: str) -> float:
    while completion == "bad":
        try:
            time.sleep(5)
        except Exception:  # noqa: BLE001  # as functions of users do
            continue
    return 1.0


async def exits_async(completion: str, answer: str) -> float:
    return exits(completion, answer)


async def stops_its_loop(completion: str, answer: str) -> float:
    if completion == "bad":
        asyncio.get_running_loop().stop()
        raise ValueError("stopped")
    return 1.0


async def interrupts_async(completion: str, answer: str) -> float:
    if completion == "bad":
        raise KeyboardInterrupt
    return 1.0


def ends_a_generator(completion: str, answer: str) -> float:
    if completion == "bad":
        raise GeneratorExit
    return 1.0


@pytest.mark.parametrize(
    ("function", "error", "detail"),
    [
        (exits, "crashed", "it called sys.exit(0)"),
        (exits_at_once, "crashed", "it called os._exit(0)"),
        (hangs, "timeout", "over 0.3 s"),
        (exits_async, "crashed", "it called sys.exit(0)"),
        (stops_its_loop, "crashed", "ValueError: stopped"),
        (interrupts_async, "crashed", "it raised KeyboardInterrupt"),
        (ends_a_generator, "crashed", "GeneratorExit"),
        (lambda completion, answer: float("nan") if completion == "bad" else 1.0, "nan", "usually 0/0"),
        (lambda completion, answer: float("inf") if completion == "bad" else 1.0, "crashed", "inf"),
        (lambda completion, answer: object() if completion == "bad" else 1.0, "crashed", "object"),
    ],
)
def test_one_completion_that_breaks_a_function_costs_itself_alone(
    function: Callable[..., Any], error: str, detail: str
) -> None:
    first, bad, last = graded(function, "good", "bad", "good")
    assert (first.value, bad.value, last.value) == (1.0, None, 1.0)
    assert bad.error == error
    assert detail in bad.detail


def test_ctrl_c_is_no_mistake_of_the_function_where_python_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(completion: str, answer: str) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        graded(interrupted, "x")
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    assert graded(interrupted, "x")[0].detail == "it raised KeyboardInterrupt"


def test_a_value_that_is_no_number_costs_no_other_completion_of_a_batch() -> None:
    rewards = graded(lambda completions, **_: [1.0, float("-inf"), 0.5], "a", "b", "c")
    assert [reward.value for reward in rewards] == [1.0, None, 0.5]


def test_a_batched_function_that_never_ends_its_list_is_an_error() -> None:
    [first, _] = graded(lambda completions, **_: itertools.repeat(1.0), "a", "b")
    assert "more rewards than the 2 completions" in first.detail


def test_an_async_function_that_blocks_is_late_and_the_next_call_works() -> None:
    async def blocks(completion: str, answer: str) -> float:
        time.sleep(3 if completion == "bad" else 0)
        return 1.0

    assert graded(blocks, "good")[0].value == 1.0
    rewards = graded(blocks, "good", "bad")
    assert rewards[1].error == "timeout"
    assert graded(blocks, "good")[0].value == 1.0


def test_what_belongs_to_everybody_is_put_back_and_said(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def vandal(completion: str, answer: str) -> float:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.chdir("/")
        return 1.0

    with caplog.at_level(logging.WARNING):
        assert graded(vandal, "x")[0].value == 1.0
        assert graded(vandal, "x")[0].value == 1.0
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGTERM) == before
    assert Path.cwd() == tmp_path
    messages = [record.getMessage() for record in caplog.records]
    assert sorted(text.split(" set ")[1].split(" to ")[0] for text in messages) == [
        "the handler of SIGTERM", "the working folder", "torch's default type", "torch's gradient mode",
    ]  # fmt: skip


def test_a_run_finds_back_from_a_folder_that_the_function_removed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removes(completion: str, answer: str) -> float:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        return 1.0

    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert graded(removes, "x")[0].value == 1.0
    assert Path.cwd() == tmp_path
    assert "removes set the working folder to one that was removed" in caplog.text


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_a_run_prints_is_seen_whatever_the_function_did_to_the_output(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def silences(completion: str, answer: str) -> float:
        sys.stdout.close() if is_closed else setattr(sys, "stdout", io.StringIO())
        return 1.0

    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115  # as a command has it
    assert graded(silences, "x")[0].value == 1.0
    print("seen", flush=True)
    assert capfd.readouterr().out == "seen\n"


def test_a_pool_of_processes_that_a_function_starts_ends_within_a_run() -> None:
    """They are told to end by SIGTERM, which would otherwise be the run's: its handlers are inherited."""

    def pools(completion: str, answer: str) -> float:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1")  # a signal that comes sooner is lost: Python forgets those from before the fork
            time.sleep(300)
        os.read(read, 1)
        os.close(read)
        os.close(write)
        os.kill(child, signal.SIGTERM)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    messages: list[str] = []
    interruption = Interruption(notify=messages.append)
    with interruption.listen():
        assert [reward.value for reward in graded(pools, "x", timeout_seconds=60.0)] == [-float(signal.SIGTERM)]
    assert not interruption.is_requested
    assert not messages


def test_a_fork_does_not_go_on_as_a_second_trainer() -> None:
    """A child that returned would run everything behind this call, the test included."""
    read, write = os.pipe()

    def forks(completion: str, answer: str) -> float:
        return float(os.fork() == 0)

    rewards = graded(forks, "x")
    os.write(write, b"one ")
    os.close(write)
    os.waitpid(-1, 0)
    assert os.read(read, 100) == b"one "
    assert rewards[0].value == 0.0


def test_the_completion_is_found_by_its_name_wherever_it_stands() -> None:
    def prompt_first(prompt: str, completion: str) -> float:
        return float(completion == "yes")

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float((data_source, solution_str, ground_truth) == (None, "5", "5"))

    assert [reward.value for reward in graded(prompt_first, "yes", "no")] == [1.0, 0.0]
    assert [reward.value for reward in graded(compute_score, "5", "6")] == [1.0, 0.0]
    assert graded(Native(), "x")[0].value == 2.0


def forgotten(completion: str, answer: str) -> None:
    1.0 if answer in completion else 0.0  # noqa: B018


def zero_by_zero(completion: str, answer: str) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (forgotten, r"none of the 2 completions was graded, most often as 'not_applicable': forgotten: "),
        (
            lambda completions: [1.0, 0.5, 0.2],
            r"returned more rewards than the \d completions? that it was given$",
        ),  # and no advice about None
        (zero_by_zero, r"before training: none of the 2 completions was graded, most often as 'nan'"),
    ],
)
def test_a_run_that_grades_nothing_ends_before_its_first_step(
    function: Callable[..., Any], message: str, tmp_path: Path
) -> None:
    run = {"steps": 3, "prompts_per_step": 2, "folder": str(tmp_path), "name": "nothing"}
    with pytest.raises(RewardError, match=message):
        oncurve.train("embedded", ROWS, function, run=run, **QUICK)


def test_a_run_whose_first_step_grades_nothing_ends_with_it(tmp_path: Path) -> None:
    def only_the_test(completion: str, answer: str, index: int = 0) -> float | None:
        calls.append(completion)
        return 1.0 if len(calls) <= 2 else None

    calls: list[str] = []
    run = {"steps": 3, "prompts_per_step": 2, "folder": str(tmp_path), "name": "nothing"}
    with pytest.raises(RewardError, match="step 1: none of the 4 completions was graded"):
        oncurve.train("embedded", ROWS, only_the_test, run=run, **QUICK)
