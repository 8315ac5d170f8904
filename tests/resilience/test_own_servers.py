"""Do servers that a run starts for itself begin and end with it, and sample what the run would have sampled?"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Nursery
from safetensors.torch import load_file
from sampled import assert_same_completions, rollouts

from oncurve.fleet.servers.children import ChildServers
from oncurve.report.overview import overview

SIZES: dict[str, dict[str, Any]] = {
    "rollouts": {"max_completion_tokens": 24},
    "evaluation": {"every_steps": 0},
    "run": {"steps": 4, "prompts_per_step": 3, "save_every_steps": 0},
}
SERVED = SIZES | {"rollouts": {**SIZES["rollouts"], "type": "servers", "own_servers": 2}}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def processes_with(*words: str) -> list[int]:
    """Living processes whose command lines have all of these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().decode(errors="replace")
            state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and all(word in line for word in words):
            found.append(int(path.name))
    return found


def until(is_so: Callable[[], Any], told: Callable[[], str] = str, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, told()
        time.sleep(0.01)


@linux
def test_a_run_with_servers_of_its_own_is_the_run_without_any_and_leaves_nobody(
    nursery: Nursery, recipe: Callable[..., Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    status, said = nursery.run("train", recipe(tmp_path / "alone", **SIZES))
    assert status == 0, said
    assert "placement:" not in said or torch.cuda.is_available()
    status, said = nursery.run("train", recipe(tmp_path / "served", **SERVED))
    assert status == 0, said
    alone, served = tmp_path / "alone" / "run", tmp_path / "served" / "run"
    assert_same_completions(served, alone)
    assert len(rollouts(served)) == 4
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (served, alone))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    assert len(list((tmp_path / "served" / "server_logs").glob("oncurve_*.txt"))) == 2
    assert processes_with("serve", str(checkpoints["qwen2"])) == []


@linux
def test_servers_of_a_run_get_what_changed_and_its_report_says_how_much(
    nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    rollouts_section = {**SERVED["rollouts"], "deltas": {}, "staleness": 1}
    changes = {"rollouts": rollouts_section, "optimizer": {"learning_rate": 1e-6}}
    status, said = nursery.run("train", recipe(tmp_path, **SERVED | changes))
    assert status == 0, said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sent = [row["weights/sent_fraction"] for row in rows if "weights/sent_fraction" in row]
    assert sent[0] == 1.0
    assert max(sent[1:]) < 0.7
    [fact] = [value for name, value in overview(tmp_path / "run")["facts"] if name == "weights sent"]
    assert "MB per step" in fact


@linux
def test_servers_end_with_a_trainer_that_is_killed(
    nursery: Nursery, recipe: Callable[..., Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    trainer = nursery.start("train", recipe(tmp_path, **SERVED | {"run": SIZES["run"] | {"steps": 500}}))
    status = tmp_path / "run" / "status.json"

    def is_training() -> bool:
        assert trainer.is_running(), trainer.output
        return status.exists() and json.loads(status.read_text())["step"] >= 2

    until(is_training, lambda: trainer.output)
    assert len(processes_with("serve", str(checkpoints["qwen2"]), "--port")) >= 2
    trainer.kill(signal.SIGKILL)
    trainer.wait()
    until(lambda: processes_with("serve", str(checkpoints["qwen2"])) == [], seconds=20.0)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if sys.argv[1] == "parent": subprocess.run([sys.executable, "-c", sys.argv[2], "child", sys.argv[2], sys.argv[3]])
time.sleep(600)
"""
"""A server with a process of its own, both of which do not listen to SIGTERM."""


@linux
def test_a_server_takes_its_whole_group_along_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncurve.fleet.servers.children.ENDING_SECONDS", 0.2)
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    said: list[str] = []
    servers = ChildServers(
        2,
        name="stubborn",
        logs=tmp_path,
        command=lambda port: [sys.executable, "-c", STUBBORN, "parent", STUBBORN, mark],
        environment=dict(os.environ),
        devices=["4,5", "7"],
    )

    def tell(text: str) -> None:
        said.append(text)
        raise BrokenPipeError  # the terminal is gone

    servers.notify = tell
    try:
        until(lambda: sorted(path.read_text().split() for path in tmp_path.iterdir()) == [["4,5"] * 2, ["7"] * 2])
        assert len(processes_with(mark)) == 6, "a leader, a server and its child, twice"
        first = servers.process_of(servers.urls[0])
        os.kill(first.pid, signal.SIGKILL)  # the leader alone
        until(lambda: servers.process_of(servers.urls[0]).pid != first.pid and len(processes_with(mark)) == 6)
        until(lambda: len(said) == 1)
        assert "is started again" in said[0]
        second = servers.process_of(servers.urls[0])
        os.kill(second.pid, signal.SIGKILL)
        until(lambda: servers.process_of(servers.urls[0]).pid != second.pid and len(processes_with(mark)) == 6)
    finally:
        servers.close()
    until(lambda: processes_with(mark) == [])
