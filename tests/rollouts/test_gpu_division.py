"""Does each GPU of a machine belong to training or to sampling, and is it said where everything is?

No GPU is needed: torch is told how many there are, and a script that is no vLLM writes down what it was given.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from oncurve import wiring
from oncurve.config.load import parse_config
from oncurve.config.schema import Config
from oncurve.errors import ConfigError
from oncurve.rollouts.servers.gpus import divide_gpus, gpus_per_server, idle_gpus, shared_options, visible_devices
from oncurve.rollouts.servers.local_vllm import VllmServers, check_version
from oncurve.wiring.servers import divide_machine

RECIPE = "{model: embedded, data: {type: word_problems}}"
SAMPLE_WITH_VLLM = ("rollouts.type=servers", "rollouts.vllm_servers=1")


def recipe(*overrides: str) -> Config:
    return parse_config(RECIPE, list(overrides))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """A machine with so many GPUs, as far as torch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return request.param


def test_two_gpus_are_one_for_training_and_one_for_sampling() -> None:
    division = divide_gpus(2, processes=1, servers=1)
    assert (division.trainers, division.servers, division.is_shared) == ((0,), ((1,),), False)


def test_four_gpus_hold_two_processes_and_a_server_over_two() -> None:
    division = divide_gpus(4, processes=2, servers=1, gpus_per_server=2)
    assert (division.trainers, division.servers, division.is_shared) == ((0, 1), ((2, 3),), False)


def test_servers_have_gpus_of_their_own_while_there_are_enough() -> None:
    division = divide_gpus(8, processes=2, servers=3, gpus_per_server=2)
    assert division.servers == ((2, 3), (4, 5), (6, 7))
    assert not division.is_shared


def test_one_gpu_is_shared() -> None:
    division = divide_gpus(1, processes=1, servers=1)
    assert (division.trainers, division.servers, division.is_shared) == ((0,), ((0,),), True)


def test_a_server_over_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="Lower --tensor-parallel-size"):
        divide_gpus(2, processes=1, servers=1, gpus_per_server=4)
    with pytest.raises(ConfigError, match="number of GPUs"):
        gpus_per_server(["--tensor-parallel-size", "all"])


def test_a_server_that_shares_a_gpu_gets_a_part_of_its_memory_unless_the_recipe_says_how_much() -> None:
    assert shared_options(("--max-model-len", "4096"))[-2:] == ("--gpu-memory-utilization", "0.3")
    said = ("--gpu-memory-utilization", "0.5")
    assert shared_options(said) == said


def test_numbers_are_those_that_this_process_sees() -> None:
    assert visible_devices([1, 3], {}) == "1,3"
    assert visible_devices([1, 3], {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c,GPU-d"}) == "GPU-b,GPU-d"


def test_idle_gpus_are_pointed_out_and_only_those() -> None:
    assert "--processes 4" in (idle_gpus(4, processes=1, samples_here=True) or "")
    assert idle_gpus(1, processes=1, samples_here=True) is None
    assert idle_gpus(4, processes=4, samples_here=True) is None
    assert idle_gpus(4, processes=1, samples_here=False) is None


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_with_two_gpus_the_run_says_where_everything_is(gpus: int) -> None:
    assert wiring.describe_gpus(recipe(*SAMPLE_WITH_VLLM)) == ["training on GPU 0, vLLM server 1 on GPU 1"]
    [idle] = wiring.describe_gpus(recipe())
    assert idle.startswith(f"warning: this machine has {gpus} GPUs")


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_with_one_gpu_the_run_falls_back_to_sharing_it_and_warns() -> None:
    place, warning = wiring.describe_gpus(recipe(*SAMPLE_WITH_VLLM))
    assert place == "training on GPU 0, vLLM server 1 on GPU 0"
    assert "share" in warning
    assert "--gpu-memory-utilization 0.3" in warning
    assert wiring.describe_gpus(recipe()) == []


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_recipe_that_names_its_gpu_trains_there_and_samples_on_the_other() -> None:
    division = divide_machine(recipe(*SAMPLE_WITH_VLLM, "policy.device=cuda:1"))
    assert division is not None
    assert (division.trainers, division.servers) == ((1,), ((0,),))


FAKE = """#!/usr/bin/env python3
import json, os, sys, time
if sys.argv[1] == "-c":
    print("{version}")
else:
    told = {{"seen": os.environ.get("CUDA_VISIBLE_DEVICES"), "words": sys.argv[1:]}}
    port = sys.argv[sys.argv.index("--port") + 1]
    with open("{folder}/" + port + ".part", "w") as file:
        json.dump(told, file)
    os.rename("{folder}/" + port + ".part", "{folder}/" + port + ".json")
    time.sleep(60)
"""


def fake_python(folder: Path, version: str) -> str:
    path = folder / "python"
    path.write_text(FAKE.format(version=version, folder=folder))
    path.chmod(0o755)
    return str(path)


def test_each_server_is_started_with_its_gpus_and_the_options_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    options = ("--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.85", "--max-model-len", "4096")
    python = fake_python(tmp_path, "0.32.0")
    servers = VllmServers(
        "model", 2, python=python, dtype="bfloat16", on_cpu=False, logs=tmp_path, options=options, gpus=((1, 2), (3,))
    )
    try:
        files = [tmp_path / f"{port}.json" for port in servers.ports]
        deadline = time.monotonic() + 30
        while not all(file.is_file() for file in files) and time.monotonic() < deadline:
            time.sleep(0.02)
        told = [json.loads(file.read_text()) for file in files]
    finally:
        servers.close()
    assert [one["seen"] for one in told] == ["5,6", "7"]
    assert all(one["words"][-6:] == list(options) for one in told)


def test_a_vllm_that_is_too_old_or_none_at_all_is_refused_by_version(tmp_path: Path) -> None:
    check_version(fake_python(tmp_path, "0.32.0"))
    check_version(fake_python(tmp_path, "1.0.3.dev1"))
    with pytest.raises(ConfigError, match=r"has vLLM 0\.15\.1.*Install vLLM 0\.32 or newer"):
        check_version(fake_python(tmp_path, "0.15.1"))
    with pytest.raises(ConfigError, match="has no vLLM"):
        check_version(fake_python(tmp_path, ""))
