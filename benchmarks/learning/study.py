"""Learning studies: recipes with overrides, over seeds, beside controls; `--list` names them, studies.py holds them.

    python benchmarks/bench.py study --list
    python benchmarks/bench.py study staleness --seeds 0 1 2 --detach
    python benchmarks/bench.py study demo --seeds 0 --override run.steps=1 --override evaluation.num_prompts=8
    python benchmarks/bench.py study presets --cells grpo dapo --output benchmarks/results/presets.json

Each run is one of the command line, in build/studies/NAME/runs or in --folder, and continues there after a kill. Cells
take turns within a seed. A run that is in the result or whose folder is complete is not made again.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import ROOT, Record, bare

CONTROL_TRIAL = 40
"""Updates of a supervised run that tell how many fill the time of GRPO."""


@dataclass(frozen=True)
class Cell:
    """One row of a study's table. In overrides, {runs} is the folder of the runs, {seed} the seed."""

    name: str
    overrides: tuple[str, ...] = ()
    recipe: str = "word_problems"
    verb: str = "train"
    base: str | None = None
    """Name in the study's bases; None for the model of the recipe."""
    control: str | None = None
    """Recipe of demonstrations on which the base is also trained, for as long as the first cell's GRPO took."""
    seeds: int | None = None
    """Only the first so many seeds."""
    figures: Callable[[Runs], dict[str, Any]] | None = None
    """What is read where the cell is no run, such as figures of the model before training."""


@dataclass(frozen=True)
class Study:
    """Cells and what is read of each run."""

    about: str
    cells: tuple[Cell, ...]
    figures: tuple[Callable[[Path], dict[str, Any]], ...]
    """What is read of the folder of a finished run; their keys together are a row."""
    budget: tuple[str, ...] = ()
    """Overrides of every cell, before its own."""
    bases: Any = None
    """By name, the words of `oncurve coldstart` that make a base."""
    control_settings: tuple[str, ...] = ("data.lesson_fraction=0", "data.limit={rows}", "evaluation.num_prompts=8")
    """Overrides of a control. {updates} is the number of its updates, {rows} that of its rows."""
    measure: Callable[[Runs, Path, str], dict[str, Any]] | None = None
    """Measures a model, of which the name is given, in place of the evaluations of its run; and the base first."""
    write: Callable[[Path], None] | None = None
    """Writes the files of the task into the folder."""
    facts: Any = None
    """Figures that belong to the study."""
    draw: Callable[[list[dict[str, Any]]], None] | None = None
    """Draws the picture of a page from the rows of a published result."""


def oncurve(folder: Path, threads: int, *words: str) -> float:
    """A command of oncurve in a process of its own; CPU seconds. Raises SystemExit with its last words if it fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "oncurve", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode < 0 or done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@dataclass
class Runs:
    """The runs of a study in its folder."""

    folder: Path
    study: Study
    threads: int
    overrides: Sequence[str]
    """Of the command line, after all others."""

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def base(self, name: str) -> Path:
        """The base of this name, made if it is not there."""
        place = self.folder / "bases" / name
        if not (place / "model").is_dir():
            if place.exists():  # what a kill left behind
                place.rename(place.with_name(f".{name}-{time.time_ns()}"))
            oncurve(self.folder, self.threads, "coldstart", *self.study.bases[name], "--output", str(place))
        return place

    def words(self, cell: Cell, seed: int) -> list[str]:
        """Overrides of a run, in their order."""
        own = [filled(word, {"{runs}": str(self.path("")), "{seed}": str(seed)}) for word in cell.overrides]
        model = [f"model={self.base(cell.base)}"] if cell.base else []
        return [*self.study.budget, *model, f"run.seed={seed}", *own, *self.overrides]

    def make(self, cell: Cell, seed: int) -> dict[str, Any]:
        """A run of a cell from its beginning or its newest checkpoint to its end, and what is read of it."""
        if cell.figures is not None:
            return {"cell": cell.name, "seed": seed, **cell.figures(self)}
        name = f"{cell.name}-{seed}".replace(" ", "_")
        run, cpu = self.path(name), 0.0
        started = time.monotonic()
        if not (run / "evaluations" / "trained.json").is_file():
            settings = [f"run.folder={self.path('')}", f"run.name={name}", *self.words(cell, seed)]
            cpu = oncurve(self.folder, self.threads, cell.verb, cell.recipe, "--resume", *settings)
        row: dict[str, Any] = {"cell": cell.name, "seed": seed}
        for figures in self.study.figures:
            row |= figures(run)
        row["whole_command_seconds"] = round(time.monotonic() - started, 1) if cpu else None
        row["command_cpu_seconds"] = round(cpu, 1) if cpu else None
        return row | (self.study.measure(self, run / "model", name) if self.study.measure else {})

    def control(self, cell: Cell, seed: int, seconds: float) -> dict[str, Any]:
        """The base trained on demonstrations alone for about so many seconds, and measured as the run was."""
        trial = self._demonstrated(cell, f"{cell.name}-trial-{seed}", seed, CONTROL_TRIAL)
        updates = max(CONTROL_TRIAL, round(CONTROL_TRIAL * seconds / trial))
        name = f"{cell.name}-control-{seed}"
        spent = self._demonstrated(cell, name, seed, updates)
        facts = {"control_seconds": round(spent, 1), "control_updates": updates}
        if self.study.measure:
            found = self.study.measure(self, self.path(name) / "model", name)
            return {"control": found["trained"], "control_against_base": found, **facts}
        output = self.folder / "evaluations" / name
        if not (output / "evaluations" / "evaluation.json").is_file():
            words = [*self.study.budget, f"run.seed={seed}", *self.overrides]
            oncurve(
                self.folder, self.threads, "evaluate", cell.recipe, "--model", str(self.path(name)),
                "--output", str(output), *words,
            )  # fmt: skip
        return {"control": shares(output, "evaluation"), **facts}

    def _demonstrated(self, cell: Cell, name: str, seed: int, updates: int) -> float:
        run = self.path(name)
        assert cell.control is not None
        if not (run / "evaluations" / "trained.json").is_file():
            model = str(self.base(cell.base)) if cell.base else "embedded"
            counts = {"{updates}": str(updates), "{rows}": str(16 * updates)}
            settings = [filled(word, counts) for word in self.study.control_settings]
            oncurve(
                self.folder, self.threads, "sft", cell.control, "--resume", f"model={model}",
                f"run.folder={self.path('')}", f"run.name={name}", f"run.seed={seed + 1}", "run.save_every_steps=0",
                *settings,
            )  # fmt: skip
        return sum(row["time/step_seconds"] for row in steps_of(run))


def filled(word: str, values: Mapping[str, str]) -> str:
    """A word with the values in the place of their names."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of the steps of a run."""
    from oncurve.observe.record import read_metrics  # lazy

    return [row for row in read_metrics(run) if row["step"]]


def shares(run: Path, name: str) -> dict[str, Any]:
    """Correct completions of an evaluation with their 95 % interval, right answers in any form, tokens."""
    from oncurve.observe.record import read_json  # lazy

    found = read_json(run / "evaluations" / f"{name}.json")
    correct, metrics = found["correct"], found["metrics"]
    keys = ("correct_fraction", "any_format_fraction", "bad_format_fraction", "mean_tokens", "num_examples")
    return {
        "correct": correct["successes"], "of": correct["total"], "interval": [correct["low"], correct["high"]],
        **{key: round(metrics[f"evaluation/{key}"], 4) for key in keys if f"evaluation/{key}" in metrics},
    }  # fmt: skip


def accuracy(run: Path) -> dict[str, Any]:
    """Base and trained model on the test problems, seconds of the steps, and accuracy during training."""
    steps = steps_of(run)
    before = {"base": shares(run, "base")} if (run / "evaluations" / "base.json").is_file() else {}
    return {
        **before,
        "trained": shares(run, "trained"),
        "grpo_seconds": round(sum(row["time/step_seconds"] for row in steps), 1),
        "steps": len(steps),
        "curve": [
            {"step": row["step"], "correct": round(row["evaluation/correct_fraction"], 4)}
            for row in steps
            if row.get("evaluation/correct_fraction") is not None
        ],
    }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each cell over its seeds."""
    from oncurve.stats import wilson_interval  # lazy

    yield "| cell | correct, each seed | 95 % over problems | control | seconds |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(row["cell"] for row in rows if "trained" in row):
        own = [row for row in rows if row["cell"] == name]
        low, high = wilson_interval(
            sum(row["trained"]["correct"] for row in own), sum(row["trained"]["of"] for row in own)
        )
        each, controls = (
            ", ".join(f"{row[key]['correct'] / row[key]['of']:.1%}" for row in own if key in row)
            for key in ("trained", "control")
        )
        seconds = statistics.median(row["grpo_seconds"] for row in own)
        yield f"| {name} | {each} | {low:.1%} to {high:.1%} | {controls} | {seconds:.0f} |"


def options(parser: argparse.ArgumentParser) -> None:
    from studies import STUDIES

    parser.add_argument("study", nargs="?", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--list", action="store_true", help="what there is, with the cells")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", help="only these")
    parser.add_argument("--override", action="append", default=[], help="key=value for every run, after all others")
    parser.add_argument("--controls", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--folder", type=Path, help="where the runs are kept; build/studies/STUDY if not given")
    parser.add_argument("--draw", action="store_true", help="the picture of the page, from this result")


def name_of(asked: argparse.Namespace) -> str:
    """The file of a study has its name."""
    return asked.study or "study"


def bench(asked: argparse.Namespace, record: Record) -> None:
    from studies import STUDIES

    if asked.list or not asked.study:
        for name, study in STUDIES.items():
            print(f"{name:14} {study.about}\n{'':14} cells: {', '.join(cell.name for cell in study.cells)}")
        return
    study = STUDIES[asked.study]
    record.what = f"study {asked.study}"
    cells = [cell for cell in study.cells if asked.cells is None or cell.name in asked.cells]
    if not cells:
        raise SystemExit(f"--cells: {asked.study} has {', '.join(cell.name for cell in study.cells)}")
    folder = (asked.folder or ROOT / "build" / "studies" / asked.study).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if study.write:
        study.write(folder)
    record.resume()
    record.facts |= {"budget": bare(study.budget), **(study.facts or {})}
    runs = Runs(folder, study, asked.threads or 1, asked.override)
    todo = [(seed, cell) for seed in asked.seeds for cell in cells if seed in asked.seeds[: cell.seeds]]
    record.total = len(todo)
    for seed, cell in todo:
        if record.has(cell=cell.name, seed=seed):
            continue
        row = runs.make(cell, seed)
        if cell.control and asked.controls:
            row |= runs.control(cell, seed, row["grpo_seconds"])
        record.add({**row, "overrides": list(cell.overrides)})
    print("\n".join(table(record.rows)))
    if asked.draw and study.draw:
        study.draw(record.rows)
