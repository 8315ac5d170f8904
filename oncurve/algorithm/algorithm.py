"""What is an algorithm? A row of functions, and the one place where they are composed into a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oncurve.algorithm.kl import k3
from oncurve.algorithm.losses import is_clipped
from oncurve.batch import Batch, Rewards, Size
from oncurve.records import Mean


@runtime_checkable
class TokenLoss(Protocol):
    """(logprobs, old_logprobs, advantages, mask) to one number per token."""

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        old_logprobs: Float[Tensor, "B T"],
        advantages: Float[Tensor, " B"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """The loss of each token."""
        ...


@runtime_checkable
class Normalizer(Protocol):
    """Losses of tokens to a scalar, with the denominators of the whole update."""

    def __call__(self, loss: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, of: Size) -> Float[Tensor, ""]:
        """The contribution of these rows to the loss of the update."""
        ...


@dataclass(frozen=True)
class Algorithm:
    """One row of the table of algorithms."""

    name: str
    advantage: Callable[[Rewards], Float[Tensor, "P G"]]
    token_loss: TokenLoss
    normalize: Normalizer
    group_size: int
    """Completions per prompt, G."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; 0 means that no reference exists."""
    clip_low: float = 0.2
    """Only for the statistic of clipped tokens; the loss carries its own bounds."""
    clip_high: float = 0.2

    @property
    def needs_reference(self) -> bool:
        """A KL term asks for the log-probabilities of the reference."""
        return self.kl_coef > 0

    def advantages(self, rewards: Rewards) -> Float[Tensor, "P G"]:
        """The advantage of every completion."""
        return self.advantage(rewards)

    def loss(
        self,
        logprobs: Float[Tensor, "B T"],
        entropy: Float[Tensor, "B T"],
        microbatch: Batch,
    ) -> tuple[Float[Tensor, ""], dict[str, Mean]]:
        """The microbatch's share of the update's loss, and statistics that add up over microbatches.

        Without stored old log-probabilities the current ones stand for them, detached: with one update per batch of
        rollouts they are the same numbers, and the second forward pass is saved.
        """
        mask = microbatch.mask
        old = microbatch.old_logprobs if microbatch.old_logprobs is not None else logprobs.detach()
        per_token = self.token_loss(logprobs, old, microbatch.advantages, mask)
        kl = None
        if microbatch.ref_logprobs is not None and self.needs_reference:
            kl = k3(logprobs, microbatch.ref_logprobs)
            per_token = per_token + self.kl_coef * kl
        loss = self.normalize(per_token, mask, of=microbatch.size)
        return loss, self._statistics(loss, logprobs, old, entropy, kl, microbatch)

    @torch.no_grad()
    def _statistics(
        self, loss: Tensor, logprobs: Tensor, old: Tensor, entropy: Tensor, kl: Tensor | None, microbatch: Batch
    ) -> dict[str, Mean]:
        mask = microbatch.mask
        tokens = int(mask.sum())
        ratio = torch.exp(logprobs - old)
        clipped = is_clipped(ratio, microbatch.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        gap = torch.where(mask, microbatch.sampler_logprobs - old, 0.0)  # log p_sampler / p_trainer
        statistics = {
            "policy/entropy": _sum(entropy, mask, tokens),
            "policy/ratio_mean": _sum(ratio, mask, tokens),
            "policy/clip_fraction": _sum(clipped.float(), mask, tokens),
            "mismatch/kl": _sum(torch.exp(-gap) + gap - 1, mask, tokens),
            "policy/loss": Mean(loss.item(), len(microbatch) / microbatch.size.num_rows),
        }
        if kl is not None:
            statistics["policy/kl"] = _sum(kl, mask, tokens)
        return statistics


def _sum(values: Tensor, mask: Tensor, tokens: int) -> Mean:
    return Mean(torch.where(mask, values, 0.0).sum().item(), tokens)
