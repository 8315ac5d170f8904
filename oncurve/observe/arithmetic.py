"""Batch arithmetic of a recipe: how its numbers follow from each other, for the terminal and for reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def batch_arithmetic(config: Mapping[str, Any], prompts: Mapping[str, int]) -> list[tuple[str, str]]:
    """The derived numbers of a run with their units, as pairs of name and value.

    ``config`` is the resolved recipe as plain data; ``prompts`` counts those for "training", "test" and "held_out" and
    those left out as "too_long"; what is not counted there has no line.

    Raises KeyError for a recipe without the sections run, algorithm, rollouts and policy.
    """
    run, group_size = config["run"], config["algorithm"]["group_size"]
    per_step = run["prompts_per_step"] * group_size
    per_update = run.get("completions_per_update") or per_step
    passes = run.get("passes_per_step") or 1
    per_loss = run.get("save_every_steps") or run["steps"]
    sampled = [
        ("prompts per step", f"{run['prompts_per_step']}"),
        ("x completions per prompt (group size)", f"{group_size}"),
        ("= completions per step", f"{per_step}"),
    ]
    shown = [("demonstrations per step", f"{per_step}")]
    rows = [
        *(sampled if config.get("sft") is None else shown),
        ("/ completions per update", f"{per_update}"),
        *([("x passes over the completions of a step", f"{passes}")] if passes > 1 else []),
        ("= updates per step", f"{per_step // per_update * passes}"),
        ("steps x updates per step", f"{run['steps'] * (per_step // per_update) * passes} updates"),
    ]
    if training := prompts.get("training"):
        rows += [
            ("training prompts", f"{training}"),
            ("passes over them", f"{run['steps'] * run['prompts_per_step'] / training:.2f}"),
        ]
    rows += [
        ("steps lost by a failure, at most", f"{per_loss}"),
        *([("= completions sampled again", f"{per_loss * per_step}")] if config.get("sft") is None else []),
        ("most tokens in a completion", f"{config['rollouts']['max_completion_tokens']}"),
        ("tokens in a microbatch, at most", f"{config['policy']['tokens_per_microbatch']}"),
    ]
    counted = (
        ("test prompts (before and after)", "test"),
        ("held-out prompts (during)", "held_out"),
        ("prompts left out as too long", "too_long"),
    )
    return rows + [(name, f"{prompts[key]}") for name, key in counted if key in prompts]
