"""What older weights do to learning: accuracy by `rollouts.staleness`, with and without a correction.

The demo and the calculator as their recipes say, but 30 steps of 8 prompts, so that a run takes half a minute on an
idle core. Steps are sampled ahead in the training process: the completions are those that servers would have
given, without the time saved. Runs that are in the output already are not repeated.

    python benchmarks/learning/staleness.py --seeds 0 1 2      # 42 runs
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from oncurve.cli.coldstart import prepare_base
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import read_metrics
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, read_text
from oncurve.run.result import finish
from oncurve.run.training import recipe_steps, run_recipe
from oncurve.stats import wilson_interval

RESULTS = Path(__file__).resolve().parents[1] / "results" / "staleness.json"
RECIPES = ("word_problems", "calculator")
STALENESS = (0, 1, 4, 8)
CORRECTIONS = ("none", "truncate")
BUDGET = ["run.prompts_per_step=8", "run.steps=30", "evaluation.num_prompts=200", "evaluation.every_steps=0"]
CELLS = [(0, "none"), *product(STALENESS[1:], CORRECTIONS)]
"""Without staleness there is nothing to correct: sampler and trainer are the same weights and the same code."""
KEYS = ("recipe", "staleness", "correction", "seed")


def one_run(recipe: str, staleness: int, correction: str, seed: int, *, base: Path | None) -> dict[str, Any]:
    """One run of a recipe: how far it comes, and how much of its batches the gradient can use."""
    path = find_recipe(recipe)
    with tempfile.TemporaryDirectory() as scratch:
        words = [f"run.folder={scratch}", "run.name=run", f"run.seed={seed}", "run.save_every_steps=0"]
        words += [f"rollouts.staleness={staleness}", f"algorithm.correction={correction}"]
        config = load_config(path, [*BUDGET, *words, *([] if base is None else [f"model={base}"])])
        started = time.perf_counter()
        result = run_recipe(config, read_text(path), console=Console(file=io.StringIO()))
        seconds = time.perf_counter() - started
        rows = read_metrics(result.folder)
    assert result.base is not None
    assert result.trained is not None
    steps = [row for row in rows if row["step"]]
    key = "mismatch/effective_sample_fraction"  # is missing where no group of a step had a signal
    effective = [row[key] for row in steps if key in row]
    return {
        "recipe": recipe,
        "staleness": staleness,
        "correction": correction,
        "seed": seed,
        "base": result.base.correct.successes,
        "correct": result.trained.correct.successes,
        "of": result.trained.correct.total,
        "effective_sample_fraction": {
            "mean": round(statistics.fmean(effective), 4), "least": round(min(effective), 4), "steps": len(effective)
        },
        "oldest_steps": max(row["completion/max_staleness_steps"] for row in steps),
        "mean_age_steps": round(statistics.fmean(row["completion/mean_staleness_steps"] for row in steps), 2),
        "rewards": [round(row["reward/mean"], 3) for row in steps],
        "seconds": round(seconds, 1),
    }  # fmt: skip


def identity(run: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a run the same run."""
    return tuple(run[key] for key in KEYS)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs that were made before."""
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []


def write_runs(path: Path, runs: list[dict[str, Any]]) -> None:
    """All runs so far, in the order of the table."""
    found = {"command": "python benchmarks/learning/staleness.py", "budget": BUDGET, "run": describe_run()}
    path.write_text(json.dumps({**found, "runs": sorted(runs, key=identity)}, indent=1) + "\n", encoding="utf-8")


def table(runs: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each recipe, staleness and correction, over its seeds."""
    yield "| recipe | staleness | correction | correct, each seed | 95 % | effective samples: mean, least |"
    yield "|---|---|---|---|---|---|"
    for recipe, (staleness, correction) in product(RECIPES, CELLS):
        found = [run for run in runs if identity(run)[:3] == (recipe, staleness, correction)]
        if not found:
            continue
        low, high = wilson_interval(sum(run["correct"] for run in found), sum(run["of"] for run in found))
        correct = [run["correct"] / run["of"] for run in found]
        shares = [run["effective_sample_fraction"] for run in found]
        yield (
            f"| `{recipe}` | {staleness} | `{correction}` "
            f"| {', '.join(f'{one:.1%}' for one in correct)} | {low:.1%} to {high:.1%} "
            f"| {statistics.fmean(one['mean'] for one in shares):.3f}, {min(one['least'] for one in shares):.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--base", type=Path, help="folder of the calculator's base; built where it is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runs = read_runs(arguments.output)
    with tempfile.TemporaryDirectory() as scratch:
        base = arguments.base or Path(scratch) / "base"
        for seed, recipe, (staleness, correction) in product(arguments.seeds, arguments.recipes, CELLS):
            if (recipe, staleness, correction, seed) in map(identity, runs):
                continue
            if recipe == "calculator" and not (base / "model").is_dir():
                stage, given = prepare_base(base, task=recipe, seed=0)
                path = find_recipe(stage)
                finish(recipe_steps(load_config(path, given), read_text(path), console=Console(file=io.StringIO())))
            own = base if recipe == "calculator" else None
            runs.append(one_run(recipe, staleness, correction, seed, base=own))
            write_runs(arguments.output, runs)
            print(json.dumps(runs[-1]), flush=True)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
