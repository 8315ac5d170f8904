"""DeepSpeed's file: read, filled in from the recipe, and refused where the two contradict each other.

What DeepSpeed and the recipe both set is taken from the recipe, and a file that says otherwise is refused: two numbers
for one thing are how sweeps go wrong.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import AUTO, ZeroSettings, section_of

DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 2}}
"""The file of a recipe that names none."""
_OURS = ("scheduler", "train_batch_size", "comms_logger", "flops_profiler", "autotuning", "elasticity", "pipeline")
"""Sections that are the recipe's business, or that change what an update is; only "auto" may stand there."""


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
    zero = dict(section_of(config, "zero_optimization", settings.source))
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
        setting = config.pop(name, {})
        if setting != AUTO and section_of({name: setting}, name, source).get("enabled") is True:
            raise ConfigError(
                f"{source}: {name}.enabled is true, which keeps weights in half precision, where small updates are "
                f"lost. Write auto, and set policy.compute_type, which is for the arithmetic"
            )


def _agree(section: dict[str, Any], key: str, value: float, source: str) -> None:
    if section.get(key, AUTO) not in (AUTO, value):
        raise ConfigError(f"{source}: {key} is {section[key]!r}, and the recipe says {value}. Write auto there")


def _agree_on_optimizer(settings: Any, optimizer: OptimizerSettings, source: str) -> None:
    section = section_of({"optimizer": settings}, "optimizer", source)
    if section.get("type", "AdamW") not in ("Adam", "AdamW"):
        raise ConfigError(f"{source}: optimizer.type is {section['type']!r}; the recipe trains with AdamW")
    params = dict(section_of(section, "params", source))
    known = optimizer.adam_options | {"betas": list(optimizer.betas), "weight_decay": optimizer.weight_decay}
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
