"""Collation of groups of completions into the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.batch import Batch, Rewards, Size
from oncurve.records import Group, Reward


def stack_rewards(groups: Sequence[Group], graded: Sequence[Sequence[Reward]]) -> Rewards:
    """The rewards of groups as [P, G] tensors; a completion whose grader failed is marked, not given a 0."""
    names = sorted({name for group in graded for reward in group for name in reward.parts})
    return Rewards(
        values=torch.tensor([[reward.value or 0.0 for reward in group] for group in graded], dtype=torch.float32),
        graded=torch.tensor([[reward.error is None for reward in group] for group in graded]),
        num_tokens=torch.tensor([[c.num_tokens for c in group.completions] for group in groups]),
        is_truncated=torch.tensor([[c.is_truncated for c in group.completions] for group in groups]),
        parts={
            name: torch.tensor(
                [[reward.parts.get(name, 0.0) for reward in group] for group in graded], dtype=torch.float32
            )
            for name in names
        },
    )


def collate(groups: Sequence[Group], advantages: Float[Tensor, "P G"], *, mask_truncated: bool = False) -> Batch:
    """One row per completion, right-padded, in the order of the groups. What the policy did not write is masked.

    A completion with branches has a row for each of them too, with its own advantage.

    ``mask_truncated`` takes completions that never ended out of the loss; they stay rows, so that denominators over
    rows do not change with them.
    """
    whole = [(place, one) for place, group in enumerate(groups) for one in group.completions]
    owned = [(owner, place, row) for owner, (place, one) in enumerate(whole) for row in (one, *one.branches)]
    rows, owners = [row for _, _, row in owned], torch.tensor([owner for owner, _, _ in owned])
    prompts = [torch.tensor(row.prompt_ids, dtype=torch.long) for row in rows]
    completions = [torch.tensor(row.token_ids, dtype=torch.long) for row in rows]
    lengths = torch.tensor([len(ids) for ids in completions])
    trained = [
        torch.tensor(row.written, dtype=torch.bool) & (not (mask_truncated and row.is_truncated)) for row in rows
    ]
    width = max(int(lengths.max()), 1)
    batch = Batch(
        prompt_ids=_pad(prompts, max(len(ids) for ids in prompts)),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        completion_ids=_pad(completions, width),
        mask=_pad(trained, width).bool(),
        completion_lengths=lengths,
        group_ids=torch.tensor([place for _, place, _ in owned]),
        advantages=advantages.reshape(-1).float()[owners.to(advantages.device)],
        sampler_logprobs=_pad([torch.tensor(row.sampler_logprobs) for row in rows], width),
        size=Size(0, 0, 0),
        episode_ids=owners if len(rows) > len(whole) else None,
    )
    return batch.measured()


def _pad(sequences: Sequence[Tensor], width: int) -> Tensor:
    """Sequences as the rows of one tensor, filled up with zeros on the right."""
    padded = torch.zeros(len(sequences), width, dtype=sequences[0].dtype)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    return padded
