"""State of a dashboard: its run folders, read no more often than a viewer needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oncurve.doctor.diagnose import diagnose
from oncurve.doctor.read import read_case, read_config
from oncurve.errors import DataError
from oncurve.observe.record import read_metrics
from oncurve.report.blocks import finite
from oncurve.report.follow import find_runs, fingerprint
from oncurve.report.overview import overview, state

PAUSE_SECONDS = 3.0
"""What is worked out about a run is worked out at most so often, and less often where it takes long."""
MAX_SHARE = 0.05
"""Of one processor, for working things out about one run."""
MAX_LISTED = 200
_SPARK_POINTS = 80


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was worked out about a run: from which state of its folder, when, and in how many seconds."""

    value: dict[str, Any]
    stamp: tuple[Any, ...]
    made: float
    seconds: float


class Viewer:
    """The runs of a dashboard. Folders are only read; nothing is kept that they do not hold."""

    def __init__(self, paths: Sequence[Path], *, usd_per_hour: float | None = None) -> None:
        """``paths`` are run folders, or folders with runs in them, also ones that appear later."""
        self.paths, self.usd_per_hour = list(paths), usd_per_hour
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether the server wants to end: streams end then by themselves."""
        self._kept: dict[tuple[str, Path], _Kept] = {}

    def runs(self) -> dict[str, Path]:
        """Run folders by name, as they are now."""
        return find_runs([path for path in self.paths if path.is_dir()])

    def overview(self, run: Path) -> dict[str, Any]:
        """The overview of a run; the last one while nothing has changed, or only a moment ago."""
        told = self._keep("overview", run, lambda: overview(run, usd_per_hour=self.usd_per_hour))
        return {**told, "state": state(run), "stages": self._linked(told["stages"])}

    def _linked(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Stages with the addresses of their pages here, for those that have one."""
        names = {str(path.resolve()): name for name, path in self.runs().items()} if found else {}
        pages = {place: f"/run/{quote(name, safe='')}" for place, name in names.items()}
        return [{**stage, "href": None if stage["is_own"] else pages.get(stage["path"])} for stage in found]

    def listed(self) -> list[dict[str, Any]]:
        """The runs in a few numbers each."""
        return [
            {
                "name": name,
                "href": f"/run/{quote(name, safe='')}",
                **self._keep("entry", run, partial(_entry, run)),
                "state": state(run),
            }
            for name, run in list(self.runs().items())[:MAX_LISTED]
        ]

    def _keep(self, kind: str, run: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        kept, stamp, started = self._kept.get((kind, run)), fingerprint(run), time.monotonic()
        if kept is not None:
            pause = max(PAUSE_SECONDS, kept.seconds / MAX_SHARE)
            if kept.stamp == stamp or started - kept.made < pause:
                return kept.value
        value = make()
        made = time.monotonic()
        self._kept[kind, run] = _Kept(value, stamp, made, made - started)
        return value


def _entry(run: Path) -> dict[str, Any]:
    """A run in a few numbers, for a list."""
    try:
        rows = read_metrics(run)
        config = read_config(run)
        planned = (config.get("run") or {}).get("steps")
        found = [finding for finding in diagnose(read_case(run)) if finding.severity != "note"]
    except DataError as error:
        return {"problem": str(error)}
    held_out = [value for row in rows if (value := finite(row.get("evaluation/correct_fraction"))) is not None]
    rewards = [value for row in rows if (value := finite(row.get("reward/mean"))) is not None]
    return {
        "steps_done": max((row["step"] for row in rows), default=0),
        "steps_planned": finite(planned),
        "model": str(config.get("model") or ""),
        "findings": [sum(each.severity == kind for each in found) for kind in ("severe", "warning")],
        "held_out": held_out[-1] if held_out else None,
        "reward": rewards[-1] if rewards else None,
        "rewards": rewards[:: max(1, len(rewards) // _SPARK_POINTS)],
    }
