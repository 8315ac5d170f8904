"""Which reward function does a recipe's list of rewards stand for?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oncurve.config.rewards import (
    CustomReward,
    FormatReward,
    JsonSchemaReward,
    JudgeReward,
    LengthReward,
    MathematicsReward,
    OverlongReward,
    ProgramsReward,
    R1ZeroReward,
    RepetitionReward,
    Reward,
    ToolCallsReward,
)

if TYPE_CHECKING:
    from oncurve.rewards.base import RewardFunction


def make_reward_function(rewards: Sequence[Reward]) -> RewardFunction:
    """The weighted sum of a recipe's rewards."""
    from oncurve.rewards.base import Term, WeightedSum

    return WeightedSum(
        [
            Term(
                make_reward(reward),
                weight=reward.weight,
                name=reward.name,
                only_if_correct=reward.only_if_correct,
            )
            for reward in rewards
        ]
    )


def make_reward(reward: Reward) -> RewardFunction:
    """One term of the reward."""
    match reward:
        case R1ZeroReward():
            from oncurve.rewards.r1_zero import R1Zero

            return R1Zero(**reward_options(reward))
        case MathematicsReward():
            from oncurve.rewards.mathematics import Mathematics

            return Mathematics(**reward_options(reward))
        case ProgramsReward():
            from oncurve.rewards.programs import Programs

            return Programs(allow=reward.isolation, **reward_options(reward, "isolation"))
        case CustomReward():
            from oncurve.rewards.custom import from_function, load_function

            function = load_function(reward.function)
            if reward.isolate:
                from oncurve.rewards.isolated import Isolated

                return Isolated(reward.function, name=reward.name, timeout_seconds=reward.timeout_seconds)
            return from_function(function, name=reward.name, timeout_seconds=reward.timeout_seconds)
        case JsonSchemaReward() | ToolCallsReward() | JudgeReward():
            return make_structured_reward(reward)
        case _:
            return make_form_reward(reward)


def make_structured_reward(reward: JsonSchemaReward | ToolCallsReward | JudgeReward) -> RewardFunction:
    """Structured output, and the opinion of a model."""
    match reward:
        case JsonSchemaReward():
            from oncurve.rewards.schema import JsonSchema

            return JsonSchema(schema=reward.json_schema, **reward_options(reward, "json_schema"))
        case ToolCallsReward():
            from oncurve.rewards.tool_calls import ToolCalls

            return ToolCalls(**reward_options(reward))
        case JudgeReward():
            from oncurve.rewards.judge import RUBRIC, Judge

            return Judge(rubric=reward.rubric or RUBRIC, **reward_options(reward, "rubric"))


def make_form_reward(reward: FormatReward | LengthReward | OverlongReward | RepetitionReward) -> RewardFunction:
    """What a completion looks like, whatever it says."""
    from oncurve.rewards.formats import TagFormat
    from oncurve.rewards.shaping import LengthWindow, Overlong, Repetition

    match reward:
        case FormatReward():
            return TagFormat(tags=reward.tags, per_tag=reward.per_tag)
        case LengthReward():
            return LengthWindow(reward.min_tokens, reward.max_tokens)
        case OverlongReward():
            return Overlong(reward.max_tokens, reward.buffer_tokens)
        case RepetitionReward():
            return Repetition()


def reward_options(reward: Reward, *besides: str) -> dict[str, Any]:
    """The keys of a reward that are its function's own arguments."""
    return reward.model_dump(exclude={"type", "weight", "name", "only_if_correct", *besides})


def make_loose_reward() -> RewardFunction:
    """Correctness whatever the format: the second number of an evaluation."""
    from oncurve.rewards.mathematics import Mathematics

    return Mathematics(answer_from="any")
