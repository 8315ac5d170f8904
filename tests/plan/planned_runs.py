"""Runs to plan: a recipe of 16 prompts x 8 completions of at most 512 tokens, with whatever a test changes in it."""

from __future__ import annotations

from typing import Any

from oncurve.cli.plan import plan_recipe
from oncurve.plan.find_shape import find_shape
from oncurve.plan.hardware import load_devices
from oncurve.plan.layout import DeviceLayout
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.shape import ModelShape
from oncurve.plan.token_lengths import TokenLengths
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import parse_config

RECIPE = """
model: Qwen/Qwen2.5-1.5B
data: {type: gsm8k}
algorithm: {type: grpo, group_size: 8, kl_coef: 0}
rollouts: {max_completion_tokens: 512}
run: {prompts_per_step: 16}
"""
SHAPE = find_shape("Qwen/Qwen2.5-1.5B")
LORA = "policy.lora={rank: 16}"
KL = "algorithm.kl_coef=0.1"
DEVICES = load_devices()
SEVEN = find_shape("Qwen/Qwen2.5-7B")
SERVER = ("rollouts.type=servers", "rollouts.servers=[http://a:1]")


def planned_run(
    *overrides: str,
    shape: ModelShape = SHAPE,
    prompt_tokens: int = 256,
    mean_tokens: float = 256,
    **layout: Any,
) -> PlannedRun:
    """A run on one GPU, or on what ``layout`` says; prompts and completions of 256 tokens on average."""
    return PlannedRun(
        config=parse_config(RECIPE, overrides),
        shape=shape,
        layout=DeviceLayout(**layout),
        lengths=TokenLengths(
            prompt_tokens=prompt_tokens, mean_prompt_tokens=prompt_tokens, completion_tokens=mean_tokens
        ),
    )


def planned(recipe: str, overrides: list[str], **wishes: Any) -> str:
    """What `oncurve plan` says of a recipe."""
    return plan_recipe(find_recipe(recipe), overrides, **wishes)
