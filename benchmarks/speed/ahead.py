"""Seconds per step by `rollouts.staleness`, in flight and not, where completions differ much in length.

A trainer and one `oncurve serve`, each on a processor core of its own (taskset). Lengths are log-normal, as in real
runs: median 24 tokens, the longest ten times that. The server draws each from the completion's own random stream, so
that every setting samples the same. The ideal is max(sampling, training) per step: sampling as one large batch, in
which stragglers cost nothing, training as it is without look-ahead.

    python benchmarks/bench.py ahead                     # some twelve minutes on two idle cores
    python benchmarks/bench.py ahead --steps 6 --rounds 1 --staleness 0 2
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np
from record import ROOT, Record

from oncurve.core.requests import Rows
from oncurve.observe.ahead import seconds_ahead
from oncurve.observe.record import read_metrics

MEDIAN, LONGEST, SPREAD = 24, 240, 0.96
"""Tokens of the middle and of the longest completion, and the deviation of their logarithm: of 64 completions, the
longest is then ten times as long as the middle one, on average."""
GROUP, ROWS = 8, 16
WAITS = {
    "completions": "time/sample_seconds",
    "grading": "time/grade_seconds",
    "weights": "weights/held_seconds",
    "checkpoints": "time/save_seconds",
}
"""What a trainer waits for, by the metric that says for how long."""
RECIPE = """
model: embedded
data: {{type: word_problems, limit: 2000}}
rewards: [{{type: custom, function: {folder}/reward.py:parity}}]
algorithm: {{group_size: {group}, correction: truncate}}
rollouts: {{type: servers, servers: ["{address}"], max_completion_tokens: {longest}}}
evaluation: {{every_steps: 0, num_prompts: 2}}
run: {{prompts_per_step: {prompts}, save_every_steps: 0, folder: {folder}}}
"""
REWARD = """
import zlib
def parity(completion):
    return float(zlib.crc32(completion.encode()) % 2)
"""


def serve(port: int) -> None:
    """`oncurve serve`, whose completions have the lengths that are drawn for them, and end nowhere else."""
    from oncurve.__main__ import main  # lazy

    enter = Rows.enter

    def entered(self: Rows, request: Any, first: int, count: int, **words: Any) -> np.ndarray:
        request.end_ids = ()
        rows = enter(self, request, first, count, **words)
        drawn = [np.random.default_rng(int(key)).lognormal(np.log(MEDIAN), SPREAD) for key in self.keys[rows]]
        self.limits[rows] = np.clip(np.rint(drawn), 1, request.params.max_completion_tokens)
        return rows

    Rows.enter = entered  # type: ignore[method-assign]
    sys.argv = ["oncurve", "serve", "embedded", "--port", str(port), "--max-rows", str(ROWS)]
    main()


@contextlib.contextmanager
def server(core: int) -> Iterator[str]:
    """The address of a server on a core of its own."""
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [
            "taskset",
            "-c",
            str(core),
            sys.executable,
            str(ROOT / "benchmarks" / "bench.py"),
            "ahead",
            "--child",
            str(port),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def run(folder: Path, core: int, address: str, *, prompts: int, name: str, words: list[str]) -> list[dict[str, Any]]:
    """The metrics of a run whose trainer has a core of its own, step by step."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    text = RECIPE.format(folder=folder, group=GROUP, address=address, longest=LONGEST, prompts=prompts)
    recipe.write_text(text, encoding="utf-8")
    program = [sys.executable, "-c", "from oncurve.__main__ import main; main()"]
    command = ["taskset", "-c", str(core), *program, "train", str(recipe), f"run.name={name}", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [row for row in read_metrics(folder / name) if row["step"]]


def figures(rows: list[dict[str, Any]], first: int) -> dict[str, float]:
    """Mean seconds of the steps behind the first ones, and what of them the trainer waited, by cause."""
    counted = rows[first:]
    found = {"step_seconds": statistics.fmean(row["time/step_seconds"] for row in counted)}
    for cause, key in WAITS.items():
        found[f"waits_for_{cause}_seconds"] = statistics.fmean(row.get(key, 0.0) for row in counted)
    found["training_seconds"] = statistics.fmean(row["time/train_seconds"] for row in counted)
    found["server_idle_fraction"] = statistics.fmean(row["speed/server_idle_fraction"] for row in counted)
    found["mean_age_steps"] = statistics.fmean(row.get("tokens/mean_age_steps", 0.0) for row in counted)
    found["mixed_fraction"] = statistics.fmean(row.get("tokens/mixed_fraction", 0.0) for row in counted)
    return {key: round(value, 4) for key, value in found.items()}


def one_round(place: Path, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every setting once, each with a server that has just started, and what would be ideal."""
    settings = [(0, False), *((number, way) for number in chosen.staleness if number for way in (False, True))]
    steps, skipped, alone = chosen.skip + chosen.steps, chosen.skip, [0.0, 0.0]
    for staleness, in_flight in settings:
        name = f"s{staleness}{'-in-flight' * in_flight}"
        words = [
            f"run.steps={steps}",
            f"rollouts.staleness={staleness}",
            f"rollouts.in_flight={str(in_flight).lower()}",
        ]
        with server(chosen.cores[1]) as address:
            rows = run(place, chosen.cores[0], address, prompts=chosen.prompts, name=name, words=words)
            found = {"staleness": staleness, "in_flight": in_flight, **figures(rows, skipped)}
            if not staleness:
                batch = chosen.prompts * chosen.steps
                [whole] = run(place, chosen.cores[0], address, prompts=batch, name="whole", words=["run.steps=1"])
                training = found["step_seconds"] - found["waits_for_completions_seconds"]
                alone = [whole["time/sample_seconds"] / chosen.steps, training]
                waits = [row["time/sample_seconds"] for row in rows[skipped:]]
        own = seconds_ahead(waits, [alone[1]] * len(waits), staleness) / len(waits)
        yield {**found, "ideal_seconds": round(max(alone), 4), "forecast": round(own, 4)}


def table(runs: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each setting, medians over the rounds."""
    yield "| staleness | in flight | s per step | ideal | waits for completions | weights | server idle | mean age |"
    yield "|---|---|---|---|---|---|---|---|"
    keys = ("step_seconds", "ideal_seconds", "waits_for_completions_seconds", "waits_for_weights_seconds")
    for staleness, in_flight in dict.fromkeys((run["staleness"], run["in_flight"]) for run in runs):
        found = [run for run in runs if (run["staleness"], run["in_flight"]) == (staleness, in_flight)]
        middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
        cells = [f"{middle[key]:.3f}" for key in keys]
        cells += [f"{middle['server_idle_fraction']:.0%}", f"{middle['mean_age_steps']:.1f}"]
        yield f"| {staleness} | {'yes' if in_flight else 'no'} | {' | '.join(cells)} |"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24, help="that count; those before them fill the look-ahead")
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of the trainer and of the server")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)


def bench(asked: argparse.Namespace, record: Record) -> None:
    if asked.child is not None:
        return serve(asked.child)
    record.facts |= {"group_size": GROUP, "server_rows": ROWS, "median_tokens": MEDIAN, "longest_tokens": LONGEST}
    record.total = asked.rounds * (1 + 2 * sum(number > 0 for number in asked.staleness))
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory(prefix="oncurve-speed-") as place:
            for found in one_round(Path(place), asked):
                record.add({"round": number, **found})
    print("\n".join(table(record.rows)))
    return None
