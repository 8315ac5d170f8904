"""DeepSpeed ZeRO backend, the only door to DeepSpeed.

ZeRO, arXiv:1910.02054: stage 1 divides the moments, 2 the gradients as well, 3 the weights as well; each may leave the
moments to the CPU. What DeepSpeed and the recipe both set is taken from the recipe, and a file that says otherwise is
refused: two numbers for one thing are how sweeps go wrong.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from oncurve.errors import ConfigError
from oncurve.policy.distributed import join_alone

if TYPE_CHECKING:
    from oncurve.policy.distributed import Processes
    from oncurve.settings import OptimizerSettings

AUTO = "auto"
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 2}}
"""The file of a recipe that names none."""
_OURS = ("scheduler", "train_batch_size", "comms_logger", "flops_profiler", "autotuning", "elasticity", "pipeline")
"""Sections that are the recipe's business, or that change what an update is; only "auto" may stand there."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What the file of DeepSpeed says, and the recipe beside it."""

    config: Mapping[str, Any]
    source: str = "the default"
    """Where it was read, for messages."""
    offload: bool = False
    """Moments in the CPU's memory where the file does not say."""

    @property
    def stage(self) -> int:
        """1, 2 or 3. Raises ConfigError for anything else."""
        found = _section(self.config, "zero_optimization", self.source).get("stage", 2)
        if found == AUTO:
            return 2
        if found not in (1, 2, 3):
            raise ConfigError(f"{self.source}: zero_optimization.stage is {found!r}; use 1, 2 or 3")
        return found


def read_settings(path: str | None, *, offload: bool) -> ZeroSettings:
    """The settings of a JSON file; ZeRO-2 without one. Raises ConfigError for a file that cannot be read."""
    if path is None:
        return ZeroSettings(DEFAULT, offload=offload)
    try:
        config = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.deepspeed: {path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"policy.deepspeed: {path} holds a {type(config).__name__}, not a JSON object")
    return ZeroSettings(config, str(path), offload)


def _section(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{source}: {name} is {found!r}; it must be an object")
    return found


def resolve(
    settings: ZeroSettings, optimizer: OptimizerSettings, *, hidden_size: int, half: bool, world_size: int
) -> dict[str, Any]:
    """The file with every "auto" filled in from the recipe and the model.

    One call of ``step`` is one update, after as many backward passes as there were microbatches.

    Raises ConfigError for values that contradict the recipe, and for sections that would change what an update is.
    """
    config: dict[str, Any] = copy.deepcopy(dict(settings.config))
    _refuse_others(config, settings.source)
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": float(optimizer.max_gradient_norm),
    }
    for key, value in own.items():
        _agree(config, key, value, settings.source)
    _agree_on_optimizer(config.pop("optimizer", {}), optimizer, settings.source)
    zero = dict(_section(config, "zero_optimization", settings.source))
    zero["stage"] = settings.stage
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero |= {key: size for key, size in sizes.items() if zero.get(key) == AUTO}
    if settings.offload:
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    config |= own | {
        "train_batch_size": world_size,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if half:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if rest := _autos(config):
        raise ConfigError(f'{settings.source}: nobody knows what "auto" means for {rest[0]}. Give it a value')
    return config


def _refuse_others(config: dict[str, Any], source: str) -> None:
    for name in _OURS:
        if name in config and config[name] != AUTO and not (name == "scheduler" and not _numbers(config[name])):
            raise ConfigError(f"{source}: {name} is the recipe's to say. Leave it out of the file, or write auto")
        config.pop(name, None)
    for name in ("fp16", "bf16", "bfloat16"):
        found = config.pop(name, {})
        if found != AUTO and _section({name: found}, name, source).get("enabled") is True:
            raise ConfigError(
                f"{source}: {name}.enabled is true, which keeps weights in half precision, where small updates are "
                f"lost. Write auto, and set policy.compute_type, which is for the arithmetic"
            )


def _agree(found: dict[str, Any], key: str, value: float, source: str) -> None:
    if found.get(key, AUTO) not in (AUTO, value):
        raise ConfigError(f"{source}: {key} is {found[key]!r}, and the recipe says {value}. Write auto there")


def _agree_on_optimizer(found: Any, optimizer: OptimizerSettings, source: str) -> None:
    section = _section({"optimizer": found}, "optimizer", source)
    if section.get("type", "AdamW") not in ("Adam", "AdamW"):
        raise ConfigError(f"{source}: optimizer.type is {section['type']!r}; the recipe trains with AdamW")
    params = dict(_section(section, "params", source))
    known = {
        "lr": optimizer.learning_rate,
        "betas": list(optimizer.betas),
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }
    for key in params:
        if key not in known:
            raise ConfigError(f"{source}: optimizer.params.{key} is not known. Use {', '.join(known)}")
        if params[key] not in (AUTO, known[key]):
            value = params[key]
            raise ConfigError(
                f"{source}: optimizer.params.{key} is {value!r}, and the recipe says {known[key]}. Write auto there"
            )


def _numbers(section: Any) -> bool:
    """Something in a section is set, and not left to us."""
    values = section.get("params", {}).values() if isinstance(section, Mapping) else [section]
    return any(value != AUTO for value in values)


def _autos(tree: Any, prefix: str = "") -> list[str]:
    if isinstance(tree, Mapping):
        return [name for key, value in tree.items() for name in _autos(value, f"{prefix}.{key}" if prefix else key)]
    return [prefix] if tree == AUTO else []


class Zero:
    """A module in training under DeepSpeed. Gradients are summed over the processes, not averaged."""

    def __init__(
        self,
        scorer: nn.Module,
        head: nn.Parameter | None,
        settings: ZeroSettings,
        optimizer: OptimizerSettings,
        processes: Processes,
        *,
        hidden_size: int,
        half: bool,
    ) -> None:
        """``head`` is a weight that is read as a matrix, so that DeepSpeed does not see its layer called.

        Raises ConfigError if DeepSpeed is not installed, does not take the file, or cannot build its optimizer.
        """
        device = next(scorer.parameters()).device
        self._library = _deepspeed(device)
        if processes.count == 1:
            join_alone(device)
        self.processes, self.stage, self.source = processes, settings.stage, settings.source
        config = resolve(settings, optimizer, hidden_size=hidden_size, half=half, world_size=processes.count)
        self.offloads = config["zero_optimization"].get("offload_optimizer", {}).get("device") in ("cpu", "nvme")
        self._may_move = True
        self.engine: Any = None
        trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        try:
            self.engine, *_ = self._library.initialize(
                model=scorer,
                optimizer=self._make_optimizer(trained, optimizer),
                config=config,
                dist_init_required=False,
            )
        except (ValueError, AssertionError, TypeError, KeyError) as error:
            said = " ".join(str(error).split())[:600]
            raise ConfigError(f"{settings.source}: DeepSpeed does not take it: {said}") from None
        scorer.eval()
        if self.stage == 3 and head is not None:
            self._library.zero.register_external_parameter(scorer, head)

    def _make_optimizer(self, trained: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
        """AdamW that stands still where the whole gradient is zero: momentum alone must not move the weights."""
        common = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
        common |= {"weight_decay": settings.weight_decay}
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
            return Gated(trained, **common)
        except (*unbuildable, RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
            said = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{self.source}: DeepSpeed cannot build its Adam for the CPU ({type(error).__name__}: {said}). "
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

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """All of a weight, which all processes must ask for."""
        if not parameter.requires_grad:
            return self._frozen(parameter)
        found = self._library.utils.safe_get_full_fp32_param(parameter)
        return parameter.detach() if found is None else found.detach().view(self.full_shape(parameter))

    def _frozen(self, parameter: nn.Parameter) -> Tensor:
        if self.stage < 3:
            return parameter.detach()
        with self._library.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """The shape of all of a weight, of which this process may have a part."""
        return parameter.ds_shape if self.stage == 3 else parameter.shape  # type: ignore[attr-defined]

    def load_shard(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Put values into a weight and its master copy."""
        values, place = values.to(parameter.device), self._library.utils
        with torch.no_grad():
            if self.stage < 3:
                parameter.copy_(values)
                place.safe_set_full_fp32_param(parameter, values)
                return
            part = self._own_part(parameter, values)
            parameter.ds_tensor.copy_(part)  # type: ignore[attr-defined]
            place.safe_set_local_fp32_param(parameter, part)
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

    def load_moments(self, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
        """The moments of a checkpoint, whatever number of processes made it."""
        if not tensors:
            return
        self._begin_moments()
        counts = {int(tensors[key]) for key in tensors if key.endswith(":step")}
        for name, parameter in named.items():
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


def _deepspeed(device: torch.device) -> Any:
    """The library, quiet. Raises ConfigError if it is not installed or cannot be loaded."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # which it reads also where no launcher was
    try:
        library = importlib.import_module("deepspeed")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"policy.parallel is deepspeed, and DeepSpeed cannot be loaded ({error}). Run `pip install "
            f"'oncurve[deepspeed]'`, or set policy.parallel to fsdp, which needs nothing"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return library
