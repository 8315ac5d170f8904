"""The composition of an algorithm's functions into one loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.core.batch import Batch, Rewards
from oncurve.core.formulas import (
    EntropyBonus,
    importance_corrected,
    k3,
    per_completion,
    sequence_ratio,
    token_mean,
)
from oncurve.core.records import Mean

Statistics = Mapping[str, Tensor]
"""Values of every token [B, T] by the name of the metric, which is their mean over the trained tokens."""
TokenLoss = Callable[..., Tensor | tuple[Tensor, Statistics]]
"""(logprobs [B, T], old_logprobs [B, T], advantages [B], mask [B, T]) to one number per token [B, T], alone or with
statistics of the loss."""
Normalizer = Callable[..., Tensor]
"""(loss [B, T], mask [B, T], of=Size, prompt_tokens=, row_tokens=) to a scalar: what these rows contribute to the loss
of the update, whose denominators are handed in."""
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(trainer_logprobs, sampler_logprobs, mask), each [B, T], to the weight of each token, a constant."""


@dataclass(frozen=True)
class KLTerm:
    """The KL to a reference: how it is estimated, where it enters, and what becomes of the reference."""

    coefficient: float = 0.0
    """0 means that there is no such term and no reference in memory."""
    estimator: Callable[[Tensor, Tensor], Tensor] = k3
    placement: Literal["loss", "reward", "advantage"] = "loss"
    """advantage: subtracted from that of each token; the token loss then gets every token as a row of its own."""
    importance: bool = True
    """Multiply the estimate by the ratio, so that k1 and k3 have the gradient of the KL."""
    reference: Literal["frozen", "refreshed", "average", "old", "base", "teacher"] = "frozen"
    """old is the policy that sampled; base the weights under an adapter; teacher another model."""
    every_steps: int = 1
    share: float = 1.0
    """Share of the policy mixed into the reference at each refresh; 1 replaces it."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its functions and their settings."""

    name: str
    advantage: Callable[[Rewards], Float[Tensor, "P G"]]
    token_loss: TokenLoss
    normalize: Normalizer
    group_size: int
    """Completions per prompt, G."""
    kl: KLTerm = field(default_factory=KLTerm)
    correction: Weights | None = None
    """Weights for the gap between sampler and trainer; None only measures the gap."""
    leave_out: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(logprobs, sampler_logprobs, advantages, mask) to a weight of each token, 0 on what is left out."""
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    choose: Callable[[Tensor, Tensor], Tensor] | None = None
    """(entropy, mask) of all tokens of a step to those that the policy loss trains; None: all of them."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    uses_ratio: bool = True
    """The token loss compares with the old log-probabilities."""
    is_custom: bool = False
    """The token loss is none of ours: nothing is known of it."""
    ratio_level: Literal["token", "sequence"] = "token"

    @property
    def needs_reference(self) -> bool:
        """A KL term asks for the log-probabilities of a reference, unless that is the policy that sampled."""
        return self.kl.coefficient > 0 and self.kl.reference != "old"

    @property
    def needs_entropy(self) -> bool:
        """The entropies of all tokens of the step are asked for before its first update."""
        return self.choose is not None

    @property
    def needs_every_row(self) -> bool:
        """Rows whose advantage is zero have a gradient too: from a KL term, an entropy bonus, a loss nobody knows."""
        per_token = self.kl.coefficient > 0 and self.kl.placement != "reward"
        return per_token or self.entropy.coefficient > 0 or self.entropy.target is not None or self.is_custom

    @property
    def has_token_advantages(self) -> bool:
        """The KL of each token is part of its advantage."""
        return self.kl.coefficient > 0 and self.kl.placement == "advantage"

    def needs_old(self, updates_per_step: int) -> bool:
        """Whether the trainer must recompute the log-probabilities of the policy that sampled.

        With one update per batch they are the current ones, and the extra forward pass does not exist.
        """
        in_loss = self.kl.coefficient > 0 and self.kl.placement == "loss"
        in_loss_used = in_loss and (self.kl.importance or self.kl.reference == "old")
        used = self.uses_ratio or in_loss_used or self.has_token_advantages
        return updates_per_step > 1 and used and self.old_logprobs == "trainer"

    def reference_share(self, step: int) -> float:
        """Share of the policy that goes into the reference after this step, counted from 0; 0 leaves it alone."""
        if not self.needs_reference or self.kl.reference not in ("refreshed", "average"):
            return 0.0
        return self.kl.share if (step + 1) % self.kl.every_steps == 0 else 0.0

    def advantages(self, rewards: Rewards) -> Float[Tensor, "P G"]:
        """The advantage of every completion, from its rewards alone."""
        return self.advantage(rewards)

    @torch.no_grad()
    def prepare(self, batch: Batch, rewards: Rewards) -> Batch:
        """The annotated batch of a step with what depends on its log-probabilities: call it before the first update.

        A KL in the reward is subtracted from it and the advantages are made anew; training on tokens of high entropy
        marks them. Most algorithms need neither and get the batch back as it is.

            r_i <- r_i - beta sum_t kl_it             RLOO, arXiv:2402.14740; beta is kl.coefficient

        Raises ValueError if the rows are not those of the rewards, in their order.
        """
        owners = torch.arange(len(batch)) if batch.episode_ids is None else batch.episode_ids
        if len(torch.unique(owners)) != rewards.values.numel():
            raise ValueError(f"{len(batch)} rows cannot be matched with {rewards.values.numel()} rewards")
        if self.kl.coefficient > 0 and self.kl.placement == "reward":
            sampled = batch.old_logprobs if batch.old_logprobs is not None else batch.sampler_logprobs
            kl = per_completion(self.kl.estimator(sampled, self._reference(batch, sampled)), batch.mask)
            kl = torch.zeros(rewards.values.numel()).to(kl).index_add(0, owners.to(kl.device), kl)
            penalty = self.kl.coefficient * kl.reshape(rewards.values.shape).to(rewards.values)
            shifted = replace(rewards, values=torch.where(rewards.graded, rewards.values - penalty, 0.0))
            batch = replace(batch, advantages=self.advantage(shifted).reshape(-1)[owners].to(batch.advantages))
        if self.choose is not None:
            if batch.old_entropy is None:
                raise ValueError("training on tokens of high entropy needs the entropies of the batch, and it has none")
            batch = replace(batch, policy_mask=self.choose(batch.old_entropy, batch.mask))
        return batch

    def loss(
        self,
        logprobs: Float[Tensor, "B T"],
        entropy: Float[Tensor, "B T"],
        microbatch: Batch,
    ) -> tuple[Float[Tensor, ""], dict[str, Mean]]:
        """The microbatch's share of the update's loss, and statistics that add up over microbatches.

            L = normalize(correction * token_loss + beta kl) - entropy_coef H        beta = kl.coefficient
            A_it = A_i - beta (log p_old,t - log p_ref,t)        where the KL is part of the advantage; k1

        Without stored old log-probabilities the current ones stand for them, detached: with one update per batch of
        rollouts they are the same numbers, and the second forward pass is saved.
        """
        mask = microbatch.mask
        logprobs, entropy = torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)
        trainer = logprobs.detach() if microbatch.old_logprobs is None else microbatch.old_logprobs
        old = microbatch.sampler_logprobs if self.old_logprobs == "sampler" else trainer
        old = torch.where(mask, old, 0.0)  # what stands in the padding must not reach a ratio of a whole completion
        reference = self._reference(microbatch, old) if self.kl.coefficient > 0 else None
        advantages = self._advantages(microbatch, old, reference)
        now, before, trained = (_rows(values, advantages) for values in (logprobs, old, mask))
        result = self.token_loss(now, before, advantages, trained)
        per_token, own = result if isinstance(result, tuple) else (result, {})
        per_token = per_token.reshape(mask.shape)
        weights = self._weights(logprobs, trainer, microbatch)
        per_token = self._weigh(per_token, weights, microbatch)
        if reference is not None and self.kl.placement == "loss":
            per_token = per_token + self.kl.coefficient * self._kl(logprobs, old, reference, mask)
        tokens = {"prompt_tokens": microbatch.prompt_tokens, "row_tokens": microbatch.row_tokens}
        loss = self.normalize(per_token, mask, of=microbatch.size, **tokens)
        if self.entropy.applied:
            loss = loss - self.entropy.applied * token_mean(entropy, mask, of=microbatch.size)
        return loss, self._statistics(loss, own, logprobs, old, trainer, entropy, reference, weights, microbatch)

    def _advantages(self, microbatch: Batch, old: Tensor, reference: Tensor | None) -> Tensor:
        """Advantages by completion [B], or by token [B*T], which the token loss then takes as rows of one token."""
        if reference is None or not self.has_token_advantages:
            return microbatch.advantages
        return (microbatch.advantages[:, None] - self.kl.coefficient * self.kl.estimator(old, reference)).reshape(-1)

    def _weights(self, logprobs: Tensor, trainer: Tensor, microbatch: Batch) -> Tensor | None:
        """The weight of every token in the policy loss, a constant; None where all of them are 1."""
        sampler, mask = microbatch.sampler_logprobs, microbatch.mask
        weights = None if self.correction is None else self.correction(trainer, sampler, mask)
        if self.leave_out is None:
            return weights
        retained = self.leave_out(logprobs, sampler, microbatch.advantages, mask)
        return retained if weights is None else weights * retained

    def _weigh(self, per_token: Tensor, weights: Tensor | None, microbatch: Batch) -> Tensor:
        """The policy loss with the weights of the correction, and without the tokens that it leaves out."""
        if weights is not None:
            per_token = per_token * weights
        if not self.needs_entropy:
            return per_token
        chosen = microbatch.policy_mask
        if chosen is None:
            raise ValueError("training on tokens of high entropy needs prepare() before the first update of a step")
        return torch.where(chosen, per_token, 0.0)

    def _kl(self, logprobs: Tensor, old: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        kl = self.kl.estimator(logprobs, reference)
        if not self.kl.importance:
            return kl
        log_ratio = logprobs - old
        if self.ratio_level == "sequence":
            log_ratio = torch.log(sequence_ratio(log_ratio, mask))
        return importance_corrected(kl, log_ratio)

    def _reference(self, batch: Batch, old: Tensor) -> Tensor:
        if self.kl.reference == "old":
            return old
        if batch.ref_logprobs is None:
            raise ValueError("a KL term needs the log-probabilities of the reference, and this batch has none")
        return torch.where(batch.mask, batch.ref_logprobs, 0.0)

    @torch.no_grad()
    def _statistics(
        self,
        loss: Tensor,
        own: Statistics,
        logprobs: Tensor,
        old: Tensor,
        trainer: Tensor,
        entropy: Tensor,
        reference: Tensor | None,
        weights: Tensor | None,
        microbatch: Batch,
    ) -> dict[str, Mean]:
        """Everything that is measured, with one transfer from the device."""
        mask = microbatch.mask
        ratio = torch.exp(logprobs - old)
        gap = torch.where(mask, trainer - microbatch.sampler_logprobs, 0.0)  # log p_trainer / p_sampler
        mismatch = torch.exp(gap)
        summed = {"policy/entropy": entropy, "policy/ratio_mean": ratio, "mismatch/kl": mismatch - gap - 1}
        summed |= {name: values.detach().reshape(mask.shape) for name, values in own.items()}
        if weights is not None:
            summed |= {"mismatch/weight_mean": weights, "mismatch/dropped_fraction": weights == 0}
        if reference is not None and self.has_token_advantages:
            summed["distillation/reverse_kl"] = old - reference
        elif reference is not None:
            summed["policy/kl"] = k3(logprobs, reference)
        extra = [mask, torch.where(mask, mismatch, 0.0), torch.where(mask, mismatch**2, 0.0)]
        sums = [torch.where(mask, values, 0).sum().to(loss.dtype) for values in (*summed.values(), *extra)]
        largest = torch.where(mask, mismatch, 0.0).amax() if mask.numel() else loss.new_zeros(())
        sums += [largest.to(loss.dtype), loss.detach()]
        *numbers, tokens, total, squares, top, value = torch.stack(sums).tolist()
        statistics = {key: Mean(number, tokens) for key, number in zip(summed, numbers, strict=True)}
        statistics["mismatch/effective_sample_fraction"] = EffectiveFraction(total, tokens, squares)
        statistics["mismatch/max_ratio"] = Largest.of(top)
        statistics["policy/loss"] = Mean(value, 0)  # parts of one sum, counted once by DevicePolicy.update
        if self.entropy.applied or self.entropy.target is not None:
            statistics["policy/entropy_coef"] = Mean(self.entropy.applied, 1)
        return statistics


def _rows(values: Tensor, advantages: Tensor) -> Tensor:
    """Values of all tokens [B, T] with one row for each advantage: as they are, or [B*T, 1]."""
    return values.reshape(len(advantages), values.numel() // max(len(advantages), 1))


@dataclass(frozen=True, slots=True)
class Largest(Mean):
    """A maximum: adding two keeps the larger.

    >>> (Largest.of(1.5) + Largest.of(0.5)).value
    1.5
    """

    @classmethod
    def of(cls, value: float) -> Largest:
        """The maximum of one value."""
        return cls(value, 1.0)

    def __add__(self, other: Mean) -> Largest:
        return Largest.of(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class EffectiveFraction(Mean):
    """The effective sample size of weights over their number, 1 when all weigh the same.

        (sum w)^2 / (n sum w^2)                       Kish 1965; ``total`` is sum w and ``count`` n

    >>> (EffectiveFraction(2.0, 2.0, 2.0) + EffectiveFraction(0.0, 2.0, 0.0)).value
    0.5
    """

    squares: float = 0.0
    """Sum of the squared weights."""

    def __add__(self, other: Mean) -> EffectiveFraction:
        if not isinstance(other, EffectiveFraction):
            raise TypeError("an effective fraction adds only to another one")
        return EffectiveFraction(self.total + other.total, self.count + other.count, self.squares + other.squares)

    @property
    def value(self) -> float:
        """The share of the weights that counts; NaN over nothing."""
        return self.total**2 / (self.count * self.squares) if self.count and self.squares else math.nan
