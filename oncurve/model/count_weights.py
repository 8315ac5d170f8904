"""Weights of a model of any family, counted on its modules without memory for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D


def count(path: str) -> dict[str, Any]:
    """Sizes of the model that a config.json describes, as it would be trained.

    Raises ValueError for a model type that transformers does not know as a causal language model.
    """
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    text: Any = model.config.get_text_config()
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    matrices = [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in ends]
    heads = _size(text, "num_attention_heads", 1)
    hidden, linear = _size(text, "hidden_size", 1), sum(weight.numel() for weight in matrices)
    experts = sum(weight.numel() for weight in matrices if weight.ndim > 2)
    chosen = _size(text, "num_experts_per_tok", 0) or _size(text, "moe_k", 0)
    stacked = max((len(weight) for weight in matrices if weight.ndim > 2), default=1)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "linear": linear,
        "active": linear - experts + (experts * min(chosen, stacked) // stacked if chosen else experts),
        "kv_numbers": _cached_numbers(model),
        "adapted": dict(_adapted(model)),
        "hidden": hidden,
        "layers": _size(text, "num_hidden_layers", 1),
        "heads": heads,
        "kv_heads": _size(text, "num_key_value_heads", heads),
        "head_size": _size(text, "head_dim", hidden // heads),
        "mlp": _widest(model, hidden),
        "vocabulary": _size(text, "vocab_size", 1),
        "is_tied": len(ends) == 1,
        "max_tokens": _size(text, "max_position_embeddings", 32_768),
    }


def _size(config: PreTrainedConfig, name: str, default: int) -> int:
    """A size by transformers' name for it; the largest where it differs from layer to layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # it differs from layer to layer
        layers: Any = config.per_layer_config
        value = [getattr(layer, name, None) for layer in (layers.values() if isinstance(layers, dict) else layers)]
    size = max((entry for entry in value if isinstance(entry, int)), default=0) if isinstance(value, list) else value
    return size if type(size) is int and size > 0 else default


def _widest(model: PreTrainedModel, hidden: int) -> int:
    """Numbers of a token between the matrices of an MLP: the most that a matrix with as many inputs as states makes."""
    head = model.get_output_embeddings()
    widths = [part.out_features for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    return max(widths, default=4 * hidden)


def _adapted(model: PreTrainedModel) -> Counter[str]:
    """Inputs and outputs of the linear layers but the head, added up by the ends of their names."""
    head, sizes = model.get_output_embeddings(), Counter[str]()
    for name, part in model.named_modules():
        if isinstance(part, (nn.Linear, Conv1D)) and part is not head:
            sizes[name.rpartition(".")[2]] += sum(part.weight.shape)
    return sizes


def _cached_numbers(model: PreTrainedModel) -> int | None:
    """Numbers that a token leaves in the model's own cache; None where it cannot be run without memory."""
    try:
        with torch.no_grad():
            ids = torch.ones(1, 1, dtype=torch.long, device="meta")
            cache: Any = model(input_ids=ids, use_cache=True).past_key_values
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        return sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, IndexError):
        return None
