"""GRPOConfig: every option of TRL's, read from the table of the converter."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
from enum import Enum
from functools import wraps
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames, ParallelMode

from oncurve.core.errors import ConfigError
from oncurve.trl.conversion import OPTIMIZERS
from oncurve.trl.options import older, raw_table, table
from oncurve.trl.processes import ProcessState
from oncurve.trl.settings import SETTINGS
from oncurve.trl.versions import Dated, date
from oncurve.wording import did_you_mean

TYPES: dict[str, Any] = {
    "bool": bool | None,
    "int": int | None,
    "float": float | None,
    "dict": dict | str | None,  # type: ignore[type-arg]
    "list": list[str] | None,
    "floats": list[float] | None,
}


SIZES = ("steps_per_generation", "generation_batch_size")
OF_ACCELERATE: dict[str, Any] = {
    "deepspeed": None, "fsdp": None, "tf32": None, "torch_compile": False, "torch_compile_backend": None,
    "torch_compile_mode": None, "use_cpu": True,
}  # fmt: skip
"""Options by which transformers prepares accelerate and the device, with values by which it prepares nothing: training
is not accelerate's here, and a script for a GPU also runs on a CPU, where transformers refuses bfloat16."""


@dataclasses.dataclass(frozen=True)
class Derived:
    """An option that is filled in, or written in another way, when a configuration is made."""

    provided: Any
    """The value before."""
    value: Any
    """The value since."""


@dataclasses.dataclass(frozen=True)
class Past:
    """State of a configuration besides its options; `dataclasses.replace` hands it to the new one."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Names that TRL had before."""
    dated: Dated | None = None
    derived: dict[str, Derived] = dataclasses.field(default_factory=dict)
    """Options that were filled in."""


class _Dating(type):
    """Makes a configuration also from names that TRL had before, with the defaults of their time."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The options by name, as in TRL: scripts keep only those that they find here."""
        own = list(inspect.signature(vars(cls).get("__init__", cls.__init__)).parameters.values())[1:]
        return inspect.Signature([parameter for parameter in own if parameter.name != "older_names"])

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """The configuration. Raises ConfigError for names that no version had."""
        version = options.pop("trl_version", None) or SETTINGS.version
        before = options.pop("older_names", None) or Past()
        fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        named = {**dict(zip((field.name for field in dataclasses.fields(cls)), args, strict=False)), **options}  # type: ignore[arg-type]
        unknown = [name for name in options if name not in fields and name not in older()]
        if unknown:
            known = [*fields, *older()]
            lines = [f"GRPOConfig has no option {name!r}. {did_you_mean(name, known)}".rstrip() for name in unknown]
            raise ConfigError("\n".join(lines))
        for name, derived in before.derived.items():  # follows anew from what `dataclasses.replace` changes
            if options.get(name) == derived.value:
                options[name] = derived.provided
        dated = before.dated or date(named, version)
        past = before.values | {name: options.pop(name) for name in list(options) if name not in fields}
        if dated is not None and dated is not before.dated:
            for name, value in dated.defaults.items():
                if name in fields:
                    options.setdefault(name, value)
                else:
                    past.setdefault(name, value)
        for name in list(past):
            now = older()[name].now or ("warmup_steps" if name == "warmup_ratio" else None)
            if now in fields:
                options.setdefault(str(now), past.pop(name))
        made = super().__call__(*args, **options)
        for name, value in past.items():
            setattr(made, name, value)
        made.dated, made.older_names = dated, Past(past, dated, made.derived)
        return made


class _ConfigMethods(TrainingArguments, metaclass=_Dating):
    """Methods of TRL's configuration besides its options: those of transformers' TrainingArguments."""

    dated: Dated | None = None
    """The time of the script, where its options tell."""
    derived: ClassVar[dict[str, Derived]] = {}
    """Options that transformers and TRL fill in when a configuration is made."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass of a script may have a ``__post_init__`` that knows nothing of ``older_names``."""
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("__post_init__")
        if own is not None:
            cls.__post_init__ = wraps(own)(lambda self, _=None, *more: own(self, *more))  # type: ignore[method-assign]

    def __post_init__(self, older_names: Past | None = None) -> None:
        """Fill in what follows from other options, as transformers and TRL do.

        Raises ConfigError, which is a ValueError, for what transformers refuses.
        """
        values = vars(self)
        for name in (*raw_table()["types"]["dict"], "dataset_kwargs"):
            value = values.get(name)
            if isinstance(value, str) and value.startswith("{"):  # JSON, as on a command line
                setattr(self, name, json.loads(value))
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if values[name] is False:  # a bare no in YAML
                setattr(self, name, "no")
        if isinstance(values["scale_rewards"], bool):
            self.scale_rewards = "group" if values["scale_rewards"] else "none"
        for name in ("checkpointing", "checkpointing_kwargs"):  # the newer name of transformers counts
            if values[f"activation_{name}"] is not None:
                setattr(self, f"gradient_{name}", values[f"activation_{name}"])
        provided = dict(values)
        if values["bf16"] is None:
            self.bf16 = not values["fp16"]
        if values["pad_to_multiple_of"] == "auto":
            self.pad_to_multiple_of = None  # for a kind of device that is not trained on here
        self._derive_as_transformers()
        self._derive_sizes()
        filled = {name: Derived(was, values[name]) for name, was in provided.items() if plain(values[name]) != was}
        filled.pop("output_dir", None)  # the folder that runs are written to
        self.derived = filled  # type: ignore[misc]

    def _derive_as_transformers(self) -> None:
        """All that TrainingArguments derives, but for the device and accelerate."""
        values = vars(self)
        aside = {name: values[name] for name in (*OF_ACCELERATE, "dataloader_pin_memory")}
        if values["optim"] in OPTIMIZERS and values["optim"] not in set(OptimizerNames):  # of an earlier transformers
            aside["optim"] = values["optim"]
        values.update(OF_ACCELERATE, optim="adamw_torch" if "optim" in aside else values["optim"])
        for name in ("checkpointing", "checkpointing_kwargs"):  # without the warning that the older name is the older
            values[f"activation_{name}"] = values[f"gradient_{name}"]
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(f"GRPOConfig: {error}") from None
        finally:
            values.update(aside)
        if values["report_to"] == [None]:  # of a parser that was given none
            self.report_to = []

    def _derive_sizes(self) -> None:
        """The size of a generation batch both ways, as TRL fills it in."""
        values = vars(self)
        if "unsloth" in sys.modules and not any(values[name] for name in SIZES):
            self._fill_as_unsloth()
        forward = values["per_device_train_batch_size"] * self.world_size
        if values["generation_batch_size"] is None:
            passes = values["steps_per_generation"] or values["gradient_accumulation_steps"]
            self.steps_per_generation, self.generation_batch_size = passes, forward * passes
        elif values["steps_per_generation"] is None and forward:
            self.steps_per_generation = values["generation_batch_size"] // forward

    def _fill_as_unsloth(self) -> None:
        """One group for each device where the batch holds no whole number of groups, as Unsloth's configuration has."""
        values = vars(self)
        size, group = values["per_device_train_batch_size"], values["num_generations"]
        if group and size * values["gradient_accumulation_steps"] * self.world_size % group:
            sys.stdout.write(f"note: unsloth: per_device_train_batch_size is {group}, not {size}, as with Unsloth\n")
            self.per_device_train_batch_size = group

    def options(self) -> dict[str, Any]:
        """Every option that differs from TRL's default, and names of earlier versions."""
        now = {name: plain(vars(self)[name]) for name in table()}
        unchanged = {name: derived for name, derived in self.derived.items() if now.get(name) == plain(derived.value)}
        values = now | {name: plain(derived.provided) for name, derived in unchanged.items()}
        changed = {name: values[name] for name, option in table().items() if values[name] != option.default}
        if values["bf16"] is True:
            changed.pop("bf16")  # as it is unless something else is said
        passes, follows = now["steps_per_generation"], all(name in unchanged and values[name] is None for name in SIZES)
        if follows and passes != now["gradient_accumulation_steps"]:
            changed["steps_per_generation"] = passes  # accumulation was changed later, and in TRL this stays
        return {**changed, **{name: value for name, value in vars(self).items() if name in older()}}

    def to_dict(self) -> dict[str, Any]:
        """Every option by its name; what looks like a token is not shown."""
        values = {field.name: plain(vars(self)[field.name]) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: f"<{name.upper()}>" if name.endswith("_token") else value for name, value in values.items()}

    to_sanitized_dict = to_dict

    def to_json_string(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return torch.device("cpu" if vars(self)["use_cpu"] or not torch.cuda.is_available() else "cuda")

    @property
    def n_gpu(self) -> int:
        """GPUs of this process."""
        return int(self.device.type == "cuda")

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several processes train together."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def distributed_state(self) -> ProcessState:
        """This process among all, as accelerate says it."""
        return ProcessState(self.device)

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.distributed_state.num_processes

    @property
    def process_index(self) -> int:
        """This process among all."""
        return self.distributed_state.process_index

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine."""
        return self.distributed_state.local_process_index

    @property
    def should_log(self) -> bool:
        """This process speaks."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """This process writes."""
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        """Completions of a device in one pass."""
        return vars(self)["per_device_train_batch_size"]

    @property
    def eval_batch_size(self) -> int:
        """The same in evaluation."""
        return vars(self)["per_device_eval_batch_size"]

    def get_process_log_level(self) -> int:
        """The level of messages of this process."""
        levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
        return levels.get(str(vars(self)["log_level"]), logging.WARNING)

    def main_process_first(self, local: bool = True, desc: str = "work") -> Any:
        """The first process does it before the others do."""
        return self.distributed_state.main_process_first()


def plain(value: Any) -> Any:
    """A value without the enumeration around it."""
    return value.value if isinstance(value, Enum) else value


def _fields() -> list[tuple[str, Any, Any]]:
    """Name, type and default of every option, output_dir first."""
    types = {name: TYPES[kind] for kind, names in raw_table()["types"].items() for name in names}
    options = []
    for name in ("output_dir", *(name for name in table() if name != "output_dir")):
        default = table()[name].default
        kind = types.get(name, str | None if default is None else type(default))
        if isinstance(default, list):
            options.append((name, kind, dataclasses.field(default_factory=lambda value=default: list(value))))
        else:
            options.append((name, kind, dataclasses.field(default=default)))
    return options


GRPOConfig: Any = dataclasses.make_dataclass(
    "GRPOConfig",
    [*_fields(), ("older_names", dataclasses.InitVar[Any], None)],
    bases=(_ConfigMethods,),
    namespace={"__module__": __name__},
)
GRPOConfig.__doc__ = "The options of TRL's GRPOConfig, and names that it had before."
