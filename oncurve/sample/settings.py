"""The part of a recipe's section ``rollouts`` about how tokens are drawn, and by whom."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.core.errors import ConfigError
from oncurve.core.records import SamplingParams
from oncurve.section import CountsWith, Fraction, NonNegative, Section

SAMPLERS = {
    "auto": "oncurve.sample.engine:make_engine",
    "engine": "oncurve.sample.engine:make_engine",
    "transformers": "oncurve.sample.engine:make_engine",
}
"""Functions that make the samplers of this process from the section and a seed."""


DEFAULTS = SamplingParams()


class SamplingKeys(Section):
    """The recipe's settings of sampling."""

    type: Literal["auto", "engine", "transformers", "servers"] = "auto"
    """The sampler. engine: this process. transformers: this process, by the model's own modules, slower. servers:
    other processes, here or elsewhere. auto: vLLM servers on idle GPUs, or one that shares the only GPU if it fits;
    otherwise engine."""
    temperature: PositiveFloat = DEFAULTS.temperature
    """Sampling temperature; log-probabilities are taken at the same one."""
    max_completion_tokens: PositiveInt = DEFAULTS.max_completion_tokens
    """Longest completion."""
    min_completion_tokens: NonNegative = DEFAULTS.min_completion_tokens
    """No end token before so many tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = DEFAULTS.top_p
    """Nucleus sampling; keep 1 in training."""
    top_k: NonNegative = DEFAULTS.top_k
    """Sample from the k most likely tokens; 0 is off. Keep 0 in training."""
    min_p: Fraction = DEFAULTS.min_p
    """Drop tokens below this fraction of the most likely one; keep 0 in training."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = DEFAULTS.stop
    """Strings that end a completion; they are part of it."""
    max_rows: PositiveInt | Literal["auto"] = "auto"
    """Completions sampled at a time. auto: 256; with the engine on a GPU as many as free memory allows, up to 1,024."""
    kv_tokens: Annotated[PositiveInt | None, CountsWith("type", ("engine", "auto"))] = None
    """engine: most positions in the KV cache. None: what fits into free GPU memory; no limit on a CPU."""
    cuda_graphs: bool = True
    """engine: on a GPU, record the decode steps of Llama, Qwen2 and Qwen3 as CUDA graphs, on bfloat16 copies of the
    weights. false: the model's own modules, slower and without copies."""

    def sampling(self, seed: int) -> SamplingParams:
        """Sampling parameters of training."""
        names = {field.name for field in fields(SamplingParams)} - {"seed"}
        return SamplingParams(seed=seed, **self.model_dump(include=names))

    def prompt_room(self, context_tokens: int) -> int:
        """Tokens of the longest prompt that leaves room for a completion. Raises ConfigError where none does."""
        room = context_tokens - self.max_completion_tokens
        if room < 1:
            raise ConfigError(
                f"rollouts.max_completion_tokens is {self.max_completion_tokens}, which leaves no room for a prompt in "
                f"the model's context of {context_tokens} tokens. Use at most {context_tokens // 2}"
            )
        return room

    @model_validator(mode="after")
    def _check_lengths(self) -> SamplingKeys:
        if self.min_completion_tokens > self.max_completion_tokens:
            raise ValueError(
                f"rollouts.min_completion_tokens is {self.min_completion_tokens}, more than "
                f"rollouts.max_completion_tokens, {self.max_completion_tokens}. Set "
                f"`rollouts.min_completion_tokens={self.max_completion_tokens}` or less, or "
                f"`rollouts.max_completion_tokens={self.min_completion_tokens}` or more"
            )
        return self
