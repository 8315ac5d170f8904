"""Collation of groups of completions into the tensors of a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.core.batch import Batch, Rewards, Size
from oncurve.core.records import Group, Reward, packed

BLUR = 1e-4
"""Rewards that float32 rounds by more than this share of their group's range are kept in float64."""


def stack_rewards(groups: Sequence[Group], graded: Sequence[Sequence[Reward]]) -> Rewards:
    """The rewards of groups as [P, G] tensors; a completion whose grader failed is marked, not given a 0.

    In float32, or in float64 where float32 would blur how the rewards of a group differ, such as 100,000.01 and
    100,000.02.
    """
    names = sorted({name for group in graded for reward in group for name in reward.parts})
    return Rewards(
        values=_table([[reward.value for reward in group] for group in graded]),
        graded=torch.tensor([[reward.error is None for reward in group] for group in graded]),
        num_tokens=torch.tensor([[c.num_tokens for c in group.completions] for group in groups]),
        is_truncated=torch.tensor([[c.is_truncated for c in group.completions] for group in groups]),
        parts={name: _table([[reward.parts.get(name) for reward in group] for group in graded]) for name in names},
        part_given={
            name: torch.tensor([[name in reward.parts for reward in group] for group in graded]) for name in names
        },
    )


def _table(rows: Sequence[Sequence[float | None]]) -> Float[Tensor, "P G"]:
    """Numbers with 0 for None; in float64 where rounding would move them by a ten-thousandth of their group's range."""
    exact = torch.tensor([[value or 0.0 for value in row] for row in rows], dtype=torch.float64)
    known = torch.tensor([[value is not None for value in row] for row in rows])
    lowest = torch.where(known, exact, torch.inf).amin(dim=1)
    highest = torch.where(known, exact, -torch.inf).amax(dim=1)
    error = (exact - exact.float().double()).abs().amax(dim=1)
    is_blurred = (highest > lowest) & (error > BLUR * (highest - lowest))
    return exact if bool(is_blurred.any()) else exact.float()


def collate(groups: Sequence[Group], advantages: Float[Tensor, "P G"], *, mask_truncated: bool = False) -> Batch:
    """One row per completion, right-padded, in the order of the groups. What the policy did not write is masked.

    A completion with branches has a row for each of them too, with its own advantage.

    ``mask_truncated`` takes completions that never ended out of the loss; they stay rows, so that denominators over
    rows do not change with them.
    """
    whole = [(place, one) for place, group in enumerate(groups) for one in group.completions]
    owned = [(owner, place, row) for owner, (place, one) in enumerate(whole) for row in (one, *one.branches)]
    rows, owners = [row for _, _, row in owned], torch.tensor([owner for owner, _, _ in owned])
    prompts = [array("i", row.prompt_ids) for row in rows]
    completions = [packed(row.token_ids) for row in rows]
    lengths = torch.tensor([len(ids) for ids in completions])
    width = max(int(lengths.max()), 1)
    trained = torch.arange(width) < lengths[:, None]
    for place, row in enumerate(rows):
        if mask_truncated and row.is_truncated:
            trained[place] = False
        for part in row.segments:
            if not part.is_policy:
                trained[place, part.start : part.end] = False
    batch = Batch(
        prompt_ids=_pad(prompts, max(len(ids) for ids in prompts), torch.long),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        completion_ids=_pad(completions, width, torch.long),
        mask=trained,
        completion_lengths=lengths,
        group_ids=torch.tensor([place for _, place, _ in owned]),
        advantages=advantages.reshape(-1).float()[owners.to(advantages.device)],
        sampler_logprobs=_pad([packed(row.sampler_logprobs) for row in rows], width, torch.float32),
        size=Size(0, 0, 0),
        episode_ids=owners if len(rows) > len(whole) else None,
    )
    return batch.measured()


_TYPES = {"i": torch.int32, "f": torch.float32, "d": torch.float64}


def _pad(sequences: Sequence[array[Any]], width: int, dtype: torch.dtype) -> Tensor:
    """Sequences as the rows of one tensor, filled up with zeros on the right."""
    padded = torch.zeros(len(sequences), width, dtype=dtype)
    for row, sequence in enumerate(sequences):
        if sequence:
            padded[row, : len(sequence)] = torch.frombuffer(sequence, dtype=_TYPES[sequence.typecode])
    return padded
