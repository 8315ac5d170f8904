"""The way by which a run's model is trained and sampled, in one line."""

from __future__ import annotations

from oncurve.model.weights import supports
from oncurve.policy.policy import TrainedPolicy
from oncurve.recipe.schema import Config, RolloutSection
from oncurve.sample.generic import reasons_of, way_of


def describe_ways(policy: TrainedPolicy, rollouts: RolloutSection | None = None) -> str:
    """How a policy's model is trained and sampled, and why in no faster way."""
    return f"model: trained with {policy.road}; sampled {_sampled(policy, rollouts)}"


def has_one_policy(config: Config) -> bool:
    """The tokens of a step are drawn and trained with the same weights and without anything that changes their
    probabilities: both ends compute the same numbers, up to rounding."""
    rollouts, lora = config.rollouts, config.policy.lora
    is_whole = rollouts.top_p == 1 and not rollouts.top_k and not rollouts.min_p
    drops = lora is not None and lora.dropout > 0
    return config.sft is None and is_whole and not drops and not rollouts.staleness and rollouts.temperature > 0


def _sampled(policy: TrainedPolicy, rollouts: RolloutSection | None) -> str:
    if rollouts is not None and rollouts.type == "servers":
        return "by rollout servers"
    if rollouts is not None and rollouts.type == "transformers":
        return "by transformers' generate"
    if policy.backend.is_divided and policy.backend.replica is None:
        return "in this process"
    if supports(policy.model):
        return "through our own layers"
    way, reasons = way_of(policy.model), reasons_of(policy.model)
    return f"through its modules with {way.name}" + (f", since {'; '.join(reasons)}" if reasons else "")
