"""How does the policy read a batch without padding, and the prompt of a group only once?

The rows of a microbatch are laid end to end as one sequence: each prompt, then the completions that follow it. Linear
layers see only real tokens. Attention, told of the layout through a keyword that transformers hands down to it, lets a
prompt see itself and a completion see its prompt and itself. Gradients of a prompt's keys and values are the sums over
its completions, as if the prompt had been repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oncurve.batch import Batch

NAME = "oncurve_packed"
"""Name of the attention among those of transformers; without a layout it is the ordinary SDPA."""
WASTE = 1.3
"""Rows share an attention call while padding them to its longest makes at most this many times their own tokens."""


@dataclass(frozen=True)
class Block:
    """Rows of similar length that attend in one call: completions to their prompts and themselves."""

    queries: Tensor
    """Places of the rows' own tokens in the sequence [R * T], padding pointing at place 0."""
    keys: Tensor
    """Places of the prompt's and the own tokens [R * (S + T)]."""
    mask: Tensor | None
    """Who sees whom [R, 1, T, S + T]; None for plain causal attention (prompts)."""
    rows: int


@dataclass(frozen=True)
class Layout:
    """Where everything stands in the sequence of a microbatch."""

    ids: Tensor
    """Token ids [1, N]."""
    positions: Tensor
    """Position of each token in its own row [1, N]."""
    blocks: tuple[Block, ...]
    outputs: Tensor
    """For each place of the sequence, its place among the outputs of all blocks laid end to end [N]."""
    predicts: Tensor
    """Places whose hidden state predicts a trained token, in the order of the batch's mask [M]."""


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make the model's attention understand layouts; ordinary calls of the model stay what they were."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def ordinary_attention(model: PreTrainedModel) -> None:
    """Back to transformers' own SDPA, or to eager attention where a model has no other."""
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        model.set_attn_implementation("eager")


def packed_hidden(model: nn.Module, layout: Layout) -> Tensor:
    """Last hidden states of the places that predict a trained token [M, H]."""
    unmasked = torch.zeros(1, 1, 1, 1, device=layout.ids.device)  # a finished mask: none is made from positions
    output = model(
        input_ids=layout.ids, position_ids=layout.positions, attention_mask=unmasked, use_cache=False, layout=layout
    )
    return output.last_hidden_state[0].index_select(0, layout.predicts)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention by layout where there is one: [1, H, N, D] each to [1, N, H, D]."""
    layout: Layout | None = kwargs.pop("layout", None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("sliding_window") or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise NotImplementedError("packed attention sees the whole row and caps nothing")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [N, H, D]
    pieces = [_attend(block, q, k, v, scale=kwargs.get("scaling")) for block in layout.blocks]
    return torch.cat(pieces).index_select(0, layout.outputs)[None], None


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


def make_layout(batch: Batch, device: torch.device) -> Layout:
    """The sequence of a batch: rows of one group behind their prompt, the last token of a completion left out.

    Nothing is predicted from the last token, so it is never read.
    """
    writer = _Writer()
    prompts: dict[int, range] = {}
    rows: list[tuple[range, range]] = []
    predicts: list[int] = []
    lengths, counts, groups = batch.prompt_lengths.tolist(), batch.completion_lengths.tolist(), batch.group_ids.tolist()
    for row, group in enumerate(groups):
        if group not in prompts:
            prompts[group] = writer.write(batch.prompt_ids[row, : lengths[row]], first=0)
        own = writer.write(batch.completion_ids[row, : counts[row] - 1], first=lengths[row])
        rows.append((prompts[group], own))
        trained = batch.mask[row].nonzero().flatten().tolist()
        predicts += [own[t - 1] if t else prompts[group][-1] for t in trained]
    blocks, outputs = _blocks(list(prompts.values()), rows, writer.length)
    moved = tuple(
        Block(b.queries.to(device), b.keys.to(device), None if b.mask is None else b.mask.to(device), b.rows)
        for b in blocks
    )
    return Layout(
        ids=torch.cat(writer.ids)[None].to(device),
        positions=torch.cat(writer.positions)[None].to(device),
        blocks=moved,
        outputs=outputs.to(device),
        predicts=torch.tensor(predicts, dtype=torch.long, device=device),
    )


class _Writer:
    """Lays tokens end to end."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.length = 0

    def write(self, ids: Tensor, *, first: int) -> range:
        """Add tokens whose first position in their row is given; the places where they now stand."""
        self.ids.append(ids)
        self.positions.append(torch.arange(first, first + len(ids)))
        start = self.length
        self.length += len(ids)
        return range(start, self.length)


def _blocks(prompts: list[range], rows: list[tuple[range, range]], length: int) -> tuple[list[Block], Tensor]:
    """Blocks of prompts and of completions, and where each place of the sequence finds its output in them."""
    outputs = torch.zeros(length, dtype=torch.long)
    blocks: list[Block] = []
    offset = 0
    for group in _similar(prompts, [len(prompt) for prompt in prompts]):
        table, _ = _table(group)
        blocks.append(Block(table.flatten(), table.flatten(), None, len(group)))
        offset = _note(outputs, group, table.shape[1], offset)
    completions = [(prompt, own) for prompt, own in rows if len(own)]
    for group in _similar(completions, [len(prompt) + len(own) for prompt, own in completions]):
        before, seen = _table([prompt for prompt, _ in group])
        after, real = _table([own for _, own in group])
        causal = torch.ones(after.shape[1], after.shape[1], dtype=torch.bool).tril()
        own_mask = causal[None] & real[:, None, :]
        own_mask |= torch.eye(after.shape[1], dtype=torch.bool)  # padding sees itself: a row of nothing is NaN
        mask = torch.cat([seen[:, None, :].expand(-1, after.shape[1], -1), own_mask], dim=2)
        blocks.append(Block(after.flatten(), torch.cat([before, after], dim=1).flatten(), mask[:, None], len(group)))
        offset = _note(outputs, [own for _, own in group], after.shape[1], offset)
    return blocks, outputs


def _similar(items: list[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Items of similar length together, so that padding them to the longest adds little."""
    order = sorted(range(len(items)), key=lambda i: lengths[i])
    groups: list[list[Any]] = []
    real = 0
    for i in order:
        if not groups or lengths[i] * (len(groups[-1]) + 1) > WASTE * (real + lengths[i]):
            groups.append([])
            real = 0
        groups[-1].append(items[i])
        real += lengths[i]
    return groups


def _table(rows: list[range]) -> tuple[Tensor, Tensor]:
    """Places as a table padded on the right with place 0, and which entries are real."""
    width = max(len(row) for row in rows)
    lengths = torch.tensor([len(row) for row in rows])
    starts = torch.tensor([row.start for row in rows])
    steps = torch.arange(width)
    real = steps[None] < lengths[:, None]
    return torch.where(real, starts[:, None] + steps[None], 0), real


def _note(outputs: Tensor, rows: list[range], width: int, offset: int) -> int:
    """Write down where the tokens of a block's rows stand among all outputs; where the next block begins."""
    for place, row in enumerate(rows):
        outputs[row.start : row.stop] = torch.arange(len(row)) + offset + place * width
    return offset + len(rows) * width
