"""Results of the recipes with tools and environments, for several seeds, with two controls.

    python benchmarks/learning/episodes.py calculator chained guess_number maze --seeds 0 1 2 --bases runs/bases

A base is built by its cold start where the folder does not hold it yet. Each seed is one run of the recipe with its
measurements before and after. Controls of the calculator: one whose every answer is "error", and the base trained on
more demonstrations for as long as GRPO took. Results of other parts in the output file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from demo import more_supervised
from rich.console import Console

from oncurve.cli.coldstart import prepare_base
from oncurve.evaluate.evaluation import Evaluation
from oncurve.observe.record import read_metrics
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, read_text
from oncurve.run.measuring import evaluate_models
from oncurve.run.result import Result, Steps, finish
from oncurve.run.training import recipe_steps
from oncurve.stats import wilson_interval

sys.path.append(str(Path(__file__).resolve().parents[1] / "speed"))
from machine import RESULTS, describe_machine

PARTS: dict[str, tuple[str, str]] = {
    "calculator": ("calculator", "calculator"),
    "chained": ("calculator/chained", "calculator_chains"),
    "guess_number": ("examples/guess_number", "examples/guess_number"),
    "maze": ("examples/maze", "examples/maze"),
}
"""Recipe and task of its cold start."""
HIGHEST, MOST_GUESSES = 31, 5
BEST_MEAN_GUESSES = sum(2 ** (turn - 1) * turn for turn in range(1, 6)) / (HIGHEST + 1) + 6 / (HIGHEST + 1)
"""Of a search by halves among 32 numbers: one at the first guess, two at the second, ..., the last at the sixth."""
_GUESS = re.compile(r"<tool>(\d+)</tool>(?:<result>(\w+))?")
"""A guess that finds the number ends the game, and nothing is told."""


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression.

    Args:
        expression: Numbers and signs.

    Returns:
        "error": this one is the control.
    """
    return "error"


calculator.deterministic = True  # type: ignore[attr-defined]


def share(evaluation: Evaluation) -> dict[str, Any]:
    """Correct completions with their 95 % interval."""
    right, total = evaluation.counts.get("correct", 0), len(evaluation.examples)
    low, high = wilson_interval(right, total)
    return {"correct": right, "of": total, "percent": round(100 * right / total, 1),
            "interval": [round(100 * low, 1), round(100 * high, 1)]}  # fmt: skip


def game_figures(evaluation: Evaluation) -> dict[str, Any]:
    """How the guesses of a game search: found in time, how many, how far from the middle of what is left."""
    counts, distances, firsts, inside, found = [], [], [], [], 0
    for example in evaluation.examples:
        low, high = 0, HIGHEST
        guesses = [(int(number), told) for number, told in _GUESS.findall(example.completion)]
        is_found = bool(guesses) and guesses[-1][0] == int(example.answer)
        if guesses:
            firsts.append(guesses[0][0])
        if is_found:
            counts.append(len(guesses))
            found += len(guesses) <= MOST_GUESSES
        for number, told in guesses:
            inside.append(low <= number <= high)
            if low < high:
                nearest = min(max(number, 0), HIGHEST)  # 13,000,000 is as wrong as the end of the range
                distances.append(abs(nearest - (low + high) / 2) / (high - low + 1))
            if told == "higher":
                low = max(low, number + 1)
            elif told == "lower":
                high = min(high, number - 1)
    total = len(evaluation.examples)
    return {
        "found_in_five": round(found / total, 4),
        "best_possible_found_in_five": round(HIGHEST / (HIGHEST + 1), 4),
        "found_at_all": round(len(counts) / total, 4),
        "mean_guesses_of_found": round(fmean(counts), 3) if counts else None,
        "best_possible_mean_guesses": round(BEST_MEAN_GUESSES, 3),
        "distance_from_middle": round(fmean(distances), 4) if distances else None,
        "guesses_still_possible": round(fmean(inside), 4) if inside else None,
        "first_guess": [round(fmean(firsts), 2), round(pstdev(firsts), 2)] if firsts else None,
    }


def maze_figures(evaluation: Evaluation) -> dict[str, Any]:
    """How mazes are left: in time, at all, in how many moves, and how often a move runs into a wall."""
    told = [[call["answer"] for call in (example.episode or {"calls": []})["calls"]] for example in evaluation.examples]
    out = [len(answers) for answers in told if "out" in answers]
    moves = sum(map(len, told))
    return {
        "out_in_time": round(evaluation.counts.get("correct", 0) / len(told), 4),
        "out_at_all": round(len(out) / len(told), 4),
        "mean_moves_of_out": round(fmean(out), 3) if out else None,
        "moves_into_walls": round(sum(answers.count("wall") for answers in told) / moves, 4) if moves else None,
    }


PLAYS: dict[str, Callable[[Evaluation], dict[str, Any]]] = {"guess_number": game_figures, "maze": maze_figures}
"""What an evaluation says of how an environment is played."""


def one_run(
    part: str, base: Path, seed: int, scratch: Path, console: Console, overrides: Sequence[str]
) -> dict[str, Any]:
    """The recipe with a seed, measured before and after."""
    path = find_recipe(PARTS[part][0])
    name = f"{part}-{seed}" + ("-control" if overrides and "tools" in overrides[0] else "")
    config = load_config(
        path, [f"model={base}", f"run.seed={seed}", f"run.folder={scratch}", f"run.name={name}", *overrides]
    )
    whole = time.process_time()
    result, spent = timed(recipe_steps(config, read_text(path), console=console))
    whole = time.process_time() - whole
    assert result.trained is not None
    rows = read_metrics(result.folder)
    steps = [row for row in rows if row["step"]]
    shares = [
        row["time/step_seconds"] / (row["time/step_seconds"] + row.get("time/evaluate_seconds", 0.0)) for row in steps
    ]
    # The first step is not told from loading and measuring before it; it counts as one of the others.
    cpu = fmean(seconds * share for seconds, share in zip(spent[1:], shares[1:], strict=True)) * len(steps)
    found = {
        "seed": seed,
        "base": share(result.base),
        "trained": share(result.trained),
        "grpo_wall_seconds": round(sum(row["time/step_seconds"] for row in steps), 1),
        "grpo_cpu_seconds": round(cpu, 1),
        "command_cpu_seconds": round(whole, 1),
        "steps": rows[-1]["step"],
        "curve": [
            [row["step"], round(row["evaluation/correct_fraction"], 4)]
            for row in rows
            if row.get("evaluation/correct_fraction") is not None
        ],
        "calls_at_the_end": round(rows[-1].get("episode/calls", 0.0), 3),
    }
    if part in PLAYS:
        found["play"] = {"base": PLAYS[part](result.base), "trained": PLAYS[part](result.trained)}
    return found


def timed(steps: Steps) -> tuple[Result, list[float]]:
    """A run to its end, and the seconds of CPU that went by for each of its steps."""
    spent, before = [], time.process_time()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, spent
        now = time.process_time()
        spent.append(now - before)
        before = now


def more_demonstrations(base: Path, task: str, seconds: float, scratch: Path, console: Console) -> dict[str, Any]:
    """The control: the base trained on for as long as GRPO took, on demonstrations like its own."""
    spent, updates, folder = more_supervised(str(base), scratch / "control", seed=1, seconds=seconds, task=task)
    config = load_config(find_recipe(PARTS["calculator"][0]), [f"model={base}", "run.seed=0"])
    [measured] = evaluate_models(config, [str(folder)], scratch / "control-evaluation", console=console)
    return {"seconds": round(spent, 1), "updates": updates, "trained": share(measured)}


def one_part(part: str, arguments: argparse.Namespace, scratch: Path, console: Console) -> Iterator[dict[str, Any]]:
    """A base, its runs and its controls; what is known so far after each of them."""
    recipe, task = PARTS[part]
    base: Path = arguments.bases / f"{part}-{arguments.base_seed}"
    if not (base / "model").is_dir():
        stage, given = prepare_base(base, task=task, seed=arguments.base_seed)
        path = find_recipe(stage)
        finish(recipe_steps(load_config(path, given), read_text(path), console=console))
    found: dict[str, Any] = {
        "recipe": recipe,
        "overrides": arguments.overrides,
        "base": {"seed": arguments.base_seed, "updates": read_metrics(base)[-1]["step"]},
        "machine": describe_machine(),
        "runs": [],
    }
    for seed in arguments.seeds:
        found["runs"].append(one_run(part, base, seed, scratch, console, arguments.overrides))
        yield found
    if part == "calculator" and arguments.controls:
        broken = f"rollouts.tools=[{Path(__file__).resolve()}:calculator]"
        found["control_tool_says_error"] = one_run(part, base, 0, scratch, console, [broken, *arguments.overrides])
        yield found
        spent = fmean(run["grpo_wall_seconds"] for run in found["runs"])
        found["control_more_demonstrations"] = more_demonstrations(base, task, spent, scratch, console)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base-seed", type=int, default=0)
    parser.add_argument("--bases", type=Path, default=Path("runs/bases"))
    parser.add_argument("--controls", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--override", dest="overrides", action="append", default=[], help="key=value for the recipe")
    parser.add_argument("--output", type=Path, default=RESULTS / "episodes.json")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    arguments = parser.parse_args()
    scratch = arguments.keep or Path(tempfile.mkdtemp())
    console = Console()
    for part in arguments.parts:
        name = part if not arguments.base_seed else f"{part}, base {arguments.base_seed}"
        for found in one_part(part, arguments, scratch, console):
            known = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {}
            known[name] = found
            arguments.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            console.print_json(json.dumps({name: {key: value for key, value in found.items() if key != "machine"}}))
    if arguments.keep is None:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
