"""Do the commands work on a GPU, from the recipe to the trained model? On one that is not there but carries numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import on_device
import pytest
import torch
from lanes import gate
from safetensors.torch import load_file

from oncurve.observe.record import read_metrics, read_rollouts

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu

STEPS = 2
FLOAT32 = "policy.compute_type=float32"
KINDS = {
    "on the CPU": ["policy.device=cpu", FLOAT32],
    "float32": ["policy.device=cuda", FLOAT32],
    "not recorded": ["policy.device=cuda", FLOAT32, "rollouts.cuda_graphs=false"],
    "bfloat16": ["policy.device=cuda", "algorithm.kl_coef=0.1"],
    "adapter": [
        "policy.device=cuda", "policy.lora.rank=4", "algorithm.kl_coef=0.1", "policy.gradient_checkpointing=true",
        "policy.offload_activations=true", "run.completions_per_update=8", "run.save_every_steps=2",
    ],
}  # fmt: skip


def small(folder: Path, name: str) -> list[str]:
    """A training run that is over in seconds."""
    return [
        "train", "word_problems", "run.prompts_per_step=4", "algorithm.group_size=4", "evaluation.num_prompts=4",
        "evaluation.num_prompts_during=4", "evaluation.data.limit=4", "run.save_every_steps=0",
        "rollouts.max_completion_tokens=48", "run.rollouts_every_steps=1",
        f"run.steps={STEPS}", f"run.folder={folder}", f"run.name={name}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_of(
    pretend_gpu: PretendGpu, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The folder of a run of one of the kinds, and what was counted; each is run once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(kind: str) -> tuple[Path, dict[str, Any]]:
        if kind not in made:
            name = kind.replace(" ", "_")
            report = folder / f"{name}.json"
            code, said = pretend_gpu.command(
                *small(folder, name), *KINDS[kind], folder=folder, environment={"PRETEND_GPU_REPORT": str(report)}
            )
            assert code == 0, said
            made[kind] = (folder / name, json.loads(report.read_text())["parts"])
        return made[kind]

    return run


RunOf = Callable[[str], tuple[Path, dict[str, Any]]]


def answers(run: Path, when: str) -> list[str]:
    """What a model said in an evaluation, in the order of the problems."""
    text = (run / "evaluations" / f"{when}.jsonl").read_text()
    return [json.loads(line)["completion"] for line in text.splitlines()]


def texts(run: Path, step: int) -> list[str]:
    return [one["text"] for group in read_rollouts(run, step) for one in group["completions"]]


def correct(run: Path, when: str) -> float:
    return json.loads((run / "evaluations" / f"{when}.json").read_text())["correct"]["fraction"]


@pytest.mark.parametrize("kind", gate(["float32", "not recorded"], "float32"))
def test_training_on_a_gpu_is_training_on_the_cpu(kind: str, run_of: RunOf) -> None:
    (here, _), (there, _) = run_of("on the CPU"), run_of(kind)
    assert answers(here, "base") == answers(there, "base")
    assert [texts(here, step) for step in range(1, STEPS + 1)] == [texts(there, step) for step in range(1, STEPS + 1)]
    norms = [[row.get("policy/gradient_norm", 0.0) for row in read_metrics(run)] for run in (here, there)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert any(norms[0][1:]), "something was trained"
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (here, there))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    assert correct(here, "trained") == pytest.approx(correct(there, "trained"), abs=0.26)


@pytest.mark.nightly
def test_recorded_steps_give_the_tokens_of_steps_that_are_not(run_of: RunOf) -> None:
    (recorded, counts), (plain, others) = run_of("float32"), run_of("not recorded")
    assert [texts(recorded, step) for step in range(1, STEPS + 1)] == [
        texts(plain, step) for step in range(1, STEPS + 1)
    ]
    assert counts["decode_step"]["kernels_per_call"] > 4 * counts["decode_step"]["host_launches_per_call"]
    assert "decode_step" not in others


@pytest.mark.nightly
def test_a_decode_step_and_a_microbatch_wait_seldom(run_of: RunOf) -> None:
    _, parts = run_of("bfloat16")
    assert parts["decode_step"]["synchronizations"].get("aten::_local_scalar_dense", 0) == 0
    assert 0 < parts["engine_step"]["synchronizations_per_call"] < 12
    assert 0 < parts["microbatch"]["synchronizations_per_call"] < 60
    assert parts["microbatch"]["calls"] >= 1
    assert any("_flash_attention_backward" in name for name in parts["microbatch"]["kernels"])
    assert parts["train"]["peak_bytes"] > parts["sample"]["peak_bytes"] > 0


@pytest.mark.nightly
def test_everything_that_spares_memory_works_together(run_of: RunOf) -> None:
    run, _ = run_of("adapter")
    rows = read_metrics(run)
    assert any(row.get("policy/gradient_norm", 0) > 0 for row in rows)
    assert any(
        value.any()
        for name, value in load_file(run / "model" / "adapter_model.safetensors").items()
        if "lora_B" in name
    )
    assert (run / "checkpoints" / "step_000002").is_dir()


@pytest.mark.nightly
def test_a_run_goes_on_from_its_checkpoint(run_of: RunOf, pretend_gpu: PretendGpu) -> None:
    run, _ = run_of("adapter")
    code, said = pretend_gpu.command("resume", str(run), f"run.steps={STEPS + 1}", "--allow-change", folder=run.parent)
    assert code == 0, said
    assert [row["step"] for row in read_metrics(run)] == list(range(STEPS + 2))


@pytest.mark.nightly
def test_a_trained_model_is_measured_and_asked(run_of: RunOf, pretend_gpu: PretendGpu) -> None:
    run, _ = run_of("bfloat16")
    code, said = pretend_gpu.command("sample", str(run / "model"), "How much is 3 + 4?", folder=run.parent)
    assert code == 0, said
    few = ["policy.device=cuda", "evaluation.num_prompts=4", "evaluation.data.limit=4"]
    code, said = pretend_gpu.command("evaluate", "word_problems", *few, folder=run.parent)
    assert code == 0, said


@pytest.mark.nightly
def test_a_loss_of_rows_on_the_cpu_is_found(pretend_gpu: PretendGpu, tmp_path: Path) -> None:
    words = [*small(tmp_path, "mixed"), "policy.device=cuda", "run.steps=1", "rollouts.max_completion_tokens=72"]
    with pytest.raises(AssertionError, match="Expected all tensors to be on the same device"):
        pretend_gpu(on_device.loss_on_the_cpu, words)


@pytest.mark.nightly
def test_memory_that_runs_out_in_a_microbatch_is_tried_again_in_smaller_ones(
    pretend_gpu: PretendGpu, tmp_path: Path
) -> None:
    code, said = pretend_gpu.command(
        *small(tmp_path, "full"), *KINDS["bfloat16"], "run.steps=1",
        folder=tmp_path, environment={"PRETEND_GPU_FAIL_AT": "allocation:microbatch:200"},
    )  # fmt: skip
    assert code == 0, said
    assert "memory" in said
