"""Does the simulation of trainer and rollout servers agree with real runs?

Everything runs on this machine, one thread each. The speeds of the parts are measured apart from any run of several
parts: a decoding turn by its number of rows, a push of weights, training in a run with one server that samples within
the step, and how much two servers slow each other down. From these alone the simulation predicts runs with one and two
servers, within the step and one step ahead, whose measured times stand beside its own.

    python benchmarks/simulate.py --steps 14 --output benchmarks/results/simulate.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chaos import Servers
from fleet_simulation import FleetLayout, Simulated, Speeds, simulate
from machine import RESULTS, describe_machine
from overlap import WARM_UP, train

from oncurve.data.prompts import render_prompts
from oncurve.policy.model_folder import load_model
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Prompt
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.servers.server_sampler import ServerSampler
from oncurve.settings import OptimizerSettings
from oncurve.tasks.word_problems import word_problems

PROMPTS, GROUP, TOKENS, ROWS = 32, 8, 64, (8, 64, 256)
STILL = ["optimizer.learning_rate=1e-12", "optimizer.warmup_updates=0", "run.rollouts_every_steps=1"]
"""The policy stays what it is, so that every step has the same to do."""


@dataclass
class Probe:
    """A sampler over servers, and the prompts of a step."""

    sampler: ServerSampler
    prompts: list[Prompt]

    def seconds(self, rows: int, tokens: int, *, times: int = 3) -> float:
        """Sampling so many completions of exactly so many tokens; the median of some tries."""
        params = SamplingParams(max_completion_tokens=tokens, min_completion_tokens=tokens, top_k=0)
        chosen = self.prompts[: rows // GROUP]
        return median(lambda: self.sampler.sample(chosen, GROUP, params=params), times)


def median(work: Callable[[], object], times: int) -> float:
    work()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def open_probe(urls: list[str], folder: Path, policy: TrainedPolicy) -> Probe:
    rows = [{"question": one.question, "answer": one.answer} for one in word_problems("train", PROMPTS, seed=5)]
    prompts, _ = render_prompts(rows, policy.tokenizer, template="think_answer")  # type: ignore[arg-type]
    sampler = ServerSampler(SamplingParams(), urls=urls, weights_folder=folder)
    sampler.load_weights(policy, version=0)
    while len(sampler.pool.ready) < len(urls):
        time.sleep(0.02)
    return Probe(sampler, prompts)


def measure_parts(urls: list[str], folder: Path) -> dict[str, Any]:
    """Speeds of one server, of a push, and of two servers beside each other."""
    torch.set_num_threads(1)
    model, tokenizer = load_model("embedded")
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings())
    one = open_probe(urls[:1], folder, policy)
    short, long = {rows: one.seconds(rows, 2) for rows in ROWS}, {rows: one.seconds(rows, TOKENS) for rows in ROWS}
    turns = {rows: (long[rows] - short[rows]) / (TOKENS - 2) for rows in ROWS}
    slope = (turns[ROWS[-1]] - turns[ROWS[0]]) / (ROWS[-1] - ROWS[0])
    prompt = (short[ROWS[-1]] - short[ROWS[0]] - 2 * (turns[ROWS[-1]] - turns[ROWS[0]])) / (
        (ROWS[-1] - ROWS[0]) / GROUP
    )
    versions = iter(range(1, 100))
    push = median(lambda: one.sampler.load_weights(policy, version=next(versions)), 5)
    one.sampler.close()
    both = open_probe(urls, folder, policy)
    together = both.seconds(2 * ROWS[1], TOKENS)
    both.sampler.close()
    return {
        "turn_seconds_by_rows": turns,
        "turn_seconds": turns[ROWS[0]] - ROWS[0] * slope,
        "row_seconds": slope,
        "prompt_seconds": prompt,
        "push_seconds": push,
        "two_servers_seconds": together,
        "one_server_seconds": long[ROWS[1]],
        "beside": min(1.0, long[ROWS[1]] / together),
    }


def lengths_of(run: Path) -> list[int]:
    """Tokens of every completion of a run."""
    rows = [json.loads(line) for path in (run / "rollouts").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [one["num_tokens"] for row in rows for one in row["completions"]]


def speeds_from(parts: dict[str, Any], *, step: float, sample: float) -> Speeds:
    """The parts, and what a step of one server within the step takes beside sampling and pushing."""
    return Speeds(
        turn_seconds=parts["turn_seconds"],
        row_seconds=parts["row_seconds"],
        prompt_seconds=parts["prompt_seconds"],
        write_seconds=parts["push_seconds"],  # of which the server takes its part
        train_seconds=step - sample - parts["push_seconds"],
    )


def predict(servers: int, staleness: int, speeds: Speeds, lengths: list[int], beside: float) -> Simulated:
    layout = FleetLayout(
        servers=servers,
        prompts=PROMPTS,
        group_size=GROUP,
        max_rows=256,
        lengths=lambda random: random.choice(lengths),
        staleness=staleness,
        shared_cores=os.cpu_count(),
        beside=beside,
    )
    return simulate(layout, speeds)


def compare(urls: list[str], folder: Path, steps: int, parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs beside what is predicted for them; the first one gives the seconds of training."""
    found: list[dict[str, Any]] = []
    speeds: Speeds | None = None
    lengths: list[int] = []
    for servers, staleness in ((1, 0), (1, 1), (2, 0), (2, 1)):
        place = folder / f"servers_{servers}"
        more = [*STILL, f"rollouts.servers=[{','.join(urls[:servers])}]"]
        rows = train(urls[0], place, staleness=staleness, seed=0, steps=steps, more=more)[WARM_UP:-1]
        step, sample = (statistics.median(row[f"time/{name}_seconds"] for row in rows) for name in ("step", "sample"))
        if speeds is None:
            lengths = lengths_of(place / "staleness_0_seed_0")
            speeds = speeds_from(parts, step=step, sample=sample)
            parts["train_seconds"] = speeds.train_seconds
        said = predict(servers, staleness, speeds, lengths, parts["beside"])
        waits = sum(said.wait_seconds) + (sum(said.sync_seconds) if staleness else 0.0)  # as the run counts them
        found.append(
            {
                "servers": servers,
                "staleness": staleness,
                "measured": {"step_seconds": step, "sample_seconds": sample},
                "simulated": {"step_seconds": said.seconds, "sample_seconds": waits / len(said.step_seconds)},
                "gives_train_seconds": not found,
                "step_error": said.seconds / step - 1,
                "server_idle_fraction": said.server_idle_fraction,
                "all_step_seconds": [round(row["time/step_seconds"], 3) for row in rows],
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        servers = Servers(Path(scratch))
        try:
            urls = [servers.start(), servers.start()]
            parts = measure_parts(urls, Path(scratch))
            print(json.dumps(parts), flush=True)
            runs = compare(urls, Path(scratch), asked.steps, parts)
        finally:
            servers.close()
    found = {"machine": describe_machine(), "parts": parts, "runs": runs}
    if asked.output:
        (asked.output if asked.output.is_absolute() else RESULTS / asked.output.name).write_text(
            json.dumps(found, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
