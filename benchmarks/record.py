"""The one form of a result: what, command, commit, machine, settings, facts and rows; and turns between systems.

``facts`` are figures over all rows. Rows are saved as they come, so that a benchmark may be stopped at any time.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""Published results. A benchmark writes there only if ``--output`` says so."""
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
"""What of a processor decides how fast its matrix products are."""
PACKAGES = ("accelerate", "peft", "trl", "transformers", "torch")
QUIET_SECONDS = 2.0
"""Progress is printed for what takes longer."""


class Record:
    """The result of one benchmark while it is made."""

    def __init__(self, what: str, settings: Mapping[str, Any], path: Path, *, command: Sequence[str]) -> None:
        self.what, self.path, self.command = what, path, list(command)
        self.settings = {key: bare(value) for key, value in settings.items()}
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.total: int | None = None
        """Rows that there will be, for the time that is left."""
        self._machine: dict[str, Any] = {}
        self._started = self._printed = time.monotonic()
        self._resumed = 0

    def resume(self) -> None:
        """Take the rows that the file holds already. Raises SystemExit for a file of another benchmark."""
        if not self.path.is_file():
            return
        found = json.loads(self.path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("what") != self.what:
            raise SystemExit(f"{self.path} holds another result; name another file with --output")
        self.rows, self.facts = found["rows"], found["facts"]
        self._resumed = len(self.rows)

    def has(self, **key: Any) -> bool:
        """There is a row with these values."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """One more row: it is printed, and the file is written."""
        self.rows.append(row)
        print(short(row), flush=True)
        self.save()
        self.progress(len(self.rows), self.total)

    def progress(self, done: int, total: int | None) -> None:
        """How far it is and how long the rest takes at the speed so far."""
        now = time.monotonic()
        if total is None or done >= total or now - self._printed < QUIET_SECONDS or done <= self._resumed:
            return
        self._printed = now
        left = (now - self._started) / (done - self._resumed) * (total - done)
        print(f"[{done} of {total}] about {duration(left)} left", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self._machine = self._machine or describe_machine()
        content = {
            "what": self.what,
            "command": shlex.join(bare(self.command)),
            "commit": self._machine["code"]["commit"],
            "machine": self._machine,
            "settings": self.settings,
            "facts": self.facts,
            "rows": self.rows,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def read_result(path: Path, *, rows: str = "rows") -> dict[str, Any]:
    """A result of either form as a flat mapping, its rows under the name that they had before there was one form."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "what" not in content or "facts" not in content:
        return content
    own = {"arguments": content["settings"], "run": content["machine"], rows: content["rows"]}
    return {**content["settings"], **own, **content["facts"], **content}


def short(row: Mapping[str, Any]) -> str:
    """A row in one line, with its first figures."""
    text = json.dumps(row, ensure_ascii=False)
    return text if len(text) < 400 else f"{text[:400]} ..."


def duration(seconds: float) -> str:
    """Such as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe_machine() -> dict[str, Any]:
    """Code, versions, processor, its flags for matrix products, threads, and the load by others at this moment."""
    from oncurve.observe.manifest import describe_run  # lazy: what reads results needs none of it

    torch = sys.modules.get("torch")
    described = describe_run(
        bare(sys.argv),
        flags=[flag for flag in FLAGS if flag in cpu_flags()],
        threads=torch.get_num_threads() if torch else None,
        load_average=round(os.getloadavg()[0], 2),
        libraries={name: found for name in PACKAGES if (found := _version(name))},
        gpu=torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
        kernels=os.environ.get("ONCURVE_KERNELS", "1") != "0",
    )
    del described["command"]
    return described


def bare(value: Any) -> Any:
    """Words and settings without the folders of this machine: of an absolute path the last part stays."""
    if isinstance(value, (str, Path)):
        return re.sub(r"(?<![\w./:])/(?:[^\s/,=]+/)*([^\s/,=]*)", r"\1", str(value))
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, (list, tuple)) else value


def cpu_flags() -> frozenset[str]:
    """The processor's flags as Linux lists them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def round_robin(
    systems: Mapping[str, Callable[[int], dict[str, Any]]], *, steps: int, record: Record | None = None
) -> dict[str, list[Any]]:
    """One step of each system after the other, ``steps`` times over: what else the machine does falls on all alike."""
    raw: dict[str, list[Any]] = {name: [] for name in systems}
    for number in range(steps):
        for name, step in systems.items():
            gc.collect()
            raw[name].append(step(number))
        if record is not None:
            record.progress(number + 1, steps)
    return raw


def median_of(rows: Sequence[Mapping[str, float]], key: str, *, warmup: int) -> float:
    """The median of one figure over the steps after the warm-up."""
    return statistics.median(row[key] for row in rows[warmup:])


def ratios_of(
    above: Sequence[Mapping[str, float]], below: Sequence[Mapping[str, float]], keys: tuple[str, str], *, warmup: int
) -> list[float]:
    """The ratio of each pair of steps that were neighbours."""
    pairs = zip(above[warmup:], below[warmup:], strict=True)
    return [one[keys[0]] / other[keys[1]] for one, other in pairs]
