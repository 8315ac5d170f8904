"""The policy: how log-probabilities are computed, and how the weights are moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.algorithm.precision import HALF
from oncurve.algorithm.reference import move_reference
from oncurve.batch import Batch
from oncurve.errors import TrainingError
from oncurve.model.allocator import give_back
from oncurve.model.lora_weights import LoraWeights
from oncurve.model.weights import set_trust, trust_of
from oncurve.policy.activation_checkpointing import recomputable_layers, recomputing
from oncurve.policy.arrivals import Arrivals
from oncurve.policy.backend import Backend, OneDevice, trained_parameters
from oncurve.policy.deepspeed import Zero
from oncurve.policy.deepspeed_settings import ZeroSettings
from oncurve.policy.distributed import ALONE, Processes, own_rows
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.fsdp import Fsdp
from oncurve.policy.lora import Adapter
from oncurve.policy.lora_merge import adapter_weights, merged_weights, trains_pairs_only, why_not_apart
from oncurve.policy.loss_scale import LossScale
from oncurve.policy.road import find_road
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import Sharding
from oncurve.policy.shortage import in_smaller_parts, moving_weights
from oncurve.policy.teacher import OutsideTeacher, taught_logprobs, with_prompts
from oncurve.policy.unread_model import ReplicaPlace, Unread
from oncurve.records import Mean

ComputeType = Literal["float32", "bfloat16", "float16", "float64"]


class Scorer(nn.Module):
    """The pass over a batch as a module, around which the weights of a model in parts can be put together."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, batch: Batch, temperature: float, packed: bool, recompute: bool = False
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probabilities and entropies of the completion tokens."""
        return completion_logprobs(self.model, batch, temperature=temperature, packed=packed, recompute=recompute)


class TrainedPolicy:
    """The model in training: weights and optimizer state in float32, arithmetic in the compute type.

    bfloat16 has 8 bits of mantissa, so that an update of 1e-6 to a weight of 0.02 is lost in it: the master weights
    stay in float32 and only the products are done in the smaller type.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerSettings,
        total_updates: int = 1,
        temperature: float = 1.0,
        compute_type: ComputeType = "float32",
        tokens_per_microbatch: int = 8192,
        gradient_checkpointing: bool = False,
        offload_activations: bool = False,
        packing: bool = True,
        reference: PreTrainedModel | None = None,
        adapter: Adapter | None = None,
        processes: Processes = ALONE,
        sharding: Sharding | ZeroSettings | None = None,
        replica_place: ReplicaPlace = "device",
        unread: Unread | None = None,
        teacher: OutsideTeacher | None = None,
    ) -> None:
        """``total_updates`` is what the schedule of the learning rate spans. ``adapter`` is the one inside the model;
        without a ``reference``, the base under it is the reference.

        With ``sharding``, each process keeps a part of what is trained. Where weights are in parts, ``replica_place``
        says where this process has all of them, to sample or to publish from. ``unread`` says where the weights of
        model and reference are, if they are to be read when they are in parts. A ``teacher`` outside stands for the
        reference.
        """
        self._model, self._tokenizer, self.reference = model, tokenizer, reference
        self.adapter, self.processes, self.teacher = adapter, processes, teacher
        self.reference_prompts: Mapping[tuple[int, ...], tuple[int, ...]] = {}
        """The prompt of the reference for each prompt of the policy; empty where it is the same."""
        self.settings, self.total_updates, self.temperature = optimizer, total_updates, temperature or 1.0
        self.compute_type: ComputeType = compute_type
        self.tokens_per_microbatch = tokens_per_microbatch
        self._recomputed = recomputable_layers(model) if gradient_checkpointing else []
        self.device = model.device if unread is None else unread.device
        """Device of the passes; weights in parts may lie elsewhere in between."""
        find = find_road if unread is None else unread.find_road
        parts, kind = [part for part in (model, reference) if part is not None], torch_type(compute_type)
        cuts = cuts_weights(sharding, processes)
        roads = [find(part, kind, packing=packing, in_parts=cuts) for part in parts]
        if any(road.is_packed for road in roads) and not all(road.is_packed for road in roads):
            roads = [find(part, kind, packing=False, in_parts=cuts) for part in parts]
        self.road, self.is_packed = roads[0], all(road.is_packed for road in roads)
        self._offloads_activations = offload_activations
        self.backend = self._make_backend(sharding, replica_place, unread)
        if self.backend.replica is not None:
            set_trust(self.backend.replica, trust_of(model))
        for part in parts if self.backend.is_divided else ():
            set_trust(part, replace(trust_of(part), layers=False))  # they need whole weights
        self.num_updates, self.num_scheduled = 0, 0
        self.rate_of: Callable[[int], float] = partial(self.settings.rate, total_updates=total_updates)
        self.arrivals = Arrivals(model, kind) if kind in HALF else None
        self.loss_scale = LossScale() if compute_type == "float16" else None
        """The factor of the loss in float16; None elsewhere."""
        self.last_rate = 0.0
        """Updates that moved the weights; and all of them, by which the schedule counts."""
        self._is_loss_finite = True

    @property
    def model(self) -> PreTrainedModel:
        """The module to sample from: the one in training, or the whole copy of one in parts, where there is one."""
        return self._model if self.backend.replica is None else self.backend.replica

    @property
    def trained_model(self) -> PreTrainedModel:
        """The module in training; under sharding its weights are parts."""
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Text to tokens and back."""
        return self._tokenizer

    def compute(self) -> AbstractContextManager[object]:
        """The arithmetic of the compute type, for training and for sampling in process."""
        return compute_context(self.device, self.compute_type)

    def ordinary_weights(self) -> dict[str, Tensor]:
        """The weights under the names of an ordinary checkpoint, with an adapter added to them."""
        return self.model.state_dict() if self.adapter is None else merged_weights(self.model)

    def adapter_weights(self) -> LoraWeights | None:
        """The adapter alone, for whoever has the base; None where weights of the base are trained as well."""
        return adapter_weights(self.model) if self.adapter is not None and trains_pairs_only(self._model) else None

    def why_not_apart(self) -> str | None:
        """The reason why servers cannot apply the adapter beside its base, with what to change; None where they can,
        and without an adapter."""
        return why_not_apart(self._model) if self.adapter is not None else None

    def logprobs(self, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """log pi_theta(o_t | q, o_<t) and the entropy of each token's distribution; 0 outside the mask."""
        with self.compute(), self._training_pass():
            return self.backend.scorer(self._model)(batch, self.temperature, self.is_packed, bool(self._recomputed))

    @contextmanager
    def _training_pass(self) -> Iterator[None]:
        """The surroundings of a pass with gradients: recompute, drop, move activations away."""
        with ExitStack() as stack:
            if self.adapter is not None:
                stack.enter_context(self.adapter.dropping_out())
            if self._offloads_activations:
                pinned = self.device.type == "cuda"
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
            stack.enter_context(recomputing(self._model, self._recomputed, self.adapter))
            yield

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
        """Under the reference: a teacher outside, a model of its own, or the base with the adapter switched off."""
        if self.reference_prompts:
            batch = with_prompts(batch, self.reference_prompts)
        if self.teacher is not None:
            return taught_logprobs(self.teacher, batch, self.processes, share_prompts=self.is_packed)
        if self.reference is not None:
            return self._fixed(self.reference, batch)[0]
        if self.adapter is None:
            raise TrainingError("a KL term needs a reference, and this policy was made without one")
        with self.adapter.off():
            return self._fixed(self._model, batch)[0]

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the copy to sample from up to date, where there is one. All processes must call it."""
        self.backend.publish()

    def _make_backend(
        self, sharding: Sharding | ZeroSettings | None, replica_place: ReplicaPlace, unread: Unread | None
    ) -> Backend:
        """The backend that holds the weights from here on; weights that are to be cut are cut here."""
        model, compute = self._model, torch_type(self.compute_type)
        scorers = {id(part): Scorer(part) for part in (model, self.reference) if part is not None}
        if isinstance(sharding, ZeroSettings):
            return Zero(
                model,
                scorers,
                sharding,
                self.settings,
                self.processes,
                compute_type=compute,
                replica_place=replica_place,
            )
        if isinstance(sharding, Sharding) and cuts_weights(sharding, self.processes):
            return Fsdp(
                model,
                scorers,
                self.settings,
                self.processes,
                sharding=sharding,
                compute_type=compute,
                replica_place=replica_place,
                unread=unread,
            )
        return OneDevice(model, scorers, self.settings, self.processes)

    def _fixed(self, model: PreTrainedModel, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        logprobs, entropies = torch.zeros_like(batch.sampler_logprobs), torch.zeros_like(batch.sampler_logprobs)
        scorer = self.backend.scorer(model)

        def compute() -> None:
            for rows, part in self._own_parts(batch):
                with self.compute():
                    pieces = scorer(part, self.temperature, self.is_packed)
                for full, piece in zip((logprobs, entropies), pieces, strict=True):
                    if len(rows):
                        full[rows, : piece.shape[1]] = piece.to(full)

        in_smaller_parts(self, batch, compute)
        self.backend.after_scoring(model)
        return self.processes.all_reduce(logprobs), self.processes.all_reduce(entropies)

    def _own_parts(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Rows and microbatches of this process's share, at most ``tokens_per_microbatch`` tokens each.

        Weights in parts are put together by all processes at once, so all must make as many passes: who has fewer
        microbatches adds passes over a row of which nothing is trained.
        """
        mine = own_rows(batch, self.processes, share_prompts=self.is_packed)
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
        self.backend.backward(loss if self.loss_scale is None else loss * self.loss_scale.value)

    def update(self) -> dict[str, Mean]:
        """Clip the gradient, move the weights, forget the gradient.

        Without any gradient (no group of the update has a signal, or every token is masked) nothing moves, not even by
        momentum, and the update is counted as skipped. So is one whose loss or gradient is not finite.
        """
        rate = self.last_rate = self.rate_of(self.num_scheduled)
        self.num_scheduled += 1  # without a signal too: the plan is of steps
        is_finite = self.processes.all_true(self._is_loss_finite)
        before = self.arrivals.copies() if self.arrivals is not None else []
        if self.loss_scale is not None:
            self.loss_scale.unscale(trained_parameters(self._model).values())
        with moving_weights(self.num_updates + 1):
            norm = self.backend.move(rate, is_allowed=is_finite)
        give_back()
        is_finite, self._is_loss_finite = is_finite and math.isfinite(norm), True
        count = Mean(0, 1 / self.processes.count)  # of updates; the microbatches of all processes gave the loss
        scaled, is_explained = {}, False
        if self.loss_scale is not None:
            scaled = {"policy/loss_scale": Mean(self.loss_scale.value, 1)}
            is_explained = self.loss_scale.adapt(is_finite=is_finite)
        if not is_finite or norm == 0:
            return {
                **scaled,
                "policy/skipped_updates": Mean(1, 1),
                "policy/nonfinite_updates": Mean(float(not is_finite and not is_explained), 1),
                "policy/loss": count,
            }
        self.num_updates += 1
        arrived = self.arrivals.measure(before) if self.arrivals is not None else {}
        return {
            **arrived,
            **scaled,
            "policy/gradient_norm": Mean(norm, 1),
            "policy/learning_rate": Mean(rate, 1),
            "policy/skipped_updates": Mean(0, 1),
            "policy/nonfinite_updates": Mean(0, 1),
            "policy/loss": count,
        }


def cuts_weights(sharding: Sharding | ZeroSettings | None, processes: Processes) -> bool:
    """Each process will have a part of each weight only."""
    if isinstance(sharding, ZeroSettings):
        return sharding.stage == 3
    return sharding is not None and processes.count > 1


def torch_type(compute_type: ComputeType) -> torch.dtype:
    """The type of torch that has this name."""
    return getattr(torch, compute_type)


def compute_context(device: torch.device, compute_type: ComputeType) -> AbstractContextManager[object]:
    """Autocast to a half-width type; nothing for the full-width ones, whose weights have that type already."""
    if compute_type in ("float32", "float64"):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch_type(compute_type))
