"""Packing of a microbatch: rows laid end to end, each prompt once for its group.

The sequence is: all prompts, then all completions, those of one prompt one after another, so that completions of the
same length are read in place. Linear layers see only real tokens. A prompt attends to itself, a completion to its
prompt and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from oncurve.core.batch import Batch
from oncurve.model.context import whole_tokens

Run = tuple[int, int]
"""First index of some tokens that lie side by side, and the index behind the last."""
WASTE = 1.2
"""Rows share an attention call while padding them to its longest makes at most this many times their own tokens."""
HEAD_STEP, LARGEST_HEAD = 8, 256
"""Sizes of heads that torch's flash kernel knows: multiples of the first up to the second."""


@dataclass(frozen=True)
class PackedRow:
    """One run of tokens that attends in a block: a prompt, or a completion with its prompt."""

    own: range
    """Places of its own tokens in the sequence."""
    prompt: range = range(0)
    """Places of the prompt before them; empty for a prompt itself."""

    @property
    def length(self) -> int:
        """Tokens that its last token sees."""
        return len(self.own) + len(self.prompt)


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of similar length that attend in one call, those of one prompt next to each other."""

    spans: Tensor
    """Start and length of the own tokens, start and length of the prompt [R, 4]."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.spans)

    @cached_property
    def own(self) -> int:
        """Own tokens of the longest row: T."""
        return int(self.spans[:, 1].max())

    @cached_property
    def prompt(self) -> int:
        """Tokens of the longest prompt: S."""
        return int(self.spans[:, 3].max())

    @cached_property
    def queries(self) -> Tensor:
        """Indices of the rows' own tokens [R * T]; padding points at index 0."""
        return _table(self.spans[:, 0], self.spans[:, 1], self.own).flatten().to(self.device)

    @cached_property
    def keys(self) -> Tensor:
        """Indices of the prompts' and the own tokens [R * (S + T)]; padding points at index 0."""
        before = _table(self.spans[:, 2], self.spans[:, 3], self.prompt)
        after = _table(self.spans[:, 0], self.spans[:, 1], self.own)
        return torch.cat([before, after], dim=1).flatten().to(self.device)

    @cached_property
    def real(self) -> Tensor:
        """Which of ``queries`` are no padding [R * T]."""
        return self._real().to(self.device)

    @cached_property
    def filled(self) -> Tensor:
        """The indices of those within ``queries``, in ascending order."""
        return self._real().nonzero().flatten().to(self.device)

    def _real(self) -> Tensor:
        return (torch.arange(self.own) < self.spans[:, 1, None]).flatten()

    @cached_property
    def run(self) -> slice | None:
        """The indices of ``queries`` where they are one run of the sequence, so that nothing need be gathered."""
        first, last = int(self.spans[0, 0]), int(self.spans[0, 0]) + self.rows * self.own
        starts = first + self.own * torch.arange(self.rows)
        is_run = bool((self.spans[:, 0] == starts).all() and (self.spans[:, 1] == self.own).all())
        return slice(first, last) if is_run else None

    def take(self, x: Tensor) -> Tensor:
        """Own tokens by row [R, T, ...] of something that all tokens have [N, ...]; padding holds that of index 0."""
        picked = x.index_select(0, self.queries) if self.run is None else x[self.run]
        return picked.unflatten(0, (self.rows, self.own))

    def put(self, to: Tensor, x: Tensor) -> None:
        """The way back: write what own tokens hold [R, T, ...] to their indices in [N, ...]."""
        if self.run is None:
            to[self.queries.index_select(0, self.filled)] = x.flatten(0, 1).index_select(0, self.filled)
        else:
            to[self.run].unflatten(0, (self.rows, self.own)).copy_(x)

    def visible(self) -> Tensor:
        """The mask of attention [R, T, S + T]; padding sees itself, because a softmax over nothing is not a number."""
        steps = torch.arange(self.own)
        causal = (steps[:, None] >= steps)[None] & (steps < self.spans[:, 1, None])[:, None]
        causal = causal | torch.eye(self.own, dtype=torch.bool)
        prompt = torch.arange(self.prompt) < self.spans[:, 3, None]
        return torch.cat([prompt[:, None].expand(-1, self.own, -1), causal], dim=2).to(self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """The same as an attention mask [R, 1, T, S + T]; None where plain causal attention does (prompts)."""
        return self.visible()[:, None] if self.prompt else None


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of queries, each of which reads one run of keys, as a kernel for runs of any length takes them."""

    queries: slice | Tensor
    """Places of the queries in the sequence, run after run."""
    keys: slice | Tensor
    """The same for the keys."""
    query_starts: Tensor
    """Start of each run among the queries, and the end of the last, int32 [R + 1]."""
    key_starts: Tensor
    """The same for the keys."""
    longest_queries: int
    """Queries of the longest run."""
    longest_keys: int
    """Keys of the longest run."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The indices of rows and prompts in the sequence of a microbatch."""

    ids: Tensor
    """Token ids [1, N]."""
    positions: Tensor
    """Position of each token in its own row [1, N]."""
    blocks: tuple[Block, ...]
    predicts: Tensor
    """Places whose hidden state predicts a trained token, in the order of the batch's mask [M]."""

    @cached_property
    def spans(self) -> Tensor:
        """Start and length of own tokens and of prompt of every row [R, 4]: prompts, then completions by prompt."""
        rows = [tuple(row) for block in self.blocks for row in block.spans.tolist()]
        return torch.tensor(sorted(rows, key=lambda row: (row[3] > 0, row[2], row[0])))

    @cached_property
    def num_prompts(self) -> int:
        """Rows of ``spans`` that are prompts."""
        return int((self.spans[:, 3] == 0).sum())

    @cached_property
    def groups(self) -> Tensor:
        """The first row of each prompt and of each group of completions in ``spans``, and the number of rows."""
        starts = self.spans[:, 2]
        is_same = (starts[1:] == starts[:-1]) & (self.spans[1:, 3] > 0) & (self.spans[:-1, 3] > 0)
        return torch.cat([torch.tensor([0]), (~is_same).nonzero().flatten() + 1, torch.tensor([len(starts)])])

    @cached_property
    def _read(self) -> dict[Run, list[Run]]:
        """The runs of tokens that read each prompt, in ascending order of both; prompts that nobody reads are none."""
        runs: dict[Run, list[Run]] = {}
        for own, length, prompt, prompt_length in self.spans[self.num_prompts :].tolist():
            runs.setdefault((prompt, prompt + prompt_length), []).append((own, own + length))
        return runs

    @cached_property
    def readers(self) -> list[tuple[slice, slice | Tensor]]:
        """For each prompt with completions: its indices, and those of all tokens that read it."""
        return [(slice(*prompt), _together(own)) for prompt, own in self._read.items()]

    @cached_property
    def own_runs(self) -> Runs:
        """The own tokens of every row reading themselves; together they are the sequence.

        Raises ValueError for rows that leave out or repeat an index.
        """
        own = sorted((start, start + length) for start, length, *_ in self.spans.tolist())
        indices = _together(own)
        if not isinstance(indices, slice) or (indices.start, indices.stop) != (0, self.ids.shape[1]):
            raise ValueError("the rows of a layout do not lie end to end")
        return _runs([[run] for run in own], own, self.ids.device)

    @cached_property
    def prompt_runs(self) -> Runs | None:
        """All tokens behind each prompt reading it; None where no prompt is read."""
        return _runs([*self._read.values()], [*self._read], self.ids.device) if self._read else None

    @cached_property
    def outputs(self) -> Tensor:
        """For each index of the sequence, its index among the padded outputs of all blocks laid end to end [N]."""
        outputs = torch.zeros(self.ids.shape[1], dtype=torch.long, device=self.ids.device)
        offset = 0
        for block in self.blocks:
            outputs[block.queries.index_select(0, block.filled)] = block.filled + offset
            offset += len(block.queries)
        return outputs


def make_layout(batch: Batch, device: torch.device) -> Layout:
    """The sequence of a batch: each group's prompt once, and its completions without their last tokens.

    Nothing is predicted from the last token, so it is never read. A row that nobody reads fills up the sequence to
    ``whole_tokens``.
    """
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    prompts: dict[tuple[int, ...], range] = {}
    rows: list[PackedRow] = []
    predicts: list[Tensor] = []
    end = 0

    def write(part: Tensor, first: int) -> range:
        nonlocal end
        ids.append(part)
        positions.append(torch.arange(first, first + len(part)))
        end += len(part)
        return range(end - len(part), end)

    lengths, counts, groups = batch.prompt_lengths.tolist(), batch.completion_lengths.tolist(), batch.group_ids.tolist()
    read = [(group, *batch.prompt_ids[row, : lengths[row]].tolist()) for row, group in enumerate(groups)]
    for row, key in enumerate(read):  # an environment may begin each episode of a group in words of its own
        if key not in prompts:
            prompts[key] = write(batch.prompt_ids[row, : lengths[row]], 0)
    for row, key in enumerate(read):
        own = write(batch.completion_ids[row, : counts[row] - 1], lengths[row])
        rows.append(PackedRow(own, prompts[key]))
        before = torch.arange(own.start - 1, own.stop)
        before[0] = prompts[key][-1]
        predicts.append(before[batch.mask[row, : counts[row]]])
    alone = [*prompts.values()]
    if padding := whole_tokens(end) - end:
        alone.append(write(torch.zeros(padding, dtype=torch.long), 0))
    blocks = [*_blocks([PackedRow(prompt) for prompt in alone], device)]
    blocks += _blocks([row for row in rows if len(row.own)], device)
    return Layout(
        torch.cat(ids)[None].to(device),
        torch.cat(positions)[None].to(device),
        tuple(blocks),
        torch.cat(predicts).to(device),
    )


def prompt_layout(prompts: Sequence[Sequence[int]], device: torch.device) -> Layout:
    """The sequence of prompts alone, filled up likewise; what is predicted is the token after each of them."""
    tokens = sum(len(prompt) for prompt in prompts)
    padding = whole_tokens(tokens) - tokens
    read = [*prompts, [0] * padding] if padding else prompts
    starts = [0, *accumulate(len(prompt) for prompt in read)]
    positions = [*(torch.arange(len(prompt)) for prompt in prompts), torch.zeros(padding, dtype=torch.long)]
    rows = [PackedRow(range(start, start + len(prompt))) for start, prompt in zip(starts, read, strict=False)]
    return Layout(
        torch.tensor([token for prompt in read for token in prompt], dtype=torch.long, device=device)[None],
        torch.cat(positions)[None].to(device),
        tuple(_blocks(rows, device)),
        torch.tensor([row.own[-1] for row in rows[: len(prompts)]], device=device),
    )


def _blocks(rows: Sequence[PackedRow], device: torch.device) -> list[Block]:
    """Rows of similar length together, so that padding them to the longest adds little."""
    blocks: list[list[PackedRow]] = []
    real = 0
    for row in sorted(rows, key=lambda row: row.length):
        if not blocks or row.length * (len(blocks[-1]) + 1) > WASTE * (real + row.length):
            blocks.append([])
            real = 0
        blocks[-1].append(row)
        real += row.length
    return [
        Block(
            torch.tensor(
                [
                    [row.own.start, len(row.own), row.prompt.start, len(row.prompt)]
                    for row in sorted(together, key=lambda row: (row.prompt.start, row.own.start))
                ]
            ),
            device,
        )
        for together in blocks
    ]


def _table(starts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Indices of runs as a table padded on the right with index 0."""
    steps = torch.arange(width)
    return torch.where(steps < lengths[:, None], starts[:, None] + steps, 0)


def _runs(queries: Sequence[Sequence[Run]], keys: Sequence[Run], device: torch.device) -> Runs:
    """The tables of runs of queries, each of them in pieces, and of the runs of keys that they read."""
    of_queries = [sum(end - start for start, end in pieces) for pieces in queries]
    of_keys = [end - start for start, end in keys]
    query_indices, key_indices = _together([piece for pieces in queries for piece in pieces]), _together(keys)
    return Runs(
        query_indices if isinstance(query_indices, slice) else query_indices.to(device),
        key_indices if isinstance(key_indices, slice) else key_indices.to(device),
        torch.tensor([0, *accumulate(of_queries)], dtype=torch.int32).to(device),
        torch.tensor([0, *accumulate(of_keys)], dtype=torch.int32).to(device),
        max(of_queries),
        max(of_keys),
    )


def _together(runs: Sequence[Run]) -> slice | Tensor:
    """The indices of runs in ascending order, as a slice where nothing lies between them."""
    if all(end == start for (_, end), (start, _) in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    return torch.cat([torch.arange(*run) for run in runs])
