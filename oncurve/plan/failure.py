"""Cost of losing a machine in the middle of a run: repeated steps, tokens, seconds and dollars."""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.plan.cost import Price, price
from oncurve.plan.hardware import Device
from oncurve.plan.setup import Setup, Work
from oncurve.plan.step_time import StepTime


@dataclass(frozen=True, slots=True)
class FailureCost:
    """What one preemption of the trainer costs, at most; half of it on average."""

    steps: int
    """Done again: those since the last checkpoint."""
    completions: int
    tokens: float
    """Sampled again: steps x prompts x group size x mean length."""
    seconds: float
    """Of those steps, without the time until another machine is there and has loaded the model."""
    usd: Price
    sampler_tokens: float
    """Sampled again when one of the devices that only sample is taken away instead: its share of a step."""


def cost_of_failure(work: Work, time: StepTime, setup: Setup, device: Device) -> FailureCost:
    """The most that a preemption costs when checkpoints are written every ``work.save_every_steps`` steps.

        tokens = steps x P x G x mean length      seconds = steps x seconds of a step

    Without checkpoints (0) it is the whole run. A sampler that is lost costs completions of the current step only.
    """
    steps = min(work.save_every_steps or work.steps, work.steps)
    seconds = steps * time.total
    return FailureCost(
        steps=steps,
        completions=steps * work.completions,
        tokens=steps * time.sampled_tokens,
        seconds=seconds,
        usd=price(setup, device, hours=seconds / 3600),
        sampler_tokens=time.sampled_tokens / max(setup.sampler_devices, 1),
    )
