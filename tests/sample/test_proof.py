"""Is a decode step used on a GPU only if it computes what the model's module computes?"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oncurve.core.decoder import ModuleDecoder
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decode_proof as proof
from oncurve.model import decode_torch, decoding, ops_torch
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.decode_proof import Proof, mismatch
from oncurve.model.decoding import LayerDecoder
from oncurve.model.weights import backbone_of
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePolicy = Callable[..., TrainedPolicy]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    monkeypatch.setattr(decode_torch, "TorchLayers", RecordedLayers)
    monkeypatch.setattr(proof, "needs_proof", lambda backbone: True)


def break_step(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Make the decode step wrong, or fail."""
    right = LayerDecoder.step

    def wrong(self: LayerDecoder, tokens: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        if how == "raises":
            raise RuntimeError("cutlassF: no kernel found to launch!\nand more")
        if how == "positions":
            return right(self, tokens, torch.zeros_like(positions), places)
        if how == "late":
            return right(self, tokens, positions, places) * (1 if int(places[0, 1]) < 128 else -1)
        return right(self, tokens.flip(0), positions, places)

    monkeypatch.setattr(LayerDecoder, "step", wrong)


@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@torch.no_grad()
def test_a_right_step_is_proven(architecture: str, compute_type: str, make_policy: MakePolicy) -> None:
    policy = make_policy(architecture, compute_type=compute_type)
    backbone = backbone_of(policy.model)
    assert backbone is not None
    with policy.compute():
        assert mismatch(policy, backbone) is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "raised RuntimeError: cutlassF: no kernel found to launch!"),
        ("positions", "that differ by"),
        ("late", "differ by"),
        ("rows", "differ by"),
    ],
)
def test_a_wrong_step_is_said_and_left_for_the_module(
    how: str,
    said: str,
    make_policy: MakePolicy,
    make_prompts: Callable[..., list[Prompt]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_step(monkeypatch, how)
    engine = InProcessEngine(SamplingParams(max_completion_tokens=3, seed=1))
    engine.load_weights(make_policy(), version=0)
    runs: list[int] = []
    read: Any = ModuleDecoder.prefill
    monkeypatch.setattr(ModuleDecoder, "prefill", lambda self, *given: runs.append(1) or read(self, *given))
    with caplog.at_level(logging.WARNING):
        groups = engine.sample(SamplingRequest(make_prompts("1 + 1 ="), 2))
        engine.sample(SamplingRequest(make_prompts("1 + 1 ="), 2))
    assert len(groups[0].completions) == 2
    assert len(runs) == 2
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("oncurve")]
    assert "through its own module" in warning
    assert said in warning


def test_a_step_is_proven_once(
    make_policy: MakePolicy, make_prompts: Callable[..., list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(proof, "mismatch", lambda policy, backbone: asked.append(1))
    engine = InProcessEngine(SamplingParams(max_completion_tokens=3, seed=1))
    engine.load_weights(make_policy(), version=0)
    for _ in range(3):
        engine.sample(SamplingRequest(make_prompts("1 + 1 ="), 2))
    assert len(asked) == 1


def test_without_cuda_graphs_a_gpu_samples_through_the_module(make_policy: MakePolicy) -> None:
    policy = make_policy()
    with policy.compute(), torch.inference_mode():
        assert Proof().backbone(policy) is backbone_of(policy.model)
        assert Proof(on_gpu=False).backbone(policy) is None


@torch.no_grad()
def test_much_rounding_is_allowed_where_the_module_rounds_as_much(
    make_policy: MakePolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """Large biases of keys, as Qwen2.5 has them, are rounded to a larger part than what they are added to."""
    policy = make_policy("qwen2", compute_type="bfloat16")
    for name, parameter in policy.model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            parameter.copy_(30 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    backbone = backbone_of(policy.model)
    assert backbone is not None
    with policy.compute(), caplog.at_level(logging.INFO):
        assert mismatch(policy, backbone) is None
    [_, said] = [record.getMessage() for record in caplog.records if "decode step gives" in record.getMessage()]
    numbers = [float(number) for number in re.findall(r"[\d.]*\d(?:e-\d+)?", said)]
    assert numbers[0] > 0.5, "more than a constant that finds mistakes allows"
    assert numbers[1] > 0.5


def test_running_out_of_memory_in_the_check_decides_nothing(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, right, failures = make_policy("qwen2"), LayerDecoder.step, [torch.OutOfMemoryError("CUDA out of memory")]

    def short(self: LayerDecoder, tokens: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        if failures:
            raise failures.pop()
        return right(self, tokens, positions, places)

    monkeypatch.setattr(LayerDecoder, "step", short)
    proof = Proof()
    with torch.inference_mode(), policy.compute():
        assert proof.backbone(policy) is None
        assert "it is checked again the next time" in caplog.text
        assert proof.backbone(policy) is backbone_of(policy.model)
