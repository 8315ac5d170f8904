"""Do servers sample from all of a small adapter, and is one that does not found out?"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lanes import gate
from served import FAST, make_server_sampler

from oncurve.core.errors import ConfigError, SamplerError
from oncurve.core.records import SamplingParams
from oncurve.fleet.servers.adapter_proof import (
    MOST_ERROR,
    NUM_TOKENS,
    AdapterProof,
    AdapterShare,
    measure,
    mismatch,
    stored_tokens,
)
from oncurve.fleet.servers.children import ChildServers, own_environment, serve_command
from oncurve.fleet.servers.local_vllm import adapter_options
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.policy.lora import add_adapter
from oncurve.policy.model_folder import load_model
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from nursery import Nursery

    from oncurve.core.policy import ComputeType

MERGES = """
import sys
from contextlib import contextmanager

import torch

from oncurve.__main__ import main
from oncurve.fleet.serving import sampling, weight_update

BASE, ADAPTED = {}, {}

def merge(model, thin):
    own = dict(model.named_parameters())
    for name, (a, b) in thin.pairs.items():
        BASE.setdefault(name, own[name].detach().clone())
        ADAPTED[name] = (BASE[name] + thin.scales[name] * b @ a).bfloat16().float()
        own[name].data.copy_(ADAPTED[name])

@contextmanager
def off(model):
    own = dict(model.named_parameters())
    for name, weight in BASE.items():
        own[name].data.copy_(weight)
    yield
    for name, weight in ADAPTED.items():
        own[name].data.copy_(weight)

weight_update.put_adapter, sampling.adapters_off = merge, off
sys.argv = ["oncurve", *sys.argv[1:]]
main()
"""
"""A server with a planted bug: it adds the adapter to its base and rounds the sum to 8 bits."""


def noisy(change: np.ndarray, fraction: float, noise: float, seed: int = 0) -> AdapterShare:
    """What is found on a server that has a fraction of a change, both sides with noise in each log-probability."""
    draw = np.random.default_rng(seed)
    base = draw.normal(-2.0, 1.0, len(change))

    def seen(values: np.ndarray) -> tuple[float, ...]:
        return tuple(values + draw.normal(0.0, noise, len(change)))

    proof = AdapterProof((0,), seen(base + change), seen(base))
    return proof.share(seen(base + fraction * change), seen(base))


CHANGE = np.random.default_rng(1).normal(0.0, 1e-3, NUM_TOKENS)


def test_a_server_that_has_the_whole_adapter_is_never_refused_and_one_with_a_part_is() -> None:
    for seed in range(200):
        for noise in (0.0, 1e-7, 1e-5, 1e-4, 3e-4, 1e-3, 1e-2):
            assert not noisy(CHANGE, 1.0, noise, seed).is_wrong
    for fraction in (-0.01, 0.09, 0.38, 0.84, 2.0):
        assert noisy(CHANGE, fraction, 1e-6).is_wrong
    for fraction in (-0.01, 0.09, 0.38):
        found = noisy(CHANGE, fraction, 1.5e-4)
        assert found.is_wrong
        assert found.fraction == pytest.approx(fraction, abs=4 * found.error)


def test_what_is_below_the_noise_of_the_arithmetic_is_not_judged() -> None:
    found = noisy(CHANGE, 0.0, 1e-2)
    assert found.error > MOST_ERROR
    assert (found.is_known, found.is_wrong) == (False, False)
    nothing = AdapterProof((0,), (-1.0, -2.0), (-1.0, -2.0)).share((-1.0, -2.0), (-1.0, -2.0))
    assert (nothing.is_known, nothing.is_wrong) == (False, False), "an adapter that is still zero"


def test_a_refusal_names_both_numbers() -> None:
    said = mismatch(AdapterShare(0.38, 0.01, 1.3e-3, 4.9e-4), "run:7:abc")
    assert "0.38" in said
    assert "0.0013" in said
    assert "0.00049" in said


def little_adapter(steps: int, compute_type: ComputeType = "float32", rank: int = 16) -> TrainedPolicy:
    """The embedded model on the grid of bfloat16 with an adapter as it is after some steps of 1e-5."""
    model, tokenizer = load_model("embedded")
    adapter = add_adapter(model, LoraSettings(rank=rank), base="embedded")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw).sign() * 1e-5 * steps)
            elif "lora_A" not in name:
                weight.copy_(weight.bfloat16())
    return TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings(), compute_type=compute_type, adapter=adapter)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model, tokenizer = load_model("embedded")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def started(
    base: Path, tmp_path: Path, starts_forks: None
) -> Iterator[Callable[..., tuple[ChildServers, ServerSampler, list[str]]]]:
    """A sampler over a process of its own, ``oncurve serve`` or a program in its place."""
    opened: list[Any] = []

    def start(
        compute_type: str = "float32", program: str | None = None
    ) -> tuple[ChildServers, ServerSampler, list[str]]:
        plain = serve_command(str(base), settings=[f"policy.compute_type={compute_type}", "policy.device=cpu"])

        def command(port: int) -> list[str]:
            words = plain(port)
            return words if program is None else [sys.executable, "-c", program, *words[3:]]

        logs = tmp_path / "logs"
        local = ChildServers(1, name="oncurve", logs=logs, command=command, environment=own_environment(1))
        said: list[str] = []
        sampler = make_server_sampler(
            SamplingParams(max_completion_tokens=8),
            urls=local.urls,
            weights_folder=tmp_path / "weights",
            deadlines=FAST.model_copy(update={"gone_seconds": 120.0, "push_seconds": 60.0}),
            notify=said.append,
        )
        opened.extend((local, sampler))
        return local, sampler, said

    yield start
    for one in reversed(opened):
        one.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compute_type", gate(["float32", "bfloat16"], "bfloat16"))
def test_a_server_has_what_one_step_taught_and_has_it_again_after_it_was_killed(
    compute_type: ComputeType, started: Callable[..., tuple[ChildServers, ServerSampler, list[str]]]
) -> None:
    local, sampler, _ = started(compute_type)
    for version, steps in enumerate((0, 1, 30)):
        sampler.load_weights(little_adapter(steps, compute_type), version)
        assert sampler.weight_metrics().get("mismatch/adapter_fraction", 1.0) == pytest.approx(1.0, abs=0.02)
    assert "mismatch/adapter_fraction" in sampler.weight_metrics()
    [server] = sampler.pool.servers
    [process] = local._processes.values()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    sampler.load_weights(little_adapter(31, compute_type), 3)
    assert server.adapter is not None
    assert server.adapter.is_known
    assert server.adapter.fraction == pytest.approx(1.0, abs=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", gate([1, 10], 10))
def test_a_server_that_adds_the_adapter_to_its_base_is_refused_with_both_numbers(
    steps: int, started: Callable[..., tuple[ChildServers, ServerSampler, list[str]]]
) -> None:
    _, sampler, _ = started(program=MERGES)
    with pytest.raises(SamplerError, match=r"applies -?0\.\d\d of the adapter of .*nats.*standard error"):
        sampler.load_weights(little_adapter(steps), 1)


def test_the_stored_tokens_are_those_of_a_passage_or_run_through_the_vocabulary(
    make_policy: Callable[..., TrainedPolicy],
) -> None:
    policy = little_adapter(1)
    ids = stored_tokens(policy)
    assert len(ids) == NUM_TOKENS + 1
    proof = measure(policy)
    assert proof.adapted != proof.base
    small = make_policy("qwen2")
    vocabulary = small.model.config.vocab_size
    assert all(0 <= one < vocabulary for one in stored_tokens(small))
    assert len(set(stored_tokens(small))) > 8


@pytest.mark.parametrize(("rank", "room"), [(1, "8"), (8, "8"), (16, "16"), (17, "32"), (300, "320"), (512, "512")])
def test_vllm_gets_room_for_the_rank(rank: int, room: str) -> None:
    assert adapter_options(rank)[2] == room


def test_a_rank_that_vllm_does_not_apply_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="at most"):
        adapter_options(513)


def test_the_newest_versions_can_be_proven(tmp_path: Path) -> None:
    sampler = make_server_sampler(SamplingParams(), urls=[], weights_folder=tmp_path)
    policy = little_adapter(1)
    for version in range(12):
        sampler._prove(policy, f"run:{version}")
    assert sampler.pool.proof("run:0") is None
    assert sampler.pool.proof("run:11") is not None


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_run_with_an_adapter_and_its_own_server_shows_that_nothing_of_it_is_lost(
    nursery: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ["policy.lora={rank: 16}", "policy.device=cpu", "rollouts.type=servers", "rollouts.own_servers=1"]
    words += ["rollouts.max_completion_tokens=48", "run.steps=3", "run.prompts_per_step=4", f"run.folder={folder}"]
    words += ["algorithm.group_size=8", "evaluation.num_prompts=4", "optimizer.learning_rate=1e-5"]
    status, said = nursery.run("train", "word_problems", *words)
    assert status == 0, said
    [metrics] = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    shares = [row["mismatch/adapter_fraction"] for row in rows if "mismatch/adapter_fraction" in row]
    assert len(shares) >= 2
    assert shares == pytest.approx([1.0] * len(shares), abs=0.02)
