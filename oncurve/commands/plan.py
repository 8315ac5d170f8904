"""The command ``oncurve plan``, from its arguments to its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from oncurve.errors import ConfigError
from oncurve.observe.run_model import locate
from oncurve.plan.find_shape import find_shape
from oncurve.plan.from_recipe import PlanRequest, check_ranks, make_setup, make_work
from oncurve.plan.hardware import Device, find_device, load_devices
from oncurve.plan.memory import rows_that_fit
from oncurve.plan.report import as_data, as_text, make_plan
from oncurve.plan.setup import Placement, Setup, Shard, Work
from oncurve.plan.shape import ModelShape
from oncurve.recipe.load import load_config

DEFAULT_GPU = "H100"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan is made from."""

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
    found = plan_inputs(recipe, overrides, **asked)
    plan = make_plan(
        found.shape,
        found.work,
        found.setup,
        found.device,
        devices=found.devices,
        network_gbit=network_gbit,
        rows_by_memory=found.rows_by_memory,
    )
    return json.dumps(as_data(plan), indent=2) if as_json else as_text(plan)


def plan_inputs(
    recipe: Path, overrides: Sequence[str], *, gpu: str | None = None, devices: Path | None = None, **asked: Any
) -> PlanInputs:
    """Model, work, setup and device of a recipe. No torch, no weights; an unknown model's config.json is fetched.

    Without ``gpu``, the embedded model and what is told to run on a CPU are planned for a CPU, all else for an H100.
    The rest of what is ``asked`` are the fields of ``PlanRequest``.

    Raises ConfigError or CheckpointError for a recipe, a model or a device that is not there.
    """
    config = load_config(recipe, overrides)
    table = load_devices(devices)
    is_for_cpu = config.policy.device == "cpu" or (config.policy.device == "auto" and config.model == "embedded")
    device = find_device(gpu or ("cpu" if is_for_cpu else DEFAULT_GPU), table)
    wishes = PlanRequest(**asked, is_gpu=device.is_gpu)
    if wishes.shard is not None and wishes.shard not in get_args(Shard):
        raise ConfigError(f"--shard {wishes.shard}: choose one of {', '.join(get_args(Shard))}")
    if wishes.placement not in get_args(Placement):
        raise ConfigError(f"--placement {wishes.placement}: choose one of {', '.join(get_args(Placement))}")
    shape = find_shape(config.model, revision=config.policy.revision)
    work, setup = make_work(config, wishes, context_tokens=shape.max_tokens), make_setup(config, wishes)
    if config.algorithm.teacher is not None and not config.algorithm.has_served_teacher:
        setup = replace(setup, teacher=find_shape(locate(config.algorithm.teacher)))
    check_ranks(work, setup)
    by_memory = config.rollouts.max_rows == "auto"
    if by_memory and device.is_gpu and wishes.placement == "colocated":
        rows = rows_that_fit(shape, work, setup, memory_bytes=device.memory_bytes)
        work = replace(work, max_rows=rows) if rows >= work.group_size else work  # else it does not fit, and is told so
    return PlanInputs(shape, work, setup, device, table, by_memory)
