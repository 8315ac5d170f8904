"""A step as tensors: rewards of groups, and the rows of completions that one optimizer update trains on."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oncurve.core.records import Group, Reward, packed


@dataclass(frozen=True)
class Rewards:
    """Rewards of the groups of one step, P prompts by G completions."""

    values: Float[Tensor, "P G"]
    """The reward; 0 where ``graded`` is False, which no formula may read."""
    graded: Bool[Tensor, "P G"]
    """False where the grader failed: such a completion has no reward, which is not a reward of 0."""
    num_tokens: Int[Tensor, "P G"]
    """Length of each completion in tokens of the policy."""
    is_truncated: Bool[Tensor, "P G"]
    """The completion never ended by itself."""
    parts: Mapping[str, Float[Tensor, "P G"]] = field(default_factory=dict)
    """Named components before weighting, 0 where there is none."""
    parts_graded: Mapping[str, Bool[Tensor, "P G"]] = field(default_factory=dict)
    """True where a component has a value; one that is not named here has a value wherever ``graded`` is True."""

    @classmethod
    def of(cls, values: Sequence[Sequence[float | None]]) -> Rewards:
        """Rewards from plain numbers, None where ungraded; every completion one token long. For tests and tours."""
        graded = torch.tensor([[value is not None for value in row] for row in values])
        filled = torch.tensor([[0.0 if value is None else value for value in row] for row in values])
        ones = torch.ones(filled.shape, dtype=torch.long)
        return cls(filled, graded, ones, torch.zeros_like(graded))


@dataclass(frozen=True)
class Size:
    """The denominators of one optimizer update, counted over all its rows, microbatches and ranks.

    They are handed to every normalizer, so that no mean is ever taken over a microbatch.
    """

    num_rows: int
    """Completions in the update, each counted once however many rows it has."""
    num_tokens: int
    """Completion tokens that are trained on."""
    num_prompts: int
    """Different prompts among the rows."""


PER_TOKEN = (
    "completion_ids",
    "mask",
    "sampler_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "old_entropy",
    "policy_mask",
)
"""Fields of a batch with one value per completion token."""


@dataclass(frozen=True)
class Batch:
    """Rows of completions, right-padded: B rows of at most T completion tokens after at most S prompt tokens."""

    prompt_ids: Int[Tensor, "B S"]
    prompt_lengths: Int[Tensor, " B"]
    completion_ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    """True on the completion tokens that are trained on: what the policy wrote, its end token included, and
    never padding."""
    completion_lengths: Int[Tensor, " B"]
    """Tokens of each completion; more than the mask counts where a tool or an environment wrote some of them, and where
    a truncated completion is masked out."""
    group_ids: Int[Tensor, " B"]
    """Which prompt of the step a row belongs to."""
    advantages: Float[Tensor, " B"]
    sampler_logprobs: Float[Tensor, "B T"]
    """As reported by the sampler; 0 on padding and on what the policy did not write."""
    size: Size
    """Denominators of the update that these rows belong to."""
    old_logprobs: Float[Tensor, "B T"] | None = None
    """Log-probabilities under the weights that sampled, recomputed by the trainer; None if not asked for."""
    ref_logprobs: Float[Tensor, "B T"] | None = None
    """Log-probabilities under the frozen reference; None without a KL term."""
    old_entropy: Float[Tensor, "B T"] | None = None
    """Entropy of each token's distribution under the weights that sampled; None if not asked for."""
    policy_mask: Bool[Tensor, "B T"] | None = None
    """Tokens that the policy loss is computed on, when an algorithm chooses among those of ``mask``."""
    prompt_tokens: Int[Tensor, " B"] | None = None
    """Trained tokens of all rows of the row's prompt in the update; None until the update is cut."""
    episode_ids: Int[Tensor, " B"] | None = None
    """Which completion of the step a row belongs to, where some have several rows; None: each row is its own."""
    row_tokens: Int[Tensor, " B"] | None = None
    """Trained tokens of all rows of the row's completion in the update; None where each row is its own."""

    def __len__(self) -> int:
        return len(self.advantages)

    @property
    def row_lengths(self) -> Int[Tensor, " B"]:
        """Prompt and completion tokens of each row."""
        return self.prompt_lengths + self.completion_lengths

    def select(self, rows: Int[Tensor, " b"]) -> Batch:
        """Some of the rows, with the padding that they no longer need cut off. The denominators stay."""
        picked = {f.name: value[rows] for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        longest_prompt = int(picked["prompt_lengths"].max()) if len(rows) else 0
        longest = int(picked["completion_lengths"].max()) if len(rows) else 0
        picked["prompt_ids"] = picked["prompt_ids"][:, :longest_prompt]
        for name in PER_TOKEN:
            if name in picked:
                picked[name] = picked[name][:, :longest]
        return replace(self, **picked)

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on another device."""
        moved = {f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **moved)

    def split(self, rows_per_update: int) -> Iterator[Batch]:
        """Consecutive optimizer updates of ``rows_per_update`` completions, each with denominators of its own.

        Raises ValueError if they do not divide: an update of another size would weigh its rows differently.
        """
        owners = torch.arange(len(self)) if self.episode_ids is None else self.episode_ids
        count = len(torch.unique(owners))
        if rows_per_update < 1 or count % rows_per_update:
            raise ValueError(
                f"{count} completions do not divide into updates of {rows_per_update}; choose a divisor of {count}"
            )
        for start in range(0, count, rows_per_update):
            part = self.select(((owners >= start) & (owners < start + rows_per_update)).nonzero().flatten())
            yield part.measured()

    def with_signal(self) -> Batch:
        """The rows whose advantage is not zero. The denominators stay, so the gradient of a policy loss stays too."""
        return self.select((self.advantages != 0).nonzero().flatten())

    def split_tokens(self, max_tokens: int, *, share_prompts: bool = False) -> Iterator[Batch]:
        """Microbatches of at most ``max_tokens`` computed tokens; their denominators stay those of the update."""
        for rows in self.plan_microbatches(max_tokens, share_prompts=share_prompts):
            yield self.select(rows)

    def plan_microbatches(self, max_tokens: int, *, share_prompts: bool = False) -> Iterator[Int[Tensor, " b"]]:
        """The rows of each microbatch.

        Padded rows cost the longest of their microbatch, so rows of similar length go together. With ``share_prompts``
        rows cost their own tokens and a prompt is counted once for all its rows that follow each other, so groups stay
        together. A row longer than the budget gets a microbatch of its own.
        """
        order = range(len(self)) if share_prompts else torch.argsort(self.row_lengths, stable=True).tolist()
        prompts, completions = self.prompt_lengths.tolist(), self.completion_lengths.tolist()
        groups = self.group_ids.tolist()
        picked: list[int] = []
        cost = 0
        for row in order:
            whole = prompts[row] + completions[row]
            if share_prompts:
                known = bool(picked) and groups[row] == groups[picked[-1]]
                grown = cost + completions[row] + (0 if known else prompts[row])
            else:
                grown = (len(picked) + 1) * whole
            if picked and grown > max_tokens:
                yield torch.tensor(picked)
                picked, grown = [], whole
            picked.append(row)
            cost = grown
        if picked:
            yield torch.tensor(picked)

    def measure(self) -> Size:
        """The denominators of these rows alone."""
        num_rows = len(self) if self.episode_ids is None else len(torch.unique(self.episode_ids))
        return Size(num_rows, int(self.mask.sum()), len(torch.unique(self.group_ids)))

    def measured(self) -> Batch:
        """These rows as an update of their own: with their own denominators."""
        row_tokens = None if self.episode_ids is None else self._tokens_of(self.episode_ids)
        return replace(self, size=self.measure(), prompt_tokens=self._tokens_of(self.group_ids), row_tokens=row_tokens)

    def _tokens_of(self, owners: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """For each row the trained tokens of all rows with its owner."""
        _, owner_ids = torch.unique(owners, return_inverse=True)
        return torch.zeros_like(owner_ids).index_add(0, owner_ids, self.mask.sum(dim=1))[owner_ids]


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
        parts_graded={
            name: torch.tensor([[name in reward.parts for reward in group] for group in graded]) for name in names
        },
    )


def _table(rows: Sequence[Sequence[float | int | None]]) -> Float[Tensor, "P G"]:
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
    whole = [(group_id, completion) for group_id, group in enumerate(groups) for completion in group.completions]
    owned = [(owner, group_id, row) for owner, (group_id, main) in enumerate(whole) for row in (main, *main.branches)]
    rows, owners = [row for _, _, row in owned], torch.tensor([owner for owner, _, _ in owned])
    prompts = [array("i", row.prompt_ids) for row in rows]
    completions = [packed(row.token_ids) for row in rows]
    lengths = torch.tensor([len(ids) for ids in completions])
    width = max(int(lengths.max()), 1)
    trained = torch.arange(width) < lengths[:, None]
    for index, row in enumerate(rows):
        if mask_truncated and row.is_truncated:
            trained[index] = False
        for part in row.segments:
            if not part.is_policy:
                trained[index, part.start : part.end] = False
    batch = Batch(
        prompt_ids=_pad(prompts, max(len(ids) for ids in prompts), torch.long),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        completion_ids=_pad(completions, width, torch.long),
        mask=trained,
        completion_lengths=lengths,
        group_ids=torch.tensor([group_id for _, group_id, _ in owned]),
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
