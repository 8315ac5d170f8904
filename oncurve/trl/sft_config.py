"""SFTConfig: every option of TRL's, those that GRPOConfig has as well by the same table."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainingArguments

from oncurve.convert.options import Option, older, table
from oncurve.errors import ConfigError, did_you_mean
from oncurve.trl.grpo_config import _ConfigMethods, _Dating, _fields, _plain

OWN_DEFAULTS = {"learning_rate": 2e-5, "loss_type": "nll", "shuffle_dataset": False, "remove_unused_columns": True}
"""Options that GRPOConfig has with other defaults."""
COMPUTED = (
    "assistant_only_loss", "chat_template_path", "completion_only_loss", "dataset_text_field", "eos_token",
    "max_length", "packing",
)  # fmt: skip
"""Options of SFTConfig alone that say which tokens are learned."""
_IDLE = "It changes how fast TRL is, not what is learned."
_SFT_ALONE: tuple[Option, ...] = (
    Option("completion_only_loss", None, "computed"),
    Option("assistant_only_loss", False, "computed"),
    Option("dataset_text_field", "text", "computed"),
    Option("max_length", 1024, "computed"),
    Option("packing", False, "computed"),
    Option("eos_token", None, "computed"),
    Option("chat_template_path", None, "computed"),
    Option("packing_strategy", "bfd", "nothing", why="Rows are never cut, whatever is packed."),
    Option("padding_free", False, "nothing", why=_IDLE),
    Option("eval_packing", None, "nothing", why=_IDLE),
    Option("dataset_num_proc", None, "nothing", why=_IDLE),
    Option("activation_offloading", False, "nothing", why=_IDLE),
    Option("pad_token", None, "nothing", why="There is no padding that a token is needed for."),
    Option("dataset_kwargs", None, "unsupported", why="Rows are prepared here, from text or messages."),
    Option("truncation_mode", "keep_start", "nothing", why="Longer rows are left out and counted, not cut."),
)
_OLDER = {"max_seq_length": "max_length"}
_GONE = ("dataset_batch_size", "num_of_sequences", "chars_per_token", "use_liger")
"""Names that SFTConfig had before and that say nothing here."""


def sft_options() -> dict[str, Option]:
    """Every option of SFTConfig by name, with its own default."""
    theirs = {each.name for each in dataclasses.fields(TrainingArguments)}
    theirs |= {
        "model_init_kwargs",
        "trust_remote_code",
        "router_aux_loss_coef",
        "shuffle_dataset",
        "pad_to_multiple_of",
    }
    shared = [
        dataclasses.replace(option, default=OWN_DEFAULTS.get(name, option.default))
        for name, option in table().items()
        if name in theirs | {"loss_type", "pad_to_multiple_of"}
    ]
    return {option.name: option for option in (*shared, *_SFT_ALONE)}


class _Names(_Dating):
    """Makes a configuration also from names that SFTConfig had before."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """The configuration. Raises ConfigError for names that no version had."""
        fields = {each.name for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in [name for name in options if name not in fields]:
            old = older().get(name)
            now = _OLDER.get(name) or (old.now if old else None) or ("warmup_steps" if name == "warmup_ratio" else None)
            if now is None and old is None and name not in _GONE:
                hint = did_you_mean(name, [*fields, *_OLDER])
                raise ConfigError(f"SFTConfig has no option {name!r}. {hint}".rstrip())
            value = options.pop(name)
            if now in fields:
                options.setdefault(str(now), value)
        return type.__call__(cls, *args, **options)


class _SftMethods(_ConfigMethods, metaclass=_Names):
    """What scripts ask a configuration of TRL besides its options."""

    def options(self) -> dict[str, Any]:
        """Every option that differs from TRL's default."""
        plain = {name: _plain(vars(self)[name]) for name in sft_options()}
        changed = {name: value for name, value in plain.items() if value != sft_options()[name].default}
        if plain["bf16"] is True:
            changed.pop("bf16")
        return changed


def _own_fields() -> list[tuple[str, Any, Any]]:
    """Those of GRPOConfig that SFTConfig has, and its own."""
    kinds = {"completion_only_loss": bool | None, "max_length": int | None, "eval_packing": bool | None,
             "dataset_num_proc": int | None, "dataset_kwargs": dict | str | None}  # fmt: skip
    known = sft_options()
    found = [
        (name, kind, dataclasses.field(default=OWN_DEFAULTS[name]) if name in OWN_DEFAULTS else default)
        for name, kind, default in _fields()
        if name in known
    ]
    for option in _SFT_ALONE:
        kind = kinds.get(option.name, str | None if option.default is None else type(option.default))
        found.append((option.name, kind, dataclasses.field(default=option.default)))
    return found


SFTConfig: Any = dataclasses.make_dataclass(
    "SFTConfig", _own_fields(), bases=(_SftMethods,), namespace={"__module__": __name__}
)
SFTConfig.__doc__ = "The options of TRL's SFTConfig, and names that it had before."
