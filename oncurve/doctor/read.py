"""Reading a run's folder, complete or not, into a case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from oncurve.core.errors import DataError
from oncurve.doctor.case import Case
from oncurve.observe.columns import read_columns
from oncurve.observe.record import METRICS, read_json, read_rows, recorded_steps, rollouts_path

_EVALUATIONS = ("base", "trained")
_MAX_BYTES = 8 * 2**20
"""A larger file of completions is passed over: the doctor should answer at once."""
BETWEEN = 8
"""About so many steps between the first and the last are looked at, to see where something began."""


def read_case(run: str | Path) -> Case:
    """The case of a run folder, or of a file of metrics alone; also while the run continues.

    Completions are those of the evaluations before and after, and of the first and last step that were kept.

    Raises DataError if there are no metrics, or if a file that is there is broken.
    """
    folder = Path(run)
    if not folder.is_file() and not (folder / METRICS).is_file():
        near = next((parent for parent in folder.resolve().parents[:2] if (parent / METRICS).is_file()), None)
        named = f"Its run is {near}." if near else "Name the folder that `oncurve train` made."
        raise DataError(f"{folder}: is no run folder, {METRICS} is missing. {named}")
    if folder.is_file() and folder.suffix != ".jsonl":
        raise DataError(f"{folder}: is no run. Name a run folder or its {METRICS}.")
    metrics = read_columns(folder)
    if not folder.is_dir():
        return Case(metrics)
    examples = [row for name in _EVALUATIONS for row in _rows(folder / "evaluations" / f"{name}.jsonl")]
    measured = set(metrics.steps)
    recorded = [(step, rollouts_path(folder, step)) for step in recorded_steps(folder) if step in measured]
    lags: dict[int, int] = {}
    for step, path in dict([*recorded[:1], *recorded[-1:]]).items():
        rolled = [{**row, "step": step} for row in _completions(path)]
        examples += rolled
        versions = [row["policy_version"] for row in rolled if isinstance(row["policy_version"], int)]
        if versions:  # a step, counted as done, trains weights that have seen one step less
            lags[step] = max(0, step - 1 - min(versions))

    def between() -> list[dict[str, Any]]:
        middle = recorded[1:-1][:: max(1, len(recorded) // BETWEEN)]
        return [{**row, "step": step} for step, path in middle for row in _completions(path)]

    path = folder / "comparison.json"
    compared = read_json(path) if path.is_file() else {}
    if not isinstance(compared.get("rows", []), list):
        raise DataError(f"{path}: its rows are no list. Restore or remove it.")
    config = read_config(folder)
    return Case(metrics, config=config, examples=examples, between=between, compared=compared, lags=lags)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return []
    return read_rows(path, may_be_torn=False)


def _completions(path: Path) -> Iterator[dict[str, Any]]:
    """The completions of a step in the shape of evaluation examples."""
    for group in _rows(path):
        answer = group.get("answer")
        for completion in group.get("completions") or ():
            reward, version = completion.get("reward"), completion.get("policy_version")
            example = {"completion": completion.get("text"), "answer": answer, "reward": reward}
            yield {**example, "prompt": group.get("prompt"), "policy_version": version}


def read_config(run: Path) -> Mapping[str, Any]:
    """The resolved recipe of a run as plain data, empty if it is not there; it was checked when the run started.

    Raises DataError if it cannot be read.
    """
    path = run / "config.yaml"
    if not path.is_file():
        return {}
    try:
        loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML ({error}). Restore or remove it.") from error
    return tree if isinstance(tree, dict) else {}
