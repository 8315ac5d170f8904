"""An evaluation behind a progress bar, which goes on from what was kept before a stop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from oncurve.errors import Stopped
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import Evaluation
from oncurve.evaluate.resumable import PartialResults, prompts_per_call
from oncurve.recipe.schema import Config
from oncurve.records import Prompt
from oncurve.rewards.base import RewardFunction
from oncurve.sample.base import Sampler, SamplingParams


def bar(console: Console) -> Progress:
    """A progress bar with the time that is left."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def recipe_settings(config: Config, prompts: Sequence[Prompt], params: SamplingParams, samples: int) -> dict[str, Any]:
    """What of a recipe must be the same for an evaluation that goes on."""
    digest = hashlib.sha256("\0".join(f"{prompt.text}\0{prompt.row.get('answer')}" for prompt in prompts).encode())
    return {
        "prompts": digest.hexdigest(),
        "rewards": [reward.model_dump(mode="json") for reward in config.rewards],
        "decoding": asdict(params),
        "samples": samples,
        "compute_type": config.policy.compute_type,
        "prompts_per_call": prompts_per_call(samples),
    }


def measure(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    reward_function: RewardFunction,
    params: SamplingParams,
    kept: PartialResults,
    *,
    what: str,
    goes_on: str,
    console: Console,
    **options: Any,
) -> Evaluation:
    """The evaluation, with ``options`` of ``evaluate``; Ctrl-C leaves what is whole and says how it ``goes_on``."""

    def said() -> str:
        right = sum(one.is_correct for one in kept.examples)
        return what if any(one.category == "graded" for one in kept.examples) else f"{what}, {right:,} correct"

    try:
        with bar(console) as progress:
            shown = progress.add_task(said(), total=len(prompts))
            return evaluate(
                prompts,
                sampler,
                reward_function,
                params=params,
                samples_per_prompt=kept.samples,
                prompts_per_call=prompts_per_call(kept.samples),
                kept=kept,
                seed=params.seed,
                on_progress=lambda done, total: progress.update(shown, completed=done, description=said()),
                **options,
            )
    except KeyboardInterrupt:
        done = len(kept.examples) // kept.samples
        raise Stopped(
            f"stopped: {done} of {len(prompts)} problems are kept in {kept.folder}. {goes_on}", exit_code=130
        ) from None
