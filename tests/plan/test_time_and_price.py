"""Are the bytes, seconds and dollars of a plan those of its formulas and of what was measured?"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_runs import DEVICES, LORA, SERVER, SEVEN, planned, planned_run

from oncurve.core.errors import ConfigError
from oncurve.plan import constants
from oncurve.plan.cost import compare_trainers, price
from oncurve.plan.find_shape import find_shape
from oncurve.plan.memory import plan_memory
from oncurve.plan.shape import Counted
from oncurve.plan.step_time import flops_per_token, step_time, train_seconds
from oncurve.plan.weight_transfer import sent_share, sync_bytes, transfer_parts

ROOT = Path(__file__).resolve().parents[2]
THIRTY_TWO = find_shape("Qwen/Qwen2.5-32B")
APART: dict[str, Any] = {"placement": "disaggregated", "sampler_devices": 1}
CHECKPOINTING, SMALL = "policy.gradient_checkpointing=true", "policy.tokens_per_microbatch=1024"


@pytest.mark.proves("F72", "D15")
def test_weights_of_a_32b_model_are_65_gigabytes_and_no_300_megabytes() -> None:
    apart = planned_run(shape=THIRTY_TWO, **APART)
    size = sync_bytes(apart)
    assert size == pytest.approx(2 * 32_763_876_352, rel=1e-4)
    assert size > 2 * 32_763_876_352, "vectors travel in full width"
    parts = {part.name: part for part in transfer_parts(apart, DEVICES["H200"], network_gbit=100)}
    assert parts["fetch over the network"].seconds == pytest.approx(5.24, abs=0.01)
    assert sync_bytes(planned_run(LORA, shape=THIRTY_TWO, **APART)) < 0.01 * size
    assert sync_bytes(planned_run(shape=THIRTY_TWO)) == 0


def test_differences_are_a_share_of_the_weights_that_grows_with_the_learning_rate() -> None:
    whole = sync_bytes(planned_run(shape=THIRTY_TWO, **APART))
    shares = []
    for rate in (1e-7, 1e-6, 1e-5, 1e-4, 1e-2):
        overrides = (*SERVER, "rollouts.deltas={}", f"optimizer.learning_rate={rate}")
        shares.append(sync_bytes(planned_run(*overrides, shape=THIRTY_TWO, **APART)) / whole)
    assert shares == sorted(shares)
    assert shares[1:4] == pytest.approx([share for _, share in constants.SENT_SHARES[-1][1]])
    assert sent_share(10.0, 1e9) == 1.0
    words: dict[str, Any] = {"gpu": "H200", "gpus": 8, "placement": "disaggregated", "sampler_gpus": 2}
    words["network_gbit"] = 0.1
    slow = {
        key: json.loads(planned("spot_32b/full", [f"rollouts.deltas={key}"], **words, as_json=True))["seconds"]["sync"]
        for key in ("{}", "null")
    }
    assert slow["{}"] < slow["null"] / 10
    assert "of all weights: rollouts.deltas" in planned("spot_32b/full", [], **words)


def test_the_forecast_of_what_changes_is_within_a_fifth_of_what_was_measured() -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    cases = [case for path in results.glob("weight_deltas*.json") for case in json.loads(path.read_text())["cases"]]
    cases = [case for case in cases if case["training"] == "full" and case["steps"] == 50]
    assert {case["model"] for case in cases} == {"embedded", "M"}
    for case in cases:
        share = sent_share(case["learning_rate"], case["whole_bytes"] / 2)
        assert share == pytest.approx(case["mean_share"], rel=0.2), case["model"]


def test_the_way_of_weights_that_is_taken_is_priced_part_by_part() -> None:
    ways = {
        way: json.loads(
            planned("math_r1_zero", [f"rollouts.transfer={way}"], gpu="H100", placement="split", as_json=True)
        )["seconds"]
        for way in ("fetch", "nccl")
    }
    names = {way: [part["name"] for part in seconds["way"]] for way, seconds in ways.items()}
    assert names["fetch"] == ["copy to the machine's memory", "checksum", "write", "read and check", "load"]
    assert names["nccl"] == ["broadcast", "load"]
    for seconds in ways.values():
        assert seconds["sync"] == pytest.approx(sum(part["seconds"] for part in seconds["way"]))
        assert seconds["way"][0]["bytes"] == seconds["sync_bytes"]
    assert ways["fetch"]["sync"] > 1, "three gigabytes of files are not written, summed and read in less"
    assert ways["nccl"]["sync"] < ways["fetch"]["sync"] / 5
    text = planned("math_r1_zero", [], gpu="H100", placement="split")
    assert "rollouts.transfer fetch" in text
    assert "read and check" in text
    assert "the rest is estimated" in text


def test_training_costs_six_operations_per_weight_and_two_more_with_checkpointing() -> None:
    for override, operations in (("policy.packing=true", 6), (CHECKPOINTING, 8), (LORA, 4)):
        short = (override, "rollouts.max_completion_tokens=1")
        run = planned_run(*short, shape=SEVEN, prompt_tokens=1, mean_tokens=1)
        assert flops_per_token(run) / SEVEN.matrix_parameters == pytest.approx(operations, rel=1e-3)


@pytest.mark.proves("F149")
def test_more_devices_and_faster_memory_take_less_time() -> None:
    run = planned_run(shape=SEVEN)
    slow = step_time(run, DEVICES["A100-80GB"], network_gbit=100)
    fast = step_time(run, DEVICES["H200"], network_gbit=100)
    four = step_time(run.with_layout({"ranks": 4}), DEVICES["H200"], network_gbit=100)
    assert fast.total < slow.total
    assert four.train - four.network == pytest.approx(fast.train / 4)
    assert fast.sampled_tokens == 16 * 8 * 256
    assert fast.trained_tokens == 16 * 8 * 256


def test_weights_in_parts_pass_the_network_between_machines_with_every_microbatch() -> None:
    """Two gathers of half-width weights and one float32 gradient for each: 8 B a weight at the network's rate."""
    run = planned_run(SMALL, shape=THIRTY_TWO, ranks=16, shard="zero3")
    slow = step_time(run, DEVICES["H100"], network_gbit=100)
    microbatches = math.ceil((16 * 256 + 16 * 8 * 256) / 16 / 1024)
    assert slow.train == pytest.approx(microbatches * 8 * THIRTY_TWO.num_parameters / 12.5e9, rel=1e-3)
    assert 0 < slow.network < slow.train
    assert step_time(run, DEVICES["H100"], network_gbit=3200).network < slow.network / 5
    one_machine = step_time(run.with_layout({"ranks": 8}), DEVICES["H100"], network_gbit=1)
    assert one_machine.network < slow.network
    assert step_time(planned_run(shape=SEVEN), DEVICES["H100"], network_gbit=1).network == 0
    assert "waits for the weights and gradients of other devices" in planned(
        "spot_32b/full", [], gpus=16, network_gbit=10
    )


def test_rows_of_devices_that_have_all_weights_send_gradients_alone_between_machines() -> None:
    """Twice 4 B a weight for each update instead of 8 B for each microbatch, and twice as much memory for weights."""
    run = planned_run(SMALL, shape=THIRTY_TWO, ranks=16, shard="zero3")
    rows = run.with_keys("policy", {"shard_degree": 8})
    flat, hybrid = (step_time(one, DEVICES["H100"], network_gbit=25) for one in (run, rows))
    assert hybrid.network == pytest.approx(8 * THIRTY_TWO.num_parameters / 3.125e9, rel=0.2)
    assert hybrid.network < flat.network / 2
    held, twice = ({part.name: part.bytes for part in plan_memory(one).trainer.components} for one in (run, rows))
    for name in ("weights, float32 (master)", "optimizer moments", "gradients"):
        assert twice[name] == pytest.approx(2 * held[name], rel=0.05), name
    with pytest.raises(ConfigError, match=r"--gpus 12 is no multiple of policy.shard_degree, 8"):
        planned("spot_32b/full", ["policy.shard_degree=8"], gpus=12)


def test_what_samples_through_modules_waits_for_their_kernels_the_longest_in_eight_bits() -> None:
    seconds = {
        quantization: step_time(
            planned_run(LORA, f"policy.quantization={quantization}", shape=SEVEN), DEVICES["H100"], network_gbit=100
        ).sample
        for quantization in ("null", "nf4", "int8")
    }
    assert seconds["null"] < seconds["nf4"] < seconds["int8"]
    assert seconds["int8"] >= 512 * SEVEN.layers * constants.MODULE_LAYER_SECONDS["int8"]
    unknown = replace(SEVEN, family="gemma3_text")
    by_modules, by_own_layers = (
        step_time(planned_run(shape=shape), DEVICES["H100"], network_gbit=100).sample for shape in (unknown, SEVEN)
    )
    assert by_modules > by_own_layers


def test_a_mixture_of_experts_reads_those_that_its_rows_are_sent_to() -> None:
    counted = Counted(parameters=30_000, linear=24_000, active=3_000, kv_numbers=None, adapted={})
    mixture = replace(SEVEN, family="qwen3_moe", counted=counted)
    assert mixture.is_mixture
    assert not SEVEN.is_mixture
    head = SEVEN.head_parameters
    assert mixture.parameters_read(1) == pytest.approx(head + 3_000)
    assert head + 20_000 < mixture.parameters_read(16) < mixture.parameters_read(1000) <= head + 24_000
    assert SEVEN.parameters_read(1) == SEVEN.parameters_read(100) == SEVEN.matrix_parameters


def test_a_measured_share_replaces_the_guess() -> None:
    guessed = DEVICES["H200"]
    measured = guessed.model_copy(update={"train_utilization": 0.1})
    run = planned_run(shape=SEVEN)
    times = [step_time(run, device, network_gbit=100).train for device in (guessed, measured)]
    assert times[1] == pytest.approx(run.step_tokens * flops_per_token(run) / (guessed.matrix_rate / 10))
    assert times[0] < times[1] / 2


@pytest.mark.parametrize(("model", "checkpointing"), [(m, c) for m in ("0.5B", "1.5B") for c in (False, True)])
def test_training_takes_as_long_as_it_took_on_an_h100(model: str, checkpointing: bool) -> None:
    """Also where small kernels take more time than products do: one share of the nominal rate holds for no other size.

    The smaller model waits for its host as well, a sixth of the time, which the planner does not count.
    """
    items = json.loads((ROOT / "benchmarks/results/gpu_h100_stage_B.json").read_text(encoding="utf-8"))["items"]
    [ways] = [item["figures"]["ways"] for item in items if item["name"] == f"B2.{model}.shared"]
    taken = ways["checkpointing" if checkpointing else "plain"]["seconds"]
    override = f"policy.gradient_checkpointing={checkpointing}"
    run = planned_run(override, shape=find_shape(f"Qwen/Qwen2.5-{model}"), mean_tokens=320)
    assert 0.75 < train_seconds(run, DEVICES["H100"]) / taken < 1.15


@pytest.mark.parametrize(
    ("overrides", "gpu", "said"),
    [
        ([], None, "trained with packed rows through our own layers; sampled through our own layers"),
        (["policy.packing=false"], None, "trained with padded rows through the model's modules; sampled"),
        (["model=Qwen/Qwen2.5-0.5B"], "H100", "through the model's modules; sampled through our own layers"),
        (["model=Qwen/Qwen2.5-0.5B", "rollouts.cuda_graphs=false"], "H100", "; sampled through the model's modules"),
        (["model=Qwen/Qwen2.5-0.5B", "rollouts.type=servers", "rollouts.vllm_servers=1", "rollouts.sleep=true"],
         "H100", "; sampled by rollout servers"),
    ],
)  # fmt: skip
def test_the_ways_of_a_plan_are_those_of_its_settings(overrides: list[str], gpu: str | None, said: str) -> None:
    assert said in planned("word_problems", overrides, gpu=gpu)


@pytest.mark.proves("F146")
def test_prices_are_devices_times_hours() -> None:
    apart = planned_run(**APART | {"sampler_devices": 2})
    found = price(apart.layout, DEVICES["H200"], hours=24)
    assert found.on_demand == pytest.approx(285.12)
    assert found.spot_samplers == pytest.approx(152.16)
    assert price(planned_run().layout, DEVICES["B300"], hours=1).on_demand is None


@pytest.mark.proves("F147", "D18")
def test_a_critic_costs_a_second_set_of_states_and_dpo_samples_nothing() -> None:
    grpo, ppo, dpo = compare_trainers(planned_run(CHECKPOINTING, shape=SEVEN), DEVICES["B200"], network_gbit=100)
    assert (grpo.name, ppo.name, dpo.name) == ("GRPO", "PPO", "DPO")
    assert ppo.run.layout.ranks > grpo.run.layout.ranks
    assert ppo.per_run.on_demand > grpo.per_run.on_demand  # type: ignore[operator]
    assert all(one.fits for one in (grpo, ppo, dpo))
    assert dpo.run.has_reference
    times = [step_time(one.run, DEVICES["B200"], network_gbit=100) for one in (grpo, ppo, dpo)]
    assert grpo.step_seconds == pytest.approx(times[0].sample + times[0].train + times[0].sync)
    assert ppo.step_seconds == pytest.approx(times[1].sample + 2 * times[1].train + times[1].sync)
    assert dpo.step_seconds == pytest.approx(times[2].train)
    assert grpo.hours == pytest.approx(grpo.step_seconds * grpo.run.steps / 3600)
