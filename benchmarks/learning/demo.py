"""The demo for several seeds, and supervised training of the same length as a control.

For each seed: the base is measured, GRPO runs as the recipe says, the result is measured. Then the control: the base
is trained for as long as GRPO took, on more demonstrations of the kind that it was made from, and measured.

    python benchmarks/learning/demo.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from oncurve.cli.coldstart import BASES
from oncurve.evaluate.compare import compare
from oncurve.evaluate.evaluation import Evaluation
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import read_metrics
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, read_text
from oncurve.run.measuring import evaluate_models
from oncurve.run.training import run_recipe

RECIPE = "word_problems"


def figures(evaluation: Evaluation) -> dict[str, Any]:
    """What the promise is about."""
    metrics = evaluation.metrics()
    return {
        key: round(metrics[f"evaluation/{key}"], 4)
        for key in ("correct_fraction", "any_format_fraction", "bad_format_fraction", "mean_tokens", "num_examples")
    }


def more_supervised(
    model: str, output: Path, *, seed: int, seconds: float, task: str = "word_problems"
) -> tuple[float, int, Path]:
    """Train the base on more demonstrations for about so many seconds: seconds, updates, run."""
    trial = 40
    updates = max(trial, round(trial * seconds / demonstrated(model, f"{output}-trial", seed, trial, task)))
    return demonstrated(model, str(output), seed, updates, task), updates, output


def demonstrated(model: str, output: str, seed: int, updates: int, task: str) -> float:
    """Seconds of so many updates on demonstrations alone, without those of measurements."""
    path, place = find_recipe(BASES[task]), Path(output)
    config = load_config(path, [
        f"model={model}", f"run.folder={place.parent}", f"run.name={place.name}", f"run.seed={seed}",
        "data.lesson_fraction=0", f"data.limit={16 * updates}", "evaluation.num_prompts=8", "run.save_every_steps=0",
    ])  # fmt: skip
    folder = run_recipe(config, read_text(path), console=Console(quiet=True)).folder
    return sum(row["time/step_seconds"] for row in read_metrics(folder) if row["step"])


def one_seed(seed: int, scratch: Path, console: Console, overrides: list[str]) -> dict[str, Any]:
    path = find_recipe(RECIPE)
    config = load_config(path, [f"run.seed={seed}", f"run.folder={scratch}", f"run.name=seed-{seed}", *overrides])
    started = time.perf_counter()
    result = run_recipe(config, read_text(path), console=console)
    whole = time.perf_counter() - started
    assert result.trained is not None
    metrics = read_metrics(result.folder)
    grpo = metrics[-1]["time/elapsed_seconds"]
    spent, updates, control = more_supervised(config.model, scratch / f"control-{seed}", seed=seed + 1, seconds=grpo)
    measured = evaluate_models(config, [str(control)], scratch / f"control-{seed}-evaluation", console=console)
    return {
        "seed": seed,
        "grpo_seconds": round(grpo, 1),
        "whole_command_seconds": round(whole, 1),
        "base": figures(result.base),
        "trained": figures(result.trained),
        "control_seconds": round(spent, 1),
        "control_updates": updates,
        "control": figures(measured[0]),
        "table": compare(result.base, result.trained).text(),
        "curve": [
            {"step": row["step"], "correct": row["evaluation/correct_fraction"]}
            for row in metrics
            if row.get("evaluation/correct_fraction") is not None
        ],
    }


def draw(seeds: list[dict[str, Any]], picture: Path) -> None:
    """Held-out accuracy over the steps, a line for each seed."""
    figure = Figure(figsize=(8.0, 4.4), dpi=160, layout="constrained")
    axes = figure.add_subplot(
        title="Held-out accuracy of the demo: greedy, 128 problems", xlabel="step", ylim=(-0.03, 1.03)
    )
    for seed in seeds:
        points = [(point["step"], point["correct"]) for point in seed["curve"]]
        axes.plot(*zip(*points, strict=True), linewidth=2, marker="o", markersize=4.5, label=f"seed {seed['seed']}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(color="#e9edf2")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "demo.json")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for the recipe")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp()) if arguments.keep is None else arguments.keep
    console = Console()
    seeds = [one_seed(seed, scratch, console, arguments.overrides) for seed in arguments.seeds]
    record = {"recipe": RECIPE, "overrides": arguments.overrides, "seeds": seeds, "run": describe_run()}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print_json(json.dumps([{k: v for k, v in seed.items() if k not in ("curve", "table")} for seed in seeds]))
    draw(seeds, Path(__file__).parents[2] / "docs" / "pictures" / "demo.png")
    if arguments.keep is None:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
