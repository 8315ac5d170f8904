"""Methods of TRL's trainer that a subclass replaces, although nothing here calls them."""

from __future__ import annotations

from transformers import Trainer as TransformersTrainer

from oncurve.errors import ConfigError, listed

OF_TRL = (
    "_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions", "_generate_single_turn",
    "_get_per_token_logps", "_get_per_token_logps_and_entropies",
    "_get_tool_suffix_ids", "_log_completion_extra", "_move_model_to_vllm",
    "_prepare_inputs", "_tokenize_prompts", "_tool_call_loop", "get_gamma_weights", "get_high_entropy_mask",
    "get_off_policy_mask", "split_tensor_dict", "compute_liger_loss",
)  # fmt: skip
"""Methods of GRPOTrainer, of this version or an earlier one, beside those of transformers' Trainer."""
CALLED = ("log", "evaluate", "save_model", "train", "__init__")
"""What is called here as there, so that a subclass may replace it."""


def refuse_overridden(kind: type, base: type) -> None:
    """Raises ConfigError for a subclass that replaces a method which is never called here."""
    theirs = {*OF_TRL, *dir(TransformersTrainer)} - set(dir(object)) - set(CALLED)
    bodies = [vars(each) for each in kind.__mro__[: kind.__mro__.index(base)]]
    replaced = sorted({name for body in bodies for name in body if name in theirs and name != "__module__"})
    if replaced:
        raise ConfigError(
            f"{kind.__name__} replaces {listed(replaced)} of TRL's GRPOTrainer, which nothing calls here. Say it as a "
            f"recipe's algorithm or a reward, or write the loop yourself with oncurve's verbs (docs/python.md)"
        )
