"""The model that a benchmark measures: its sampler, its decoding and its name in the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from rich.console import Console

from oncurve import wiring
from oncurve.commands.evaluate_recipe import short_name
from oncurve.config.load import parse_config
from oncurve.config.schema import Config
from oncurve.data.contamination import NGRAM_WORDS
from oncurve.data.prompts import Template
from oncurve.errors import ConfigError
from oncurve.evaluate.benchmarks import Benchmark
from oncurve.observe.run_model import locate, resolve_model
from oncurve.policy.lora import base_of, is_adapter
from oncurve.policy.policy import TrainedPolicy
from oncurve.rollouts.base import Sampler, SamplingParams
from oncurve.train.state import checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest:
    """What is to be measured, and how; None takes what the benchmark says."""

    benchmarks: tuple[str, ...]
    data: Mapping[str, str] = field(default_factory=dict)
    """A local file or folder for a benchmark's name; the name "" stands for all."""
    split: str = "test"
    limit: int | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    template: str | None = None
    chat: bool | None = None
    """Through the tokenizer's chat template; None if it has one."""
    sampler: str = "engine"
    """What ``rollouts.type`` of a recipe may be."""
    overrides: tuple[str, ...] = ()
    """More keys of a recipe, such as policy.compute_type=bfloat16 or rollouts.max_rows=64."""
    trained_on: str | None = None
    """Run, recipe or file with the training data, to look for the benchmark's problems in it."""
    ngram_words: int = NGRAM_WORDS


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model that is measured, ready to sample."""

    name: str
    label: str
    config: Config
    policy: TrainedPolicy
    sampler: Sampler
    identity: Mapping[str, Any]

    @property
    def tokenizer(self) -> Any:
        """Of the model."""
        return self.policy.tokenizer


def short_labels(models: Sequence[str]) -> list[str]:
    """A short name for each model, fit for a folder, none of them twice."""
    labels: list[str] = []
    for name in models:
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", short_name(resolve_model(name))).strip("-.") or "model"
        same = sum(other == label or other.startswith(f"{label}-") for other in labels)
        labels.append(f"{label}-{same + 1}" if label in labels else label)
    return labels


def load_subject(name: str, label: str, request: BenchmarkRequest) -> MeasuredModel:
    """Load a model and the sampler that the request names. Raises ConfigError or CheckpointError."""
    place = resolve_model(name)
    tree = {
        "model": place,
        "data": {"type": "word_problems"},  # a recipe needs some; nothing is trained here
        "rollouts": {"type": request.sampler},
    }
    config = parse_config(yaml.safe_dump(tree), list(request.overrides), source="evaluate")
    policy = wiring.make_policy(config)
    sampler = wiring.make_sampler(config)
    sampler.load_weights(policy, version=0)
    folder = locate(place)
    identity = {
        "name": name,
        "label": label,
        "revision": config.policy.revision,
        "sha256": checksum(policy.model.named_parameters()),
        "num_parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "adapter_of": base_of(folder)[0] if is_adapter(folder) else None,
    }
    return MeasuredModel(name, label, config, policy, sampler, identity)


def decoding_of(
    subject: MeasuredModel,
    benchmark: Benchmark,
    request: BenchmarkRequest,
    template: Template,
    *,
    chat: bool,
    console: Console,
) -> tuple[SamplingParams, int]:
    """How completions are drawn, and how many of each problem: as asked for, else as the benchmark says.

    A benchmark's own limit on tokens gives way to a smaller context, and says so; one that was asked for does not.
    Without a chat template, a completion ends where the model begins another question of its own.
    """
    usual = benchmark.decoding
    temperature = usual.temperature if request.temperature is None else request.temperature
    most = usual.max_tokens if request.max_tokens is None else request.max_tokens
    room = wiring.context_of(subject.policy.model.config)
    if room is not None and most >= room:
        if request.max_tokens is not None:
            raise ConfigError(
                f"--max-tokens is {most}, and the model's context has {room} tokens. Use at most {room // 2}"
            )
        console.print(f"{benchmark.title}: at most {room // 2} tokens, half of the model's context", highlight=False)
        most = room // 2
    head = template.turn.partition("{user}")[0].strip()
    samples = usual.samples if request.samples is None else request.samples
    if request.samples is None and temperature == 0:
        samples = 1
    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"--samples {samples} at temperature 0 gives the same completion {samples} times. "
            f"Add --temperature 0.6, or ask for one"
        )
    params = SamplingParams(
        temperature=temperature,
        top_p=1.0 if temperature == 0 else usual.top_p if request.top_p is None else request.top_p,
        max_completion_tokens=most,
        stop=(f"\n{head}",) if head and not chat else (),
        seed=request.seed,
    )
    return params, samples
