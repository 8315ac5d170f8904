"""Small models of a model's kind, in which what changes with the length of a row changes after a few tokens.

A window of 4,096 tokens, or a rope that changes there, would need rows of that length to show a mistake. A model of the
same class with a window of 16 shows it in rows that cost nothing.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from oncurve.algorithm.precision import HALF

ROUNDINGS = 30.0
"""A way may differ from the model's own result by so many times the effect of rounding its embeddings once more."""
FLOOR, HALF_FLOOR = 2e-5, 1e-2
"""Differences of log-probabilities that always count as rounding, in float32 and where some weights are narrower."""
LENGTH = 16
"""Tokens after which a stand-in's windows end and its index chooses."""
VOCABULARY = 64
_LENGTHS = re.compile(r"window|chunk_size|topk$|block_size")
_COUNTS = re.compile(r"layers|pattern|expert|moe|group")
_HEADS = re.compile(r"(?<!index_n)_heads$|^n_head$|n_groups$")
_WIDTHS = re.compile(r"(?<!index_n)_heads$|^n_head$|n_groups$|^hidden_size$|^d_model$|^n_embd$|^lru_width$|_d_ssm$")
_INNER = re.compile(r"(intermediate|ffn)_(hidden_)?(size|dim)|^n_inner$|^d_ff$|^dff$")
_DEPTHS = re.compile(r"num_hidden_layers|^depth$|^num_layers$|encoder_layers")
INNER, HIDDEN = 64, 256
"""Numbers of a token between the matrices of a stand-in's MLP and experts, and between its layers where the size of a
head does not follow from them."""
FAILURES = (
    TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, AttributeError, IndexError, AssertionError,
    ZeroDivisionError, StrictDataclassError,
)  # fmt: skip
"""Exceptions of transformers for a configuration of which it cannot make a working model, of an unknown model's
attention where it is given a layout, and of a kernel where it cannot run."""


def stand_in(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """A random model with one layer of each kind, two at least, a vocabulary of a few tokens and short lengths.

    It is as narrow as its number of heads allows, has all layers where some share what others made, and is as wide as
    the model where none of its kind is narrower. Its weights are so large that what a token sees shows in its numbers:
    std = 1 / sqrt(inputs).

    Raises what transformers raises for a kind of which there is no such model.
    """
    for cuts in (True, False):
        try:
            return _made(model, torch.device(device), narrows=True, cuts=cuts)
        except FAILURES:
            continue
    return _made(model, torch.device(device), narrows=False, cuts=True)


def _made(model: PreTrainedModel, device: torch.device, *, narrows: bool, cuts: bool) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    _shorten(text, cuts=cuts)
    if narrows:
        _narrow(config, text)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        made = type(model)._from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in made.parameters():
                if weight.ndim > 1:
                    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
                else:  # biases and sinks begin as zeros, which show nothing
                    weight += 0.1 * torch.randn_like(weight)
            made(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=False)
    return made


def find_stand_in(model: PreTrainedModel) -> PreTrainedModel | None:
    """The same; None where there is none that computes anything, and for weights of few bits."""
    if any(not weight.is_floating_point() for weight in model.parameters()):
        return None
    try:
        return stand_in(model, model.device)
    except FAILURES:
        return None


def _shorten(text: Any, *, cuts: bool) -> None:
    """Short lengths, few tokens, and with ``cuts`` fewer layers, as many entries in the lists with one for each."""
    own, kinds = vars(text), getattr(text, "layer_types", None)
    layers = text.num_hidden_layers
    count = max(2, 1 + max(kinds.index(kind) for kind in kinds)) if kinds else min(2, layers)
    for name, value in [*own.items()]:
        if cuts and isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, name, value[:count])
        elif name.endswith("_token_id") and isinstance(value, (int, list)):
            setattr(text, name, 0)
        elif type(value) is not int:
            continue
        elif name.startswith("vocab_size"):
            setattr(text, name, min(value, VOCABULARY))
        elif value > LENGTH and _LENGTHS.search(name) and not _COUNTS.search(name):
            setattr(text, name, LENGTH)
    if cuts:
        text.num_hidden_layers = count


def _narrow(config: Any, text: Any) -> None:
    """As few heads as keep two of the fewest and what queries share a key, as narrow a model for them; short towers.

    The heads of an index stay: its score is a sum of their relus, and with two of them many tokens have the same, zero.
    """
    sizes = {name: value for name, value in vars(text).items() if type(value) is int and value > 0}
    heads = [value for name, value in sizes.items() if _HEADS.search(name) and value > 1]
    parts = max(1, math.gcd(*heads) // 2) if heads else 1
    for name, value in [*vars(text).items()]:
        if _INNER.search(name) and isinstance(value, (int, list)):
            setattr(
                text, name, [min(number, INNER) for number in value] if isinstance(value, list) else min(value, INNER)
            )
        elif name in sizes and _WIDTHS.search(name) and value % parts == 0:
            setattr(text, name, value // parts)
    if {"head_dim", "num_attention_heads", "hidden_size"} <= sizes.keys():
        while text.hidden_size > HIDDEN and text.hidden_size % 2 == 0:
            text.hidden_size //= 2
    for tower in (part for part in vars(config).values() if isinstance(part, PreTrainedConfig) and part is not text):
        for name in [name for name, value in vars(tower).items() if type(value) is int and _DEPTHS.search(name)]:
            setattr(tower, name, 1)


def changes_with_length(model: PreTrainedModel, tokens: int) -> bool:
    """Something of the model's configuration begins or ends beyond so many tokens of a row."""
    settings = vars(model.config.get_text_config()).items()
    lengths = [value for name, value in settings if _LENGTHS.search(name) and not _COUNTS.search(name)]
    return any(type(length) is int and length > tokens for length in lengths)


def nudged(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Logits of the rows with embeddings that differ in their last digit: how far rounding alone moves them."""

    def nudge(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        signs = torch.arange(output.numel(), device=output.device).view_as(output).remainder(3) - 1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        return model(input_ids=rows, use_cache=False).logits
    finally:
        hook.remove()


def allowed(model: PreTrainedModel, rounding: float) -> float:
    """The largest difference of a log-probability that is rounding, where nudged embeddings make this one."""
    is_half = any(weight.dtype in HALF for weight in model.parameters())
    return max(HALF_FLOOR if is_half else FLOOR, ROUNDINGS * rounding)


Distance = Callable[[Tensor, Tensor], float]
KERNEL_FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""Errors of a kernel that cannot do what it is asked for."""


@dataclass(frozen=True)
class Agreement:
    """Two distances from the exact result: that of the fast way, and that of the plain way in the same type."""

    name: str
    """Name of the computed quantity."""
    error: float
    rounding: float
    allowed: float

    @property
    def holds(self) -> bool:
        """The fast way is not further away than rounding explains; nan never is near."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.name} that differ by {self.error:.2g} from the exact ones, those of the plain way by "
            f"{self.rounding:.2g} (at most {self.allowed:.2g} is rounding)"
        )


def agreement(
    name: str, fast: Tensor, plain: Tensor, exact: Tensor, *, times: float, floor: float, distance: Distance
) -> Agreement:
    """Whether the fast way is as near to the exact result as ``times`` the plain one is, or nearer than the floor."""
    error, rounding = (distance(actual.double(), exact.double()) for actual in (fast, plain))
    return Agreement(name, error, rounding, max(floor, times * rounding))


def of_size(actual: Tensor, exact: Tensor) -> float:
    """|a - b| / |b|, as a part of the size of the whole."""
    return float((actual - exact).norm() / exact.norm())


def largest(actual: Tensor, exact: Tensor) -> float:
    """The largest difference of a number."""
    return float((actual - exact).abs().max())


def mean(actual: Tensor, exact: Tensor) -> float:
    """The mean difference."""
    return float((actual - exact).abs().mean())


def worst_step(actual: Tensor, exact: Tensor) -> float:
    """The mean difference over rows [R, T] of the step where it is largest."""
    return float((actual - exact).abs().mean(dim=0).max())
