"""The reward function of a recipe's list of rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oncurve.errors import ConfigError
from oncurve.rewards.settings import (
    BoxedFormatReward,
    CosineLengthReward,
    CustomReward,
    EnvironmentSection,
    FormatReward,
    GivenReward,
    HashFormatReward,
    JsonSchemaReward,
    JudgeReward,
    LengthReward,
    MathematicsReward,
    OverlongReward,
    ProgramsReward,
    R1ZeroReward,
    RepetitionReward,
    Reward,
    RewardSection,
    StepFormatReward,
    ToolCallsReward,
)

if TYPE_CHECKING:
    from oncurve.rewards.base import RewardFunction, Term


_FORM_REWARDS = (
    FormatReward,
    BoxedFormatReward,
    HashFormatReward,
    StepFormatReward,
    LengthReward,
    OverlongReward,
    RepetitionReward,
)
"""Rewards that look at a completion alone."""
_UNBOUNDED = (CustomReward, GivenReward, JudgeReward, EnvironmentSection)
"""Rewards whose values may be above 1 or below -1."""
SAYS_CORRECT = (
    R1ZeroReward, MathematicsReward, ProgramsReward, JsonSchemaReward, ToolCallsReward, CosineLengthReward,
)  # fmt: skip
"""Rewards with a part "correct" of their own."""


@dataclass(frozen=True)
class Surroundings:
    """What rewards are made in."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """Functions of a Python program by the names of their sections."""
    columns: Sequence[str] | None = None
    """Columns of the data, which functions of the user's may ask for; None checks nothing."""


def make_reward_function(
    rewards: Sequence[Reward],
    *,
    seed: int = 0,
    given: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
) -> RewardFunction:
    """The weighted sum of a recipe's rewards; those that rotate are one term of it, those held out are only logged.

    Raises ConfigError if nothing is left to train on, the rotating ones do not fit together, or a function of the
    user's asks for something that is not among ``columns``.
    """
    from oncurve.rewards.base import WeightedSum  # lazy
    from oncurve.rewards.rotation import HeldOut  # lazy

    if all(reward.held_out for reward in rewards):
        raise ConfigError("rewards: every one of them is held_out, so nothing pays. Train on at least one")
    around = Surroundings(given or {}, columns)
    total: RewardFunction = WeightedSum(_terms(rewards, seed, around))
    watched: set[str] = set()
    for reward in rewards:
        if reward.held_out:
            function = make_reward(reward, around)
            name = reward.name or function.name
            if name in watched:
                raise ConfigError(f"rewards: two that are held out are named {name!r}. Give one of them another name")
            watched.add(name)
            total = HeldOut(total, function, part=f"held_out/{name}")
    return total


def with_early_grading(function: RewardFunction, rewards: Sequence[Reward]) -> RewardFunction:
    """The function, able to grade groups while others are sampled, unless code of somebody else's is called here.

    Such code may look at all completions of a step, or count on being called from the main thread.
    """
    from oncurve.rewards.pipelined import PipelinedRewards  # lazy

    foreign = [reward for reward in rewards if isinstance(reward, (CustomReward, GivenReward))]
    own = all(isinstance(reward, CustomReward) and reward.isolate for reward in foreign)
    return PipelinedRewards(function) if own else function


def _terms(rewards: Sequence[Reward], seed: int, around: Surroundings) -> list[Term]:
    """The rewards that pay, in their order; all that rotate stand where the first of them does."""
    from oncurve.rewards.base import Term  # lazy

    terms: list[Term] = []
    rotating, deciding = rotating_rewards(rewards), deciding_reward(rewards)
    for reward in rewards:
        if reward.held_out or (reward in rotating and reward is not rotating[0]):
            continue
        function = _make_rotating(rotating, seed, around) if reward in rotating else make_reward(reward, around)
        name = None if reward in rotating else reward.name
        terms.append(
            Term(
                function,
                weight=reward.weight,
                name=name,
                only_if_correct=reward.only_if_correct,
                decides=reward is deciding,
                correct_at=deciding.correct_at if deciding is not None and reward is deciding else None,
                is_limited=reward.limited,
            )
        )
    return terms


Deciding = CustomReward | GivenReward | EnvironmentSection


def deciding_reward(rewards: Sequence[Reward]) -> Deciding | None:
    """The reward of the user's whose value says what is correct: the first with ``correct_at``, else the first of all;
    None where a reward of the package says so."""
    paid = [reward for reward in rewards if not reward.held_out]
    if any(isinstance(reward, SAYS_CORRECT) for reward in paid):
        return None
    theirs = [reward for reward in paid if isinstance(reward, Deciding)]
    return next((reward for reward in theirs if reward.correct_at is not None), theirs[0] if theirs else None)


def describe_correct(rewards: Sequence[Reward]) -> str:
    """What "correct" means beside these rewards, in a few words."""
    deciding = deciding_reward(rewards)
    if deciding is None:
        names = [reward.name or reward.type for reward in rewards if isinstance(reward, SAYS_CORRECT)]
        return f"{' and '.join(names)} says so" if names else "a reward says so"
    bound = "1" if deciding.correct_at is None else f"{deciding.correct_at:g} or more"
    return f"{deciding.name or deciding.type} gives {bound}"


def rotating_rewards(rewards: Sequence[Reward]) -> list[Reward]:
    """The rewards that take turns. Raises ConfigError if it is one alone or if they are paid differently."""
    rotating = [reward for reward in rewards if reward.rotate_every_steps is not None]
    if len(rotating) == 1:
        raise ConfigError("rewards: only one of them has rotate_every_steps. Give it to those that take turns with it")
    for key in ("rotate_every_steps", "weight", "only_if_correct"):
        values = [reward.model_dump()[key] for reward in rotating]
        if len(set(values)) > 1:
            raise ConfigError(
                f"rewards: those that rotate have {key} {', '.join(map(str, values))}. Give all of them the same, so "
                f"that a turn changes what is looked at and not what it pays"
            )
    return rotating


def _make_rotating(rotating: Sequence[Reward], seed: int, around: Surroundings) -> RewardFunction:
    """One term in which the rewards take turns; all of them are graded and logged at every step."""
    from oncurve.rewards.rotation import Rotating  # lazy

    functions = [make_reward(reward, around) for reward in rotating]
    for function, reward in zip(functions, rotating, strict=True):
        function.name = reward.name or function.name
    return Rotating(functions, every_steps=rotating[0].rotate_every_steps or 1, seed=seed)


def have_right_answer(rewards: Sequence[Reward], given: Mapping[str, Any] | None = None) -> bool:
    """Whether some reward looks at the answer of a row, so that a right completion is one that it pays for."""
    return any(_reads_answer(reward, given or {}) for reward in rewards)


def _reads_answer(reward: Reward, given: Mapping[str, Any]) -> bool:
    from oncurve.rewards.custom import load_function, reads_answer  # lazy

    match reward:
        case CustomReward():
            return reads_answer(load_function(reward.function))
        case GivenReward():
            return str(reward.name) not in given or reads_answer(given[str(reward.name)])
        case JudgeReward():
            return reward.rubric is None or "answer" in reward.rubric
        case _:
            return not isinstance(reward, _FORM_REWARDS)


def part_weights(rewards: Sequence[Reward]) -> dict[str, float]:
    """The parts of the reward that pay, by their names in the metrics, and what each of them weighs."""
    weights: dict[str, float] = {}
    for reward in rewards:
        if not reward.held_out:
            weights["rotating" if reward.rotate_every_steps else reward.name or reward.type] = reward.weight
    return weights


def describe_rewards(rewards: Sequence[Reward], *, is_default: bool = False) -> list[str]:
    """What is trained on and what is only watched, a line for each; nothing if the recipe's every reward pays in every
    step. ``is_default``: the recipe names none."""
    lines = ["rewards: none are named, so r1_zero is taken: the right answer in <answer> tags"] if is_default else []
    rotating = rotating_rewards(rewards)
    if rotating:
        names = ", ".join(reward.name or reward.type for reward in rotating)
        every = rotating[0].rotate_every_steps
        lines.append(f"rewards: {names} take turns of {every} steps; all are logged at every step, one pays")
    for reward in rewards:
        if reward.held_out:
            name = reward.name or reward.type
            lines.append(f"rewards: {name} is held out: logged as reward/held_out/{name}, never trained on")
    return [*lines, *_describe_limit(rewards)]


def _describe_limit(rewards: Sequence[Reward]) -> Iterator[str]:
    """What the terms that do not know whether an answer is right may pay, where that is less than their weights say."""
    paid = [reward for reward in rewards if not reward.held_out]
    knowing = [reward for reward in paid if isinstance(reward, SAYS_CORRECT)]
    limited = [reward for reward in paid if reward.limited and not isinstance(reward, SAYS_CORRECT)]
    limit = sum(abs(reward.weight) for reward in knowing)
    may_exceed = sum(abs(reward.weight) for reward in limited) > limit or any(
        isinstance(reward, _UNBOUNDED) for reward in limited
    )
    if limit and limited and may_exceed:
        names, others = (", ".join(one.name or one.type for one in some) for some in (limited, knowing))
        yield (
            f"rewards: {names} can together add or take at most {limit:g}, the weight of {others}. To let one of them "
            f"pay in full, set its key limited to false"
        )


def make_reward(reward: Reward, around: Surroundings = Surroundings()) -> RewardFunction:
    """One term of the reward."""
    match reward:
        case GivenReward():
            return _given_reward(reward, around)
        case EnvironmentSection():
            from oncurve.rewards.environment_reward import EnvironmentReward  # lazy

            return EnvironmentReward()
        case R1ZeroReward():
            from oncurve.rewards.r1_zero import R1Zero  # lazy

            return R1Zero(**reward_options(reward))
        case MathematicsReward():
            from oncurve.rewards.mathematics import Mathematics  # lazy

            return Mathematics(**reward_options(reward))
        case ProgramsReward():
            from oncurve.rewards.programs import Programs  # lazy

            return Programs(allow=reward.isolation, **reward_options(reward, "isolation"))
        case CustomReward():
            from oncurve.rewards.custom import asks_for, from_function, load_function  # lazy

            function = load_function(reward.function)
            _check_parameters(function, reward.function, around)
            if reward.isolate:
                if asks_for(function, "environments"):
                    raise ConfigError(
                        f"rewards: {reward.function} asks for environments, which live in the trainer's process. Set "
                        f"isolate=false for this reward"
                    )
                from oncurve.rewards.subprocess_reward import SubprocessReward  # lazy

                options = reward_options(reward, "function", "isolate", "correct_at")
                return SubprocessReward(reward.function, name=reward.name, **options)
            return from_function(
                function, name=reward.name, **reward_options(reward, "function", "isolate", "correct_at")
            )
        case JsonSchemaReward() | ToolCallsReward() | JudgeReward():
            return make_structured_reward(reward)
        case _:
            return make_form_reward(reward)


def _check_parameters(function: Any, location: str, around: Surroundings) -> None:
    from oncurve.rewards.parameters import check_parameters  # lazy

    if around.columns is not None:
        check_parameters(function, around.columns, location=location)


def _given_reward(reward: GivenReward, around: Surroundings) -> RewardFunction:
    from oncurve.rewards.custom import from_function  # lazy

    name = str(reward.name)
    if name not in around.given:
        raise ConfigError(
            f"rewards: {name!r} was passed from Python, and a recipe cannot hold it. Train or resume from the "
            f"program, with oncurve.Trainer and the same functions; or name the function in the recipe with "
            f"type: custom and function: file.py:name"
        )
    function = around.given[name]
    _check_parameters(function, name, around)
    return from_function(function, name=name, **reward_options(reward, "correct_at"))


def make_structured_reward(reward: JsonSchemaReward | ToolCallsReward | JudgeReward) -> RewardFunction:
    """Structured output, and the opinion of a model."""
    match reward:
        case JsonSchemaReward():
            from oncurve.rewards.json_schema import JsonSchema  # lazy

            return JsonSchema(schema=reward.json_schema, **reward_options(reward, "json_schema"))
        case ToolCallsReward():
            from oncurve.rewards.tool_calls import ToolCalls  # lazy

            return ToolCalls(**reward_options(reward))
        case JudgeReward():
            from oncurve.rewards.llm_judge import RUBRIC, Judge  # lazy

            return Judge(rubric=reward.rubric or RUBRIC, **reward_options(reward, "rubric"))


def make_form_reward(
    reward: FormatReward
    | BoxedFormatReward
    | HashFormatReward
    | StepFormatReward
    | LengthReward
    | OverlongReward
    | RepetitionReward
    | CosineLengthReward,
) -> RewardFunction:
    """What a completion looks like, whatever it says; and an answer that is worth more when it is short."""
    from oncurve.rewards.formats import BoxedFormat, HashFormat, StepFormat, TagFormat  # lazy
    from oncurve.rewards.shaping import CosineLength, LengthWindow, Overlong, Repetition  # lazy

    match reward:
        case FormatReward():
            return TagFormat(tags=reward.tags, per_tag=reward.per_tag, is_signed=reward.scale == "signed")
        case BoxedFormatReward():
            return BoxedFormat(name=reward.type)
        case HashFormatReward():
            return HashFormat(name=reward.type)
        case StepFormatReward():
            return StepFormat(min_steps=reward.min_steps, name=reward.type)
        case LengthReward():
            return LengthWindow(reward.min_tokens, reward.max_tokens)
        case OverlongReward():
            return Overlong(reward.max_tokens, reward.buffer_tokens)
        case RepetitionReward():
            return Repetition()
        case CosineLengthReward():
            options = reward_options(reward, "correctness", "answer_from")
            return CosineLength(_correctness(reward), **options)


def _correctness(reward: CosineLengthReward) -> RewardFunction:
    """The reward that says whether the answer is right, inside one that also looks at the length."""
    match reward.correctness:
        case "mathematics":
            return make_reward(MathematicsReward(answer_from=reward.answer_from))
        case "r1_zero":
            return make_reward(R1ZeroReward())
        case "programs":
            return make_reward(ProgramsReward())


def reward_options(reward: Reward, *besides: str) -> dict[str, Any]:
    """The keys of a reward that are its function's own arguments."""
    return reward.model_dump(exclude={"type", *RewardSection.model_fields, *besides})


def make_loose_reward() -> RewardFunction:
    """Correctness whatever the format: the second number of an evaluation."""
    from oncurve.rewards.mathematics import Mathematics  # lazy

    return Mathematics(answer_from="any")
