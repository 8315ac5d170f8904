"""The policy of a recipe: scored in the fastest proven way, with an adapter, a teacher, and weights in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.algorithm.precision import HALF
from oncurve.core.batch import Batch
from oncurve.core.errors import TrainingError
from oncurve.core.policy import ComputeType, DevicePolicy, torch_type
from oncurve.core.records import Mean
from oncurve.model.allocator import give_back
from oncurve.model.trace_ranges import traced
from oncurve.model.weights import set_trust, trust_of
from oncurve.policy.backend import Backend, DataParallel, Scorers, trained_parameters
from oncurve.policy.device_memory import in_smaller_parts, moving_weights
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.scoring_path import ScoringPath, find_scoring_path
from oncurve.policy.settings import OptimizerSettings, PolicySection
from oncurve.policy.sharding import ReplicaLocation, Sharding, ZeroSettings

if TYPE_CHECKING:
    from transformers.modeling_layers import GradientCheckpointingLayer

    from oncurve.model.lora_weights import LoraWeights
    from oncurve.policy.arrivals import Arrivals
    from oncurve.policy.lora import Adapter
    from oncurve.policy.loss_scale import LossScale
    from oncurve.policy.teacher import OutsideTeacher
    from oncurve.policy.unread_model import Unread


@dataclass(frozen=True, eq=False)
class Parallelism:
    """The processes that train one policy, and what each of them has of it."""

    processes: Processes = ALONE
    sharding: Sharding | ZeroSettings | None = None
    """How weights or the optimizer's state are cut; None: each process has all of them."""
    replica_location: ReplicaLocation = "device"
    """Where weights are cut: where this process has all of them, to sample or to publish from."""
    unread: Unread | None = None
    """Where the weights of model and reference are, if they are read when they have been cut."""

    @property
    def cuts_weights(self) -> bool:
        """Each process has a part of each weight only."""
        if isinstance(self.sharding, ZeroSettings):
            return self.sharding.stage == 3
        return self.sharding is not None and self.processes.count > 1


WHOLE = Parallelism()
"""One process with all weights."""


class Scorer(nn.Module):
    """The pass over a batch as a module, around which the weights of a model in parts can be put together."""

    def __init__(self, model: PreTrainedModel, packed: bool, *, recompute: bool) -> None:
        super().__init__()
        self.model, self.packed, self.recompute = model, packed, recompute

    def forward(
        self, batch: Batch, temperature: float, is_training: bool
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probabilities and entropies of the completion tokens."""
        again = self.recompute and is_training
        return completion_logprobs(self.model, batch, temperature=temperature, packed=self.packed, recompute=again)


class TrainedPolicy(DevicePolicy):
    """The model in training with what a recipe asks for: an adapter, a teacher, parts, recomputed activations."""

    backend: Backend

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerSettings,
        section: PolicySection | None = None,
        compute_type: ComputeType = "float32",
        total_updates: int = 1,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        adapter: Adapter | None = None,
        teacher: OutsideTeacher | None = None,
        parallelism: Parallelism = WHOLE,
    ) -> None:
        """The model, on the device and in the processes where it is trained.

        ``section`` has the memory of a pass: tokens, packing, recomputed and offloaded activations; ``compute_type`` is
        the one that its device gets. ``total_updates`` is what the schedule of the learning rate spans. ``adapter`` is
        the one inside the model; without a ``reference``, the base under it is the reference, or a ``teacher`` outside.
        """
        section = section or PolicySection()
        processes, unread = parallelism.processes, parallelism.unread
        self.adapter, self.teacher = adapter, teacher
        self.reference_prompts: Mapping[tuple[int, ...], tuple[int, ...]] = {}
        """The prompt of the reference for each prompt of the policy; empty where it is the same."""
        self.settings, self.total_updates = optimizer, total_updates
        self._recomputed: list[GradientCheckpointingLayer] = []
        if section.gradient_checkpointing:
            from oncurve.policy.activation_checkpointing import recomputable_layers  # lazy

            self._recomputed = recomputable_layers(model)
        parts, kind = [part for part in (model, reference) if part is not None], torch_type(compute_type)
        scoring_paths = find_scoring_paths(
            parts, unread, kind, packing=section.packing, in_parts=parallelism.cuts_weights
        )
        self.scoring_path, self.is_packed = scoring_paths[0], all(path.is_packed for path in scoring_paths)
        self._offloads_activations = section.offload_activations
        scorers = {id(part): Scorer(part, self.is_packed, recompute=section.gradient_checkpointing) for part in parts}
        super().__init__(
            model,
            tokenizer,
            make_backend(model, scorers, optimizer, kind, parallelism),
            rate=partial(optimizer.rate, total_updates=total_updates),
            temperature=temperature,
            compute_type=compute_type,
            tokens_per_microbatch=section.tokens_per_microbatch,
            reference=reference,
            processes=processes,
        )
        if unread is not None:
            self.device = unread.device
        self.arrivals = _arrivals(model, kind) if kind in HALF else None
        self._before_update: list[Tensor] = []
        self.loss_scale = _loss_scale() if compute_type == "float16" else None
        """The factor of the loss in float16; None elsewhere."""
        if self.backend.replica is not None:
            set_trust(self.backend.replica, trust_of(model))
        for part in parts if self.backend.is_divided else ():
            set_trust(part, replace(trust_of(part), layers=False))  # they need whole weights

    def ordinary_weights(self) -> dict[str, Tensor]:
        """The weights under the names of an ordinary checkpoint, with an adapter added to them."""
        if self.adapter is None:
            return self.model.state_dict()
        from oncurve.policy.lora_merge import merged_weights  # lazy

        return merged_weights(self.model)

    def adapter_weights(self) -> LoraWeights | None:
        """The adapter alone, for whoever has the base; None where weights of the base are trained as well."""
        if self.adapter is None:
            return None
        from oncurve.policy.lora_merge import adapter_weights, trains_pairs_only  # lazy

        return adapter_weights(self.model) if trains_pairs_only(self._model) else None

    @contextmanager
    def _training_pass(self) -> Iterator[None]:
        """The surroundings of a pass with gradients: recompute, drop, move activations away."""
        with ExitStack() as stack:
            if self.adapter is not None:
                stack.enter_context(self.adapter.dropping_out())
            if self._offloads_activations:
                pinned = self.device.type == "cuda"
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
            if self._recomputed:
                from oncurve.policy.activation_checkpointing import recomputing  # lazy

                stack.enter_context(recomputing(self._model, self._recomputed, self.adapter))
            yield

    def _reference_logprobs(self, batch: Batch) -> Float[Tensor, "B T"]:
        """Under the reference: a teacher outside, a model of its own, or the base with the adapter switched off."""
        if self.reference_prompts:
            from oncurve.policy.teacher import with_prompts  # lazy

            batch = with_prompts(batch, self.reference_prompts)
        if self.teacher is not None:
            from oncurve.policy.teacher import taught_logprobs  # lazy

            return taught_logprobs(self.teacher, batch, self.processes, share_prompts=self.is_packed)
        if self.reference is not None:
            return self._fixed(self.reference, batch)[0]
        if self.adapter is None:
            raise TrainingError("a KL term needs a reference, and this policy was made without one")
        with self.adapter.off():
            return self._fixed(self._model, batch)[0]

    def _in_parts(self, batch: Batch, compute: Callable[[], None]) -> None:
        """In smaller microbatches where memory runs out."""
        in_smaller_parts(self, batch, compute)

    def why_not_apart(self) -> str | None:
        """The reason why servers cannot apply the adapter beside its base, with what to change; None where they can,
        and without an adapter."""
        if self.adapter is None:
            return None
        from oncurve.policy.lora_merge import why_not_apart  # lazy

        return why_not_apart(self._model)

    @traced("forward")
    def logprobs(self, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """See ``DevicePolicy``."""
        return super().logprobs(batch)

    @traced("old_reference")
    def annotate(self, batch: Batch, *, old: bool, entropy: bool, reference: bool) -> Batch:
        """See ``DevicePolicy``."""
        return super().annotate(batch, old=old, entropy=entropy, reference=reference)

    @traced("backward")
    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a microbatch to that of the update."""
        self._is_loss_finite = self._is_loss_finite and math.isfinite(loss.item())
        self.backend.backward(loss if self.loss_scale is None else loss * self.loss_scale.value)

    @traced("optimizer")
    def update(self) -> dict[str, Mean]:
        """As in core; with what arrived of the update in 16 bits, and with the factor of the loss in float16."""
        done = self.num_updates
        statistics = super().update()
        if self.loss_scale is not None:
            statistics["policy/loss_scale"] = Mean(self.loss_scale.value, 1)
            is_explained = self.loss_scale.adapt(is_finite=not statistics["policy/nonfinite_updates"].total)
            if is_explained:
                statistics["policy/nonfinite_updates"] = Mean(0, 1)
        if self.arrivals is not None and self.num_updates > done:
            statistics |= self.arrivals.measure(self._before_update)
        self._before_update = []
        return statistics

    def _move(self, rate: float, *, is_allowed: bool) -> float:
        """Let the optimizer make an update, and give back the memory that it used."""
        self._before_update = self.arrivals.copies() if self.arrivals is not None else []
        if self.loss_scale is not None:
            self.loss_scale.unscale(trained_parameters(self._model).values())
        with moving_weights(self.num_updates + 1):
            norm = super()._move(rate, is_allowed=is_allowed)
        give_back()
        return norm


def _arrivals(model: PreTrainedModel, kind: torch.dtype) -> Arrivals:
    from oncurve.policy.arrivals import Arrivals  # lazy

    return Arrivals(model, kind)


def _loss_scale() -> LossScale:
    from oncurve.policy.loss_scale import LossScale  # lazy

    return LossScale()


def find_scoring_paths(
    parts: Sequence[PreTrainedModel], unread: Unread | None, kind: torch.dtype, *, packing: bool, in_parts: bool
) -> list[ScoringPath]:
    """The ways in which the model in training and its reference are scored: all of them packed, or none."""
    find = find_scoring_path if unread is None else unread.find_scoring_path
    paths = [find(part, kind, packing=packing, in_parts=in_parts) for part in parts]
    if any(path.is_packed for path in paths) and not all(path.is_packed for path in paths):
        paths = [find(part, kind, packing=False, in_parts=in_parts) for part in parts]
    return paths


def make_backend(
    model: PreTrainedModel,
    scorers: Scorers,
    settings: OptimizerSettings,
    compute_type: torch.dtype,
    parallelism: Parallelism,
) -> Backend:
    """The backend that holds the weights from here on; weights that are to be cut are cut here."""
    processes, sharding, replica_location = parallelism.processes, parallelism.sharding, parallelism.replica_location
    if isinstance(sharding, ZeroSettings):
        from oncurve.policy.deepspeed import Zero  # lazy

        return Zero(
            model, scorers, sharding, settings, processes, compute_type=compute_type, replica_location=replica_location
        )
    if isinstance(sharding, Sharding) and parallelism.cuts_weights:
        from oncurve.policy.fsdp import Fsdp  # lazy

        return Fsdp(
            model, scorers, settings, processes, sharding=sharding, unread=parallelism.unread,
            compute_type=compute_type, replica_location=replica_location,
        )  # fmt: skip
    return DataParallel(model, scorers, settings, processes)
