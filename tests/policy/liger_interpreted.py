"""Under Triton's interpreter, on a CPU: what do Liger's kernels change in a policy of a family of models?

``TRITON_INTERPRET=1 python liger_interpreted.py FAMILY`` prints the largest differences, which kernels ran and whether
they are near enough in bfloat16 as well, as JSON.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from triton.runtime import interpreter

from oncurve.policy import forward, liger, self_check
from oncurve.policy.lora import add_adapter
from oncurve.policy.policy import TrainedPolicy
from oncurve.settings import LoraSettings, OptimizerSettings

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "packed": {},
    "recomputed": {"gradient_checkpointing": True},
    "activations on the CPU": {"offload_activations": True},
}
launched: set[str] = set()


def complete_the_interpreter() -> None:
    """What a GPU can do and the interpreter cannot: numbers as arguments, rsqrt, bfloat16 rounded to nearest."""
    converted, executed = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    builder: Any = interpreter.InterpreterBuilder
    cast_to, computed = builder.cast_impl, builder.binary_op

    def convert(argument: Any) -> Any:
        if not isinstance(argument, float):
            return converted(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    def round_to(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast_to(self, source, kind)
        rounded = torch.from_numpy(np.atleast_1d(source.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded.reshape(source.data.shape), kind.scalar)

    def compute(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
        is_half = left.dtype.scalar == right.dtype.scalar == tl.bfloat16
        if not is_half or operation not in (np.add, np.subtract, np.multiply, np.divide):
            return computed(self, left, right, operation)
        wide = [self.cast_impl(part, tl.float32) for part in (left, right)]
        return self.cast_impl(computed(self, *wide, operation), tl.bfloat16)

    def execute(self: Any, *arguments: Any, **options: Any) -> None:
        launched.add(self.fn.__name__)
        executed(self, *arguments, **options)

    interpreter._implicit_cvt, interpreter.GridExecutor.__call__ = convert, execute
    builder.cast_impl, builder.binary_op = round_to, compute
    vars(importlib.import_module("liger_kernel.ops.rms_norm"))["rsqrt"] = lambda x: tl.math.rsqrt(x)


def make_model(family: str) -> PreTrainedModel:
    """Two layers of random numbers, none of which is a one of a fresh norm or a zero of a fresh bias."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=64, num_hidden_layers=2, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def with_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """The model with an adapter in it that does something."""
    add_adapter(model, LoraSettings(rank=2), base="tiny")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def passed(model: PreTrainedModel, way: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities, entropies and all gradients of a policy around a copy of the model."""
    tokenizer = cast("PreTrainedTokenizerBase", None)
    policy = TrainedPolicy(copy.deepcopy(model), tokenizer, optimizer=OptimizerSettings(), **way)
    if way.get("packing", True) and not policy.is_packed:
        raise RuntimeError("the packed way was not taken")
    logprobs, entropies = policy.logprobs(self_check.example_batch(64))
    policy.backward((logprobs + 0.1 * entropies).sum())
    gradients = [p.grad for p in policy.trained_model.parameters() if p.requires_grad]
    return [logprobs.detach(), entropies.detach(), *(g for g in gradients if g is not None)]


def largest_difference(ordinary: list[Tensor], fused: list[Tensor]) -> float:
    """As a part of the size of what differs."""
    return max(float((a - b).norm() / a.norm()) for a, b in zip(ordinary, fused, strict=True))


def main(family: str) -> None:
    complete_the_interpreter()
    vars(liger)["DEVICES"] = ("cpu",)
    vars(forward)["backbone_of"] = lambda model: None  # on a CPU, our own layers would take the place of the modules
    model, adapted = make_model(family), with_adapter(make_model(family))
    ordinary = {way: passed(model, options) for way, options in WAYS.items()}
    ordinary["adapter first"] = ordinary["adapter later"] = passed(adapted, {})

    if family != "qwen3":  # whose heads have norms; so many rows take the interpreter half a minute
        vars(liger)["MANY_ROWS"] = 64
    liger.use_liger(model, True, compute_type="float32")
    vars(liger)["MANY_ROWS"] = 64
    liger.use_liger(adapted, True, compute_type="float32")
    in_half = liger.use_liger(make_model(family), "auto", compute_type="bfloat16")
    fused = {way: passed(model, options) for way, options in WAYS.items()}
    fused |= {"adapter first": passed(adapted, {}), "adapter later": passed(with_adapter(model), {})}
    differences = {way: largest_difference(ordinary[way], fused[way]) for way in ordinary}
    print(json.dumps({"differences": differences, "kernels": sorted(launched), "in_half": in_half}))


if __name__ == "__main__":
    main(sys.argv[1])
