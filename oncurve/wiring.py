"""Which objects does a recipe stand for? The only module that reads the config and knows the parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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
from oncurve.config.schema import Config, DataSection, WordProblemsData
from oncurve.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from oncurve.algorithm.algorithm import Algorithm
    from oncurve.algorithm.pairings import Finding
    from oncurve.data.prompts import Excluded
    from oncurve.records import Prompt
    from oncurve.rewards.base import RewardFunction
    from oncurve.rollouts.base import Sampler, SamplingParams
    from oncurve.train.policy import OptimizerSettings, Policy

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """Prompts for training, for measuring during the run, and for measuring before and after it."""

    train: list[Prompt]
    during: list[Prompt]
    test: list[Prompt]
    excluded: list[Excluded]
    """Rows left out because their prompt is too long."""


def make_rows(data: DataSection, *, seed: int) -> Rows:
    """The rows of a data section."""
    from oncurve.data.datasets import load_rows

    extra: dict[str, Any] = {"levels": data.levels} if isinstance(data, WordProblemsData) else {}
    return load_rows(
        data.type,  # type: ignore[attr-defined]  # every section of the union has one
        path=data.path,
        split=data.split,
        columns=data.columns or None,
        limit=data.limit,
        seed=seed,
        **extra,
    )


def split_rows(config: Config) -> tuple[Rows, Rows, Rows, Rows]:
    """Rows for training, few-shot examples, measuring during the run, and the final test: no row is in two of them."""
    from oncurve.data.datasets import hold_out

    seed = config.run.seed
    rows = make_rows(config.data, seed=0)
    few_shot: Rows = []
    during: Rows = []
    if config.data.few_shot:
        rows, few_shot = hold_out(rows, count=config.data.few_shot, seed=seed)
    if config.evaluation.data is not None:
        test = make_rows(config.evaluation.data, seed=0)[: config.evaluation.num_prompts]
    else:
        rows, test = hold_out(rows, count=config.evaluation.num_prompts, seed=seed)
    if config.evaluation.every_steps:
        rows, during = hold_out(rows, count=config.evaluation.num_prompts_during, seed=seed)
    return rows, few_shot, during, test


def make_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, *, context_tokens: int | None) -> Rendered:
    """Every prompt of the run as tokens.

    Raises DataError or ConfigError if nothing fits, or fewer prompts are left than a step takes.
    """
    from oncurve.data.prompts import render_prompts

    rows, few_shot, during, test = split_rows(config)
    limit = prompt_limit(config, context_tokens=context_tokens)
    excluded: list[Excluded] = []

    def render(part: Rows, data: DataSection) -> list[Prompt]:
        if not part:
            return []
        prompts, too_long = render_prompts(
            part,
            cast("Any", tokenizer),
            template=data.template,
            chat=data.chat,
            few_shot=few_shot,
            max_prompt_tokens=limit,
        )
        excluded.extend(too_long)
        return prompts

    train = render(rows, config.data)
    if len(train) < config.run.prompts_per_step:
        raise DataError(
            f"run.prompts_per_step is {config.run.prompts_per_step}, but only {len(train)} training prompts are left: "
            f"{len(during) + len(test)} are held out and {len(excluded)} too long. Use more data, or smaller steps"
        )
    return Rendered(train, render(during, config.data), render(test, evaluation_section(config)), excluded)


def evaluation_section(config: Config) -> DataSection:
    """How test prompts are written: as the evaluation's data say, or as in training."""
    return config.evaluation.data or config.data


def prompt_limit(config: Config, *, context_tokens: int | None) -> int | None:
    """The longest prompt that leaves room for a completion in the model's context; None where nothing limits it."""
    asked = config.data.max_prompt_tokens
    if context_tokens is None:
        return asked
    room = context_tokens - config.rollouts.max_completion_tokens
    if room < 1:
        raise ConfigError(
            f"rollouts.max_completion_tokens is {config.rollouts.max_completion_tokens}, which leaves no room for a "
            f"prompt in the model's context of {context_tokens} tokens. Use at most {context_tokens // 2}"
        )
    return min(asked, room) if asked else room


def context_of(model_config: Any) -> int | None:
    """Positions that the model was made for; None if it does not say."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


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


def algorithm_choices(config: Config) -> dict[str, Any]:
    """What the recipe replaces in its row of the table, by the names of the table."""
    chosen = config.algorithm.model_dump(
        exclude={"type", "group_size", "function", "advantage_function", "mask_truncated"}
    )
    return {key: value for key, value in chosen.items() if value is not None}


def algorithm_name(config: Config) -> str:
    """The row of the table; a loss of the user's own stands in the row of grpo."""
    return "grpo" if config.algorithm.type == "custom" else config.algorithm.type


def is_signed(reward: Reward) -> bool:
    """The term can be below zero."""
    return reward.weight < 0 or (isinstance(reward, MathematicsReward) and reward.scale == "signed")


def check_algorithm(config: Config) -> list[Finding]:
    """Choices that do not go together, for the user to read. Loads nothing heavy.

    Raises ConfigError for those that a run must not have.
    """
    from oncurve.algorithm.pairings import Choices, check_pairing
    from oncurve.algorithm.table import resolve

    try:
        row = resolve(
            "grpo" if config.algorithm.type == "custom" else config.algorithm.type, **algorithm_choices(config)
        )
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from None
    choices = Choices(
        row=row,
        group_size=config.algorithm.group_size,
        updates_per_step=config.updates_per_step,
        top_p=config.rollouts.top_p,
        top_k=config.rollouts.top_k,
        min_p=config.rollouts.min_p,
        max_completion_tokens=config.rollouts.max_completion_tokens,
        masks_truncated=config.algorithm.mask_truncated,
        punishes_length=any(isinstance(reward, OverlongReward) for reward in config.rewards),
        num_reward_parts=len(config.rewards),
        negative_rewards=any(
            getattr(reward, "scale", None) == "signed" or reward.weight < 0 for reward in config.rewards
        ),
    )
    findings = check_pairing(choices)
    refused = [finding for finding in findings if finding.severity == "refuse"]
    if refused:
        raise ConfigError("\n".join(f"algorithm: {f.what}. {f.why} {f.do}" for f in refused))
    return findings


def make_algorithm(config: Config) -> Algorithm:
    """The row of the table of algorithms, with the recipe's choices and functions."""
    from oncurve.algorithm.presets import build
    from oncurve.rewards.custom import load_function

    own: dict[str, Any] = algorithm_choices(config)
    if config.algorithm.function is not None:
        own["loss"] = load_function(config.algorithm.function)
    if config.algorithm.advantage_function is not None:
        own["advantage"] = load_function(config.algorithm.advantage_function)
    return build(
        algorithm_name(config),
        group_size=config.algorithm.group_size,
        max_completion_tokens=config.rollouts.max_completion_tokens,
        part_weights={reward.name or reward.type: reward.weight for reward in config.rewards},
        **own,
    )


def make_sampling(config: Config) -> SamplingParams:
    """How completions are drawn in training."""
    from oncurve.rollouts.base import SamplingParams

    return SamplingParams(seed=config.run.seed, **config.rollouts.model_dump(exclude={"type", "max_rows"}))


def evaluation_sampling(config: Config) -> SamplingParams:
    """How completions are drawn when the model is measured: random numbers apart from those of training."""
    from dataclasses import replace

    return replace(
        make_sampling(config),
        temperature=config.evaluation.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=config.run.seed + 1_000_003,
    )


def make_sampler(config: Config) -> Sampler:
    """What samples completions."""
    params = make_sampling(config)
    match config.rollouts.type:
        case "engine":
            from oncurve.rollouts.engine.engine import Engine

            return Engine(params, max_rows=config.rollouts.max_rows)
        case "transformers":
            from oncurve.rollouts.hf import HfSampler

            return HfSampler(params, max_rows=config.rollouts.max_rows)


def make_device(name: str) -> torch.device:
    """The device of a recipe; auto takes a GPU if there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"policy.device is {name!r}, which this machine does not have: {error}") from None
    return device


def make_policy(config: Config, *, with_reference: bool = False) -> Policy:
    """The model of the recipe, ready to be trained; with a copy of it as reference if the algorithm needs one."""
    from oncurve.train.checkpoint import load_model
    from oncurve.train.policy import Policy

    device = make_device(config.policy.device)
    model, tokenizer = load_model(
        config.model,
        device=device,
        revision=config.policy.revision,
        trust_remote_code=config.policy.trust_remote_code,
    )
    reference = copy.deepcopy(model).requires_grad_(False) if with_reference else None
    compute = config.policy.compute_type
    if compute == "auto":
        compute = "bfloat16" if device.type == "cuda" else "float32"
    return Policy(
        model,
        tokenizer,
        optimizer=make_optimizer(config),
        temperature=config.rollouts.temperature,
        compute_type=compute,
        tokens_per_microbatch=config.policy.tokens_per_microbatch,
        gradient_checkpointing=config.policy.gradient_checkpointing,
        packing=config.policy.packing,
        reference=reference,
    )


def make_optimizer(config: Config) -> OptimizerSettings:
    """AdamW's settings, with the number of updates that the schedule spans."""
    from oncurve.train.policy import OptimizerSettings

    chosen = config.optimizer.model_dump(exclude={"beta1", "beta2"})
    return OptimizerSettings(
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        total_updates=config.run.steps * config.updates_per_step,
        **chosen,
    )
