"""Losses of TRL as presets of the table of algorithms, with their changes."""

from __future__ import annotations

from typing import Any

from oncurve.algorithm.table import PRESETS
from oncurve.core.errors import ConfigError
from oncurve.trl.draft import Draft
from oncurve.trl.trl_batch import StepShape

TOKEN_LEVEL = {
    "grpo": ("grpo", {"loss": "clipped", "normalize": "sequence_mean"}),
    "bnpo": ("grpo", {"loss": "clipped", "normalize": "token_mean"}),
    "dr_grpo": ("dr_grpo", {"loss": "clipped", "normalize": "constant"}),
    "dapo": ("dapo", {"loss": "clipped", "normalize": "token_mean"}),
    "luspo": ("grpo", {"loss": "clipped", "normalize": "sequence_sum"}),
    "cispo": ("cispo", {"loss": "truncated_importance", "normalize": "token_mean"}),
    "sapo": ("sapo", {"loss": "soft_gated", "normalize": "sequence_mean"}),
    "vespo": ("vespo", {"loss": "sequence_gated", "normalize": "token_mean"}),
}
"""loss_type to a row and its choices, with one ratio for each token."""
SEQUENCE_LEVEL = {
    "grpo": ("gspo", {"loss": "sequence_clipped", "normalize": "sequence_mean"}),
    "bnpo": ("gspo", {"loss": "sequence_clipped", "normalize": "token_mean"}),
    "dr_grpo": ("gspo", {"loss": "sequence_clipped", "normalize": "constant"}),
    "dapo": ("gspo", {"loss": "sequence_clipped", "normalize": "token_mean"}),
    "luspo": ("luspo", {"loss": "sequence_clipped", "normalize": "sequence_sum"}),
    "cispo": ("cispo", {"loss": "sequence_truncated_importance", "normalize": "token_mean"}),
    "sapo": ("sapo", {"loss": "sequence_soft_gated", "normalize": "sequence_mean"}),
    "vespo": TOKEN_LEVEL["vespo"],
}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
SCALED = {"group": "group_std", "batch": "batch_std", "none": "group_mean"}
STD_EPSILON = 1e-4
"""The epsilon that TRL adds to every standard deviation."""
NO_BOUND = 1e6


def put_algorithm(draft: Draft, step: StepShape) -> None:
    """The section ``algorithm``: the row, and every choice in which TRL's settings differ from it."""
    kind, level = draft.ask("loss_type"), draft.ask("importance_sampling_level")
    if kind not in TOKEN_LEVEL or level not in ("token", "sequence"):
        raise ConfigError(
            f"{draft.outcome.source}: loss_type {kind!r} with importance_sampling_level {level!r} is none of TRL's. "
            f"There are: {', '.join(TOKEN_LEVEL)}; token, sequence"
        )
    row, chosen = (SEQUENCE_LEVEL if level == "sequence" else TOKEN_LEVEL)[kind]
    draft.put("algorithm.type", row, "loss_type")
    draft.put("algorithm.group_size", draft.ask("num_generations"), "num_generations")
    names = ("loss_type", "importance_sampling_level")
    choices: dict[str, tuple[Any, tuple[str, ...]]] = {key: (value, names) for key, value in chosen.items()}
    choices |= _advantage(draft) | _bounds(draft, kind) | _kl(draft, step) | _entropy(draft) | _correction(draft, kind)
    choices["off_policy_threshold"] = (draft.ask("off_policy_mask_threshold"), ("off_policy_mask_threshold",))
    for key, (value, sources) in choices.items():
        if value != vars(PRESETS[row])[key]:
            draft.put(f"algorithm.{key}", value, *sources)
    _note_averages(draft, kind, step)


Choices = dict[str, tuple[Any, tuple[str, ...]]]


def _advantage(draft: Draft) -> Choices:
    how, scale = draft.ask("multi_objective_aggregation"), draft.ask("scale_rewards")
    scale = {True: "group", False: "none"}.get(scale, scale)
    if scale not in SCALED or how not in ("sum_then_normalize", "normalize_then_sum"):
        raise ConfigError(f"{draft.outcome.source}: scale_rewards {scale!r} with {how!r} is none of TRL's choices")
    if how == "normalize_then_sum":
        if draft.outcome.num_rewards >= 2:
            names = ("multi_objective_aggregation",)
            return {"advantage": ("multi_objective", names), "std_epsilon": (STD_EPSILON, names)}
        draft.note("unsupported", "multi_objective_aggregation", "it needs two rewards; scale_rewards decides instead")
    choices: Choices = {"advantage": (SCALED[scale], ("scale_rewards",))}
    if scale != "none":
        choices["std_epsilon"] = (STD_EPSILON, ("scale_rewards",))
    return choices


def _bounds(draft: Draft, kind: str) -> Choices:
    low, high, delta = draft.ask("epsilon"), draft.ask("epsilon_high"), draft.ask("delta")
    high = low if high is None else high
    if kind == "cispo":
        name = "epsilon_high" if draft.is_set("epsilon_high") else "epsilon"
        if high < 1:
            draft.note("differs", name, f"with cispo it is the largest ratio: every gradient is scaled down to {high}")
        return {"ratio_max": (float(high), (name,))}
    if kind not in CLIPPED:
        for name in ("epsilon", "epsilon_high", "delta"):
            if draft.is_set(name):
                draft.note("nothing", name, f"{kind} clips nothing, in TRL neither")
        return {}
    choices: Choices = {"clip_low": (low, ("epsilon",)), "clip_high": (high, ("epsilon_high", "epsilon"))}
    if delta is not None and delta <= 1:
        draft.note("unsupported", "delta", "at 1 or below it takes the gradient of tokens that have not moved yet")
    elif delta is not None:
        choices["ratio_max"] = (delta, ("delta",))
    return choices


def _kl(draft: Draft, step: StepShape) -> Choices:
    if not draft.ask("beta"):
        return {}
    choices: Choices = {
        "kl_coef": (draft.ask("beta"), ("beta",)),
        "kl_estimator": ("k3", ("beta",)),
        "kl_importance": (bool(draft.ask("use_bias_correction_kl")), ("use_bias_correction_kl",)),
    }
    if draft.ask("sync_ref_model"):
        every = max(round(draft.ask("ref_model_sync_steps") / step.updates), 1)
        choices["reference"] = ("average", ("sync_ref_model",))
        choices["reference_every_steps"] = (every, ("ref_model_sync_steps",))
        choices["reference_share"] = (draft.ask("ref_model_mixup_alpha"), ("ref_model_mixup_alpha",))
    elif draft.outcome.lora is not None and not trains_biases(draft):
        choices["reference"] = ("base", ("beta",))
    return choices


def trains_biases(draft: Draft) -> bool:
    """The adapter also changes biases of the base, which is then no reference."""
    bias = (draft.outcome.lora or {}).get("bias")
    return bias not in (None, "none")


def _entropy(draft: Draft) -> Choices:
    choices: Choices = {
        "high_entropy_share": (draft.ask("top_entropy_quantile"), ("top_entropy_quantile",)),
        "entropy_coef": (draft.ask("entropy_coef"), ("entropy_coef",)),
    }
    if draft.ask("top_entropy_quantile") <= 0:
        draft.note("unsupported", "top_entropy_quantile", "a share above 0 is needed; all tokens are trained on")
        del choices["high_entropy_share"]
    if draft.ask("use_adaptive_entropy"):
        choices["entropy_target"] = (draft.ask("entropy_target"), ("entropy_target", "use_adaptive_entropy"))
        choices["entropy_coef_step"] = (draft.ask("entropy_coef_delta"), ("entropy_coef_delta",))
        choices["entropy_coef_max"] = (draft.ask("entropy_coef_max"), ("entropy_coef_max",))
    return choices


def has_servers(draft: Draft) -> bool:
    """Completions come from vLLM servers."""
    return bool(draft.ask("use_vllm")) and draft.ask("vllm_mode") == "server"


def _correction(draft: Draft, kind: str) -> Choices:
    if not has_servers(draft) or not draft.ask("vllm_importance_sampling_correction"):
        return {}
    name = "vllm_importance_sampling_mode"
    level, _, how = str(draft.ask(name)).partition("_")
    if how not in ("mask", "truncate") or level not in ("token", "sequence"):
        raise ConfigError(f"{draft.outcome.source}: {name} {draft.ask(name)!r} is none of TRL's modes")
    cut = draft.ask("top_p") < 1 or draft.ask("top_k") > 0 or (draft.ask("min_p") or 0) > 0
    if cut:
        why = (
            "top_p, top_k or min_p cut the distribution, so that every ratio to the sampler would be off; none is used"
        )
        draft.note("unsupported", "vllm_importance_sampling_correction", why)
        return {}
    if kind == "vespo":
        why = "the gate of vespo takes the sampler's ratio by itself: algorithm.old_logprobs sampler"
        draft.note("differs", name, why)
        return {"old_logprobs": ("sampler", (name,))}
    if level == "token" and draft.ask("importance_sampling_level") == "sequence":
        draft.note("unsupported", name, "a loss with one ratio for each completion takes no weight for each token")
        return {}
    low, high = draft.ask("vllm_importance_sampling_clip_min"), draft.ask("vllm_importance_sampling_clip_max")
    old = draft.ask("vllm_importance_sampling_cap")
    return {
        "correction": (how, (name,)),
        "correction_level": (level, (name,)),
        "correction_low": (low or 0.0, ("vllm_importance_sampling_clip_min",)),
        "correction_high": (
            next((value for value in (old, high) if value is not None), NO_BOUND),
            ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        ),
    }


def _note_averages(draft: Draft, kind: str, step: StepShape) -> None:
    """Note that TRL's average is one of averages, which weighs completions unevenly."""
    if kind == "bnpo":
        draft.note(
            "differs", "loss_type", "TRL averages over the tokens of each microbatch, the recipe over the update's"
        )
    if kind in ("dapo", "cispo", "vespo") and step.updates > 1:
        why = "TRL divides by the mean number of tokens of an update of the batch, the recipe by the update's own"
        draft.note("differs", "loss_type", why)
    if draft.ask("top_entropy_quantile") < 1:
        why = "TRL takes the quantile over the tokens of a microbatch, the recipe over those of a step"
        draft.note("differs", "top_entropy_quantile", why)
