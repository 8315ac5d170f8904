"""The sampler of a recipe: in this process, or over rollout servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from oncurve.data.given import NOTHING, Given
from oncurve.extensions import extension
from oncurve.recipe.schema import Config
from oncurve.wiring.episodes import with_episodes
from oncurve.wiring.sampling_params import make_sampling

if TYPE_CHECKING:
    from oncurve.sample.base import Sampler


log = logging.getLogger(__name__)


def make_sampler(config: Config, given: Given = NOTHING) -> Sampler:
    """What samples completions; ``given`` holds the tools and environments that a Python program passed."""
    return with_episodes(_make_plain_sampler(config), config, given)


def _make_plain_sampler(config: Config) -> Sampler:
    """What samples turns."""
    params = make_sampling(config)
    match config.rollouts.type:
        case "engine" | "auto":  # what is only measured samples in this process
            from oncurve.sample.engine import InProcessEngine  # lazy

            chosen = config.rollouts
            max_rows = None if chosen.max_rows == "auto" else chosen.max_rows
            return InProcessEngine(
                params, max_rows=max_rows, kv_tokens=chosen.kv_tokens, cuda_graphs=chosen.cuda_graphs
            )
        case "transformers":
            from oncurve.model.decode_memory import USUAL_ROWS  # lazy
            from oncurve.sample.hf import HfSampler  # lazy

            at_once = config.rollouts.max_rows
            return HfSampler(params, max_rows=USUAL_ROWS if at_once == "auto" else at_once)
        case "servers":
            return extension("servers")(config)
