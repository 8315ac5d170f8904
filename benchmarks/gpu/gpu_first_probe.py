"""One item of a first hour on a GPU, in the process that was started for it; see gpu_first.py."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "speed"))  # for the models and the roofline


@dataclass(frozen=True)
class Setting:
    """What a probe is told."""

    work: Path
    """Shared by all items: the models that were made."""
    folder: Path
    """Of this item alone."""
    device: str
    tiny: bool
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a probe found."""

    outcome: str
    """passed, failed or absent."""
    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def judged(holds: bool, said: str, **figures: Any) -> Answer:
    """Passed where something holds."""
    return Answer("passed" if holds else "failed", said, figures)


def call(
    words: Sequence[str], setting: Setting, *, variables: Mapping[str, str] | None = None
) -> tuple[int, str, float]:
    """Run a command and print what it prints; its exit code, its output and its seconds.

    "python" as the first word is this Python.
    """
    started = time.monotonic()
    chosen = [sys.executable, *words[1:]] if words[0] == "python" else list(words)
    done = subprocess.run(
        chosen, cwd=ROOT, env={**os.environ, **(variables or {})}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    print(done.stdout, flush=True)
    return done.returncode, done.stdout, time.monotonic() - started


def main() -> None:
    """``gpu_first_probe.py MODULE:FUNCTION ANSWER SETTING``; the setting is JSON."""
    where, answer, told = sys.argv[1:]
    module, function = where.split(":")
    facts = json.loads(told)
    setting = Setting(Path(facts["work"]), Path(facts["folder"]), facts["device"], facts["tiny"], facts["options"])
    found: Answer = getattr(importlib.import_module(module), function)(setting)
    record = {"outcome": found.outcome, "said": found.said, "figures": found.figures}
    Path(answer).write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"{found.outcome}: {found.said}")


if __name__ == "__main__":
    sys.modules["gpu_first_probe"] = sys.modules["__main__"]  # the probes import this module by its name
    main()
