"""The planner's input from a recipe. The only file of this folder that knows a recipe's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from oncurve.core.errors import ConfigError
from oncurve.core.records import USUAL_ROWS
from oncurve.data.settings import DemonstrationsData
from oncurve.plan import constants
from oncurve.plan.setup import Placement, Setup, Shard, TurnPlan, Work
from oncurve.plan.shape import ModelShape
from oncurve.recipe.schema import Config, RolloutSection

PROMPT_TOKENS = {
    "demonstrations": 64,
    "word_problems": 64,
    "calculator_problems": 96,
    "program_problems": 192,
    "gsm8k": 256,
    "math": 384,
}
"""Guessed. Tokens of a long prompt with its template, by the type of the data; 512 for any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of a plan on the command line, beyond the recipe."""

    gpus: int = 1
    """Devices that train."""
    shard: Shard | None = None
    """None: not cut on one device, ZeRO-3 on several."""
    offloads_optimizer: bool = False
    placement: Placement = "colocated"
    sampler_gpus: int = 0
    """Devices that only sample; 0 takes one where the placement needs some."""
    prompt_tokens: int | None = None
    mean_tokens: float | None = None
    mean_turns: float | None = None
    answer_tokens: float | None = None
    """Tokens of the average answer."""
    tool_seconds: float | None = None
    is_gpu: bool = True


def make_work(config: Config, request: PlanRequest, *, context_tokens: int | None = None) -> Work:
    """The work of a step of a recipe; lengths that nobody knows before the data is read are guesses.

    A guessed prompt leaves room for the completion in the model's context.
    """
    limit = config.rollouts.max_completion_tokens
    mean = request.mean_tokens or constants.MEAN_LENGTH_SHARE * limit
    if mean > limit:
        raise ConfigError(
            f"--mean-tokens {mean:g} is more than rollouts.max_completion_tokens, {limit}. Lower it or raise the limit"
        )
    given = request.prompt_tokens or config.data.max_prompt_tokens
    guessed = PROMPT_TOKENS.get(config.data.type, 512)
    epochs = None if config.sft is None else config.sft.epochs
    rows = config.data.limit if isinstance(config.data, DemonstrationsData) else None
    if context_tokens is not None and limit < context_tokens < limit + guessed:
        guessed = context_tokens - limit
    return Work(
        prompts=config.run.prompts_per_step,
        group_size=config.algorithm.group_size,
        prompt_tokens=given or guessed,
        completion_tokens=limit,
        mean_completion_tokens=mean,
        updates=config.updates_per_step,
        passes=config.run.passes_per_step,
        extra_passes=int(needs_reference(config)) + int(recomputes_old(config)),
        max_rows=USUAL_ROWS if config.rollouts.max_rows == "auto" else config.rollouts.max_rows,
        steps=config.run.steps if rows is None else config.steps_over(rows),
        save_every_steps=config.run.save_every_steps,
        keep_checkpoints=config.run.keep_checkpoints,
        keep_every_steps=config.run.keep_every_steps,
        records_all=config.run.record == "all",
        turns=make_turns(config, request),
        context_tokens=context_tokens,
        is_supervised=config.sft is not None,
        epochs=epochs if rows is None else None,
    )


def make_turns(config: Config, request: PlanRequest) -> TurnPlan:
    """Turns and answers of a recipe with tools or environments; guessed where the command line does not say."""
    asked = {
        "--mean-turns": request.mean_turns,
        "--answer-tokens": request.answer_tokens,
        "--tool-seconds": request.tool_seconds,
    }
    if not config.rollouts.has_episodes:
        for option, value in asked.items():
            if value is not None:
                raise ConfigError(
                    f"{option} is for completions with tools, and this recipe has none. Set rollouts.tools or "
                    f"rollouts.environments, or leave {option} out"
                )
        return TurnPlan()
    limits = config.rollouts.episodes
    mean = request.mean_turns or min(constants.MEAN_TURNS, float(limits.max_turns))
    answer = request.answer_tokens or constants.MEAN_ANSWER_SHARE * limits.max_answer_tokens
    for option, value, key, most in (
        ("--mean-turns", mean, "max_turns", limits.max_turns),
        ("--answer-tokens", answer, "max_answer_tokens", limits.max_answer_tokens),
    ):
        if value > most:
            raise ConfigError(
                f"{option} {value:g} is more than rollouts.episodes.{key}, {most}. Lower it or raise the limit"
            )
    return TurnPlan(
        limit=limits.max_turns,
        mean=mean,
        answer_limit=limits.max_answer_tokens,
        mean_answer=answer,
        seconds=constants.TOOL_SECONDS if request.tool_seconds is None else request.tool_seconds,
        threads=limits.threads,
        cached=_has_vllm(config, request) or not request.is_gpu,
    )


def placement_of(config: Config, *, is_gpu: bool) -> tuple[Placement, int]:
    """The placement of a recipe's sampler, and the devices that its servers take.

    On a CPU one machine does everything. Of servers that come and go one is planned.
    """
    rollouts = config.rollouts
    if not is_gpu or rollouts.type != "servers" or rollouts.sleep:
        return "colocated", 0
    started = rollouts.own_servers + rollouts.vllm_servers * rollouts.tensor_parallel
    return ("split", started) if started else ("disaggregated", max(1, len(rollouts.servers)))


def _has_vllm(config: Config, request: PlanRequest) -> bool:
    """vLLM servers sample, which keep what they have read."""
    rollouts = config.rollouts
    named = bool(rollouts.vllm_servers or rollouts.sleep)
    return named or (rollouts.type == "auto" and request.placement != "colocated")


def _server_devices(rollouts: RolloutSection) -> int:
    """GPUs of one server; 0 where the recipe does not say: an address may be that of any."""
    if rollouts.vllm_servers:
        return rollouts.tensor_parallel
    return int(bool(rollouts.own_servers or rollouts.registry))


def make_setup(config: Config, request: PlanRequest) -> Setup:
    """The training setup of a recipe, on the devices that the command line asks for."""
    policy = config.policy
    compute = policy.compute_type
    if compute == "auto":
        compute = "bfloat16" if request.is_gpu else "float32"
    lora = policy.lora
    targets = lora.target_modules if lora is not None else None
    apart = request.placement != "colocated"
    if request.gpus > 1 and not apart and request.sampler_gpus:
        raise ConfigError("--sampler-gpus needs --placement split or disaggregated: colocated devices do both")
    return Setup(
        method="full" if lora is None else "lora",
        **cast("dict[str, Any]", {} if lora is None else {"rank": lora.rank}),
        targets=None if targets is None or isinstance(targets, str) else tuple(targets),
        quantization=policy.quantization,
        compute=compute,
        is_gpu=request.is_gpu,
        packed=policy.packing,
        checkpointing=policy.gradient_checkpointing,
        offloads_activations=policy.offload_activations,
        optimizer=config.optimizer.type,
        tokens_per_microbatch=policy.tokens_per_microbatch,
        has_reference=needs_reference(config) and config.algorithm.teacher is None,
        records_decoding=config.rollouts.cuda_graphs,
        ranks=request.gpus,
        shard=request.shard or ("zero3" if request.gpus > 1 else "none"),
        degree=policy.shard_degree,
        loads_by_parts=policy.parallel != "deepspeed" and config.algorithm.teacher is None,
        offloads_optimizer=request.offloads_optimizer,
        placement=request.placement,
        sampler_devices=max(1, request.sampler_gpus) if apart else 0,
        server_devices=_server_devices(config.rollouts) if apart else 0,
        transfer="fetch" if config.rollouts.transfer == "auto" else config.rollouts.transfer,
        delta_rate=None
        if config.rollouts.deltas is None or lora is not None
        else config.optimizer.learning_rate * config.updates_per_step,
        staleness=config.rollouts.staleness,
        in_flight=config.rollouts.in_flight,
        has_server_beside=not apart and config.rollouts.sleep,
    )


def needs_reference(config: Config) -> bool:
    """A KL term whose other side is not the policy that sampled."""
    return bool(config.algorithm.kl_coef) and config.algorithm.reference != "old"


def recomputes_old(config: Config) -> bool:
    """Several updates on one batch, with old log-probabilities from the trainer: one more forward pass."""
    return config.updates_per_step > 1 and config.algorithm.old_logprobs == "trainer"


def check_ranks(work: Work, setup: Setup) -> None:
    """Raises ConfigError where the completions of an update do not divide over the ranks."""
    rows = work.completions_per_update
    if setup.degree is not None and setup.parts != setup.degree:
        raise ConfigError(
            f"--gpus {setup.ranks} is no multiple of policy.shard_degree, {setup.degree}. Choose one, or leave it out"
        )
    if rows % setup.ranks:
        raise ConfigError(
            f"--gpus {setup.ranks}: the {rows} completions of an update do not divide over them. "
            f"Choose a divisor, or another run.prompts_per_step"
        )


def longest_row(shape: ModelShape, work: Work) -> str | None:
    """A warning where prompt and completion are longer than the model was made for; None otherwise."""
    row = work.prompt_tokens + work.completion_tokens
    if row <= shape.max_tokens:
        answers = (work.turns.limit - 1) * work.turns.answer_limit
        if row + answers <= shape.max_tokens:
            return None
        return (
            f"a prompt, its turns and their answers may take {row + answers} tokens, more than the context of "
            f"{shape.name}, {shape.max_tokens}: such completions end with the reason context"
        )
    return (
        f"a prompt and its completion may take {row} tokens, more than the context of {shape.name}, "
        f"{shape.max_tokens}: longer prompts are left out"
    )
