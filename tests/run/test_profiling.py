"""Does a trace see every part of a step, and change nothing?"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oncurve.algorithm.presets import build
from oncurve.core.records import Prompt, SamplingParams
from oncurve.model import decode_proof as proof
from oncurve.observe.record import read_metrics, read_rollouts
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.profiling import Profiler
from oncurve.run.services import Run
from oncurve.sample.engine import InProcessEngine

SAMPLING = SamplingParams(max_completion_tokens=8)
TEXTS = tuple(f"{'word ' * number}= {number}" for number in range(8))


@pytest.fixture
def run_of(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]
) -> Callable[..., Run]:
    """Three steps with two updates each; one of them traced, if it is named."""

    def train(folder: str, *, trace_step: int | None = None) -> Run:
        def watched(engine: InProcessEngine, place: Path) -> Profiler | None:
            return None if trace_step is None else Profiler(place, trace_step=trace_step, is_main=True)

        return train_in(
            make_policy(tokens_per_microbatch=60),
            make_prompts(*TEXTS),
            lambda prompt, completion: completion.token_ids[0] % 2 == 0,
            build("grpo", group_size=4, max_completion_tokens=8),
            SAMPLING,
            steps=3,
            prompts_per_step=4,
            updates_per_step=2,
            folder=folder,
            rollouts_every_steps=1,
            watched=watched,
        )

    return train


def comparable(run: Run) -> list[dict[str, float]]:
    rows = read_metrics(run.log.folder.path)
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))} for row in rows]


@pytest.mark.parametrize("way", ["own layers", "modules"])
def test_a_trace_of_one_step_names_its_parts_and_changes_nothing(
    way: str, run_of: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "modules":
        monkeypatch.setattr(proof, "backbone_of", lambda model: None)
    plain, traced = run_of("plain"), run_of("traced", trace_step=2)
    for step in (1, 2, 3):
        assert read_rollouts(plain.log.folder.path, step) == read_rollouts(traced.log.folder.path, step)
    assert comparable(plain) == comparable(traced)
    [table, trace] = sorted(traced.log.folder.path.glob("trace_step_*"), reverse=True)
    assert trace.name == "trace_step_000002.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"prefill", "decode", "forward", "old_reference", "backward", "optimizer"} <= names
    longest = {line.split()[0] for line in table.read_text().splitlines() if line.strip()}
    assert {"decode", "forward", "backward"} & longest  # the optimizer is among them on a quick machine alone
    assert not list(plain.log.folder.path.glob("trace*"))
