"""TRL's names over oncurve: `from oncurve.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`.

Signatures are those of the version of TRL in ``__version__``, which need not be installed. A script turns into a recipe
and Python objects, and runs like any other run; ``docs/coming_from_trl.md`` says what differs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.16.0"

if TYPE_CHECKING:
    from oncurve.trl.chat import apply_chat_template, is_conversational, maybe_apply_chat_template
    from oncurve.trl.grpo_config import GRPOConfig
    from oncurve.trl.grpo_trainer import GRPOTrainer
    from oncurve.trl.ready_rewards import (
        accuracy_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )
    from oncurve.trl.script_arguments import (
        DatasetMixtureConfig,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_dataset,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from oncurve.trl.settings import accept_lost
    from oncurve.trl.sft_config import SFTConfig
    from oncurve.trl.sft_trainer import SFTTrainer

_HOMES = {
    "DatasetMixtureConfig": "script_arguments",
    "GRPOConfig": "grpo_config",
    "GRPOTrainer": "grpo_trainer",
    "ModelConfig": "script_arguments",
    "SFTConfig": "sft_config",
    "SFTTrainer": "sft_trainer",
    "ScriptArguments": "script_arguments",
    "TrlParser": "script_arguments",
    "accept_lost": "settings",
    "accuracy_reward": "ready_rewards",
    "apply_chat_template": "chat",
    "get_cosine_scaled_reward": "ready_rewards",
    "get_dataset": "script_arguments",
    "get_kbit_device_map": "script_arguments",
    "get_peft_config": "script_arguments",
    "get_quantization_config": "script_arguments",
    "get_repetition_penalty_reward": "ready_rewards",
    "get_soft_overlong_punishment": "ready_rewards",
    "is_conversational": "chat",
    "maybe_apply_chat_template": "chat",
    "reasoning_accuracy_reward": "ready_rewards",
    "think_format_reward": "ready_rewards",
}
"""The module of every name."""

__all__ = [
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "__version__",
    "accept_lost",
    "accuracy_reward",
    "apply_chat_template",
    "get_cosine_scaled_reward",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "is_conversational",
    "maybe_apply_chat_template",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oncurve.trl' has no attribute {name!r}. It has: {', '.join(__all__)}")
    return vars(import_module(f"oncurve.trl.{_HOMES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
