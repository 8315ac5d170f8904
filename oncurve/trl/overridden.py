"""Parts of TRL's trainer that nothing here calls or reads: refused when a script replaces, sets or asks for them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from transformers import Trainer as TransformersTrainer

from oncurve.core.errors import ConfigError
from oncurve.trl.options import table
from oncurve.wording import listed

OF_TRL = (
    "_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions", "_generate_single_turn",
    "_get_per_token_logps", "_get_per_token_logps_and_entropies",
    "_get_tool_suffix_ids", "_log_completion_extra", "_move_model_to_vllm",
    "_prepare_inputs", "_tokenize_prompts", "_tool_call_loop", "get_gamma_weights", "get_high_entropy_mask",
    "get_off_policy_mask", "split_tensor_dict", "compute_liger_loss",
)  # fmt: skip
"""Methods of GRPOTrainer, of this version or an earlier one, beside those of transformers' Trainer."""
ATTRIBUTES = (
    "_async_tool_dicts", "_batch_environments", "_buffered_inputs", "_current_train_step_time", "_dist",
    "_entropy_bonus_enabled", "_entropy_window_stats", "_env_tools", "_environment_pool", "_has_async_funcs",
    "_image_pad_token_id", "_is_vlm", "_last_loaded_step", "_last_world_entropy", "_logs", "_metrics",
    "_multi_environment", "_pending_extra_logs", "_pending_metrics", "_standalone_tools", "_step", "_sync_tool_dicts",
    "_tokenizer", "_total_train_tokens", "_video_pad_token_id", "aux_loss_enabled", "beta", "chat_template",
    "chat_template_kwargs", "continuous_batching_config", "entropy_coef", "environment_factories", "environments",
    "eos_token_ids", "epsilon_high", "epsilon_low", "generation_config", "generation_kwargs",
    "importance_sampling_level", "log_completions", "log_multimodal", "log_unique_prompts", "loss_type",
    "mask_truncated_completions", "max_completion_length", "max_prompt_length", "max_tool_calling_iterations", "min_p",
    "multi_objective_aggregation", "num_completions_to_print", "num_generations", "num_generations_eval",
    "num_iterations", "off_policy_mask_threshold", "pad_to_multiple_of", "ref_model", "repetition_penalty",
    "reward_processing_classes", "reward_weights", "rollout_func", "router_aux_loss_coef", "scale_rewards",
    "shuffle_dataset", "temperature", "tools", "top_entropy_quantile", "top_k", "top_p", "use_adaptive_entropy",
    "use_transformers_continuous_batching", "use_vllm", "vllm_client", "vllm_generation",
    "vllm_gpu_memory_utilization", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_mode", "vllm_tensor_parallel_size",
)  # fmt: skip
"""Attributes of GRPOTrainer beside those of transformers' Trainer."""
CALLED = (
    "log", "evaluate", "save_model", "train", "push_to_hub", "create_model_card", "__init__", "create_optimizer",
    "create_scheduler", "compute_loss", "_compute_loss", "_generate_and_score_completions", "_calculate_rewards",
    "_prepare_inputs", "predict", "hyperparameter_search", "get_num_trainable_parameters", "get_learning_rates",
)  # fmt: skip
"""Methods that are called here as in TRL, or by nothing in either, so that a subclass may replace them."""
WHY = "Say it in GRPOConfig or as a reward, or write the loop yourself with oncurve's verbs (docs/python.md)"
_ROWS = "rows are taken by their place: put them in the order of training, with GRPOConfig(shuffle_dataset=False)"
_MEASURED = "replace evaluate, which samples, measures and logs"
INSTEAD = {
    **dict.fromkeys(("get_train_dataloader", "_get_train_sampler", "_get_dataloader", "data_collator"), _ROWS),
    **dict.fromkeys(("evaluation_loop", "prediction_step", "get_eval_dataloader", "_get_eval_sampler"), _MEASURED),
    "training_step": "replace compute_loss, which sees every loss, or take a callback's on_pre_optimizer_step, where "
    "the gradients are there, and on_step_end",
    "optimizer_step": "take a callback's on_pre_optimizer_step and on_optimizer_step",
    "_save_checkpoint": "replace save_model, or take a callback's on_save",
    "create_optimizer_and_scheduler": "replace create_optimizer and create_scheduler",
    "_maybe_log_save_evaluate": "replace log, save_model and evaluate, or take a callback",
    "_inner_training_loop": "replace train, or take callbacks",
}
"""The remedy for each method that is not called."""


class NotHere(ConfigError, AttributeError):
    """Something of TRL's trainer that there is none of here."""


@cache
def of_trl() -> frozenset[str]:
    """Every name that TRL's trainer has, but those that any object has."""
    assigned = re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(TransformersTrainer))
    return frozenset({*OF_TRL, *ATTRIBUTES, *dir(TransformersTrainer), *assigned} - set(dir(object)) - {"__init__"})


def refuse_overridden(kind: type, base: type) -> None:
    """Raises ConfigError for a subclass that replaces a method which is never called here."""
    bodies = [vars(parent) for parent in kind.__mro__[: kind.__mro__.index(base)]]
    replaced = sorted({name for body in bodies for name in body if name in of_trl() and name not in CALLED})
    replaced = [name for name in replaced if not name.startswith("__")]
    if replaced:
        raise ConfigError(
            f"{kind.__name__} replaces {listed(replaced)} of TRL's GRPOTrainer, which nothing calls here. "
            f"{instead_of(replaced)}"
        )


def instead_of(names: Iterable[str]) -> str:
    """The remedies for methods that are not called here, as one text."""
    return ". ".join(dict.fromkeys(f"For {name}: {INSTEAD[name]}" if name in INSTEAD else WHY for name in names))


class TrlNames(type):
    """Says of a name of TRL's trainer that is asked of the class that there is none; remembers what the class had."""

    own: dict[str, Any]

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        cls.own = dict(vars(cls))

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments by name, as in TRL."""
        own = inspect.signature(vars(cls).get("__init__", cls.__init__))
        return own.replace(parameters=list(own.parameters.values())[1:])

    def __call__(cls, *args: Any, **named: Any) -> Any:
        """The trainer; one made by a script of Unsloth may be given its tokenizer under that name."""
        if "tokenizer" in named and "unsloth" in sys.modules and "tokenizer" not in cls.__signature__.parameters:
            tokenizer = named.pop("tokenizer")
            named.setdefault("processing_class", tokenizer)
        return super().__call__(*args, **named)

    def __getattr__(cls, name: str) -> Any:
        """Raises NotHere."""
        raise _missing(f"{cls.__name__}.{name}", name, cls)

    def refuse_patched(cls) -> None:
        """Raises ConfigError for methods that a script put on the class after it was made, and that nothing calls."""
        for kind in cls.__mro__:
            if not isinstance(kind, TrlNames):
                continue
            now = {name: value for name, value in vars(kind).items() if kind.own.get(name) is not value}
            patched = sorted(name for name in now if name in of_trl() and name not in CALLED and name[:2] != "__")
            if patched:
                raise ConfigError(
                    f"the script replaces {listed(patched)} of {kind.__name__}, which nothing calls here. "
                    f"{instead_of(patched)}"
                )


class TrlAttributes(metaclass=TrlNames):
    """An object with TRL's attributes: options can be read, and what would change nothing cannot be set."""

    args: Any
    _is_made = False

    def __getattr__(self, name: str) -> Any:
        """An option of the configuration, as TRL's trainer keeps it. Raises NotHere for what there is none of."""
        args = vars(self).get("args")
        known = {"epsilon_low": "epsilon"}.get(name, name)
        if args is not None and name in ATTRIBUTES and known in table():
            value = vars(args)[known]
            return vars(args)["epsilon"] if name == "epsilon_high" and value is None else value
        raise _missing(f"{type(self).__name__} object: {name}", name, type(self))

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ConfigError for what TRL's trainer would read and nothing here does."""
        is_own = name in vars(self) or inspect.isdatadescriptor(inspect.getattr_static(type(self), name, None))
        if self._is_made and not is_own and name in of_trl() and name not in CALLED:
            where = f"Set it in GRPOConfig({name}=...)" if name in table() else instead_of([name])
            raise ConfigError(f"trainer.{name} is set by the script, and nothing here reads it. {where}")
        object.__setattr__(self, name, value)


def _missing(owner: str, name: str, kind: type) -> AttributeError:
    if name not in of_trl():
        return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
    return NotHere(f"{owner} is TRL's, and oncurve's trainer has none. {instead_of([name])}")
