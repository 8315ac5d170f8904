"""The named algorithms on the embedded task, with the same budget for each.

Every row of the table of algorithms trains the embedded base with the recipe of the demo, changed only in
`algorithm.type`, for each seed; then the model is measured on held-out problems. Runs that are in the output already
are not repeated, so the script can be stopped and started again, and several can share the rows (--rows).

    python benchmarks/learning/presets.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from oncurve.algorithm.table import PRESETS
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import read_metrics
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, read_text
from oncurve.run.training import run_recipe
from oncurve.stats import wilson_interval

BUDGET = ["run.steps=12", "run.prompts_per_step=16", "evaluation.num_prompts=200", "evaluation.data.limit=200"]
"""The same for every row: 12 steps of 16 prompts and 8 completions each, measured on 200 problems."""

NEEDS = {"gdpo": ["rewards=[{type: r1_zero}, {type: mathematics, weight: 0.5}]"]}
"""What a row cannot do without: multi_objective wants two rewards, so gdpo also gets paid for the value in any form."""


def one_run(name: str, seed: int) -> dict[str, Any]:
    path = find_recipe("word_problems")
    with tempfile.TemporaryDirectory() as scratch:
        place = [f"run.folder={scratch}", "run.name=run", f"run.seed={seed}", f"algorithm.type={name}"]
        config = load_config(path, [*BUDGET, *NEEDS.get(name, []), "evaluation.every_steps=0", *place])
        started = time.perf_counter()
        result = run_recipe(config, read_text(path), console=Console(file=io.StringIO()))
        seconds = time.perf_counter() - started
        rows = read_metrics(result.folder)[1:]
    assert result.trained is not None
    sampled = sum(row["tokens/sampled"] for row in rows)
    return {
        "row": name,
        "seed": seed,
        "correct": result.trained.correct.successes,
        "of": result.trained.correct.total,
        "bad_format_fraction": result.trained.metrics()["evaluation/bad_format_fraction"],
        "seconds": round(seconds, 1),
        "skipped_token_fraction": round(1 - sum(row["tokens/trained"] for row in rows) / sampled, 4),
        "last_reward": round(statistics.fmean(row["reward/mean"] for row in rows[-5:]), 4),
    }


def merge(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write the runs together with those that another process wrote meanwhile."""
    known = json.loads(path.read_text())["runs"] if path.is_file() else []
    merged = {(run["row"], run["seed"]): run for run in [*known, *runs]}
    ordered = sorted(merged.values(), key=lambda run: (list(PRESETS).index(run["row"]), run["seed"]))
    path.write_text(json.dumps({"budget": BUDGET, "runs": ordered, "run": describe_run()}, indent=1) + "\n")


def table(runs: list[dict[str, Any]]) -> str:
    """One line per row: accuracy over its seeds with the interval of their spread, seconds, skipped tokens."""
    lines = [
        "| row | correct, mean of seeds | each seed | 95 % over problems | seconds | tokens not trained on |",
        "|---|---|---|---|---|---|",
    ]
    for name in PRESETS:
        found = [run for run in runs if run["row"] == name]
        if not found:
            continue
        shares = [run["correct"] / run["of"] for run in found]
        low, high = wilson_interval(sum(run["correct"] for run in found), sum(run["of"] for run in found))
        lines.append(
            f"| {name} | {statistics.fmean(shares):.1%} | {', '.join(f'{share:.0%}' for share in shares)} "
            f"| {low:.1%} to {high:.1%} | {statistics.median(run['seconds'] for run in found):.0f} "
            f"| {statistics.fmean(run['skipped_token_fraction'] for run in found):.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(PRESETS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "presets.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    done = json.loads(arguments.output.read_text())["runs"] if arguments.output.is_file() else []
    finished = {(run["row"], run["seed"]) for run in done}
    for seed in arguments.seeds:
        for name in arguments.rows:
            if (name, seed) in finished:
                continue
            run = one_run(name, seed)
            merge(arguments.output, [run])
            print(json.dumps(run), flush=True)
    print(table(json.loads(arguments.output.read_text())["runs"]))


if __name__ == "__main__":
    main()
