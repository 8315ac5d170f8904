"""The way by which a model is trained and sampled, in one line, and what would be faster.

Also a program of its own, `python -m oncurve.run.model_paths CONFIG`, since whoever plans imports no torch: it reads a
config.json and writes the sizes of the model and its ways as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from oncurve.algorithm.precision import HALF, multiplies_bfloat16, seed_of
from oncurve.core.errors import OncurveError
from oncurve.core.policy import torch_type
from oncurve.data.python_objects import PythonObjects
from oncurve.model.stand_in import FAILURES, stand_in
from oncurve.model.weights import supports
from oncurve.policy.backend import trained_parameters
from oncurve.policy.model_folder import unloadable
from oncurve.policy.passport import passport_of
from oncurve.policy.scoring_path import find_scoring_path
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.schema import Config, RolloutSection

if TYPE_CHECKING:
    from oncurve.run.builder import Parts

WORTH_SAYING = 50_000_000
"""Weights of a model from which the time of matrix products is felt."""


def describe_paths(policy: TrainedPolicy, rollouts: RolloutSection | None = None) -> str:
    """The ways in which a policy's model is trained and sampled, and the reasons against faster ones."""
    return f"model: trained with {policy.scoring_path}; {_sampled(policy, rollouts)}"


def describe_folder(policy: TrainedPolicy, name: str) -> list[str]:
    """The passport of a policy's model in five lines; nothing of the package's own, and of one that a program made."""
    passport = None if name == "embedded" else passport_of(policy.model)
    return [] if passport is None else [*passport.lines]


def passport_facts(policy: TrainedPolicy, paths: str) -> dict[str, Any]:
    """The same for the manifest of a run, with the ways that ``describe_paths`` gives, and the threads."""
    passport = passport_of(policy.model)
    own = {} if passport is None else {"passport": dict(passport.facts)}
    return {"threads": torch.get_num_threads(), "ways": paths, **own}


def describe_sampling(policy: TrainedPolicy, rollouts: RolloutSection | None = None) -> str:
    """The way in which a policy's model is sampled, where it is not trained."""
    return f"model: {_sampled(policy, rollouts)}"


def describe_weights(policy: TrainedPolicy) -> str:
    """The numbers that a policy which is not trained multiplies with: the model's weights, or which copies of them."""
    compute = torch_type(policy.compute_type)
    if compute not in HALF:
        return f"weights: as they are in the files, in {policy.compute_type}"
    if not any(_is_rounded(weight, compute) for weight in policy.model.parameters() if weight.ndim > 1):
        return f"weights: as they are in the files; {policy.compute_type} loses none of their digits"
    seed = seed_of(policy.model)
    if seed is None:
        return f"weights: copies in {policy.compute_type}, rounded to the nearest"
    return f"weights: copies in {policy.compute_type}, dithered by seed {seed}"


def _is_rounded(weight: Tensor, dtype: torch.dtype) -> bool:
    """A matrix has numbers that a type has not."""
    return weight.dtype == torch.float32 and not torch.equal(weight, weight.to(dtype).float())


def advice(parts: Parts) -> list[str]:
    """The passport of a policy's model, and lines on settings that this model and machine make doubtful."""
    policy, config = parts.policy, parts.config
    return [
        *describe_folder(policy, config.model),
        *filter(
            None,
            (
                faster_arithmetic(policy),
                slow_arithmetic(policy),
                lost_updates(policy, config),
                slow_rate(policy, config),
                changed_base(policy, config, parts.objects),
            ),
        ),
    ]


def changed_base(policy: TrainedPolicy, config: Config, objects: PythonObjects) -> str | None:
    """A warning of an adapter on a model that a program changed in memory; None for any other."""
    if objects.model is None or policy.adapter is None or not policy.processes.is_main:
        return None
    from oncurve.policy.changed_model import changed_in_memory  # lazy

    return changed_in_memory(policy.model, config.model)


def faster_arithmetic(policy: TrainedPolicy) -> str | None:
    """The setting that makes a model on this processor faster; None where there is none, or the model is too small."""
    known = torch.cpu.get_capabilities()
    multiplies = known.get("avx512_bf16") or known.get("amx_bf16")
    if policy.device.type != "cpu" or policy.compute_type != "float32" or not multiplies:
        return None
    if sum(weight.numel() for weight in policy.model.parameters()) < WORTH_SAYING:
        return None
    return (
        "arithmetic: float32, but this processor has instructions for bfloat16, which are faster: "
        "policy.compute_type=bfloat16 (weights and optimizer stay in float32), which loses no update with "
        "policy.rounding=dither, the default"
    )


def slow_arithmetic(policy: TrainedPolicy) -> str | None:
    """A warning of arithmetic for which this processor has no instructions; None where it has."""
    fast = policy.compute_type not in ("bfloat16", "float16") or (
        policy.compute_type == "bfloat16" and multiplies_bfloat16()
    )
    if policy.device.type != "cpu" or fast:
        return None
    return (
        f"warning: policy.compute_type is {policy.compute_type}, for which this processor has no instructions: float32 "
        f"is faster here"
    )


def lost_updates(policy: TrainedPolicy, config: Config) -> str | None:
    """A warning of rounding that hides updates from the policy that samples; None where they are seen at once."""
    if policy.arrivals is None or config.policy.rounding == "dither":
        return None
    return config.optimizer.hidden_warning(policy.arrivals.steps_until_seen)


def slow_rate(policy: TrainedPolicy, config: Config) -> str | None:
    """A warning of a learning rate that is low for so few weights, or that the run never reaches; else None."""
    weights = sum(
        policy.backend.full_shape(parameter).numel() for parameter in trained_parameters(policy.model).values()
    )
    is_adapter = config.policy.lora is not None
    return config.optimizer.rate_warning(weights, is_adapter=is_adapter, updates=policy.total_updates)


def foresee_paths(config: Config, model_config: PreTrainedConfig) -> str:
    """The ways of training and sampling a recipe's model, as a small random model of its kind shows without weights.

    Raises CheckpointError or SamplerError for a kind that cannot be.
    """
    descriptions = paths_of_kind(
        model_config, packing=config.policy.packing, trust_remote_code=config.policy.trust_remote_code
    )
    if descriptions is None:
        return "model: how it is trained and sampled is found when it is loaded; there is no small model of its kind"
    return (
        f"model: trained with {descriptions[0]}; sampled {_elsewhere(config.rollouts) or descriptions[1]} (shown by a "
        f"small model of its kind; the model itself is tried when it is loaded)"
    )


def paths_of_kind(
    config: PreTrainedConfig, *, packing: bool = True, trust_remote_code: bool = False
) -> tuple[str, str] | None:
    """The ways of training and sampling a small random model of a kind in this process; None where there is none.

    Raises CheckpointError or SamplerError for a kind that cannot be.
    """
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        small = stand_in(empty, "cpu")
    except FAILURES as error:
        if "Unrecognized configuration class" in str(error):
            raise unloadable(str(config.name_or_path), error) from None
        return None
    return str(find_scoring_path(small, packing=packing)), _in_engine(small)


def has_single_policy(config: Config) -> bool:
    """The tokens of a step are drawn and trained with the same weights and without anything that changes their
    probabilities: both ends compute the same numbers, up to rounding."""
    rollouts, lora = config.rollouts, config.policy.lora
    is_whole = not config.sampling().cuts
    drops = lora is not None and lora.dropout > 0
    return config.sft is None and is_whole and not drops and not rollouts.staleness and rollouts.temperature > 0


def _sampled(policy: TrainedPolicy, rollouts: RolloutSection | None) -> str:
    if (where := _elsewhere(rollouts)) is not None:
        return f"sampled {where}"
    if policy.backend.is_divided and policy.backend.replica is None:
        return "sampled in this process"
    return f"sampled {_in_engine(policy.model)}"


def _elsewhere(rollouts: RolloutSection | None) -> str | None:
    """The sampler, where it is not the engine of this process."""
    return {"servers": "by rollout servers", "transformers": "by its own modules"}.get(
        "engine" if rollouts is None else rollouts.type
    )


def _in_engine(model: PreTrainedModel) -> str:
    if supports(model):
        return "through our own layers"
    from oncurve.model.module_caches import cache_kind_of, reasons_of  # lazy

    kind, reasons = cache_kind_of(model), reasons_of(model)
    return f"through its modules with {kind.name}" + (f", since {'; '.join(reasons)}" if reasons else "")


def _described(path: str) -> dict[str, object]:
    """Sizes and ways of the model that a config.json describes. Raises ValueError for what is no such model."""
    from oncurve.model.count_weights import count  # lazy

    sizes = count(path)
    try:
        descriptions = paths_of_kind(AutoConfig.from_pretrained(path))
    except OncurveError as error:
        descriptions = f"is refused when it is loaded: {error}", ""
    return {**sizes, "ways": descriptions}


if __name__ == "__main__":
    try:
        described = _described(sys.argv[1])
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, StrictDataclassError) as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    json.dump(described, sys.stdout)
