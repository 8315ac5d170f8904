"""The builder: the parts of a run, made from the sections of its recipe.

Whoever trains, measures, checks or replays makes algorithm, policy, sampler, reward and prompts here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.algorithm.precision import HALF, like, use_dither
from oncurve.algorithm.presets import Advantage
from oncurve.algorithm.settings import AlgorithmSection
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Rewards
from oncurve.core.errors import ConfigError, RewardError
from oncurve.core.grading import RewardFunction
from oncurve.core.policy import ComputeType, torch_type
from oncurve.core.records import Group
from oncurve.core.sampler import PolicyView, Sampler, check_ids, end_token_ids
from oncurve.data.chat_template import asks_time, moment_of, prepare_tokenizer
from oncurve.data.curriculum import Curriculum
from oncurve.data.from_settings import Rows, shared_columns
from oncurve.data.prompts import describe_turn_end, unnamed_turn_end
from oncurve.data.python_objects import NAMELESS, NOTHING, PythonObjects
from oncurve.data.settings import DataSection
from oncurve.extensions import extension, imported
from oncurve.model.allocator import keep_freed_memory
from oncurve.model.context import context_of
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.from_settings import (
    LoadedModel,
    ModelSource,
    load,
    load_by_parts,
    make_sharding,
    needs_copy,
    own_compute_type,
    own_device,
    where_whole,
)
from oncurve.policy.model_folder import add_end_token
from oncurve.policy.scoring_path import expect_rows
from oncurve.policy.sharding import Sharding, ZeroSettings
from oncurve.policy.trained_policy import Parallelism, TrainedPolicy
from oncurve.recipe.schema import Config
from oncurve.rewards.section import RunLength
from oncurve.rewards.terms import make_reward_function, part_weights, with_early_grading
from oncurve.run.interruption import Interruption
from oncurve.run.rendered import Rendered, check_thinking, make_prompts, refuse_shared, split_rows
from oncurve.sample.settings import SAMPLERS

if TYPE_CHECKING:
    from oncurve.policy.teacher import OutsideTeacher


log = logging.getLogger(__name__)


def make_algorithm(config: Config) -> Algorithm:
    """The row of the table of algorithms, with the recipe's choices and functions."""
    section, functions = config.algorithm, dict[str, Any]()
    for part, key, location in (
        ("loss", "function", section.function),
        ("advantage", "advantage_function", section.advantage_function),
    ):
        if location is not None:
            from oncurve.run.own_formula import own_formula  # lazy

            functions[part] = own_formula(location, where=f"algorithm.{key}")
    made = section.make(config.sampling(), part_weights=part_weights(config.rewards), **functions)
    return replace(made, advantage=_stopping(made.advantage))


def _stopping(advantage: Advantage) -> Advantage:
    """The same function; rewards that it refuses stop the run with its sentence."""

    @wraps(advantage)
    def called(rewards: Rewards) -> Float[Tensor, "P G"]:
        try:
            return advantage(rewards)
        except ValueError as error:
            raise RewardError(
                f"algorithm.advantage refuses the rewards of this step: {error}. Change the reward, or take another "
                f"advantage (docs/algorithms.md)"
            ) from error

    return called


def make_rewards(
    config: Config, *, rows: tuple[Rows, Rows, Rows, Rows] | None = None, objects: PythonObjects = NOTHING
) -> RewardFunction:
    """The reward function of the recipe; a function of the user's may ask for the columns of the ``rows``.

    Raises ConfigError for one that asks for a column that they do not have.
    """
    return make_reward_function(
        config.rewards,
        seed=config.run.seed,
        length=RunLength(config.run.steps, len(rows[0]) / config.run.prompts_per_step if rows and rows[0] else None),
        objects=objects.rewards,
        columns=None if rows is None else shared_columns(rows),
    )


def make_policy(
    config: Config,
    *,
    with_reference: bool = False,
    processes: Processes | None = None,
    objects: PythonObjects = NOTHING,
    is_trained: bool = True,
) -> TrainedPolicy:
    """The recipe's model, or that of the ``objects``, ready to be trained, with a reference if the algorithm needs one.

    The reference is a copy of the model; or, with a fresh adapter, the base under it, which takes no memory.
    Without ``processes`` nothing of it is kept in parts. One that is not ``is_trained``, only sampled from, keeps no
    matrix in more than the width of the arithmetic.
    """
    device = own_device(config.policy.device)
    if device.type == "cuda":
        import oncurve.model.dither_triton  # noqa: F401  # lazy; a GPU makes copies with it
    if device.type == "cpu":
        keep_freed_memory(always=not config.policy.gradient_checkpointing)
    compute = own_compute_type(config.policy, device)
    sharding = None if processes is None else make_sharding(config.policy, config.optimizer, processes)
    few_bits = config.policy.quantization is not None  # which are packed on the device itself
    by_parts = isinstance(sharding, Sharding) and objects.model is None and config.algorithm.teacher is None
    source = ModelSource(config.model, config.policy, config.run.seed, objects)
    loaded = load_by_parts(source, device) if by_parts else None
    loaded = loaded or load(source, device if few_bits else torch.device("cpu"))
    model, tokenizer = loaded.model, loaded.tokenizer
    prepare_tokenizer(tokenizer, template=config.data.chat_template, moment=config.data.now)
    _end_turns(config.data, loaded, is_reported=processes is None or processes.is_main)
    if not is_trained:
        nn.Module.requires_grad_(model, False)
    _dither(model, config, compute, sharding)
    if device.type == "cuda" and compute == "bfloat16" and sharding is None and not few_bits:
        from oncurve.policy.half_precision import halve_frozen_matrices  # lazy

        halve_frozen_matrices(model)
    if not few_bits and loaded.unread is None:
        nn.Module.to(model, device)
    expect_rows(model, _longest_tokens(config, context_of(model.config)))
    teacher = _served_teacher(config, tokenizer) if with_reference and config.algorithm.has_served_teacher else None
    reference = _make_reference(config.algorithm, source, loaded, device) if with_reference and not teacher else None
    replica_location = where_whole(processes or ALONE, sharding, sent_from=config.rollouts.weights_leave_from)
    return TrainedPolicy(
        model,
        tokenizer,
        optimizer=config.optimizer,
        section=config.policy,
        compute_type=compute,
        total_updates=config.run.steps * config.updates_per_step,
        temperature=config.rollouts.temperature,
        reference=reference,
        adapter=loaded.adapter,
        teacher=teacher,
        parallelism=Parallelism(processes or ALONE, sharding, replica_location, loaded.unread),
    )


def _longest_tokens(config: Config, context_tokens: int | None) -> int:
    """Tokens that a row of a recipe may have: what its keys allow, or a prompt of 1,024 tokens where none says."""
    allowed = (config.data.max_prompt_tokens or 1024) + config.rollouts.max_completion_tokens
    return min(allowed, context_tokens or allowed)


def _served_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> OutsideTeacher:
    """The teacher behind a server."""
    from oncurve.sample.event_loop import require_aiohttp  # lazy

    require_aiohttp()
    arguments = str(config.algorithm.teacher), tokenizer, config.model, config.rollouts.deadlines
    return extension("teacher behind a server")(*arguments)


def _dither(
    model: PreTrainedModel, config: Config, compute: ComputeType, sharding: Sharding | ZeroSettings | None
) -> None:
    """Let the model's copies in 16 bits be dithered, if it has such and the recipe does not say otherwise."""
    if torch_type(compute) not in HALF or config.policy.rounding == "nearest":
        return
    if isinstance(sharding, ZeroSettings) and sharding.stage == 3:
        raise ConfigError(
            "policy.rounding is dither, and DeepSpeed's stage 3 rounds weights itself when it puts them together. Set "
            "policy.parallel=fsdp, which is dithered, or accept that small updates are not seen: "
            "policy.rounding=nearest"
        )
    use_dither(model, config.run.seed)


def _end_turns(data: DataSection, loaded: LoadedModel, *, is_reported: bool) -> None:
    """Let the token with which the chat template ends a turn end completions."""
    model, tokenizer = loaded.model, loaded.tokenizer
    end = unnamed_turn_end(data.chat, tokenizer, data.template, end_token_ids(model, tokenizer))
    if end is not None:
        add_end_token(model, end)
        if is_reported:
            log.warning("%s", describe_turn_end(tokenizer, end))


def _make_reference(
    section: AlgorithmSection, source: ModelSource, loaded: LoadedModel, device: torch.device
) -> PreTrainedModel | None:
    """The teacher, or a copy of the model; None where the base under the adapter is the reference."""
    if section.teacher is not None:
        from oncurve.policy.teacher import load_teacher  # lazy

        teacher = load_teacher(section.teacher, source.name, loaded.tokenizer)
        nn.Module.to(teacher, device)
        return teacher
    reference = section.row().reference
    if not needs_copy(source, reference):
        return None
    is_object = source.objects.model is not None and source.section.lora is None and source.name != NAMELESS
    if is_object and source.objects.reference_is_named:
        copied = load(replace(source, objects=NOTHING), device).model.requires_grad_(False)
        nn.Module.to(copied, device)
        like(loaded.model, copied)
        return copied
    from oncurve.policy.unread_model import copy_unread  # lazy

    copied = copy_unread(loaded.model).requires_grad_(False)
    like(loaded.model, copied)
    return copied


def settle(config: Config) -> tuple[Config, str | None]:
    """The recipe with what it leaves to this machine settled: where completions are sampled, how weights get there.

    With it the sentences that say so; None where nothing was left open.
    """
    if config.rollouts.type not in ("auto", "servers"):
        return config, None
    return extension("servers of a machine")(config)


def make_sampler(config: Config, objects: PythonObjects = NOTHING) -> Sampler:
    """The sampler of completions; ``objects`` holds the tools and environments that a Python program passed."""
    rollouts = config.rollouts
    if rollouts.type in SAMPLERS:
        turns = imported(SAMPLERS[rollouts.type])(rollouts, seed=config.run.seed)
    else:
        turns = extension("servers")(config)
    return with_episodes(turns, config, objects)


def with_episodes(sampler: Any, config: Config, objects: PythonObjects = NOTHING) -> Sampler:
    """The sampler, or one whose completions are episodes where the recipe has tools, environments or an agent."""
    rollouts = config.rollouts
    if not rollouts.has_episodes:
        return sampler
    if rollouts.sleep:
        raise ConfigError(
            "rollouts.sleep is true, and a server that gives its memory back between steps cannot be asked turn by "
            "turn yet. Set `rollouts.sleep=false`, or go without rollouts.tools, environments and agent"
        )
    if rollouts.agent is not None:
        return extension("agents")(sampler, config, objects)
    from oncurve.episodes.episode_sampler import EpisodeSampler  # lazy
    from oncurve.episodes.from_settings import make_setup  # lazy

    made = EpisodeSampler(sampler, config.sampling(), make_setup(rollouts, config.data, objects))
    made.staleness = rollouts.staleness
    return made


class ServerSide(Sampler, Protocol):
    """The connection to rollout servers, as the run sees it."""

    notify: Callable[[str], None]
    """Hears of servers that come, go and come back."""

    def prepare(self, policy: PolicyView, version: int) -> bool:
        """Take a copy of weights before ``load_weights`` is called; whether it did."""
        ...

    def weight_metrics(self) -> dict[str, float]:
        """Metrics of how the newest weights came to the servers."""
        ...


class LookAhead(Sampler, Protocol):
    """A sampler that is ahead of the trainer, as the run sees it."""

    def finished(self, step: int) -> dict[int, list[Group]]:
        """The whole groups of this step and of later ones."""
        ...

    def restore(self, groups: Mapping[int, Sequence[Group]]) -> None:
        """Take groups that were finished before a run stopped."""
        ...


@dataclass(frozen=True)
class Parts:
    """A recipe's parts, loaded."""

    config: Config
    policy: TrainedPolicy
    algorithm: Algorithm
    sampler: Sampler
    reward_function: RewardFunction
    prompts: Rendered
    data: Curriculum
    servers: ServerSide | None = None
    """The client of rollout servers, in the process that has one."""
    objects: PythonObjects = NOTHING
    """Objects that a Python program passed."""
    ahead: LookAhead | None = None
    """The sampler that is ahead of the trainer, in the process that has one."""
    examining_sampler: Sampler | None = None
    """Sampler of measurements; None: that of training."""
    examining_reward: RewardFunction | None = None
    """Reward of measurements; None: that of training."""
    correct_means: str = ""
    """Meaning of "correct" in measurements, or of their reward, where it is none of the recipe's."""

    @property
    def closing(self) -> list[Sampler | RewardFunction | OutsideTeacher]:
        """Everything that must be closed at the end."""
        parts = (self.examining_reward, self.examining_sampler, self.reward_function, self.sampler, self.policy.teacher)
        return [part for part in parts if part is not None]

    @property
    def moves_reference(self) -> bool:
        """The reference follows the policy, so that a checkpoint must hold it."""
        return any(self.algorithm.reference_share(step) for step in range(self.config.run.steps))


def make_parts(
    config: Config,
    processes: Processes = ALONE,
    interruption: Interruption | None = None,
    objects: PythonObjects = NOTHING,
) -> Parts:
    """Load the model and the data of a recipe. Each of several processes samples and grades a share.

    ``objects`` holds the rows and rewards that a Python program passed.

    Raises ConfigError for arithmetic that DeepSpeed is not asked for here.
    """
    if config.policy.compute_type == "float16" and config.policy.parallel == "deepspeed":
        raise ConfigError(
            "policy.compute_type is float16 and policy.parallel is deepspeed, whose arithmetic is bfloat16 or float32 "
            "here. Set policy.compute_type=bfloat16, or policy.parallel=fsdp"
        )
    rows = split_rows(config, objects)  # what a user can mistake is found before the model is loaded
    refuse_shared(rows, config, objects)
    reward_function = make_rewards(config, rows=rows, objects=objects)
    algorithm = make_algorithm(config)
    policy = make_policy(config, with_reference=algorithm.needs_reference, processes=processes, objects=objects)
    check_thinking(config, policy.tokenizer)
    config = with_moment(config, policy.tokenizer, processes)
    if processes.count > 1:
        from oncurve.run.data_parallel import ShardedRewards  # lazy

        reward_function = ShardedRewards(reward_function, processes, interruption)
    else:
        reward_function = with_early_grading(reward_function, config.rewards)
    prompts = _make_checked_prompts(config, policy, objects, rows)
    data = Curriculum(
        prompts.train,
        config.run.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        retire_above=config.data.retire_above,
        prefer_half_solved=config.data.prefer_half_solved,
        lag=config.rollouts.staleness,
    )
    sampler, servers, ahead = make_shared_sampler(config, processes, data, interruption, objects)
    if config.sft is None:
        return Parts(config, policy, algorithm, sampler, reward_function, prompts, data, servers, objects, ahead)
    from oncurve.run.demonstrated import DemonstratedReward, DemonstrationSampler, accepts, measure_without  # lazy

    correct_means, held_out = "", prompts.demonstrations_held_out
    is_chosen = config.rewards != Config.model_fields["rewards"].default
    if not is_chosen and not accepts(reward_function, held_out, in_episodes=config.rollouts.has_episodes):
        reward_function.close()
        reward_function, correct_means = measure_without(policy, held_out, in_episodes=config.rollouts.has_episodes)
    demonstrations = DemonstrationSampler(prompts.demonstrations)
    return Parts(
        config, policy, algorithm, demonstrations, DemonstratedReward(), prompts, data, servers, objects,
        examining_sampler=sampler, examining_reward=reward_function, correct_means=correct_means,
    )  # fmt: skip


def prompts_for(
    config: Config, policy: TrainedPolicy, *, rows: tuple[Rows, Rows, Rows, Rows], objects: PythonObjects = NOTHING
) -> Rendered:
    """The prompts of some rows, none longer than the policy's model can read."""
    context = context_of(policy.model.config)
    return make_prompts(config, policy.tokenizer, context_tokens=context, objects=objects, rows=rows)


def _make_checked_prompts(
    config: Config, policy: TrainedPolicy, objects: PythonObjects, rows: tuple[Rows, Rows, Rows, Rows]
) -> Rendered:
    """The prompts of a run, all of whose tokens the model has."""
    prompts = prompts_for(config, policy, rows=rows, objects=objects)
    policy.reference_prompts = prompts.hinted
    for prompt in (*prompts.written, *prompts.during, *prompts.test):
        check_ids(policy.trained_model, prompt.prompt_ids)
    if not isinstance(prompts.train, list):
        prompts.train.check = lambda token_ids: check_ids(policy.trained_model, token_ids)
    for demonstration in prompts.written_demonstrations:
        check_ids(policy.trained_model, demonstration.token_ids)
    return prompts


def with_moment(config: Config, tokenizer: PreTrainedTokenizerBase, processes: Processes) -> Config:
    """The recipe with the moment that the chat template writes into prompts, for whoever resumes or evaluates the run.

    Processes on several machines have several clocks; the first one's counts.
    """
    if config.data.now is not None or not asks_time(tokenizer):
        return config
    moment = processes.broadcast_from_main(lambda: moment_of(tokenizer))
    prepare_tokenizer(tokenizer, template=None, moment=moment)
    return config.model_copy(update={"data": config.data.model_copy(update={"now": moment})})


def make_shared_sampler(
    config: Config,
    processes: Processes,
    data: Curriculum,
    interruption: Interruption | None,
    objects: PythonObjects = NOTHING,
) -> tuple[Sampler, ServerSide | None, LookAhead | None]:
    """The sampler of the loop, the client of rollout servers inside of it, and the look-ahead around it: of
    several processes, the first one alone has servers."""
    several, rollouts = processes.count > 1, config.rollouts
    is_ahead = rollouts.staleness > 0 and config.sft is None
    ahead: LookAhead | None = None
    schedule = {"total_steps": config.run.steps, "staleness": rollouts.staleness}
    if rollouts.type != "servers":
        sampler = make_sampler(config, objects)
        if several:
            from oncurve.run.data_parallel import ShardedSampler  # lazy

            sampler = ShardedSampler(sampler, processes, interruption)
        if is_ahead:
            sampler = ahead = extension("look-ahead sampling")(sampler, data.at, at_once=True, **schedule)
        return sampler, None, ahead
    servers: ServerSide | None = extension("servers")(config) if processes.is_main else None
    leader: Sampler | None = servers if servers is None else with_episodes(servers, config, objects)
    if leader is not None and servers is not None and is_ahead:
        leader = ahead = extension("look-ahead sampling")(
            leader, data.at, in_flight=rollouts.in_flight, prepare=servers.prepare, **schedule
        )
    if several:
        from oncurve.run.data_parallel import MainRankSampler  # lazy

        return MainRankSampler(leader, processes, interruption), servers, ahead
    return cast("Sampler", leader), servers, ahead
