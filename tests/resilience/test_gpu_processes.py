"""Does the doctor list this user's processes on the GPU only, and end none without a yes?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oncurve.cli.doctor import doctor
from oncurve.core.errors import ConfigError
from oncurve.observe.machine import MachineError, gpu_processes, offer_to_end, unseen_gpu
from oncurve.policy.from_settings import make_device


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "a leftover"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name which prints a file, as the driver's own would."""
    listing = tmp_path / "listing.txt"
    command = tmp_path / "nvidia-smi"
    command.write_text(
        f'#!/bin/sh\ncase "$*" in *compute-apps=pid,used_memory*|*gpu=name*) cat {listing};; *) exit 9;; esac\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return listing


def test_a_machine_without_a_driver_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    assert offer_to_end(said.append, lambda text: True) == 0
    assert "no nvidia-smi" in said[0]


@pytest.mark.proves("F80", "D21")
def test_only_own_living_processes_are_listed_and_never_this_one(
    driver: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    driver.write_text(f"{sleeper.pid}, 1024\n{os.getpid()}, 7\n999999999, 3\nnonsense\n{sleeper.pid}, [N/A]\n")
    [process] = gpu_processes() or []
    assert process.pid == sleeper.pid
    assert "a leftover" in process.command
    assert not process.is_orphan


@pytest.mark.proves("F80", "D21")
def test_nothing_is_ended_without_a_yes_and_only_what_was_agreed_to(
    driver: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    driver.write_text(f"{sleeper.pid}, 1024\n")
    said: list[str] = []
    assert offer_to_end(said.append, lambda text: False) == 0
    assert sleeper.poll() is None
    assert offer_to_end(said.append, lambda text: str(sleeper.pid) in text) == 1
    assert sleeper.wait(20) == -15
    assert "holds 1024 MiB" in said[0]


def test_a_driver_that_fails_is_a_message(driver: Path) -> None:
    with pytest.raises(MachineError, match="does not answer"):
        gpu_processes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_a_gpu_that_torch_does_not_see_is_refused_unless_it_is_hidden(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.write_text("NVIDIA H100 80GB HBM3, 570.86.15\n")
    said = unseen_gpu("2.13.0", "13.0")
    assert said is not None
    assert "NVIDIA H100 80GB HBM3 with driver 570.86.15" in said
    assert "2.13.0 needs CUDA 13.0. Install driver 580 or newer" in said
    with pytest.raises(ConfigError, match=r"policy\.device is auto\. .* H100 .*policy\.device=cpu"):
        make_device("auto")
    with pytest.raises(MachineError, match="torch does not see it"):
        doctor(machine=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make_device("auto").type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver.write_text("")
    assert make_device("auto").type == "cpu"
