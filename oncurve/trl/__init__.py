"""TRL's names over oncurve: `from oncurve.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`.

Signatures are those of the version of TRL in ``__version__``, which need not be installed. A script turns into a recipe
and Python objects, and runs like any other run; ``docs/coming_from_trl.md`` says what differs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "1.16.0"
_HOMES = {
    "chat": ("apply_chat_template", "is_conversational", "maybe_apply_chat_template"),
    "grpo_config": ("GRPOConfig",),
    "grpo_trainer": ("GRPOTrainer",),
    "ready_rewards": (
        "accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment",
        "reasoning_accuracy_reward", "think_format_reward",
    ),
    "script_arguments": (
        "DatasetMixtureConfig", "ModelConfig", "ScriptArguments", "TrlParser", "get_dataset", "get_kbit_device_map",
        "get_peft_config", "get_quantization_config",
    ),
    "settings": ("accept_lost",),
}  # fmt: skip
"""The names of every module, which is loaded when one of them is asked for."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted([*_MODULES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'oncurve.trl' has no attribute {name!r}. It has: {', '.join(__all__)}")
    return vars(import_module(f"oncurve.trl.{_MODULES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
