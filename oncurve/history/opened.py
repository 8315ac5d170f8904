"""One step laid open at the weights that it began with: its gradient by group and by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, stack_rewards
from oncurve.core.errors import ConfigError
from oncurve.core.records import Group, Reward
from oncurve.policy.trained_policy import TrainedPolicy

Gradient = Mapping[str, Tensor]
"""The gradient of every trained weight by its name, in float32 on the CPU."""


NUM_TOKENS = 20


@dataclass(frozen=True)
class TokenView:
    """One token of a step."""

    group: int
    completion: int
    """The row of the batch."""
    place: int
    text: str
    logprob: float
    """Under the weights that the step began with."""
    sampler_logprob: float
    weight: float
    """Its derivative; the sign says whether the step makes it less likely (+) or more likely (-)."""

    @property
    def ratio(self) -> float:
        """Its probability for the trainer, by that for the sampler."""
        return math.exp(self.logprob - self.sampler_logprob)


@dataclass(frozen=True)
class OpenedStep:
    """The gradient of one step before its first update, by group and by token.

    With several updates per step the gradient is their mean, all at the first weights; dropout is left out.
    """

    number: int
    groups: tuple[Group, ...]
    rewards: tuple[tuple[Reward, ...], ...]
    advantages: Float[Tensor, "P G"]
    batch: Batch
    """With the log-probabilities that the algorithm asks for."""
    logprobs: Float[Tensor, "B T"]
    """log pi of every trained token at these weights; 0 elsewhere."""
    token_weights: Float[Tensor, "B T"]
    """The loss's derivative by each log-probability: what a token weighs in the gradient. 0 where clipping took it."""
    group_shares: tuple[float, ...]
    """For each group <its gradient, the whole one> / |the whole one|^2; they add up to 1."""
    by_ratio: tuple[TokenView, ...]
    """The tokens on which trainer and sampler differ most."""
    by_weight: tuple[TokenView, ...]
    """The tokens that move the weights most: |weight| (1 - p), since a token that is certain moves nothing."""
    max_norm: float
    """Norm to which the gradient is clipped."""
    _gradient: Gradient

    def gradient(self) -> Gradient:
        """The gradient of the step's loss by weight, before clipping."""
        return self._gradient

    @property
    def norm(self) -> float:
        """Norm of the gradient before clipping."""
        return math.sqrt(sum(part.double().square().sum().item() for part in self._gradient.values()))

    @property
    def clipped_norm(self) -> float:
        """And after it."""
        return min(self.norm, self.max_norm) if self.max_norm else self.norm

    @property
    def ratios(self) -> Float[Tensor, "B T"]:
        """pi(token) / what the sampler reported; 1 on tokens that are not trained on."""
        return torch.where(self.batch.mask, (self.logprobs - self.batch.sampler_logprobs).exp(), 1.0)

    def summary(self) -> dict[str, Any]:
        """The step as plain data, without its tensors."""
        return {
            "gradient_norm": self.norm,
            "clipped_norm": self.clipped_norm,
            "trained_tokens": int(self.batch.mask.sum()),
            "tokens_without_weight": self.num_without_weight,
            "groups": [
                {
                    "prompt_index": group.prompt.index,
                    "rewards": [reward.value for reward in rewards],
                    "advantages": weights,
                    "share": share,
                }
                for group, rewards, weights, share in zip(
                    self.groups, self.rewards, self.advantages.tolist(), self.group_shares, strict=True
                )
            ],
            "tokens_by_weight": _views_as_data(self.by_weight),
            "tokens_by_ratio": _views_as_data(self.by_ratio),
        }

    @property
    def num_without_weight(self) -> int:
        """Trained tokens of completions with an advantage that weigh nothing: clipping or a mask took them."""
        is_weighed = self.batch.mask & (self.batch.advantages[:, None] != 0)
        return int((is_weighed & (self.token_weights == 0)).sum())


def _views_as_data(tokens: Sequence[TokenView]) -> list[dict[str, Any]]:
    return [{**asdict(token), "ratio": token.ratio} for token in tokens]


def cosine(first: Gradient, second: Gradient) -> float:
    """Cosine of two gradients; NaN if one of them is zero."""
    dot = sum((first[name].double() * second[name].double()).sum().item() for name in first)
    norms = [
        math.sqrt(sum(part.double().square().sum().item() for part in gradient.values()))
        for gradient in (first, second)
    ]
    return dot / (norms[0] * norms[1]) if all(norms) else math.nan


def open_step(
    policy: TrainedPolicy,
    algorithm: Algorithm,
    batch: Batch,
    groups: Sequence[Group],
    rewards: Sequence[Sequence[Reward]],
    advantages: Float[Tensor, "P G"],
    *,
    number: int,
    rows_per_update: int,
) -> OpenedStep:
    """A step's gradient, by group and by token. Weights, optimizer and random numbers stay as they are.

    ``batch`` is annotated with what the algorithm needs. Raises ConfigError where weights are held in parts.
    """
    if policy.backend.__class__.__name__ != "DataParallel":
        raise ConfigError("the gradient of a step is shown on one device; this run keeps its weights in parts")
    prepared = algorithm.prepare(batch, stack_rewards(groups, rewards))
    updates = list(prepared.split(rows_per_update))
    with _undisturbed(policy):
        whole = _gradient(policy, algorithm, updates)
        square = sum(part.double().square().sum().item() for part in whole.values())
        shares = tuple(_shares(policy, algorithm, updates, whole, square, len(groups)))
        logprobs, weights = _token_weights(policy, algorithm, updates, prepared)
    views = partial(_views, policy, prepared, logprobs, weights)
    return OpenedStep(
        number,
        tuple(groups),
        tuple(tuple(row) for row in rewards),
        advantages,
        prepared,
        logprobs,
        weights,
        shares,
        views((logprobs - prepared.sampler_logprobs).abs() * prepared.mask),
        views(weights.abs() * -torch.expm1(logprobs)),
        policy.settings.max_gradient_norm,
        whole,
    )


def _views(
    policy: TrainedPolicy,
    batch: Batch,
    logprobs: Float[Tensor, "B T"],
    weights: Float[Tensor, "B T"],
    order: Float[Tensor, "B T"],
) -> tuple[TokenView, ...]:
    """The tokens of the largest values of ``order``."""
    values, flat = order.flatten().topk(min(NUM_TOKENS, order.numel()))
    views = []
    for flat_index in flat[values > 0].tolist():
        row, column = divmod(flat_index, order.shape[1])
        text = str(policy.tokenizer.decode([int(batch.completion_ids[row, column])]))
        numbers = [float(table[row, column]) for table in (logprobs, batch.sampler_logprobs, weights)]
        views.append(TokenView(int(batch.group_ids[row]), row, column, text, *numbers))
    return tuple(views)


@contextmanager
def _undisturbed(policy: TrainedPolicy) -> Iterator[None]:
    """Nothing is dropped out meanwhile; gradients and random numbers are afterwards as they were."""
    parameters = [weight for weight in policy.trained_model.parameters() if weight.requires_grad]
    gradients, devices = (
        [weight.grad for weight in parameters],
        [policy.model.device] if policy.model.device.index else [],
    )
    dropouts = [part for part in policy.trained_model.modules() if isinstance(part, torch.nn.Dropout)]
    shares = [part.p for part in dropouts]
    for part in dropouts:
        part.p = 0.0
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for part, share in zip(dropouts, shares, strict=True):
                part.p = share
            for weight, gradient in zip(parameters, gradients, strict=True):
                weight.grad = gradient


def _trained(algorithm: Algorithm, update: Batch) -> Batch:
    return update if algorithm.needs_every_row else update.with_signal()


def _gradient(policy: TrainedPolicy, algorithm: Algorithm, updates: Sequence[Batch]) -> Gradient:
    """Mean of the gradients of some updates, each over its own denominators."""
    named = {name: weight for name, weight in policy.trained_model.named_parameters() if weight.requires_grad}
    for weight in named.values():
        weight.grad = None
    for update in updates:
        trained = _trained(algorithm, update)
        if not len(trained):
            continue
        for microbatch in policy.microbatches(trained):
            logprobs, entropy = policy.logprobs(microbatch)
            loss, _ = algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
            policy.backend.backward(loss)
    policy.processes.add_gradients(list(named.values()))
    count = len(updates)
    return {
        name: torch.zeros(weight.shape) if weight.grad is None else weight.grad.detach().float().cpu() / count
        for name, weight in named.items()
    }


def _shares(
    policy: TrainedPolicy,
    algorithm: Algorithm,
    updates: Sequence[Batch],
    whole: Gradient,
    square: float,
    num_groups: int,
) -> Iterator[float]:
    """For each group, its share of the whole gradient."""
    for group_id in range(num_groups):
        own = [update.select((update.group_ids == group_id).nonzero()[:, 0]) for update in updates]
        own = [update if len(update) else None for update in own]
        silent = all(update is None or not len(_trained(algorithm, update)) for update in own)
        if silent or not square:
            yield 0.0
            continue
        part = _gradient(policy, algorithm, [update for update in own if update is not None])
        scale = sum(update is not None for update in own) / len(updates)
        yield scale * sum((part[name].double() * whole[name].double()).sum().item() for name in whole) / square


def _token_weights(
    policy: TrainedPolicy, algorithm: Algorithm, updates: Sequence[Batch], whole: Batch
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probabilities of all rows, and the derivative of the step's loss by each of them."""
    logprobs = policy.annotate(whole, old=True, entropy=False, reference=False).old_logprobs
    assert logprobs is not None
    logprobs, weights, start = logprobs.cpu(), torch.zeros_like(whole.sampler_logprobs), 0
    for update in updates:
        width, rows = update.mask.shape[1], slice(start, start + len(update))
        leaf = logprobs[rows, :width].clone().requires_grad_()
        if len(update):
            loss, _ = algorithm.loss(leaf, torch.zeros_like(leaf), update)
            if loss.requires_grad:
                (weights[rows, :width],) = torch.autograd.grad(loss / len(updates), leaf)
        start += len(update)
    return logprobs, weights


def with_advantages(batch: Batch, advantages: Float[Tensor, "P G"]) -> Batch:
    """The same rows with other advantages."""
    owners = batch.episode_ids if batch.episode_ids is not None else torch.arange(len(batch))
    return replace(batch, advantages=advantages.reshape(-1).float()[owners])
