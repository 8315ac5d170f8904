"""Is memory what the formulas say, and do the formulas say what happens?"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from planned_runs import KL, LORA, SERVER, SHAPE, planned_run
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from oncurve.core.batch import Batch, Size
from oncurve.plan import constants
from oncurve.plan.activations import head_bytes, largest_microbatch, saved_bytes
from oncurve.plan.memory import PHASES, Component, plan_memory, rows_that_fit
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.shape import ModelShape

N = SHAPE.num_parameters
SMALL = ModelShape(
    name="small", family="qwen2", hidden=64, layers=4, heads=4, kv_heads=2, head_size=16, mlp=160, vocabulary=96,
    is_tied=False,
)  # fmt: skip


def parts(run: PlannedRun, phase: str = "train") -> dict[str, float]:
    found: dict[str, float] = {}
    for part in plan_memory(run).trainer.components:
        if phase in part.phases:
            found[part.name] = found.get(part.name, 0.0) + part.bytes
    return found


@pytest.mark.proves("F52", "D16")
def test_full_training_in_half_width_takes_sixteen_bytes_per_weight_and_copies() -> None:
    found = parts(planned_run())
    assert found["weights, float32 (master)"] == 4 * N
    assert found["optimizer moments"] == 8 * N
    assert found["gradients"] == 4 * N
    assert found["bf16 copies of weights"] == 2 * SHAPE.layers * SHAPE.layer_matrix_parameters


def test_muon_has_one_moment_for_a_matrix_of_the_layers_and_two_for_the_rest() -> None:
    matrices = SHAPE.layers * SHAPE.layer_matrix_parameters
    assert parts(planned_run("optimizer.type=muon"))["optimizer moments"] == 4 * matrices + 8 * (N - matrices)
    adapter = SHAPE.lora_parameters(16)
    assert parts(planned_run("optimizer.type=muon", LORA))["optimizer moments"] == 4 * adapter
    assert parts(planned_run("optimizer.type=adamw_8bit"))["optimizer moments"] == 2 * N


@pytest.mark.proves("F52")
def test_float32_needs_no_copies_and_a_reference_is_a_model_more() -> None:
    assert "bf16 copies of weights" not in parts(planned_run("policy.compute_type=float32"))
    assert parts(planned_run(KL))["reference"] == 4 * N
    assert "reference" not in parts(planned_run(KL, LORA))


def test_an_adapter_has_few_moments_and_frozen_weights_shrink_in_four_bits() -> None:
    lora = parts(planned_run(LORA))
    assert lora["optimizer moments"] == 8 * SHAPE.lora_parameters(16)
    linear = SHAPE.layers * SHAPE.layer_matrix_parameters + (0 if SHAPE.is_tied else SHAPE.head_parameters)
    assert lora["frozen weights"] == 4 * N - 2 * linear
    assert parts(planned_run(LORA, "policy.compute_type=float32"))["frozen weights"] == 4 * N
    four_bits = parts(planned_run(LORA, "policy.quantization=nf4"))["frozen weights"]
    assert four_bits < parts(planned_run(LORA, "policy.quantization=int8"))["frozen weights"] < 4 * N
    assert four_bits > 0.5 * N


def test_a_gpu_that_decodes_by_itself_needs_matrices_for_it() -> None:
    attention = SHAPE.layers * 2 * SHAPE.hidden * (SHAPE.query_size + SHAPE.kv_size)
    full = parts(planned_run(), "sample")["weights repacked to decode"]
    assert full == 2 * (attention + SHAPE.head_parameters)
    lora = parts(planned_run(LORA), "sample")["weights repacked to decode"]
    assert lora == 2 * (attention + SHAPE.is_tied * SHAPE.head_parameters)
    for run in (planned_run("rollouts.cuda_graphs=false"), planned_run("policy.compute_type=float32")):
        assert "weights repacked to decode" not in parts(run, "sample")


@pytest.mark.parametrize(
    ("shard", "weights", "gradients", "moments"), [("zero1", 1, 1, 4), ("zero2", 1, 4, 4), ("zero3", 4, 4, 4)]
)
def test_stages_of_zero_cut_what_they_say(shard: str, weights: int, gradients: int, moments: int) -> None:
    found = parts(planned_run(ranks=4, shard=shard))
    assert found["weights, float32 (master)"] == 4 * N / weights
    assert found["gradients"] == 4 * N / gradients
    assert found["optimizer moments"] == 8 * N / moments


@pytest.mark.proves("F54")
def test_offload_leaves_half_width_weights_and_gradients_and_fills_the_machine() -> None:
    found = parts(planned_run(offloads_optimizer=True))
    assert found["bf16 weights"] == 2 * N
    assert found["gradients"] == 2 * N
    assert "optimizer moments" not in found
    assert plan_memory(planned_run(offloads_optimizer=True)).host_bytes == 16 * N


@pytest.mark.proves("D16")
def test_the_cache_holds_whole_groups_of_rows_of_full_length() -> None:
    on_cpu = planned_run(is_gpu=False)
    assert parts(on_cpu, "sample")["KV cache"] == 4 * 2 * SHAPE.layers * SHAPE.kv_size * 128 * (256 + 512)
    prompts_once = 16 * 256 + 128 * 512
    token = 2 * 2 * SHAPE.kv_size
    assert parts(planned_run(), "sample")["KV cache"] == token * (SHAPE.layers * prompts_once + 128 * 256), (
        "a prompt is held once on a GPU, and one layer's completions twice while they grow"
    )
    assert planned_run("rollouts.max_rows=3").rows_at_once == 8, "one group"


def test_samplers_of_their_own_take_the_cache_from_the_trainer() -> None:
    memory = plan_memory(planned_run(placement="disaggregated", sampler_devices=2))
    trainer, sampler = memory.needs
    assert "KV cache" not in {part.name for part in trainer.components}
    held = {part.name: part.bytes for part in sampler.components}
    assert held["engine's weights"] == 2 * N / 2
    assert sampler.devices == 2
    assert "weight-sync buffers" in {part.name for part in trainer.components if part.phases == ("sync",)}


def test_devices_that_sample_from_weights_in_parts_have_a_whole_copy() -> None:
    cut = planned_run(ranks=8, shard="zero3")
    linear = SHAPE.layers * SHAPE.layer_matrix_parameters + (0 if SHAPE.is_tied else SHAPE.head_parameters)
    assert parts(cut)["unsharded weights to decode"] == 2 * linear + 4 * (N - linear)
    assert parts(cut.with_keys("policy", {"compute_type": "float32"}))["unsharded weights to decode"] == 4 * N
    apart = cut.with_layout({"placement": "split", "sampler_devices": 1})
    by_nccl = apart.with_keys("rollouts", {"transfer": "nccl"})
    assert parts(by_nccl)["unsharded weights to decode"] == parts(cut)["unsharded weights to decode"]
    elsewhere = apart.with_layout({"placement": "disaggregated"})
    for other in (planned_run(), cut.with_layout({"shard": "zero2"}), apart, elsewhere):
        assert "unsharded weights to decode" not in parts(other)


def test_embedding_and_head_are_gathered_in_float32() -> None:
    cut = planned_run("policy.gradient_checkpointing=true", ranks=8, shard="zero3")
    ends = SHAPE.head_parameters * (1 if SHAPE.is_tied else 2)
    assert parts(cut)["all-gathered embedding and head"] == 4 * ends
    assert "all-gathered embedding and head" not in parts(cut.with_layout({"shard": "zero2"}))


def test_what_is_not_read_in_parts_is_whole_on_every_device_before_it_is_cut() -> None:
    layout = {"ranks": 8, "shard": "zero3", "placement": "disaggregated", "sampler_devices": 1}
    whole = "policy.parallel=deepspeed"
    assert plan_memory(planned_run(**layout)).load_bytes == 0
    once = plan_memory(planned_run(whole, **layout)).load_bytes
    assert plan_memory(planned_run(whole, KL, **layout)).load_bytes == once + 4 * N
    assert once == 4 * N + constants.GPU_CONTEXT_BYTES
    assert plan_memory(planned_run(whole, **layout | {"shard": "zero1"})).load_bytes == 0


def test_the_peak_is_the_largest_phase() -> None:
    trainer = plan_memory(planned_run()).trainer
    assert trainer.peak_bytes == max(trainer.phase_bytes(phase) for phase in PHASES)
    assert trainer.phase_bytes(trainer.peak_phase) == trainer.peak_bytes
    assert all(isinstance(part, Component) and part.bytes > 0 for part in trainer.components)


def test_everything_that_should_save_memory_saves_memory() -> None:
    plain = plan_memory(planned_run()).trainer.phase_bytes("train")
    for change in ("gradient_checkpointing=true", "tokens_per_microbatch=2048", "offload_activations=true"):
        assert plan_memory(planned_run(f"policy.{change}")).trainer.phase_bytes("train") < plain, change


@pytest.mark.proves("F27")
def test_all_logits_never_exist_at_once() -> None:
    run = planned_run("policy.tokens_per_microbatch=100000")
    many = run.with_keys("rollouts", {"max_completion_tokens": 4096})
    assert head_bytes(many, largest_microbatch(many)) == head_bytes(run, largest_microbatch(run))


def test_a_row_longer_than_the_budget_gets_a_microbatch_of_its_own() -> None:
    run = planned_run("policy.tokens_per_microbatch=10")
    batch = largest_microbatch(run)
    assert batch.tokens == 256 + 511
    assert batch.repeats == 16 * 8
    assert largest_microbatch(run.with_keys("policy", {"packing": False})).tokens == 256 + 512


def test_microbatches_are_planned_as_batches_cut_them() -> None:
    batch = small_batch(prompts=6, group_size=4, prompt_tokens=20, completion_tokens=30)
    work = ("run.prompts_per_step=6", "algorithm.group_size=4", "rollouts.max_completion_tokens=30")
    for packed in (True, False):
        for budget in (40, 160, 333, 10_000):
            policy = f"policy={{packing: {packed}, tokens_per_microbatch: {budget}}}"
            run = planned_run(*work, policy, prompt_tokens=20, mean_tokens=30)
            first = next(iter(batch.plan_microbatches(budget, share_prompts=packed)))
            assert largest_microbatch(run).trained_tokens == 30 * len(first), (packed, budget)


def small_batch(*, prompts: int, group_size: int, prompt_tokens: int, completion_tokens: int) -> Batch:
    rows = prompts * group_size
    groups = torch.arange(prompts).repeat_interleave(group_size)
    ids = torch.randint(0, SMALL.vocabulary, (prompts, prompt_tokens))[groups]
    completions = torch.randint(0, SMALL.vocabulary, (rows, completion_tokens))
    mask = torch.ones(rows, completion_tokens, dtype=torch.bool)
    lengths = torch.full((rows,), prompt_tokens), torch.full((rows,), completion_tokens)
    size = Size(rows, rows * completion_tokens, prompts)
    zeros = torch.zeros(mask.shape)
    return Batch(ids, lengths[0], completions, mask, lengths[1], groups, torch.ones(rows), zeros, size)


@pytest.mark.parametrize(
    ("packed", "checkpointing", "compute"),
    [
        (True, False, "float32"),
        (True, True, "float32"),
        (False, False, "float32"),
        (False, True, "float32"),
        (True, False, "bfloat16"),
    ],
)
def test_what_a_forward_pass_keeps_is_what_the_profiler_counts(
    packed: bool, checkpointing: bool, compute: Literal["float32", "bfloat16"]
) -> None:
    """Within 6 %, on a model small enough for a test; a change of the forward pass must change the constants."""
    from tiny_models import make_trained_policy

    config = Qwen2Config(
        vocab_size=SMALL.vocabulary,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.mlp,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    policy = make_trained_policy(
        model,
        None,
        compute_type=compute,
        packing=packed,
        gradient_checkpointing=checkpointing,
        tokens_per_microbatch=10_000,
    )
    batch = small_batch(prompts=4, group_size=4, prompt_tokens=24, completion_tokens=32)
    policy.logprobs(batch)[0].sum().backward()  # whatever is made once
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logprobs, _ = policy.logprobs(batch)
    assert logprobs.requires_grad
    changes = (e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")  # type: ignore
    kept = sum(changes)
    run = planned_run(
        "run.prompts_per_step=4",
        "algorithm.group_size=4",
        "rollouts.max_completion_tokens=32",
        f"policy={{packing: {packed}, gradient_checkpointing: {checkpointing}, compute_type: {compute}}}",
        "policy.tokens_per_microbatch=10000",
        shape=SMALL,
        prompt_tokens=24,
        mean_tokens=32,
        is_gpu=False,
    )
    assert saved_bytes(run, largest_microbatch(run)) == pytest.approx(kept, rel=0.06)


def test_what_is_in_tensors_is_told_apart_from_what_allocators_and_libraries_take() -> None:
    for run in (planned_run(), planned_run(is_gpu=False), planned_run(LORA, "policy.gradient_checkpointing=true")):
        need = plan_memory(run).trainer
        for phase in PHASES:
            taken = {part.name: part.bytes for part in need.components if part.is_allowance and phase in part.phases}
            assert set(taken) <= {"fragmentation", "device context", "libraries", "CUDA graphs"}
            assert taken
            assert need.live_bytes(phase) == pytest.approx(need.phase_bytes(phase) - sum(taken.values()))


def test_as_many_rows_are_planned_as_the_engine_would_take() -> None:
    many = planned_run("run.prompts_per_step=256", "rollouts.max_completion_tokens=4096")
    for gib in (24.0, 40.0, 80.0):
        rows = rows_that_fit(many, memory_bytes=gib * 2**30)
        planned = plan_memory(many.with_room_for(rows)).trainer.phase_bytes("sample")
        assert planned <= gib * 2**30
        assert rows < 256 * 8
    assert rows > 300, "more than the usual number on a large GPU"
    assert rows_that_fit(planned_run(), memory_bytes=80.0 * 2**30) == 128, "never more than there are"


def test_servers_take_as_many_rows_as_their_memory_and_hold_the_weights_that_one_of_them_has() -> None:
    many = ("run.prompts_per_step=256", "rollouts.max_completion_tokens=4096")
    servers = {0: SERVER, 1: ("rollouts.type=servers", "rollouts.own_servers=1")}
    servers[2] = ("rollouts.type=servers", "rollouts.vllm_servers=1", "rollouts.tensor_parallel=2")
    for count, cut in ((1, 0), (2, 1), (2, 2)):
        run = planned_run(*many, *servers[cut], placement="disaggregated", sampler_devices=count)
        rows = rows_that_fit(run, memory_bytes=40.0 * 2**30)
        [sampler] = plan_memory(run.with_room_for(rows)).needs[1:]
        assert 38 * 2**30 < sampler.phase_bytes("sample") <= 40 * 2**30
        weights = next(part.bytes for part in sampler.components if part.name == "engine's weights")
        assert weights == 2.0 * SHAPE.num_parameters / (1 if cut == 1 else count)
        assert rows < 256 * 8
