"""What messages about servers tell people to type, typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from oncurve.core.errors import ConfigError
from oncurve.fleet.launch.placement import Machine
from oncurve.fleet.recipe_servers import share_beside, start_vllm
from oncurve.fleet.servers.children import own_gpu
from oncurve.fleet.settle import placement_of
from oncurve.fleet.weights.endpoints import check_device
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, parse_config
from oncurve.recipe.schema import Config

RECIPE = "{model: Qwen/Qwen2.5-1.5B, data: {type: word_problems}}"
SERVERS = ["rollouts.type=servers"]
VLLM = [*SERVERS, "rollouts.vllm_servers=1"]
SETTING = re.compile(r"\S+=(?:\[[^\]]*\]|\{[^}]*\}|\S+)")
GIB = 2**30


def advice(message: str) -> list[list[str]]:
    """The settings of each alternative in a message; they stand between backticks."""
    groups = [SETTING.findall(words) for words in re.findall(r"`([^`]+)`", message)]
    found = [group for group in groups if group and all("." in setting.split("=")[0] for setting in group)]
    assert found, f"nothing to type in: {message}"
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        SERVERS,
        [*VLLM, "rollouts.own_servers=1"],
        ["rollouts.servers=[http://a:1]"],
        ["rollouts.vllm_servers=1", "rollouts.type=engine"],
        ["rollouts.staleness=1", "rollouts.in_flight=true"],
        [*VLLM, "rollouts.in_flight=true"],
        [*VLLM, "rollouts.in_flight=true", "rollouts.staleness=2", "rollouts.transfer=nccl"],
        ["rollouts.staleness=1", "rollouts.type=engine", "rollouts.registry=r", "rollouts.sleep=false"],
        [*SERVERS, "rollouts.servers=[a:1]"],
        ["rollouts.transfer=nccl", "rollouts.type=engine"],
        ["rollouts.sleep=true", "rollouts.type=transformers"],
        [*SERVERS, "rollouts.own_servers=1", "rollouts.transfer=nccl"],
        [*VLLM, "rollouts.transfer=nccl", "rollouts.sleep=true"],
        [*VLLM, "rollouts.staleness=1", "rollouts.sleep=true"],
        [*SERVERS, "rollouts.vllm_servers=2", "rollouts.sleep=true"],
        [*VLLM, "rollouts.tensor_parallel=2", "rollouts.sleep=true"],
        [*SERVERS, "rollouts.servers=[http://a:1]", "rollouts.sleep=true"],
        [*SERVERS, "rollouts.registry=r", "rollouts.sleep=true"],
        [*VLLM, "rollouts.transfer=nccl", "policy.lora={}"],
        ["rollouts.min_completion_tokens=300"],
    ],
)
def test_what_a_refused_recipe_is_told_to_set_loads(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RECIPE, overrides)
    for settings in advice(str(caught.value)):
        parse_config(RECIPE, [*overrides, *settings])


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int, gib: float = 24.0) -> None:
    properties = SimpleNamespace(total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("overrides", [[], ["rollouts.staleness=1"], ["rollouts.tensor_parallel=2"]])
@pytest.mark.usefixtures("one_gpu")
def test_a_recipe_for_two_gpus_says_on_one_how_to_train_there(overrides: Sequence[str]) -> None:
    recipe = find_recipe("math_r1_zero")
    with pytest.raises(ConfigError, match=r"that takes \d GPUs, and this process sees 1") as caught:
        start_vllm(load_config(recipe, overrides))
    [settings] = advice(str(caught.value))
    assert load_config(recipe, [*overrides, *settings]).rollouts.type == "engine"


@pytest.mark.usefixtures("one_gpu")
def test_a_server_without_room_beside_the_policy_is_refused_with_the_numbers() -> None:
    overrides = [*VLLM, "model=Qwen/Qwen2.5-7B", "rollouts.sleep=true"]
    with pytest.raises(
        ConfigError, match=r"of 24.0 GiB the policy keeps \d+\.\d, and a vLLM .* needs \d+\.\d"
    ) as caught:
        share_beside(parse_config(RECIPE, overrides))
    for settings in advice(str(caught.value)):
        assert (config := parse_config(RECIPE, [*overrides, *settings])) is not None
        if "policy.lora" in settings[0]:
            continue  # on 24 GiB not even that, with a frozen base of 7B in half width twice
        assert config.rollouts.type == "engine" or "--gpu-memory-utilization" in config.rollouts.vllm_options


def test_messages_before_a_transfer_say_what_to_set() -> None:
    said: list[tuple[list[str], str]] = []
    with pytest.raises(ConfigError) as caught:
        check_device(has_gpu=False)
    said.append(([*VLLM, "rollouts.transfer=nccl"], str(caught.value)))
    with pytest.raises(ConfigError) as caught:
        own_gpu(["0", "1"], trainers=2)
    said.append(([*VLLM, "rollouts.sleep=true"], str(caught.value)))
    for overrides, message in said:
        for settings in advice(message):
            assert parse_config(RECIPE, [*overrides, *settings]).rollouts.transfer in ("auto", "fetch")


@pytest.mark.parametrize("overrides", [[], ["rollouts.sleep=true"], ["rollouts.transfer=nccl"]])
@pytest.mark.parametrize("gpus", [0, 1, 2])
@pytest.mark.parametrize("has_vllm", [True, False])
def test_a_placement_says_how_to_have_it_otherwise(overrides: list[str], gpus: int, has_vllm: bool) -> None:
    config: Config = parse_config(RECIPE, overrides)
    found = placement_of(config, Machine("cuda" if gpus else "cpu", (80.0 * GIB,) * gpus, has_vllm))
    [settings] = advice(found.sentence)
    other = parse_config(RECIPE, [*overrides, *settings])
    assert other.rollouts.type == ("servers" if found.sampler == "engine" else "engine")
