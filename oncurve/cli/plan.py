"""Command `plan`: memory, time and price of a recipe before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from oncurve.cli.arguments import AsJson, Overrides, RecipeArgument
from oncurve.core.errors import ConfigError, DataError, RewardError

if TYPE_CHECKING:
    from oncurve.plan.hardware import Device
    from oncurve.plan.planned_run import PlannedRun
    from oncurve.recipe.schema import Config


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU type, such as RTX-4090 (default: cpu for the embedded model, else H100).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs for training.")] = 1,
    devices: Annotated[Path | None, typer.Option(help="YAML file with your own devices and prices.")] = None,
    usd_per_gpu_hour: Annotated[float | None, typer.Option(min=0, help="Your price of one GPU per hour.")] = None,
    shard: Annotated[str | None, typer.Option(help="Sharding: none, zero1, zero2 or zero3.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep the optimizer state in CPU memory.")] = False,
    placement: Annotated[
        str | None,
        typer.Option(help="Where rollouts run: colocated, split or disaggregated (default: as the recipe says)."),
    ] = None,
    sampler_gpus: Annotated[
        int, typer.Option(min=0, help="GPUs used only for rollouts (default: those that the recipe names).")
    ] = 0,
    bandwidth: Annotated[float, typer.Option(min=0.001, help="Network bandwidth between machines in Gbit/s.")] = 100.0,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Length of a long prompt in tokens.")] = None,
    mean_tokens: Annotated[float | None, typer.Option(min=1, help="Mean completion length in tokens.")] = None,
    mean_turns: Annotated[float | None, typer.Option(min=1, help="With tools: mean turns of a completion.")] = None,
    answer_tokens: Annotated[float | None, typer.Option(min=1, help="With tools: mean tokens of an answer.")] = None,
    tool_seconds: Annotated[float | None, typer.Option(min=0, help="With tools: seconds until an answer.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, fitting GPUs, time and cost of a recipe before running it.

    Example: `oncurve plan gsm8k policy.gradient_checkpointing=true --gpu H100`
    """
    from oncurve.recipe.files import find_recipe  # lazy

    text = plan_recipe(
        find_recipe(recipe),
        overrides or (),
        gpu=gpu,
        gpus=gpus,
        devices=devices,
        usd_per_gpu_hour=usd_per_gpu_hour,
        shard=shard,
        offloads_optimizer=offload,
        placement=placement,
        sampler_gpus=sampler_gpus,
        network_gbit=bandwidth,
        prompt_tokens=prompt_tokens,
        mean_tokens=mean_tokens,
        mean_turns=mean_turns,
        answer_tokens=answer_tokens,
        tool_seconds=tool_seconds,
        as_json=as_json,
    )
    sys.stdout.write(text + "\n")


DEFAULT_GPU = "H100"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that a plan is made from."""

    run: PlannedRun
    device: Device
    devices: Mapping[str, Device]


def plan_recipe(
    recipe: Path, overrides: Sequence[str], *, network_gbit: float = 100.0, as_json: bool = False, **options: Any
) -> str:
    """The plan of a recipe as text or JSON; the other options go to ``plan_inputs``."""
    from oncurve.plan.report import as_data, as_text, make_plan  # lazy

    inputs = plan_inputs(recipe, overrides, **options)
    made = make_plan(inputs.run, inputs.device, devices=inputs.devices, network_gbit=network_gbit)
    return json.dumps(as_data(made), indent=2) if as_json else as_text(made)


def plan_inputs(
    recipe: Path,
    overrides: Sequence[str],
    *,
    gpu: str | None = None,
    devices: Path | None = None,
    usd_per_gpu_hour: float | None = None,
    gpus: int = 1,
    shard: str | None = None,
    offloads_optimizer: bool = False,
    placement: str | None = None,
    sampler_gpus: int = 0,
    **lengths: Any,
) -> PlanInputs:
    """The run of a recipe and its device. No weights; an unknown model's config.json is fetched.

    Torch is loaded only to measure prompts.
    Without ``gpu``, the embedded model and what is told to run on a CPU are planned for a CPU, all else for an H100.
    Without ``placement``, samplers are where the recipe has them, and without ``sampler_gpus`` as many as it names.
    ``lengths`` are those of ``guess_lengths``; prompts are measured where rows and tokenizer are on this machine.

    Raises ConfigError or CheckpointError for a recipe, a model or a device that is not there.
    """
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.plan.find_shape import find_shape  # lazy
    from oncurve.plan.fit import with_rows_of  # lazy
    from oncurve.plan.hardware import load_devices  # lazy
    from oncurve.plan.layout import Placement, Shard, make_layout, placement_of  # lazy
    from oncurve.plan.planned_run import PlannedRun  # lazy
    from oncurve.plan.token_lengths import guess_lengths  # lazy
    from oncurve.recipe.load import load_config  # lazy

    config = load_config(recipe, overrides)
    table = load_devices(devices)
    device = _device(config, gpu, table, usd_per_gpu_hour)
    own_placement, own_samplers = placement_of(config.rollouts, is_gpu=device.is_gpu)
    if shard is not None and shard not in get_args(Shard):
        raise ConfigError(f"--shard {shard}: choose one of {', '.join(get_args(Shard))}")
    if placement is not None and placement not in get_args(Placement):
        raise ConfigError(f"--placement {placement}: choose one of {', '.join(get_args(Placement))}")
    teacher = None if config.algorithm.has_served_teacher else config.algorithm.teacher
    shape = find_shape(config.model, revision=config.policy.revision)
    measured = _measured_prompts(config, shape.max_tokens) if lengths.get("prompt_tokens") is None else ()
    run = PlannedRun(
        config=config,
        shape=shape,
        lengths=guess_lengths(config, context_tokens=shape.max_tokens, measured=measured, **lengths),
        layout=make_layout(
            is_gpu=device.is_gpu,
            gpus=gpus,
            shard=cast("Shard | None", shard),
            offloads_optimizer=offloads_optimizer,
            placement=cast("Placement", placement or own_placement),
            sampler_gpus=sampler_gpus or (own_samplers if placement in (None, own_placement) else 0),
        ),
        teacher=None if teacher is None else find_shape(locate(teacher)),
    )
    run.check_ranks()
    return PlanInputs(with_rows_of(run, device) if device.is_gpu else run, device, table)


def _device(config: Config, gpu: str | None, table: dict[str, Device], usd_per_gpu_hour: float | None) -> Device:
    """The device of a plan, at somebody's own price where it is given."""
    from oncurve.plan.hardware import find_device  # lazy

    is_for_cpu = config.policy.device == "cpu" or (config.policy.device == "auto" and config.model == "embedded")
    device = find_device(gpu or ("cpu" if is_for_cpu else DEFAULT_GPU), table)
    if usd_per_gpu_hour is None:
        return device
    own = {"on_demand": usd_per_gpu_hour, "spot": None, "priced": None, "source": "--usd-per-gpu-hour"}
    return device.model_copy(update=own)


def _measured_prompts(config: Config, context_tokens: int) -> list[int]:
    """Tokens of the prompts of the recipe's file; empty where there is none here, or no tokenizer that writes them."""
    if config.data.path is None or not Path(config.data.path).expanduser().exists():
        return []
    from transformers import AutoTokenizer  # lazy

    from oncurve.observe.run_model import locate  # lazy
    from oncurve.run.rendered import prompt_lengths  # lazy

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            locate(config.model), revision=config.policy.revision, local_files_only=True
        )
        return prompt_lengths(config, tokenizer, context_tokens=context_tokens)
    except (OSError, ValueError, DataError, RewardError):  # `check` says what is wrong with rows, or with a sandbox
        return []
