"""DeepSpeed ZeRO backend, the only door to DeepSpeed.

ZeRO, arXiv:1910.02054: stage 1 divides the moments, 2 the gradients as well, 3 the weights as well; each may leave the
moments to the CPU.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.core.errors import ConfigError
from oncurve.policy.backend import Piece, Scorers, TensorFiles, decayed, trained_parameters
from oncurve.policy.deepspeed_settings import resolve
from oncurve.policy.distributed import join_alone, without_deadlines
from oncurve.policy.sharding import Reader, ReplicaLocation, Room, ZeroSettings, fill
from oncurve.policy.unread_model import fill_copy, make_replica

if TYPE_CHECKING:
    from oncurve.policy.distributed import Processes
    from oncurve.policy.settings import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero:
    """A module in training under DeepSpeed. Gradients are summed over the processes, not averaged."""

    def __init__(
        self,
        model: PreTrainedModel,
        scorers: Scorers,
        settings: ZeroSettings,
        optimizer: OptimizerSettings,
        processes: Processes,
        *,
        compute_type: torch.dtype,
        replica_location: ReplicaLocation,
    ) -> None:
        """Raises ConfigError if DeepSpeed is not installed, does not take the file, or cannot build its optimizer."""
        self.model, self._scorers = model, scorers
        half, scorer, head = compute_type == torch.bfloat16, scorers[id(model)], model.get_output_embeddings()
        self.is_divided, self.is_lockstep = settings.stage == 3, True
        self.replica: PreTrainedModel | None = None
        if self.is_divided:  # a reference that moves reads the weights as they are
            self.replica = make_replica(model, replica_location, model.device, halved=half and len(scorers) == 1)
        device = next(scorer.parameters()).device
        self._library = _deepspeed(device)
        if processes.count == 1:
            join_alone(device)
        self.processes, self.stage, self.source = processes, settings.stage, settings.source
        config = resolve(
            settings,
            optimizer,
            hidden_size=model.config.get_text_config().hidden_size,
            half=half,
            world_size=processes.count,
        )
        self.offloads = config["zero_optimization"].get("offload_optimizer", {}).get("device") in ("cpu", "nvme")
        self._may_move = True
        self.engine: Any = None
        trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        try:
            with _named_local_rank():
                self.engine, *_ = self._library.initialize(
                    model=scorer,
                    optimizer=self._make_optimizer(trained, optimizer),
                    config=config,
                    dist_init_required=False,
                )
        except (ValueError, AssertionError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())[:600]
            raise ConfigError(f"{settings.source}: DeepSpeed does not take it: {reason}") from None
        without_deadlines()  # of the groups that it made
        scorer.eval()
        self.optimizer: Any = self.engine.optimizer
        if optimizer.weight_decay and trained:  # two groups: DeepSpeed looks for all moments when one has moved
            self._begin_moments()
        if self.is_divided and head is not None:  # read as a matrix, so that DeepSpeed does not see its layer called
            self._library.zero.register_external_parameter(scorer, head.weight)

    def _make_optimizer(self, trained: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
        """AdamW that stands still where the whole gradient is zero: momentum alone must not move the weights."""
        common = settings.adam_options
        groups = [{"params": group, "weight_decay": decay} for group, decay in decayed(self.model, [trained], settings)]
        kind: Any = torch.optim.AdamW
        if self.offloads:
            kind = self._library.ops.adam.DeepSpeedCPUAdam
            common |= {"adamw_mode": True, "fp32_optimizer_states": True}
        zero = self

        class Gated(kind):
            def step(self, closure: None = None) -> None:
                if zero.engine is not None and zero._may_move and zero.engine.optimizer._global_grad_norm != 0:
                    super().step(closure)

        builder = importlib.import_module("deepspeed.ops.op_builder.builder")
        unbuildable = (builder.CUDAMismatchException, builder.MissingCUDAException)
        try:
            return Gated(groups, **common)
        except (*unbuildable, RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{self.source}: DeepSpeed cannot build its Adam for the CPU ({type(error).__name__}: {reason}). "
                f"It needs ninja, a C++ compiler and, on a GPU, CUDA's toolkit of version {torch.version.cuda}. "
                f"Install them, or keep the moments on the device: policy.offload=false, and no offload_optimizer in "
                f"the file"
            ) from None

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a microbatch. All processes make as many passes."""
        self.engine.backward(loss * self.processes.count)  # it divides by their number

    def move(self, rate: float, *, is_allowed: bool) -> float:
        """Clip the gradient, move the weights, forget the gradient; its norm, infinite where it was no number."""
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        self._may_move = is_allowed
        self.engine.step()
        return float("inf") if optimizer.overflow else float(optimizer._global_grad_norm)

    def scorer(self, model: PreTrainedModel) -> nn.Module:
        """DeepSpeed's engine, or for a reference the pass itself."""
        return self.engine if model is self.model else self._scorers[id(model)]

    def after_scoring(self, model: PreTrainedModel) -> None:
        """DeepSpeed frees what it put together."""

    def publish(self) -> None:
        """Put the weights together one after the other, into the replica where this process has one."""
        if self.is_divided:
            fill_copy(self.replica, self.model, self.full_tensor, only_trained=True)

    def follow(self) -> PreTrainedModel:
        """A reference is whole in every process: the weights are put together for it."""
        self.publish()
        return self.model if self.replica is None else self.replica

    def full_tensor(self, tensor: Tensor, room: Room | None = None) -> Tensor:
        """All of a weight, which all processes must ask for; other tensors as they are."""
        if not isinstance(tensor, nn.Parameter):
            return tensor.detach()
        parameter = tensor
        if not parameter.requires_grad:
            return self._frozen(parameter)
        whole = self._library.utils.safe_get_full_fp32_param(parameter)
        return parameter.detach() if whole is None else whole.detach().view(self.full_shape(parameter))

    def _frozen(self, parameter: nn.Parameter) -> Tensor:
        if self.stage < 3:
            return parameter.detach()
        with self._library.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def full_shape(self, tensor: Tensor) -> torch.Size:
        """The shape of all of a weight, of which this process may have a part."""
        is_part = self.stage == 3 and isinstance(tensor, nn.Parameter)
        return tensor.ds_shape if is_part else tensor.shape  # type: ignore[attr-defined]

    def load_shard(self, tensor: Tensor, read: Reader) -> None:
        """Put values into a weight and its master copy."""
        if not isinstance(tensor, nn.Parameter):
            return fill(tensor, read)
        parameter, values = tensor, read(slice(None))
        values, library = values.to(parameter.device), self._library.utils
        with torch.no_grad():
            if self.stage < 3:
                parameter.copy_(values)
                library.safe_set_full_fp32_param(parameter, values)
                return
            part = self._own_part(parameter, values)
            parameter.ds_tensor.copy_(part)  # type: ignore[attr-defined]
            library.safe_set_local_fp32_param(parameter, part)
            if parameter.shape == values.shape:  # small ones are kept whole
                parameter.copy_(values)

    def _own_part(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """This process's part of a weight or moment as DeepSpeed cuts it: equal stretches, the last one filled up."""
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        flat = nn.functional.pad(values.flatten(), (0, size * self.processes.count - values.numel()))
        return flat[size * self.processes.rank :][:size]

    def count(self) -> int:
        """Updates that the optimizer made; those of all processes, since one may own nothing of small models."""
        own = max((int(state["step"]) for state in self._states() if "step" in state), default=0)
        return max(self.processes.all_gather(own))

    def moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """All of one moment of a weight, once there was an update. All processes must ask."""
        value = self._library.utils.safe_get_full_optimizer_state(parameter, name)
        return value.detach().view(self.full_shape(parameter))

    def moments(self, room: Room) -> dict[str, Piece]:
        """The optimizer's moments, once there was an update."""
        pieces: dict[str, Piece] = {}
        if (count := self.count()) == 0:
            return pieces
        for name, parameter in trained_parameters(self.model).items():
            for moment in MOMENTS:
                key, size = f"{name}:{moment}", self.full_shape(parameter).numel() * 4
                pieces[key] = Piece(size, partial(self.moment, parameter, moment), key)
            pieces[f"{name}:step"] = Piece(4, partial(torch.tensor, float(count)), f"{name}:step")
        return pieces

    def load_moments(self, tensors: TensorFiles) -> None:
        """The moments of a checkpoint, whatever number of processes made it."""
        if not tensors:
            return
        self._begin_moments()
        counts = {int(tensors[key]) for key in tensors if key.endswith(":step")}
        for name, parameter in trained_parameters(self.model).items():
            for moment in MOMENTS:
                value = tensors[f"{name}:{moment}"].to(parameter.device)
                if self.stage < 3:
                    self._library.utils.safe_set_full_optimizer_state(parameter, value, moment)
                else:
                    part = self._own_part(parameter, value)
                    self._library.utils.safe_set_local_optimizer_state(parameter, part, moment)
        for state in self._states():
            step = state["step"]
            state["step"] = torch.full_like(step, max(counts)) if isinstance(step, Tensor) else max(counts)
        if self.offloads:
            self._count_up(max(counts))

    def _count_up(self, count: int) -> None:
        """Have DeepSpeed's Adam on the CPU count as many updates, of nothing.

        It multiplies the powers of beta from one update to the next and keeps them to itself. Computed at once they
        differ in the last bit, and so would the run.
        """
        inner = self.engine.optimizer.optimizer
        group, nothing = inner.param_groups[0], [torch.zeros(1) for _ in range(4)]
        options = (group["lr"], *group["betas"], group["eps"], 0.0, group["bias_correction"])
        for number in range(1, count + 1):
            inner.ds_opt_adam.adam_update(inner.opt_id, number, *options, *nothing)

    def _states(self) -> list[dict[str, Any]]:
        return list(self.engine.optimizer.optimizer.state.values())

    def _begin_moments(self) -> None:
        """Make the moments of an optimizer that has made no update, and let DeepSpeed find them."""
        divided = self.engine.optimizer
        flats = divided.fp32_partitioned_groups_flat if self.stage == 3 else divided.single_partition_of_fp32_groups
        for flat in flats:
            if not divided.optimizer.state.get(flat):
                divided.optimizer.state[flat] = {
                    "step": 0 if self.offloads else torch.tensor(0.0),
                    **{moment: torch.zeros_like(flat) for moment in MOMENTS},
                }
        if self.stage < 3:
            divided._lazy_init_hp_params_optimizer_state()


@contextmanager
def _named_local_rank() -> Iterator[None]:
    """``LOCAL_RANK`` is there, which DeepSpeed reads also where no launcher was; others would take it for one."""
    is_ours = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop("LOCAL_RANK", None)


def _deepspeed(device: torch.device) -> Any:
    """The library, quiet. Raises ConfigError if it is not installed or cannot be loaded."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with _named_local_rank():
            library = importlib.import_module("deepspeed")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"policy.parallel is deepspeed, and DeepSpeed cannot be loaded ({error}). Run `pip install "
            f"'oncurve[deepspeed]'`, or set policy.parallel to fsdp, which needs nothing"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return library
