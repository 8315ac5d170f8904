"""Command `plan`: memory, time and price of a recipe before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from oncurve.cli.arguments import AsJson, Overrides, RecipeArgument
from oncurve.core.errors import ConfigError

if TYPE_CHECKING:
    from oncurve.plan.hardware import Device
    from oncurve.plan.setup import Setup, Work
    from oncurve.plan.shape import ModelShape


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU type, such as RTX-4090 (default: cpu for the embedded model, else H100).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs for training.")] = 1,
    devices: Annotated[Path | None, typer.Option(help="YAML file with your own devices and prices.")] = None,
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
    from oncurve.recipe.find import find_recipe  # lazy

    text = plan_recipe(
        find_recipe(recipe),
        overrides or (),
        gpu=gpu,
        gpus=gpus,
        devices=devices,
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

    shape: ModelShape
    work: Work
    setup: Setup
    device: Device
    devices: Mapping[str, Device]
    rows_by_memory: bool
    """As many rows are sampled at a time as fit; the recipe names no number."""


def plan_recipe(
    recipe: Path, overrides: Sequence[str], *, network_gbit: float = 100.0, as_json: bool = False, **asked: Any
) -> str:
    """The plan of a recipe as text or JSON; what is ``asked`` goes to ``plan_inputs``."""
    from oncurve.plan.report import as_data, as_text, make_plan  # lazy

    found = plan_inputs(recipe, overrides, **asked)
    made = make_plan(
        found.shape,
        found.work,
        found.setup,
        found.device,
        devices=found.devices,
        network_gbit=network_gbit,
        rows_by_memory=found.rows_by_memory,
    )
    return json.dumps(as_data(made), indent=2) if as_json else as_text(made)


def plan_inputs(
    recipe: Path,
    overrides: Sequence[str],
    *,
    gpu: str | None = None,
    devices: Path | None = None,
    placement: str | None = None,
    sampler_gpus: int = 0,
    **asked: Any,
) -> PlanInputs:
    """Model, work, setup and device of a recipe. No torch, no weights; an unknown model's config.json is fetched.

    Without ``gpu``, the embedded model and what is told to run on a CPU are planned for a CPU, all else for an H100.
    Without ``placement``, samplers are where the recipe has them, and without ``sampler_gpus`` as many as it names.
    The rest of what is ``asked`` are the fields of ``PlanRequest``.

    Raises ConfigError or CheckpointError for a recipe, a model or a device that is not there.
    """
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.plan.find_shape import find_shape  # lazy
    from oncurve.plan.from_recipe import PlanRequest, check_ranks, make_setup, make_work, placement_of  # lazy
    from oncurve.plan.hardware import find_device, load_devices  # lazy
    from oncurve.plan.memory import rows_that_fit  # lazy
    from oncurve.plan.setup import Placement, Shard  # lazy
    from oncurve.recipe.load import load_config  # lazy

    config = load_config(recipe, overrides)
    table = load_devices(devices)
    is_for_cpu = config.policy.device == "cpu" or (config.policy.device == "auto" and config.model == "embedded")
    device = find_device(gpu or ("cpu" if is_for_cpu else DEFAULT_GPU), table)
    own_placement, own_samplers = placement_of(config, is_gpu=device.is_gpu)
    placed = {"placement": placement or own_placement, "sampler_gpus": sampler_gpus}
    if placed["placement"] == own_placement:
        placed["sampler_gpus"] = sampler_gpus or own_samplers
    request = PlanRequest(**asked, **placed, is_gpu=device.is_gpu)
    if request.shard is not None and request.shard not in get_args(Shard):
        raise ConfigError(f"--shard {request.shard}: choose one of {', '.join(get_args(Shard))}")
    if request.placement not in get_args(Placement):
        raise ConfigError(f"--placement {request.placement}: choose one of {', '.join(get_args(Placement))}")
    shape = find_shape(config.model, revision=config.policy.revision)
    work, setup = make_work(config, request, context_tokens=shape.max_tokens), make_setup(config, request)
    if config.algorithm.teacher is not None and not config.algorithm.has_served_teacher:
        setup = replace(setup, teacher=find_shape(locate(config.algorithm.teacher)))
    if shape.is_mixture:  # whose experts transformers joins when it loads them
        setup = replace(setup, loads_by_parts=False)
    check_ranks(work, setup)
    by_memory = config.rollouts.max_rows == "auto"
    if by_memory and device.is_gpu:
        rows = rows_that_fit(shape, work, setup, memory_bytes=device.memory_bytes)
        work = replace(work, max_rows=rows) if rows >= work.group_size else work  # else it does not fit, and is told so
    return PlanInputs(shape, work, setup, device, table, by_memory)
