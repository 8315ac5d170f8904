"""Whole runs on a CUDA device, through the command that a user types, and their numbers beside those of a CPU."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from oncurve.algorithm.presets import build
from oncurve.cli.app import app
from oncurve.core.batch import collate
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.observe.record import read_metrics
from oncurve.policy.model_folder import load_model
from oncurve.sample.engine import InProcessEngine

if TYPE_CHECKING:
    from oncurve.policy.trained_policy import TrainedPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EMBEDDED = str(Path(__file__).resolve().parents[2] / "oncurve" / "assets" / "base_model")
SMALL = (
    "run.prompts_per_step=2",
    "data.levels=[1]",
    "data.limit=96",
    "rollouts.max_completion_tokens=64",
    "evaluation.num_prompts=2",
    "evaluation.num_prompts_during=2",
    "evaluation.every_steps=0",
    "policy.device=cuda",
)
WAYS: dict[str, tuple[str, ...]] = {
    "as it comes": (),
    "with a reference": ("algorithm.kl_coef=0.04",),
    "with an adapter over its base as the reference": ("policy.lora.rank=8", "algorithm.kl_coef=0.04"),
    "with checkpointing": ("policy.gradient_checkpointing=true",),
    "with padded rows": ("policy.packing=false",),
    "in float32": ("policy.compute_type=float32",),
    "without recorded steps": ("rollouts.cuda_graphs=false",),
    "with generate": ("rollouts.type=transformers",),
    "with activations in the host's memory": ("policy.offload_activations=true",),
    "with several updates a step": ("run.completions_per_update=8", "algorithm.correction=truncate"),
}


def command(folder: Path, name: str, *overrides: str) -> list[str]:
    return ["train", "word_problems", *SMALL, f"run.folder={folder}", f"run.name={name}", *overrides]


def assert_trained(run: Path, *, steps: int) -> list[dict[str, Any]]:
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert any(row["policy/gradient_norm"] > 0 for row in rows[1:]), "no step moved the weights"
    assert max(row["mismatch/kl"] for row in rows[1:]) < 0.05, "the trainer finds other probabilities than the sampler"
    assert json.loads((run / "comparison.json").read_text())
    assert (run / "report.html").is_file()
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_trains_saves_evaluates_and_reports(way: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, command(tmp_path, "run", "run.steps=2", *WAYS[way]), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = assert_trained(tmp_path / "run", steps=2)
    if "algorithm.kl_coef=0.04" in WAYS[way]:
        assert rows[-1]["policy/kl"] > 0, "the reference is the policy itself"


def test_a_run_that_was_killed_goes_on_and_keeps_its_rows(tmp_path: Path) -> None:
    words = command(tmp_path, "run", "run.steps=5", "run.save_every_steps=1")
    run = tmp_path / "run"
    with (tmp_path / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "oncurve", *words], stdout=output, stderr=output, start_new_session=True
        )
        while process.poll() is None and not (run / "checkpoints" / "step_000001").is_dir():
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, (tmp_path / "output.txt").read_text()[-2000:]
    before = read_metrics(run)
    result = CliRunner().invoke(app, ["resume", str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    after = assert_trained(run, steps=5)
    assert before[1]["reward/mean"] == after[1]["reward/mean"]


@pytest.fixture
def two_policies(make_policy: Callable[..., TrainedPolicy]) -> tuple[TrainedPolicy, TrainedPolicy]:
    """The embedded model in float32, on the device and on the CPU."""
    return tuple(make_policy(load_model(EMBEDDED)[0].to(device)) for device in ("cuda", "cpu"))  # type: ignore[return-value]


def asked(policy: TrainedPolicy) -> list[Prompt]:
    tokenizer = load_model(EMBEDDED)[1]
    texts = [f"User: Tom has {n} apples and buys {3 * n} more. How many?\nAssistant: <think>" for n in range(3, 9)]
    return [Prompt(text, tuple(tokenizer(text)["input_ids"]), place, {}) for place, text in enumerate(texts)]


def sampled(policy: TrainedPolicy, params: SamplingParams, group_size: int) -> list[Group]:
    engine = InProcessEngine(params, max_rows=8)
    engine.load_weights(policy, version=0)
    return list(engine.sample(SamplingRequest(asked(policy), group_size)))


def parting(one: Completion, other: Completion) -> float:
    """The difference of log-probabilities at the first token that differs; 0 where there is none."""
    both: Sequence[Any] = list(
        zip(one.token_ids, other.token_ids, one.sampler_logprobs, other.sampler_logprobs, strict=False)
    )
    return next((abs(p - q) for token, there, p, q in both if token != there), 0.0)


def test_greedy_completions_are_those_of_a_cpu(two_policies: tuple[TrainedPolicy, TrainedPolicy]) -> None:
    """But where two tokens are equally likely up to rounding."""
    there, here = (
        sampled(policy, SamplingParams(temperature=0.0, max_completion_tokens=40), 1) for policy in two_policies
    )
    pairs = [(a.completions[0], b.completions[0]) for a, b in zip(there, here, strict=True)]
    assert max(parting(one, other) for one, other in pairs) < 1e-3
    assert sum(one.token_ids == other.token_ids for one, other in pairs) >= len(pairs) - 1


def test_an_update_is_that_of_a_cpu(two_policies: tuple[TrainedPolicy, TrainedPolicy]) -> None:
    """Of the same completions, with a clipped loss over several microbatches and an entropy term."""
    groups = sampled(two_policies[1], SamplingParams(max_completion_tokens=24), 4)
    algorithm = build("grpo", group_size=4, max_completion_tokens=24, entropy_coef=0.01)
    batch = collate(groups, torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat(len(groups), 1))
    norms = []
    for policy in two_policies:
        policy.tokens_per_microbatch = 256
        parts = list(policy.microbatches(batch))
        assert len(parts) > 1
        for part in parts:
            logprobs, entropy = policy.logprobs(part)
            loss, _ = algorithm.loss(logprobs, entropy, replace(part).to(logprobs.device))
            policy.backward(loss)
        norms.append(policy.update()["policy/gradient_norm"].value)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    base = dict(load_model(EMBEDDED)[0].named_parameters())
    for (name, moved), other in zip(
        two_policies[0].model.named_parameters(), two_policies[1].model.parameters(), strict=True
    ):
        step = (other - base[name]).detach()
        assert float(step.norm()) > 0
        assert float((moved.cpu() - other).detach().norm()) < 0.05 * float(step.norm()), name
