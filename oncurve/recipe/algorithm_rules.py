"""Rules that an algorithm sets for the rest of its recipe."""

from __future__ import annotations

from oncurve.algorithm.pairings import Choices, Rule, check_pairing
from oncurve.core.errors import ConfigError
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import part_weights


def check_algorithm(config: Config) -> list[Rule]:
    """Choices that do not go together, for the user to read. Loads nothing heavy.

    Raises ConfigError for those that a run must not have.
    """
    if config.sft is not None:
        return []  # nothing of it is the user's choice
    try:
        row = config.algorithm.row()
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from None
    config.algorithm.check_baseline(row)
    config.algorithm.check_teacher(row)
    if config.algorithm.has_served_teacher and config.rollouts.temperature != 1:
        raise ConfigError(
            f"algorithm.teacher is {config.algorithm.teacher}, and servers score tokens at temperature 1, but "
            f"rollouts.temperature is {config.rollouts.temperature:g}. Set it to 1, or load the teacher in this process"
        )
    config.algorithm.check_hint(row)
    scheduled = [reward.key for reward in config.rewards if reward.weight_by_step and not reward.held_out]
    if scheduled and row.advantage == "multi_objective":
        raise ConfigError(
            f"rewards: {scheduled[0]} has weight_by_step, and advantage multi_objective weighs the parts of the reward "
            f"by themselves, the same in every step. Leave it out, or choose another advantage"
        )
    choices = Choices(
        row=row,
        masks_truncated=config.algorithm.mask_truncated,
        sampling=config.sampling(),
        updates_per_step=config.updates_per_step,
        max_staleness=config.rollouts.staleness,
        sampler_is_trainer=config.rollouts.vllm_servers == 0,
        punishes_length=any(reward.punishes_length and not reward.held_out for reward in config.rewards),
        lora=config.policy.lora is not None,
        num_reward_parts=len(part_weights(config.rewards)),
        negative_rewards=any(reward.can_be_negative() for reward in config.rewards if not reward.held_out),
    )
    findings = check_pairing(choices)
    refused = [finding for finding in findings if finding.severity == "refuse"]
    if refused:
        raise ConfigError("\n".join(f"algorithm: {f.what}. {f.why} {f.do}" for f in refused))
    return findings
