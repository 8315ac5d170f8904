"""The sampler in this process that the section of a recipe asks for."""

from __future__ import annotations

from oncurve.model.decode_memory import USUAL_ROWS
from oncurve.sample.base import Sampler
from oncurve.sample.engine import InProcessEngine
from oncurve.sample.hf import HfSampler
from oncurve.sample.settings import SamplingKeys


def make_own_sampler(section: SamplingKeys, *, seed: int) -> Sampler:
    """The engine, or transformers' own generation."""
    params, rows = section.sampling(seed), section.max_rows
    if section.type == "transformers":
        return HfSampler(params, max_rows=USUAL_ROWS if rows == "auto" else rows)
    max_rows = None if rows == "auto" else rows
    return InProcessEngine(params, max_rows=max_rows, kv_tokens=section.kv_tokens, cuda_graphs=section.cuda_graphs)
