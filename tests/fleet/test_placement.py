"""Is the layout the one that the machine and the recipe ask for?"""

from __future__ import annotations

import pytest
import torch

from oncurve.core.errors import ConfigError
from oncurve.fleet.launch.placement import Machine, Wants, choose_placement
from oncurve.fleet.servers import vllm_version
from oncurve.fleet.servers.children import gpu_shares, own_gpu, visible_gpus
from oncurve.fleet.settle import placement_of, reckon_beside, settle
from oncurve.plan.find_shape import find_shape
from oncurve.recipe.load import parse_config

GIB = 2.0**30
RECIPE = "{model: Qwen/Qwen2.5-7B, data: {type: gsm8k}}"


def gpus(count: int, gib: float = 80.0, *, has_vllm: bool = True) -> Machine:
    return Machine("cuda", (gib * GIB,) * count, has_vllm)


@pytest.mark.proves("F56", "F58")
@pytest.mark.parametrize(
    ("machine", "model", "overrides", "expected"),
    [
        (Machine("cpu", (), True), "Qwen2.5-7B", [], ("engine", 0, 1)),
        (Machine("mps", (), True), "Qwen2.5-7B", [], ("engine", 0, 1)),
        (gpus(1), "Qwen2.5-7B", [], ("engine", 0, 1)),
        (gpus(1), "Qwen2.5-1.5B", [], ("servers", 1, 1)),
        (gpus(1, has_vllm=False), "Qwen2.5-1.5B", [], ("engine", 0, 1)),
        (gpus(1, 24.0), "Qwen2.5-1.5B", [], ("engine", 0, 1)),
        (gpus(1), "Qwen2.5-7B", ["policy.lora={}"], ("servers", 1, 1)),
        (gpus(1), "Qwen2.5-7B", ["policy.lora={}", "policy.quantization=nf4"], ("engine", 0, 1)),
        (gpus(2), "Qwen2.5-7B", [], ("servers", 1, 1)),
        (gpus(4), "Qwen2.5-7B", [], ("servers", 3, 1)),
        (gpus(8), "Qwen2.5-7B", [], ("servers", 7, 1)),
        (gpus(2), "Qwen2.5-32B", [], ("engine", 0, 1)),
        (gpus(4), "Qwen2.5-32B", [], ("servers", 1, 2)),
        (gpus(8), "Qwen2.5-32B", [], ("servers", 3, 2)),
        (gpus(8, 24.0), "Qwen2.5-7B", [], ("servers", 3, 2)),
        (gpus(4, 24.0), "Qwen2.5-32B", [], ("engine", 0, 1)),
        (gpus(8, has_vllm=False), "Qwen2.5-7B", [], ("engine", 0, 1)),
        (gpus(8), "Qwen2.5-7B", ["policy.lora={}"], ("servers", 7, 1)),
        (gpus(8), "Qwen2.5-7B", ["policy.lora={}", "policy.quantization=nf4"], ("engine", 0, 1)),
    ],
)
def test_a_machine_and_a_recipe_have_one_layout(
    machine: Machine, model: str, overrides: list[str], expected: tuple[str, int, int]
) -> None:
    found = placement_of(parse_config(RECIPE, [f"model=Qwen/{model}", *overrides]), machine)
    assert (found.sampler, found.servers, found.tensor_parallel) == expected
    assert found.sentence.startswith(("placement: there ", "placement: no CUDA GPU found"))
    other = "rollouts.type=engine" if expected[0] == "servers" else "rollouts.type=servers"
    assert other in found.sentence, "how to have it otherwise"


@pytest.mark.proves("F60")
def test_a_server_beside_the_trainer_is_there_where_it_is_asked_for_and_can_be() -> None:
    config = parse_config(RECIPE, ["model=Qwen/Qwen2.5-1.5B", "rollouts.sleep=true"])
    for machine in (gpus(1), gpus(2)):
        found = placement_of(config, machine)
        assert (found.sampler, found.servers, found.tensor_parallel) == ("servers", 1, 1)
        assert "on the GPU that trains" in found.sentence
    for machine, why in (
        (gpus(1, has_vllm=False), "vllm_python"),
        (gpus(1, 24.0), "of 24.0 GiB the policy keeps"),
        (Machine("cpu", (), True), "no CUDA GPU"),
    ):
        found = placement_of(config, machine)
        assert found.sampler == "engine"
        assert why in found.sentence


def test_a_server_beside_the_trainer_sees_its_gpu() -> None:
    assert own_gpu(["3", "1"], trainers=1) == ["3"]
    with pytest.raises(ConfigError, match="2 train"):
        own_gpu(["3", "1"], trainers=2)


@pytest.mark.parametrize(("trainers", "expected"), [(1, 7), (4, 4), (7, 1), (8, 0)])
def test_servers_get_the_gpus_that_nothing_trains_on(trainers: int, expected: int) -> None:
    found = choose_placement(gpus(8), Wants(trainers=trainers, weights=7e9, heads=28))
    assert found.servers == expected
    assert (found.sampler == "servers") == (expected > 0)


@pytest.mark.proves("F63")
def test_what_a_server_spreads_over_divides_the_heads_and_nothing_is_hidden() -> None:
    wants = Wants(weights=30e9, heads=14)
    assert choose_placement(gpus(8), wants).tensor_parallel == 2
    assert "1 stays idle" in choose_placement(gpus(8), wants).why
    assert choose_placement(gpus(8, 40.0), wants).sampler == "engine", "four GPUs would do, and do not divide 14 heads"
    assert "do not fit" in choose_placement(gpus(8, 40.0), wants).why


@pytest.mark.proves("F55", "F68", "D10")
def test_servers_see_gpus_of_their_own_behind_those_of_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-5a,7")
    seen = visible_gpus(4)
    assert gpu_shares(seen, trainers=1, servers=3, gpus_per_server=1) == ["1", "GPU-5a", "7"]
    assert gpu_shares(seen, trainers=2, servers=1, gpus_per_server=2) == ["GPU-5a,7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_shares(visible_gpus(8), trainers=1, servers=3, gpus_per_server=2) == ["1,2", "3,4", "5,6"]
    with pytest.raises(ConfigError, match="that takes 9 GPUs, and this process sees 8"):
        gpu_shares(visible_gpus(8), trainers=1, servers=4, gpus_per_server=2)


@pytest.mark.proves("F56", "F59")
def test_only_a_recipe_that_leaves_it_open_is_settled() -> None:
    config, said = settle(parse_config(RECIPE, ["policy.device=cpu"]))
    assert (config.rollouts.type, said) == ("engine", None), "no word of servers where nothing asks for them"
    config, said = settle(parse_config(RECIPE, ["policy.device=cpu", "rollouts.transfer=nccl"]))
    assert (config.rollouts.type, config.rollouts.transfer) == ("engine", "auto")
    assert said is not None
    assert "rollouts.transfer" in said, "what was asked for and is not done is said"
    forced = parse_config(RECIPE, ["rollouts.type=servers", "rollouts.vllm_servers=2", "rollouts.transfer=fetch"])
    assert settle(forced) == (forced, None)


def test_one_gpu_is_shared_with_a_server_that_sleeps_only_if_the_policy_leaves_room() -> None:
    config = parse_config(RECIPE, ["model=Qwen/Qwen2.5-1.5B"])
    found = placement_of(config, gpus(1))
    assert found.sleeps
    assert "sleep true" in found.sentence
    unknown = parse_config(RECIPE, ["model=nobody/knows-this-model"])
    assert placement_of(unknown, gpus(1)).sampler == "engine", "one GPU needs no table of models to train on"


@pytest.mark.parametrize(("model", "share"), [("Qwen2.5-1.5B", 0.73), ("Qwen2.5-0.5B", 0.88), ("Qwen2.5-3B", 0.51)])
def test_a_server_beside_the_policy_gets_what_twelve_bytes_a_weight_and_four_gibibytes_leave(
    model: str, share: float
) -> None:
    config = parse_config(RECIPE, [f"model=Qwen/{model}"])
    shape = find_shape(f"Qwen/{model}")
    found = reckon_beside(config, shape, total=80 * GIB)
    assert found.policy == 12 * shape.num_parameters + 4 * GIB
    assert found.share == share
    reference = parse_config(RECIPE, [f"model=Qwen/{model}", "algorithm.kl_coef=0.1"])
    held = reckon_beside(reference, shape, total=80 * GIB)
    assert held.policy == found.policy + 4 * shape.num_parameters


def test_weights_go_over_nccl_where_both_sides_have_the_same_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("oncurve.fleet.servers.local_vllm.find_python", lambda python: "python")
    monkeypatch.setattr(vllm_version, "check_version", lambda python: "0.33.1")
    servers = ["rollouts.type=servers", "rollouts.vllm_servers=1"]
    for own, expected, why in (
        ("0.33.0+cu130", "nccl", "from GPU to GPU"),
        ("0.32.0", "fetch", "this process has vLLM 0.32.0, and the servers have 0.33.1"),
        (None, "fetch", "this process has no vLLM"),
    ):
        monkeypatch.setattr(vllm_version, "own_version", lambda own=own: own)
        config, said = settle(parse_config(RECIPE, servers))
        assert config.rollouts.transfer == expected
        assert said is not None
        assert why in said
        kept, silent = settle(parse_config(RECIPE, [*servers, "rollouts.transfer=fetch"]))
        assert (kept.rollouts.transfer, silent) == ("fetch", None)
        lean, said = settle(parse_config(RECIPE, [*servers, "policy.lora={}"]))
        assert lean.rollouts.transfer == "fetch"
        shared, said = settle(parse_config(RECIPE, [*servers, "rollouts.sleep=true"]))
        assert (shared.rollouts.transfer, said) == ("fetch", None), "NCCL does not connect two processes on one GPU"
