"""Are the bytes and seconds of new weights over a slow line those that ``oncurve plan --bandwidth`` forecasts?

    python benchmarks/weight_forecast.py --mbit 1

Real runs of the embedded model on word problems, each with one ``oncurve serve`` behind the trainer's own limit on what
it sends. Seconds are those until the server has the weights: to publish them, fetch, apply and load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import RESULTS, describe_machine

COMMAND = [sys.executable, "-m", "oncurve"]


def forecast(words: list[str], mbit: float) -> dict[str, Any]:
    """What the planner says of a recipe."""
    place = ["--gpu", "cpu", "--placement", "disaggregated", "--sampler-gpus", "1", "--bandwidth", str(mbit / 1e3)]
    done = subprocess.run([*COMMAND, "plan", *words, *place, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["seconds"]


def measure(words: list[str], steps: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps of a run that sent differences."""
    own = [f"run.folder={folder}", "run.name=run", f"run.steps={steps}", "run.save_every_steps=0"]
    own += ["evaluation.every_steps=0", "evaluation.num_prompts=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*COMMAND, "train", *words, *own], check=True, env=environment, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("weights/sent_fraction", 1.0) < 1.0]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1.0)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_forecast.json")
    asked = parser.parse_args()
    cases = []
    for rate in asked.rates:
        words = ["word_problems", "rollouts.type=servers", "rollouts.own_servers=1", f"optimizer.learning_rate={rate}"]
        words += ["rollouts.weights_address=127.0.0.1:0", f"rollouts.deltas={{mbit: {asked.mbit}}}"]
        words += ["run.prompts_per_step=8", "algorithm.correction=truncate"]
        said = forecast(words, asked.mbit)
        with tempfile.TemporaryDirectory() as place:
            rows = measure(words, asked.steps, Path(place))
        seconds = [row["weights/publish_seconds"] + row["weights/sync_seconds"] for row in rows]
        case = {
            "learning_rate": rate,
            "steps": len(rows),
            "forecast_mb": said["sync_bytes"] / 1e6,
            "measured_mb": statistics.fmean(row["weights/sent_mb"] for row in rows),
            "forecast_seconds": said["sync"],
            "measured_seconds": statistics.median(seconds),
            "measured_stood_seconds": statistics.median(row["weights/stood_seconds"] for row in rows),
        }
        cases.append(case)
        asked.output.write_text(
            json.dumps({"machine": describe_machine(), "mbit": asked.mbit, "cases": cases}, indent=1) + "\n"
        )
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
