"""The studies of study.py: what differs between their runs, and what is read of each."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from io import StringIO
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import code_breaker
import gsm8k
import plays
from rich.console import Console
from study import Cell, Study, accuracy, steps_of

from oncurve.algorithm.table import PRESETS
from oncurve.observe.record import read_json

HERE = Path(__file__).resolve().parent
GOAL = 0.9
"""Share of test problems at which a distillation is done."""


def tokens(run: Path) -> dict[str, Any]:
    """Sampled tokens that the gradient did not use, and the reward of the last five steps."""
    steps = steps_of(run)
    sampled = sum(row["tokens/sampled"] for row in steps)
    return {
        "skipped_token_fraction": round(1 - sum(row["tokens/trained"] for row in steps) / sampled, 4),
        "last_reward": round(statistics.fmean(row["reward/mean"] for row in steps[-5:]), 4),
    }


def ages(run: Path) -> dict[str, Any]:
    """How old the weights of completions were, and how much of its batches the gradient could use."""
    steps = steps_of(run)
    key = "mismatch/effective_sample_fraction"  # is missing where no group of a step had a signal
    effective = [row[key] for row in steps if key in row]
    share = {"mean": round(statistics.fmean(effective), 4), "least": round(min(effective), 4), "steps": len(effective)}
    return {
        "effective_sample_fraction": share if effective else None,
        "oldest_steps": max(row["completion/max_staleness_steps"] for row in steps),
        "mean_age_steps": round(statistics.fmean(row["completion/mean_staleness_steps"] for row in steps), 2),
        "rewards": [round(row["reward/mean"], 3) for row in steps],
    }


def goal(run: Path) -> dict[str, Any]:
    """Steps, sampled tokens and seconds until the goal is reached on test problems; entropy at both ends."""
    steps = steps_of(run)
    curve = [row.get("evaluation/correct_fraction") or 0.0 for row in steps]
    reached = next((number for number, value in enumerate(curve, start=1) if value >= GOAL), None)
    keys = {"tokens": "tokens/sampled", "seconds": "time/step_seconds"}
    at = {
        name: round(list(accumulate(row.get(key, 0.0) for row in steps))[reached - 1], 1) if reached else None
        for name, key in keys.items()
    }
    return {"to_goal": {"steps": reached, **at}, "entropy": [steps[place].get("policy/entropy") for place in (0, -1)]}


def comparison(run: Path) -> dict[str, Any]:
    """Both models on the same problems: the table as the command prints it, the change and its p-value."""
    from oncurve.evaluate.compare import compare  # lazy
    from oncurve.evaluate.evaluation import read_evaluation  # lazy

    base, trained = (read_evaluation(run / "evaluations", name) for name in ("base", "trained"))
    rows = read_json(run / "comparison.json")["rows"]
    correct = next((row for row in rows if row["name"] == "correct"), None)
    change = {"change": [correct["low"], correct["high"]], "p_value": correct["p_value"]} if correct else {}
    console = Console(file=StringIO(), width=250)
    compare(base, trained).print(console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    text = "\n".join(line for line in lines if line.strip("─ "))
    return {"table": text.strip(), **change}


def spread(run: Path) -> dict[str, Any]:
    """pass@k of both models, where each prompt was sampled several times."""
    found = {name: read_json(run / "evaluations" / f"{name}.json")["pass_at_k"] for name in ("base", "trained")}
    return {"pass_at_k": {name: {k: round(v, 4) for k, v in shares.items()} for name, shares in found.items()}}


def draw_demo(rows: list[dict[str, Any]]) -> None:
    """Held-out accuracy over the steps, a line for each seed: docs/pictures/demo.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.4), dpi=160, layout="constrained")
    axes = figure.add_subplot(
        title="Held-out accuracy of the demo: greedy, 128 problems", xlabel="step", ylim=(-0.03, 1.03)
    )
    for row in rows:
        points = [(point["step"], point["correct"]) for point in row["curve"]]
        axes.plot(*zip(*points, strict=True), linewidth=2, marker="o", markersize=4.5, label=f"seed {row['seed']}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(color="#e9edf2")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(HERE.parents[1] / "docs" / "pictures" / "demo.png")


def write_roman(folder: Path) -> None:
    """Roman numerals: demonstrations, problems, reward and recipe."""
    numbers = list(range(1, 4000))
    random.Random(0).shuffle(numbers)
    shown = [{"prompt": f"{roman(n)} is", "completion": f" {n}"} for n in numbers[:1500]]
    asked = [{"question": f"{roman(n)} is", "answer": str(n)} for n in numbers[1500:]]
    for name, rows in (("demonstrations", shown), ("problems", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(
        "def exact(completion, answer):\n    return float(completion.strip() == answer)\n", encoding="utf-8"
    )
    (folder / "roman.yaml").write_text(
        "model: embedded\ndata: {path: problems.jsonl, template: plain}\n"
        'rewards: [{type: custom, function: "reward.py:exact"}]\nrollouts: {max_completion_tokens: 8}\n',
        encoding="utf-8",
    )


def roman(number: int) -> str:
    """A number below 4,000 in Roman numerals."""
    signs = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V"}
    text = ""
    for value, sign in {**signs, 4: "IV", 1: "I"}.items():
        count, number = divmod(number, value)
        text += sign * count
    return text


ROMAN = (
    (16, "1e-6", 12), (16, "1e-5", 60), (16, "3e-5", 60), (16, "1e-4", 60), (16, "3e-4", 12),
    (128, "1e-4", 40), (128, "5e-4", 40), (128, "1e-3", 20), (128, "2e-4", 100), (128, "5e-4", 100),
)  # fmt: skip
"""Prompts per step, learning rate, steps."""
DURING = ("evaluation.every_steps=1", "evaluation.num_prompts_during=200")
QUIET = ("evaluation.every_steps=0",)


def demo() -> Study:
    cell = Cell("demo", control="word_problems/base")
    about = "The demo as its recipe says, and supervised training of the same length as a control."
    return Study(about, (cell,), (accuracy, comparison), draw=draw_demo)


def presets() -> Study:
    # multi_objective wants two rewards, so gdpo also gets paid for the value in any form
    needs = {"gdpo": ("rewards=[{type: r1_zero}, {type: mathematics, weight: 0.5}]",)}
    cells = tuple(Cell(name, (f"algorithm.type={name}", *needs.get(name, ()))) for name in PRESETS)
    budget = ("run.steps=12", "run.prompts_per_step=16", "evaluation.num_prompts=200", "evaluation.data.limit=200")
    about = "The named algorithms on the embedded task, with the same budget for each."
    return Study(about, cells, (accuracy, tokens), (*budget, *QUIET))


def staleness() -> Study:
    # without staleness there is nothing to correct: sampler and trainer are the same weights and the same code
    settings = [(0, "none"), *product((1, 4, 8), ("none", "truncate"))]
    cells = tuple(
        Cell(
            f"{recipe} {steps} {correction}", (f"rollouts.staleness={steps}", f"algorithm.correction={correction}"),
            recipe=recipe, base=None if recipe == "word_problems" else recipe,
        )
        for recipe, (steps, correction) in product(("word_problems", "calculator"), settings)
    )  # fmt: skip
    budget = ("run.prompts_per_step=8", "run.steps=30", "evaluation.num_prompts=200", "run.save_every_steps=0")
    about = "What older weights do to learning: accuracy by `rollouts.staleness`, with and without a correction."
    return Study(about, cells, (accuracy, ages), (*budget, *QUIET), bases={"calculator": ("--task", "calculator")})


def roman_rates() -> Study:
    cells = tuple(
        Cell(
            f"{prompts} prompts, rate {rate}, {steps} steps",
            (f"run.prompts_per_step={prompts}", f"optimizer.learning_rate={rate}", f"run.steps={steps}"),
            recipe="roman.yaml", base="quarter", seeds=1,
        )
        for prompts, rate, steps in ROMAN
    )  # fmt: skip
    base = ("--data", "demonstrations.jsonl", "--size", "nano", "sft.epochs=2", "rollouts.max_completion_tokens=8")
    about = "A small model from random weights on Roman numerals, by learning rate and prompts per step."
    budget = ("run.save_every_steps=0",)
    return Study(about, cells, (accuracy, comparison), budget, bases={"quarter": base}, write=write_roman)


def distil() -> Study:
    teacher = Cell("grpo", DURING)
    student = Cell(
        "distil", ("algorithm.teacher={runs}/grpo-{seed}", *DURING, "run.steps=4", "evaluation.num_prompts=200"),
        recipe="distil_word_problems",
    )  # fmt: skip
    about = "Steps to 90 % by distillation from a run of GRPO, and by GRPO from the same base."
    return Study(about, (teacher, student), (accuracy, goal), facts={"goal": GOAL})


def warm_start() -> Study:
    eight = ("evaluation.samples=8", "evaluation.temperature=1.0", "evaluation.num_prompts=200")
    cells = [Cell("from 0", (*QUIET, *eight))]
    for steps in (10, 40, 160):
        warm = ("run.prompts_per_step=16", "optimizer.learning_rate=3e-4", "optimizer.schedule=linear")
        cells.append(Cell(f"warm {steps}", (f"run.steps={steps}", *warm, *QUIET), verb="sft"))
        cells.append(Cell(f"from {steps}", (f"model={{runs}}/warm_{steps}-{{seed}}", *QUIET, *eight)))
    about = "Entropy and pass@8 after supervised training of growing length, and after GRPO from there."
    return Study(about, tuple(cells), (accuracy, goal, spread))


def episodes() -> Study:
    named = {
        "calculator": ("calculator", "calculator"), "chained": ("calculator/chained", "calculator_chains"),
        "guess_number": ("examples/guess_number", "examples/guess_number"),
        "maze": ("examples/maze", "examples/maze"),
    }  # fmt: skip
    cells = [
        Cell(
            name, recipe=absolute(recipe), base=name,
            control="calculator/base" if name == "calculator" else None,
        )
        for name, (recipe, _) in named.items()
    ]  # fmt: skip
    broken = (f"rollouts.tools=[{HERE / 'plays.py'}:calculator]",)
    cells.append(Cell("calculator that says error", broken, recipe="calculator", base="calculator", seeds=1))
    bases = {name: ("--task", absolute(task)) for name, (_, task) in named.items()}
    about = "The recipes with tools and environments; controls: a tool that says error, and more demonstrations."
    return Study(about, tuple(cells), (accuracy, plays.figures), bases=bases)


def absolute(name: str) -> str:
    """A folder of the repository as a whole path, a name in the package as it is."""
    return str(HERE.parents[1] / name) if name.startswith("examples/") else name


def code_breakers() -> Study:
    cells = tuple(Cell(name, recipe="code_breaker.yaml", base=name) for name in code_breaker.BASES)
    about = "A code breaker in two letters: why one base learns it and another does not."
    return Study(
        about, cells, (accuracy, code_breaker.turns), ("run.record=all",), bases=code_breaker.COLDSTARTS,
        write=code_breaker.write, facts={"best_possible": 13 / 16},
    )  # fmt: skip


def arrivals(run: Path) -> dict[str, Any]:
    """By step: rewards, the part of the updates that arrived in the copies, and tokens per second."""
    keys = ("reward/mean", "policy/arrived", "policy/moved_fraction")
    keys += ("speed/sampled_tokens_per_second", "speed/trained_tokens_per_second")
    steps = steps_of(run)
    return {key: {row["step"]: round(row[key], 4) for row in steps if key in row} for key in keys}


def write_grid(folder: Path) -> None:
    """The model in the package with its weights on bfloat16's grid, as those of a published model are."""
    from rounding import embedded_on_grid  # lazy

    embedded_on_grid(folder / "grid")


def modes(*settings: str, recipe: str, model: str) -> tuple[Cell, ...]:
    """The three ways to round, with the same settings."""
    ways = {"float32": "{compute_type: float32}"}
    ways |= {name: f"{{compute_type: bfloat16, rounding: {name}}}" for name in ("dither", "nearest")}
    return tuple(
        Cell(name, (f"model={model}", f"policy={policy}", *settings), recipe=recipe) for name, policy in ways.items()
    )


SIXTEEN = ("run.steps=16", "run.prompts_per_step=16", "run.save_every_steps=0", "evaluation.every_steps=4")


def rounding() -> Study:
    held_out = ("evaluation.data.limit=400", "evaluation.num_prompts=300", "evaluation.num_prompts_during=300")
    learning = ("optimizer.learning_rate=2e-5", "optimizer.warmup_updates=2", "data.limit=4096")
    cells = modes(*learning, *held_out, recipe="word_problems", model="{runs}/../grid")
    about = "What rounding the copies of the weights does to learning, on the embedded model."
    return Study(about, cells, (accuracy, arrivals), SIXTEEN, write=write_grid, draw=draw_rounding)


def rounding_sums() -> Study:
    from fetch_models import PLACE  # lazy

    cells = modes("optimizer.learning_rate=1e-5", recipe=str(HERE / "sums.yaml"), model=str(PLACE / "smollm2-135m"))
    about = "The same on sums with SmolLM2-135M; `bench.py fetch_models smollm2-135m` fetches it."
    return Study(about, cells, (accuracy, arrivals), SIXTEEN)


def draw_rounding(rows: list[dict[str, Any]]) -> None:
    """Held-out accuracy and what arrives, step by step: docs/pictures/precision.png."""
    from matplotlib.figure import Figure

    colors = {"float32": "#4c78a8", "dither": "#54a24b", "nearest": "#e45756"}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        label = row["cell"] if row["seed"] == rows[0]["seed"] else None
        points = [(point["step"], point["correct"]) for point in row["curve"]]
        left.plot(*zip(*points, strict=True), color=colors[row["cell"]], label=label)
        arrived = row["policy/arrived"]
        right.plot([int(step) for step in arrived], list(arrived.values()), color=colors[row["cell"]])
    left.set(xlabel="step", ylabel="correct, 300 test problems")
    right.set(xlabel="step", ylabel="policy/arrived", ylim=(0, 1.1))
    left.legend(frameon=False)
    figure.savefig(HERE.parents[1] / "docs" / "pictures" / "precision.png", dpi=110)


MAKERS: dict[str, Callable[[], Study]] = {
    "demo": demo, "presets": presets, "staleness": staleness, "roman": roman_rates, "distil": distil,
    "warm_start": warm_start, "episodes": episodes, "code_breaker": code_breakers, "rounding": rounding,
    "rounding_sums": rounding_sums, "gsm8k": gsm8k.study,
}  # fmt: skip
STUDIES: dict[str, Study] = {name: make() for name, make in MAKERS.items()}
