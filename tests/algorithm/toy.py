"""A policy of two matrices, so that a loss can be followed down to weights in float64: the next token depends on the
prompt and the token before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from oncurve.algorithm.chunked_head import from_hidden
from oncurve.core.batch import Batch, Rewards, Size

VOCABULARY, WIDTH, END = 7, 5, 0


class Toy:
    """Embedding, then head. ``weights`` are leaves that collect gradients."""

    def __init__(self, seed: int, *, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.embedding = scale * torch.randn(2 * VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)
        self.head = scale * torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)
        self.embedding, self.head = (w.to(dtype).requires_grad_() for w in (self.embedding, self.head))

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.embedding, self.head

    def near(self, seed: int, *, distance: float) -> Toy:
        """Another policy not far from this one."""
        draw = torch.Generator().manual_seed(seed)
        other = Toy(seed)
        for mine, target in zip(self.weights, other.weights, strict=True):
            noise = torch.randn(mine.shape, generator=draw, dtype=torch.float64)
            target.data = mine.data + distance * noise.to(mine.dtype)
        return other

    def hidden(self, prompts: Tensor, before: Tensor) -> Tensor:
        return self.embedding[prompts] + torch.tanh(self.embedding[VOCABULARY + before])

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, T], 0 outside the mask."""
        before = torch.cat([batch.prompt_ids[:, :1], batch.completion_ids], dim=1)[:, : batch.mask.shape[1]]
        hidden = self.hidden(batch.prompt_ids[:, :1].expand_as(before), before)[batch.mask]
        logprobs, entropy = from_hidden(hidden, self.head, batch.completion_ids[batch.mask], chunk_tokens=4)
        full = torch.zeros(batch.mask.shape, dtype=logprobs.dtype)
        return full.masked_scatter(batch.mask, logprobs), full.masked_scatter(batch.mask, entropy)

    @torch.no_grad()
    def sample(self, prompts: Tensor, *, max_tokens: int, draw: torch.Generator) -> list[list[int]]:
        """A completion per prompt, the end token included where there is one."""
        before, finished = prompts.clone(), torch.zeros(len(prompts), dtype=torch.bool)
        tokens: list[list[int]] = [[] for _ in prompts]
        for _ in range(max_tokens):
            chances = torch.softmax(self.hidden(prompts, before) @ self.head.T, dim=-1)
            before = torch.multinomial(chances, 1, generator=draw).squeeze(1)
            for row in (~finished).nonzero().flatten().tolist():
                tokens[row].append(int(before[row]))
            finished |= before == END
            if finished.all():
                break
        return tokens


def make_batch(
    prompts: Sequence[int], completions: Sequence[Sequence[int]], groups: Sequence[int], *, extra_padding: int = 0
) -> Batch:
    """Rows with advantages of zero and nothing else known; padding holds tokens that must not matter."""
    lengths = torch.tensor([len(tokens) for tokens in completions])
    width = max(int(lengths.max()), 1) + extra_padding
    ids = torch.full((len(completions), width), VOCABULARY - 1)
    for row, tokens in enumerate(completions):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    batch = Batch(
        prompt_ids=torch.tensor(prompts)[:, None],
        prompt_lengths=torch.ones(len(prompts), dtype=torch.long),
        completion_ids=ids,
        mask=mask,
        completion_lengths=lengths,
        group_ids=torch.tensor(groups),
        advantages=torch.zeros(len(prompts), dtype=torch.float64),
        sampler_logprobs=torch.zeros(mask.shape, dtype=torch.float64),
        size=Size(0, 0, 0),
    )
    return batch.measured()


@torch.no_grad()
def annotate(batch: Batch, *, old: Toy, sampler: Toy, reference: Toy) -> Batch:
    """The log-probabilities that stay fixed during an update."""
    old_logprobs, old_entropy = old.logprobs(batch)
    return replace(
        batch,
        old_logprobs=old_logprobs,
        old_entropy=old_entropy,
        sampler_logprobs=sampler.logprobs(batch)[0],
        ref_logprobs=reference.logprobs(batch)[0],
    )


def tensors_of(batch: Batch) -> list[str]:
    """Names of the fields that hold a tensor."""
    return [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]


def rewards_of(table: Sequence[Sequence[float | None]], lengths: Tensor | None = None) -> Rewards:
    """Rewards in float64, with two parts that add up to them."""
    rewards = Rewards.of([[None if value is None else float(value) for value in row] for row in table])
    values = torch.tensor([[0.0 if value is None else value for value in row] for row in table], dtype=torch.float64)
    tokens = rewards.num_tokens if lengths is None else lengths.reshape(values.shape)
    parts = {"correct": (values > 0.5).double(), "format": values - (values > 0.5).double()}
    return Rewards(values, rewards.graded, tokens, rewards.is_truncated, parts)
