"""Ways to save the small kernels of training: torch's fused norm, and torch.compile over parts of a layer or all of it.

Nothing of the package uses them; each is timed beside an update as it is, and its gradient is compared with that one's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_first_agreement import policy_of
from gpu_first_probe import Answer, Setting, judged
from gpu_first_sizes import half, make_batch, update
from gpu_first_timing import checkpoint, is_gpu, memory, seconds_of, wait
from torch import Tensor, nn
from transformers.models.qwen2 import modeling_qwen2

from oncurve.policy import packed_attention
from oncurve.policy.packed_attention import attend
from oncurve.policy.trained_policy import TrainedPolicy

ROTATE = modeling_qwen2.apply_rotary_pos_emb
FAR = 0.05
"""Relative distance of gradients that rounding to bfloat16 explains."""
SAMPLED = 200_000
"""Numbers of each weight's gradient that are compared."""


def fuse_norms(model: nn.Module, kind: torch.dtype | None = None) -> None:
    """Norms by torch's kernel; with ``kind``, given in the type that the products behind them take."""
    for part in _named(model, "RMSNorm"):

        def norm(x: Tensor, part: Any = part) -> Tensor:
            found = nn.functional.rms_norm(x, (x.shape[-1],), part.weight, part.variance_epsilon)
            return found if kind is None else found.to(kind)

        part.forward = norm


def compile_parts(model: nn.Module) -> None:
    """Norms, the MLP and the rotation, each compiled."""
    for part in (*_named(model, "RMSNorm"), *_named(model, "MLP")):
        part.forward = torch.compile(part.forward, dynamic=True)
    modeling_qwen2.apply_rotary_pos_emb = torch.compile(ROTATE, dynamic=True)


def compile_layers(model: nn.Module) -> None:
    """Layers, around attention."""
    packed_attention.attend = torch.compiler.disable(attend)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _named(model: nn.Module, end: str) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__.endswith(end)]


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "as it is": lambda model: None,
    "fused norms": fuse_norms,
    "fused norms in bfloat16": lambda model: fuse_norms(model, torch.bfloat16),
    "compiled parts": compile_parts,
    "compiled layers": compile_layers,
}


def compare(setting: Setting) -> Answer:
    """Seconds, memory and gradient of an update of 8,192 tokens a microbatch, by way."""
    folder = str(checkpoint(setting.work, "1.5B"))
    found: dict[str, dict[str, float]] = {}
    first: Tensor | None = None
    for name, change in WAYS.items():
        modeling_qwen2.apply_rotary_pos_emb, packed_attention.attend = ROTATE, attend
        torch._dynamo.reset()
        policy = policy_of(setting.device, half(setting), folder, tokens_per_microbatch=8192)
        batch = make_batch(setting, policy.tokenizer, prompts=16, group=8, prompt=256, most=512)
        change(policy.trained_model)
        gradient, seconds = _gradient(policy, batch, setting.device)
        first = gradient if first is None else first
        far = float((gradient - first).norm() / first.norm())
        step = update(policy, batch)
        memory(setting.device)
        each = seconds_of(step, setting.device, repeats=2)
        rate = int(batch.row_lengths.sum()) / each
        found[name] = {"seconds": each, "tokens_per_second": rate, "first_pass": seconds, "gradient_far": far}
        found[name] |= memory(setting.device)
        del policy, step
        gc.collect()
        if is_gpu(setting.device):
            torch.cuda.empty_cache()
    said = ", ".join(f"{name}: {row['tokens_per_second']:,.0f} tokens/s" for name, row in found.items())
    return judged(all(row["gradient_far"] < FAR for row in found.values()), said, ways=found)


def _gradient(policy: TrainedPolicy, batch: Any, device: str) -> tuple[Tensor, float]:
    """Of the first microbatch, a part of each weight's; and the seconds, compilation among them."""
    part, started = next(iter(policy.microbatches(batch))), time.perf_counter()
    logprobs, _ = policy.logprobs(part)
    policy.backward((logprobs * part.advantages[:, None].to(logprobs)).mean())
    wait(device)
    seconds = time.perf_counter() - started
    weights = [weight for weight in policy.trained_model.parameters() if weight.grad is not None]
    found = torch.cat([weight.grad.flatten()[:SAMPLED].float().cpu() for weight in weights if weight.grad is not None])
    for weight in weights:
        weight.grad = None
    return found, seconds
