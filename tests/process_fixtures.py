"""Processes that tests share: forks of one that has imported torch, vLLM or DeepSpeed, and those of the pretend GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nursery import Nursery
    from pretend_gpu import PretendGpu


def for_all_workers(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A file that all processes of one pytest have in common."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"{name}-for-all"


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Processes of Python that need not import torch, since they are forked from one that has."""
    from nursery import Nursery

    made = Nursery(tmp_path_factory.mktemp("output"), shared=for_all_workers(tmp_path_factory, "nursery"))
    yield made
    made.close()


@pytest.fixture
def starts_forks(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process starts with ``sys.executable`` is forked too: servers of a run, runs of several seeds."""
    monkeypatch.setattr(sys, "executable", str(nursery.stand_in(tmp_path / "forking-python")))


@pytest.fixture(scope="session")
def deepspeed_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The same in the Python that has DeepSpeed: this one, or that of ONCURVE_DEEPSPEED_PYTHON."""
    from nursery import Nursery

    python = os.environ.get("ONCURVE_DEEPSPEED_PYTHON", sys.executable)
    made = Nursery(
        tmp_path_factory.mktemp("deepspeed"),
        python=python,
        module="nursery_deepspeed",
        variables={"DS_ACCELERATOR": "cpu"},
        shared=for_all_workers(tmp_path_factory, "deepspeed"),
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def vllm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python for ONCURVE_VLLM_PYTHON, whose processes are forked from one that has imported vLLM."""
    from nursery import Nursery

    folder = tmp_path_factory.mktemp("vllm")
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TORCHDYNAMO_DISABLE": "1"}
    made = Nursery(
        folder,
        python=os.environ["ONCURVE_VLLM_PYTHON"],
        module="nursery_vllm",
        variables=variables,
        shared=for_all_workers(tmp_path_factory, "vllm"),
    )
    yield str(made.stand_in(folder / "python"))
    made.close()


@pytest.fixture(scope="session")
def pretend_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendGpu]:
    """A GPU that is not there and carries numbers, in processes of its own."""
    from pretend.loading import NO_COMPILER, has_compiler
    from pretend_gpu import PretendGpu

    if not has_compiler():
        pytest.skip(NO_COMPILER)
    with PretendGpu(tmp_path_factory.mktemp("pretend-gpu")) as gpu:
        yield gpu
