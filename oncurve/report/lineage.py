"""The runs that a run's model came from, such as a supervised stage before GRPO."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncurve.core.errors import DataError
from oncurve.doctor.read import read_config
from oncurve.observe.columns import read_columns
from oncurve.observe.record import METRICS, json_if_there
from oncurve.observe.run_model import MODEL
from oncurve.wording import percent

MAX_STAGES = 8
"""Runs that are followed back, at most."""


def stages(run: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs before this one, the earliest first, and the run itself; empty where its model is not that of a run.

    Each with its accuracy before and after, on the test problems of its own.
    """
    earlier: list[Path] = []
    here = run
    while len(earlier) < MAX_STAGES and (before := _run_behind(here, config)) is not None and before not in earlier:
        earlier.append(before)
        here = before
        try:
            config = read_config(before)
        except DataError:
            break
    return [_stage(stage, run) for stage in (*reversed(earlier), run)] if earlier else []


def stage_lines(stages_of_run: list[dict[str, Any]]) -> list[str]:
    """The same as lines of text."""
    if not stages_of_run:
        return []
    width = max(len(stage["name"]) for stage in stages_of_run)
    return [
        "Stages",
        *(f"  {stage['name']:<{width}}  {stage['what']:<12} {_change(stage)}".rstrip() for stage in stages_of_run),
    ]


def _change(stage: Mapping[str, Any]) -> str:
    shares = [stage[key]["fraction"] for key in ("before", "after") if stage[key]]
    return " to ".join(map(percent, shares)) + (" correct" if shares else "")


def _run_behind(run: Path, config: Mapping[str, Any]) -> Path | None:
    """The folder of the run whose final model or checkpoint this one began with."""
    named = str(config.get("model") or "")
    if not named or named == "embedded":
        return None
    model = Path(named).expanduser()
    for root in (Path(), *run.resolve().parents):
        path = root / model
        # the run itself, its folder "model", or one of its checkpoints, runs/a/checkpoints/step_000010
        for folder in (path, *list(path.parents)[:2]):
            holds = folder == path or path.name == MODEL or path.parent.name == "checkpoints"
            if holds and os.path.isfile(folder / METRICS) and folder.resolve() != run.resolve():
                return folder
    return None


def _stage(run: Path, page_folder: Path) -> dict[str, Any]:
    """A run in a few facts."""
    try:
        config, status = read_config(run), json_if_there(run / "status.json")
        done = status.get("step") if status else max(read_columns(run).steps, default=0)
    except DataError:
        config, done = {}, 0
    kind = "supervised" if config.get("sft") is not None else str((config.get("algorithm") or {}).get("type") or "-")
    is_own = run.resolve() == page_folder.resolve()
    page = run / "report.html"
    return {
        "name": run.name or run.resolve().name,
        "what": kind,
        "steps": done,
        "is_own": is_own,
        "path": str(run.resolve()),
        "href": os.path.relpath(page.resolve(), page_folder.resolve()) if page.is_file() and not is_own else None,
        "before": _accuracy(run, "base"),
        "after": _accuracy(run, "trained"),
    }


def _accuracy(run: Path, name: str) -> dict[str, Any] | None:
    """Correct test problems with their interval; None where they were not measured."""
    measured = json_if_there(run / "evaluations" / f"{name}.json")
    share = measured.get("correct")
    if not isinstance(share, dict):
        return None
    return {**{key: share.get(key) for key in ("fraction", "low", "high")}, "num_prompts": measured.get("num_prompts")}
