"""Small models of a model's kind, in which what changes with the length of a row changes after a few tokens.

A window of 4,096 tokens, or a rope that changes there, would need rows of that length to show a mistake. A model of the
same class with a window of 16 shows it in rows that cost nothing.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.algorithm.precision import HALF

ROUNDINGS = 30.0
"""So many times what rounding its embeddings once more does may a way differ from the model's own result."""
FLOOR, HALF_FLOOR = 2e-5, 1e-2
"""What always counts as rounding of a log-probability, in float32 and where some weights have half the width."""
LENGTH = 16
"""Tokens after which a stand-in's windows end and its index chooses."""
VOCABULARY = 64
_LENGTHS = re.compile(r"window|chunk_size|topk$|block_size")
_COUNTS = re.compile(r"layers|pattern|expert|moe|group")
FAILURES = (
    TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, AttributeError, IndexError, ZeroDivisionError,
    StrictDataclassError,
)  # fmt: skip
"""What transformers raises for a configuration of which it makes no model that computes anything."""


def stand_in(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """A random model with one layer of each kind, two at least, a vocabulary of a few tokens and short lengths.

    Its weights are so large that what a token sees shows in its numbers: std = 1 / sqrt(inputs).

    Raises what transformers raises for a kind of which there is no such model.
    """
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    _shorten(text)
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for name, value in [*vars(text).items()]:
        if name.endswith("_token_id") and isinstance(value, (int, list)):
            setattr(text, name, 0)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(0)
        made = type(model)._from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in made.parameters():
                if weight.ndim > 1:
                    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
                else:  # biases and sinks begin as zeros, which show nothing
                    weight += 0.1 * torch.randn_like(weight)
    return made


def find_stand_in(model: PreTrainedModel) -> PreTrainedModel | None:
    """The same; None where there is none that computes anything, and for weights of few bits."""
    if any(not weight.is_floating_point() for weight in model.parameters()):
        return None
    try:
        made = stand_in(model, model.device)
        with torch.no_grad():
            made(input_ids=torch.ones(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    except FAILURES:
        return None
    return made


def _shorten(text: Any) -> None:
    """Fewer layers, as many entries in the lists that have one for each, and short lengths."""
    own, kinds = vars(text), getattr(text, "layer_types", None)
    layers = text.num_hidden_layers
    count = max(2, 1 + max(kinds.index(kind) for kind in kinds)) if kinds else min(2, layers)
    for name, value in [*own.items()]:
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, name, value[:count])
        elif type(value) is int and value > LENGTH and _LENGTHS.search(name) and not _COUNTS.search(name):
            setattr(text, name, LENGTH)
    text.num_hidden_layers = count


def changes_with_length(model: PreTrainedModel, tokens: int) -> bool:
    """Something of the model's configuration begins or ends beyond so many tokens of a row."""
    found = vars(model.config.get_text_config()).items()
    lengths = [value for name, value in found if _LENGTHS.search(name) and not _COUNTS.search(name)]
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
