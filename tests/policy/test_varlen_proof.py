"""Is the kernel for runs proven when a policy is made, and left for blocks where it fails?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from runs_reference import Reference
from torch import Tensor

from oncurve.core.batch import Batch
from oncurve.model.packing import Runs
from oncurve.policy import forward, packed_attention, scoring_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oncurve.policy.trained_policy import TrainedPolicy

MakePolicy = Callable[..., "TrainedPolicy"]
MakeModel = Callable[..., "PreTrainedModel"]
MakeBatch = Callable[[str], Batch]


class Wrong(Reference):
    """A kernel with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **options: Any) -> tuple[Tensor, Tensor]:
        if self.fault == "raises":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nand more")
        out, logs = super().forward(q, k, v, runs, **options)
        if self.fault == "logarithms":
            logs += 1.0 if options["causal"] else 0.0
        return (torch.full_like(out, torch.nan), logs) if self.fault == "nan" else (out, logs)

    def backward(self, grad: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = super().backward(grad, *given, **options)
        if self.fault == "gradient of keys" and not options["causal"]:
            grad_k = torch.zeros_like(grad_k)
        return grad_q, grad_k, grad_v


@pytest.mark.parametrize("compute_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_right_kernel_is_proven_and_used_in_the_compute_type(
    architecture: str,
    compute_type: str,
    make_policy: MakePolicy,
    make_batch: MakeBatch,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(scoring_path, "kernel_for", packed_attention.kernel_for)
    policy = make_policy(architecture, compute_type=compute_type)
    assert policy.is_packed
    assert not [record for record in caplog.records if record.name.startswith("oncurve")]
    reference.seen.clear()
    logprobs, _ = policy.logprobs(make_batch("ragged"))
    policy.backward(-logprobs.mean())
    assert {kind for _, kind in reference.seen} == {getattr(torch, compute_type)}
    assert {part.grad.dtype for part in policy.model.parameters() if part.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "raised RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
        ("logarithms", "gives log-probabilities that differ"),
        ("nan", "gives log-probabilities that differ"),
        ("gradient of keys", "gives gradients that differ"),
    ],
)
def test_a_kernel_that_fails_or_differs_is_left_for_blocks_with_a_warning(
    fault: str,
    reason: str,
    make_policy: MakePolicy,
    make_batch: MakeBatch,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = Wrong(fault)
    for module in (packed_attention, scoring_path):
        monkeypatch.setattr(module, "kernel_for", lambda device, kind: wrong)
    policy = make_policy(compute_type="bfloat16")
    assert policy.is_packed
    [record] = [record for record in caplog.records if record.name.startswith("oncurve")]
    assert record.levelno == logging.WARNING
    assert "goes on in blocks" in record.getMessage()
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()
    wrong.seen.clear()
    logprobs, _ = policy.logprobs(make_batch("ragged"))
    assert not wrong.seen
    padded, _ = make_policy(compute_type="bfloat16", packing=False).logprobs(make_batch("ragged"))
    torch.testing.assert_close(logprobs, padded, atol=0.3, rtol=0.05)


def test_the_proof_leaves_no_gradient_and_no_hook(
    tiny_model: MakeModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_path, "kernel_for", packed_attention.kernel_for)
    model = tiny_model()
    assert scoring_path.find_scoring_path(model, torch.bfloat16).is_packed
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_packing_that_computes_something_else_is_switched_off_with_both_numbers(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = forward.packed_hidden
    monkeypatch.setattr(forward, "backbone_of", lambda model: None)
    monkeypatch.setattr(forward, "packed_hidden", lambda *given: right(*given) * 1.02)
    policy = make_policy("llama")
    assert not policy.is_packed
    said = str(policy.scoring_path)
    assert said.startswith("padded rows through the model's modules, since packed rows through")
    assert "from the model's own (at most" in said


def test_packing_that_rounds_as_padded_rows_do_stays(make_policy: MakePolicy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert make_policy("llama").is_packed
    assert "the model is trained with packed rows through our own layers" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
