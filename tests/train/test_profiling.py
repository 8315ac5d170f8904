"""Does a profile see every phase of a step, change nothing, and cost nothing when nobody asks for it?"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncurve.algorithm.presets import build
from oncurve.observe.profile import PARTS, Spent, read_profile
from oncurve.observe.record import read_metrics, read_rollouts, read_rows
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Prompt
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.engine import proof
from oncurve.rollouts.engine.engine import InProcessEngine
from oncurve.train.profiling import Profiler
from oncurve.train.run import Run

SAMPLING = SamplingParams(max_completion_tokens=8)
TEXTS = tuple(f"{'word ' * number}= {number}" for number in range(8))


@pytest.fixture
def run_of(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]
) -> Callable[..., tuple[Run, TrainedPolicy]]:
    """Three steps with two updates each; with a profiler if its settings are given."""

    def train(folder: str, **settings: Any) -> tuple[Run, TrainedPolicy]:
        policy = make_policy(tokens_per_microbatch=60)

        def watched(engine: InProcessEngine, place: Path) -> Profiler | None:
            return Profiler(policy, engine, place, **settings) if settings else None

        run = train_in(
            policy,
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
        return run, policy

    return train


def comparable(run: Run) -> list[dict[str, float]]:
    rows = read_metrics(run.folder.path)
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))} for row in rows]


@pytest.mark.parametrize("way", ["own layers", "modules"])
def test_every_phase_is_timed_and_nothing_changes(
    way: str, run_of: Callable[..., tuple[Run, TrainedPolicy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "modules":
        monkeypatch.setattr(proof, "backbone_of", lambda model: None)
    plain, untouched = run_of("plain")
    assert not {"logprobs", "backward", "annotate", "update"} & set(vars(untouched)), "nothing is wrapped"
    profiled, _ = run_of("profiled", is_timed=True)
    for step in (1, 2, 3):
        assert read_rollouts(plain.folder.path, step) == read_rollouts(profiled.folder.path, step)
    assert comparable(plain) == comparable(profiled)

    found = {row.name: row.spent for row in read_profile(profiled.folder.path)}
    assert {"sample", "load", "prefill", "decode", "grade", "train"} <= found.keys()
    assert {"old_reference", "forward", "backward", "optimizer"} <= found.keys()
    for phase in ("sample", "train"):
        inside = sum(found[part].seconds for part in PARTS[phase] if part in found)
        assert inside > 0


def test_calls_and_tokens_are_those_of_the_step(run_of: Callable[..., tuple[Run, TrainedPolicy]]) -> None:
    run, _ = run_of("run", is_timed=True)
    for row in read_rows(run.folder.path / "profile.jsonl"):
        phases = {name: Spent(**values) for name, values in row["phases"].items()}
        groups = read_rollouts(run.folder.path, row["step"])
        sampled = [c["num_tokens"] for group in groups for c in group["completions"]]
        assert phases["sample"].tokens == sum(sampled)
        assert phases["decode"].calls == max(sampled) - 1
        assert phases["optimizer"].calls == 2
        assert phases["backward"].calls == phases["forward"].calls


def test_a_trace_of_one_step_names_the_phases(run_of: Callable[..., tuple[Run, TrainedPolicy]]) -> None:
    run, _ = run_of("traced", is_timed=False, trace_step=2)
    [trace] = run.folder.path.glob("trace_step_*")
    assert trace.name == "trace_step_000002.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"prefill", "decode", "forward", "backward", "optimizer"} <= {event.get("name") for event in events}
    assert not (run.folder.path / "profile.jsonl").exists()
