"""How completions are drawn, in training and when the model is measured."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from oncurve.recipe.schema import Config

if TYPE_CHECKING:
    from oncurve.sample.base import SamplingParams


log = logging.getLogger(__name__)


def make_sampling(config: Config) -> SamplingParams:
    """How completions are drawn in training."""
    from dataclasses import fields

    from oncurve.sample.base import SamplingParams  # lazy

    names = {field.name for field in fields(SamplingParams)} - {"seed"}
    return SamplingParams(seed=config.run.seed, **config.rollouts.model_dump(include=names))


def evaluation_sampling(config: Config) -> SamplingParams:
    """How completions are drawn when the model is measured: random numbers apart from those of training."""
    from dataclasses import replace

    return replace(
        make_sampling(config),
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p if config.evaluation.temperature else 1.0,
        top_k=0,
        min_p=0.0,
        seed=config.run.seed + 1_000_003,
    )
