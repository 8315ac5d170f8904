"""The parts of a run, made from the sections of its recipe: algorithm, policy and sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.algorithm.precision import HALF
from oncurve.algorithm.presets import Advantage
from oncurve.algorithm.rounding import like, use_dither
from oncurve.algorithm.settings import AlgorithmSection
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Rewards
from oncurve.core.errors import ConfigError, Failure, RewardError, TrainingError, attempt, is_out_of_memory
from oncurve.core.policy import ComputeType, torch_type
from oncurve.core.sampler import Sampler, end_token_ids
from oncurve.data.chat_template import prepare_tokenizer
from oncurve.data.given import NOTHING, Given
from oncurve.data.prompts import describe_turn_end, unnamed_turn_end
from oncurve.data.settings import DataSection
from oncurve.extensions import extension, imported
from oncurve.model.allocator import keep_freed_memory
from oncurve.policy.deepspeed_settings import ZeroSettings
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
from oncurve.policy.half_precision import halve_frozen_matrices
from oncurve.policy.model_folder import add_end_token
from oncurve.policy.sharding import Sharding
from oncurve.policy.trained_policy import Parallelism, TrainedPolicy
from oncurve.policy.unread_model import copy_unread
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import part_weights
from oncurve.sample.event_loop import require_aiohttp
from oncurve.sample.settings import SAMPLERS
from oncurve.user_code import load_function

if TYPE_CHECKING:
    from oncurve.policy.teacher import OutsideTeacher

log = logging.getLogger(__name__)


def make_algorithm(config: Config) -> Algorithm:
    """The row of the table of algorithms, with the recipe's choices and functions."""
    section = config.algorithm
    made = section.make(
        config.sampling(),
        loss=_own_formula(section.function, where="algorithm.function"),
        advantage=_own_formula(section.advantage_function, where="algorithm.advantage_function"),
        part_weights=part_weights(config.rewards),
    )
    return replace(made, advantage=_stopping(made.advantage))


def _own_formula(location: str | None, *, where: str) -> Callable[..., Any] | None:
    """A function of the user's, if there is one; what it raises, beside a lack of memory, says whose it is."""
    if location is None:
        return None
    function = load_function(location, where=where)

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        made = attempt(lambda: function(*given, **named), passing=is_out_of_memory)
        if isinstance(made, Failure):
            raise TrainingError(f"{where}: {location} raised {made.detail}. It happened here:\n{made.trace.rstrip()}")
        is_advantage = isinstance(given[0], Rewards)
        shape = given[0].values.shape if is_advantage else given[0].shape
        numbers, statistics = made if isinstance(made, tuple) and len(made) == 2 and not is_advantage else (made, None)
        _require_numbers(numbers, shape, f"{where}: {location} gave")
        if statistics is None:
            return numbers
        if not isinstance(statistics, Mapping):
            raise TrainingError(
                f"{where}: {location} gave {type(statistics).__name__} beside the loss, not a dictionary of statistics "
                f"(docs/own_algorithm.md)"
            )
        for name, values in statistics.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise TrainingError(f"{where}: {location} gave a statistic {name!r}; name it as a variable is named")
            _require_numbers(values, shape, f"{where}: {location} gave for the statistic {name!r}")
        return numbers, {f"loss/{name}": values for name, values in statistics.items()}

    return called


def _require_numbers(numbers: Any, shape: torch.Size, what: str) -> None:
    """Raise TrainingError unless these are a tensor of a shape; ``what`` begins the sentence."""
    if not isinstance(numbers, Tensor) or numbers.shape != shape:
        found = f"a tensor of {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TrainingError(f"{what} {found}, not a tensor of {list(shape)} (docs/own_algorithm.md)")


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


def make_policy(
    config: Config,
    *,
    with_reference: bool = False,
    processes: Processes | None = None,
    given: Given = NOTHING,
    is_trained: bool = True,
) -> TrainedPolicy:
    """The model of the recipe, or the ``given`` one, ready to be trained, with a reference if the algorithm needs one.

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
    by_parts = isinstance(sharding, Sharding) and given.model is None and config.algorithm.teacher is None
    source = ModelSource(config.model, config.policy, config.run.seed, given)
    loaded = load_by_parts(source, device) if by_parts else None
    loaded = loaded or load(source, device if few_bits else torch.device("cpu"))
    model, tokenizer = loaded.model, loaded.tokenizer
    prepare_tokenizer(tokenizer, template=config.data.chat_template, moment=config.data.now)
    _end_turns(config.data, loaded, is_said=processes is None or processes.is_main)
    if not is_trained:
        nn.Module.requires_grad_(model, False)
    _dither(model, config, compute, sharding)
    if device.type == "cuda" and compute == "bfloat16" and sharding is None and not few_bits:
        halve_frozen_matrices(model)
    if not few_bits and loaded.unread is None:
        nn.Module.to(model, device)
    teacher = _served_teacher(config, tokenizer) if with_reference and config.algorithm.has_served_teacher else None
    reference = _make_reference(config.algorithm, source, loaded, device) if with_reference and not teacher else None
    place = where_whole(processes or ALONE, sharding, sent_from=config.rollouts.weights_leave_from)
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
        parallelism=Parallelism(processes or ALONE, sharding, place, loaded.unread),
    )


def _served_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> OutsideTeacher:
    """The teacher behind a server."""
    require_aiohttp()
    asked = str(config.algorithm.teacher), tokenizer, config.model, config.rollouts.deadlines
    return extension("teacher behind a server")(*asked)


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


def _end_turns(data: DataSection, loaded: LoadedModel, *, is_said: bool) -> None:
    """Let the token with which the chat template ends a turn end completions."""
    model, tokenizer = loaded.model, loaded.tokenizer
    end = unnamed_turn_end(data.chat, tokenizer, data.template, end_token_ids(model, tokenizer))
    if end is not None:
        add_end_token(model, end)
        if is_said:
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
    copied = copy_unread(loaded.model).requires_grad_(False)
    like(loaded.model, copied)
    return copied


def make_sampler(config: Config, given: Given = NOTHING) -> Sampler:
    """The sampler of completions; ``given`` holds the tools and environments that a Python program passed."""
    rollouts = config.rollouts
    if rollouts.type in SAMPLERS:
        turns = imported(SAMPLERS[rollouts.type])(rollouts, seed=config.run.seed)
    else:
        turns = extension("servers")(config)
    return with_episodes(turns, config, given)


def with_episodes(sampler: Any, config: Config, given: Given = NOTHING) -> Sampler:
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
        return extension("agents")(sampler, config, given)
    from oncurve.episodes.episode_sampler import EpisodeSampler  # lazy
    from oncurve.episodes.from_settings import make_setup  # lazy

    made = EpisodeSampler(sampler, config.sampling(), make_setup(rollouts, config.data, given))
    made.staleness = rollouts.staleness
    return made
