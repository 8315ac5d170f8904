"""Attention over a batch without padding, which reads the prompt of a group only once.

The rows of a microbatch are laid end to end as one sequence: each prompt, then the completions that follow it. Linear
layers see only real tokens. Attention, told of the layout through a keyword that transformers hands down to it, lets a
prompt see itself and a completion see its prompt and itself. Gradients of a prompt's keys and values are the sums over
its completions, as if the prompt had been repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oncurve.algorithm.precision import arithmetic_type
from oncurve.model.packing import Block, Layout
from oncurve.policy.flash_varlen import attend, fits, kernel_for

NAME, IN_BLOCKS = "oncurve_packed", "oncurve_packed_in_blocks"
"""Names of the attention among those of transformers; without a layout it is the ordinary SDPA."""


def use_packed_attention(model: PreTrainedModel, *, in_blocks: bool = False) -> None:
    """Make the model's attention understand layouts; ordinary calls of the model stay what they were.

    ``in_blocks`` does without a kernel for runs of any length, also where there is one.
    """
    name, attention = (IN_BLOCKS, block_attention) if in_blocks else (NAME, packed_attention)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    set_attention(model, name)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Give the model's text this attention; towers that see or hear keep theirs."""
    text, own = model.config.get_text_config(), vars(model.config)
    parts = [part for part in model.config.sub_configs if own.get(part) is text]
    model.set_attn_implementation({"": name} | dict.fromkeys(parts, name))


def ordinary_attention(model: PreTrainedModel) -> None:
    """Back to transformers' own SDPA, or to eager attention where a model has no other."""
    try:
        set_attention(model, "sdpa")
    except (ValueError, ImportError):
        set_attention(model, "eager")


def packed_hidden(model: nn.Module, layout: Layout) -> Tensor:
    """Last hidden states of the positions that predict a trained token [M, H]."""
    unmasked = torch.zeros(1, 1, 1, 1, device=layout.ids.device)  # a finished mask: none is made from positions
    output = model(
        input_ids=layout.ids, position_ids=layout.positions, attention_mask=unmasked, use_cache=False, layout=layout
    )
    return output.last_hidden_state[0].index_select(0, layout.predicts)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention by layout where there is one: [1, H, N, D] each to [1, N, H, D].

    A kernel for runs of any length does it where there is one for these tensors, and blocks of similar rows elsewhere.
    """
    layout: Layout | None = kwargs.get("layout")
    kind = arithmetic_type(query.device, query.dtype)
    kernel = kernel_for(query.device, kind)
    if layout is None or kernel is None or not fits(query, value):
        return block_attention(module, query, key, value, attention_mask, **kwargs)
    _check(kwargs)
    q, k, v = (part.squeeze(0).transpose(0, 1).to(kind) for part in (query, key, value))  # [N, H, D]
    return attend(q, k, v, layout, kernel, scale=kwargs.get("scaling")).unsqueeze(0), None


def block_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The same with rows of similar length padded to one block."""
    layout: Layout | None = kwargs.pop("layout", None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _check(kwargs)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [N, H, D]
    pieces = [_attend(block, q, k, v, scale=kwargs.get("scaling")) for block in layout.blocks]
    return torch.cat(pieces).index_select(0, layout.outputs)[None], None


def _check(options: Mapping[str, Any]) -> None:
    """Refuse what a model asks of its attention and packed attention does not do."""
    if options.get("sliding_window") or options.get("softcap") or options.get("s_aux") is not None:
        raise NotImplementedError("packed attention sees the whole row and caps nothing")


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
    """One attention call for a block; its rows end to end with their padding [R * T, H, D]."""
    heads, width = q.shape[1:]
    queries = q.index_select(0, block.queries).view(block.rows, -1, heads, width).transpose(1, 2)
    keys = k.index_select(0, block.keys).view(block.rows, -1, k.shape[1], width).transpose(1, 2)
    values = v.index_select(0, block.keys).view(block.rows, -1, k.shape[1], v.shape[2]).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=block.mask,
        is_causal=block.mask is None,
        scale=scale,
        enable_gqa=heads != k.shape[1],
    )
    return mixed.transpose(1, 2).reshape(-1, heads, v.shape[2])
