"""The policy: how log-probabilities are computed, and how the weights are moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.core.batch import Batch
from oncurve.core.errors import TrainingError
from oncurve.core.logprobs import PaddedScorer
from oncurve.core.records import Mean

ComputeType = Literal["float32", "bfloat16", "float16", "float64"]
Pair = tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]
"""Log-probabilities and entropies of completion tokens."""
T = TypeVar("T")


class OneProcess:
    """The processes that train one policy, seen from one of them: here one, whose every exchange is with itself.

    ``policy.distributed.Processes`` derives from it. What is asked of all must be called by all.
    """

    count: int = 1

    def own_rows(self, batch: Batch, *, share_prompts: bool) -> Int[Tensor, " b"]:
        """The rows that this process computes: all. With ``share_prompts`` those of a prompt stay together."""
        return torch.arange(len(batch))

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes."""
        return [value]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        return tensor

    def all_true(self, is_true: bool) -> bool:
        """It is true in every process."""
        return is_true

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes."""


class WeightBackend(Protocol):
    """The weights in training: where they are, how a batch is scored by them, and how they are moved."""

    optimizer: Any
    replica: PreTrainedModel | None
    """A copy of all weights to sample from, where those in training are in parts and this process is to have them."""
    is_lockstep: bool
    """All processes take every pass together, so that all must make as many, and none can begin one anew."""

    def scorer(self, model: PreTrainedModel) -> nn.Module:
        """Scores a batch by a model, the one in training or its reference.

        From (batch, temperature, is_training) to the log-probabilities and entropies of the completion tokens, 0
        outside the mask.
        """
        ...

    def after_scoring(self, model: PreTrainedModel) -> None:
        """Give back what passes without gradients put together."""

    def publish(self) -> None:
        """Bring the replica up to date."""

    def follow(self) -> PreTrainedModel:
        """The model in training with weights in the form that those of its reference have."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a microbatch."""

    def move(self, rate: float, *, is_allowed: bool) -> float:
        """Clip the gradient, move the weights if that makes sense, forget the gradient; its norm before."""
        ...


class OneDevice:
    """Every process has all weights on its device, and gradients are added up before an update."""

    replica: PreTrainedModel | None = None
    is_lockstep = False
    has_own_rates = False
    """The optimizer came with a schedule that sets the rate of each of its groups."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Any,
        scorers: Mapping[int, nn.Module] | None = None,
        *,
        max_gradient_norm: float = 1.0,
        processes: OneProcess | None = None,
    ) -> None:
        """``scorers`` score a batch by a model, each by the id of its model; None: by padded rows."""
        self.model, self.optimizer, self.scorers = model, optimizer, dict(scorers or {})
        self.max_gradient_norm = max_gradient_norm
        """0 clips nothing."""
        self.processes: OneProcess = processes or OneProcess()

    def scorer(self, model: PreTrainedModel) -> nn.Module:
        """The pass over a batch."""
        return self.scorers.setdefault(id(model), PaddedScorer(model))

    def after_scoring(self, model: PreTrainedModel) -> None:
        """Nothing was put together."""

    def publish(self) -> None:
        """The sampler reads the weights themselves."""

    def follow(self) -> PreTrainedModel:
        """The model in training: its reference has the form of its weights."""
        return self.model

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a microbatch."""
        loss.backward()

    def move(self, rate: float, *, is_allowed: bool) -> float:
        """Clip the gradient, move the weights if that makes sense, forget the gradient; its norm before."""
        norm = self._clip(self.max_gradient_norm or math.inf)
        if is_allowed and math.isfinite(norm) and norm > 0:
            for group in self.optimizer.param_groups if not self.has_own_rates else ():
                group["lr"] = rate
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)  # also of weights that an optimizer of a script's own leaves out
        return norm

    def _clip(self, limit: float) -> float:
        """Add up the gradients of all processes and scale them down to a norm; the norm before."""
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.processes.add_gradients(trained)
        norm = nn.utils.get_total_norm([weight.grad for weight in trained if weight.grad is not None])
        nn.utils.clip_grads_with_norm_(trained, limit, norm)
        return float(norm)


class DevicePolicy:
    """The model in training: weights and optimizer state in float32, arithmetic in the compute type.

    bfloat16 has 8 bits of mantissa, so that an update of 1e-6 to a weight of 0.02 is lost in it: the master weights
    stay in float32 and only the products are done in the smaller type.
    """

    is_packed = False
    """Rows of a prompt share its tokens in a pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        backend: WeightBackend,
        *,
        rate: float | Callable[[int], float],
        temperature: float = 1.0,
        compute_type: ComputeType = "float32",
        tokens_per_microbatch: int = 8192,
        reference: PreTrainedModel | None = None,
        processes: OneProcess | None = None,
    ) -> None:
        """``rate`` is the learning rate, or that of each update, counted from 0; ``temperature`` is the sampler's."""
        self._model, self._tokenizer, self.backend, self.reference = model, tokenizer, backend, reference
        self.rate_of: Callable[[int], float] = rate if callable(rate) else lambda update: rate
        self.temperature = temperature or 1.0
        self.compute_type: ComputeType = compute_type
        self.tokens_per_microbatch = tokens_per_microbatch
        self.processes: Any = processes or OneProcess()
        self.device = model.device
        """Device of the passes; weights in parts may lie elsewhere in between."""
        self.num_updates, self.num_scheduled = 0, 0
        """Updates that moved the weights; and all of them, by which the schedule counts."""
        self.last_rate = 0.0
        self._is_loss_finite = True

    @property
    def model(self) -> PreTrainedModel:
        """The module to sample from: the one in training, or the whole copy of one in parts, where there is one."""
        return self._model if self.backend.replica is None else self.backend.replica

    @property
    def trained_model(self) -> PreTrainedModel:
        """The module in training, whose weights may be parts."""
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Text to tokens and back."""
        return self._tokenizer

    def compute(self) -> AbstractContextManager[object]:
        """The arithmetic of the compute type, for training and for sampling in process."""
        return compute_context(self.device, self.compute_type)

    def logprobs(self, batch: Batch) -> Pair:
        """log pi_theta(o_t | q, o_<t) and the entropy of each token's distribution; 0 outside the mask."""
        with self.compute(), self._training_pass():
            return self.backend.scorer(self._model)(batch, self.temperature, True)

    def _training_pass(self) -> AbstractContextManager[None]:
        """The surroundings of a pass with gradients."""
        return nullcontext()

    @torch.no_grad()
    def annotate(self, batch: Batch, *, old: bool, entropy: bool, reference: bool) -> Batch:
        """The batch with what stays fixed during its updates, only what is asked for."""
        if old or entropy:
            logprobs, entropies = self._fixed(self._model, batch)
            batch = replace(batch, old_logprobs=logprobs if old else None, old_entropy=entropies if entropy else None)
        if reference:
            batch = replace(batch, ref_logprobs=self._reference_logprobs(batch))
        return batch

    def _reference_logprobs(self, batch: Batch) -> Float[Tensor, "B T"]:
        """Under the reference."""
        if self.reference is None:
            raise TrainingError("a KL term needs a reference, and this policy was made without one")
        return self._fixed(self.reference, batch)[0]

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the copy to sample from up to date, where there is one. All processes must call it."""
        self.backend.publish()

    def _fixed(self, model: PreTrainedModel, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        logprobs, entropies = torch.zeros_like(batch.sampler_logprobs), torch.zeros_like(batch.sampler_logprobs)
        scorer = self.backend.scorer(model)

        def compute() -> None:
            for rows, part in self._own_parts(batch):
                with self.compute():
                    pieces = scorer(part, self.temperature, False)
                for full, piece in zip((logprobs, entropies), pieces, strict=True):
                    if len(rows):
                        full[rows, : piece.shape[1]] = piece.to(full)

        self._in_parts(batch, compute)
        self.backend.after_scoring(model)
        return self.processes.all_reduce(logprobs), self.processes.all_reduce(entropies)

    def _in_parts(self, batch: Batch, compute: Callable[[], None]) -> None:
        """Compute something over the microbatches of a batch."""
        compute()

    def _own_parts(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Rows and microbatches of this process's share, at most ``tokens_per_microbatch`` tokens each.

        Weights in parts are put together by all processes at once, so all must make as many passes: who has fewer
        microbatches adds passes over a row of which nothing is trained.
        """
        mine = self.processes.own_rows(batch, share_prompts=self.is_packed)
        own = batch.select(mine)
        plan = list(own.plan_microbatches(self.tokens_per_microbatch, share_prompts=self.is_packed))
        missing = 0 if not self.backend.is_lockstep else max(self.processes.all_gather(len(plan))) - len(plan)
        for rows in plan:
            yield mine[rows], own.select(rows)
        for _ in range(missing):
            idle = batch.select(batch.row_lengths.argmin()[None])
            yield mine[:0], replace(idle, mask=torch.zeros_like(idle.mask), advantages=torch.zeros(1))

    def move_reference(self, share: float) -> None:
        """Let the reference follow the policy: by nothing (0), by a share, or all the way (1)."""
        if share and self.reference is not None:
            move_reference(self.reference, self.backend.follow(), share=share)

    def microbatches(self, update: Batch) -> Iterator[Batch]:
        """This process's rows of an update in parts of at most ``tokens_per_microbatch`` tokens."""
        return (part for _, part in self._own_parts(update))

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a microbatch to that of the update."""
        self._is_loss_finite = self._is_loss_finite and math.isfinite(loss.item())
        self.backend.backward(loss)

    def update(self) -> dict[str, Mean]:
        """Clip the gradient, move the weights, forget the gradient.

        Without any gradient (no group of the update has a signal, or every token is masked) nothing moves, not even by
        momentum, and the update is counted as skipped. So is one whose loss or gradient is not finite.
        """
        rate = self.last_rate = self.rate_of(self.num_scheduled)
        self.num_scheduled += 1  # skipped updates also advance the schedule of the learning rate
        is_finite = self.processes.all_true(self._is_loss_finite)
        norm = self._move(rate, is_allowed=is_finite)
        is_finite, self._is_loss_finite = is_finite and math.isfinite(norm), True
        count = Mean(0, 1 / self.processes.count)  # of updates; the microbatches of all processes gave the loss
        if not is_finite or norm == 0:
            return {
                "policy/skipped_updates": Mean(1, 1),
                "policy/nonfinite_updates": Mean(float(not is_finite), 1),
                "policy/loss": count,
            }
        self.num_updates += 1
        return {
            "policy/gradient_norm": Mean(norm, 1),
            "policy/learning_rate": Mean(rate, 1),
            "policy/skipped_updates": Mean(0, 1),
            "policy/nonfinite_updates": Mean(0, 1),
            "policy/loss": count,
        }

    def _move(self, rate: float, *, is_allowed: bool) -> float:
        """Let the optimizer make an update; the norm of the gradient."""
        return self.backend.move(rate, is_allowed=is_allowed)


def torch_type(compute_type: ComputeType) -> torch.dtype:
    """The type of torch that has this name."""
    return getattr(torch, compute_type)


def compute_context(device: torch.device, compute_type: ComputeType) -> AbstractContextManager[object]:
    """Autocast to a half-width type; nothing for the full-width ones, whose weights have that type already."""
    if compute_type in ("float32", "float64"):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch_type(compute_type))


@torch.no_grad()
def move_reference(reference: nn.Module, policy: nn.Module, *, share: float) -> None:
    """Move the weights of the reference toward those of the policy, in place.

        theta_ref <- (1 - share) theta_ref + share theta      TR-DPO, arXiv:2404.09656
        theta_ref <- theta                                    share=1; DeepSeekMath, arXiv:2402.03300, algorithm 1

    share=1 every n steps is the outer iteration of DeepSeekMath; a small share after every step is an exponential
    moving average, which has the memory of about 1 / share steps.

    Raises ValueError if the two are not the same model.
    """
    targets, sources = dict(reference.named_parameters()), dict(policy.named_parameters())
    if targets.keys() != sources.keys():
        strange = sorted(targets.keys() ^ sources.keys())[0]
        raise ValueError(f"the reference cannot follow the policy: only one of them has the weight {strange}")
    for name, target in targets.items():
        source = sources[name].to(target)
        if share == 1:
            target.copy_(source)
        else:
            target.lerp_(source, share)
