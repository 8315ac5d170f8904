"""Partial results of an evaluation, from which it is resumed without doing anything twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from oncurve.core.errors import ConfigError, DataError
from oncurve.evaluate.evaluate import PROMPTS_PER_CALL, ExampleStore
from oncurve.evaluate.evaluation import Example
from oncurve.observe.lock import RunLock
from oncurve.observe.record import read_json, read_rows, to_json, write_json, write_lines

COMPLETIONS_PER_CALL = 256
"""Completions that are sampled together; an evaluation is kept in such parts."""


def prompts_per_call(samples: int) -> int:
    """Prompts that go to the sampler together, with so many completions each; at least one."""
    return max(1, min(PROMPTS_PER_CALL, COMPLETIONS_PER_CALL // samples))


class PartialResults(ExampleStore):
    """The examples of one evaluation on the disk, as far as it came: ``samples.jsonl`` beside ``settings.json``.

    Only whole parts of ``prompts_per_call`` prompts are kept, so that every call of the sampler is the same as in a run
    that was never stopped, and gives the same completions. Owns the folder's lock until ``close()``.
    """

    draws_by_part = True

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, samples: int, num_prompts: int) -> None:
        """Raises ConfigError if the folder holds an evaluation with other settings, or is in use."""
        self.folder, self.samples = folder, samples
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(folder)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error}). Choose another --output") from error
        try:
            self._check(json.loads(to_json(settings)))
            self.examples = self._read(num_prompts)
        except BaseException:
            self._lock.close()
            raise

    def add(self, examples: Sequence[Example]) -> None:
        """Keep a part; it is on the disk when this returns."""
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(to_json(asdict(example)) + "\n" for example in examples)
            file.flush()
            os.fsync(file.fileno())
        super().add(examples)

    def close(self) -> None:
        """Give the folder free."""
        self._lock.close()

    def __enter__(self) -> PartialResults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        if not path.exists():
            write_json(path, settings)
            return
        before = read_json(path)
        changed = [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]
        if changed:
            differences = "; ".join(
                f"{key} {_short(before.get(key))}, now {_short(settings.get(key))}" for key in changed
            )
            raise ConfigError(
                f"{self.folder}: holds an evaluation with other settings ({differences}). Choose another --output, or "
                f"the same settings to go on with it"
            )

    def _read(self, num_prompts: int) -> list[Example]:
        path = self.folder / "samples.jsonl"
        if not path.exists():
            return []
        rows = read_rows(path)
        part = prompts_per_call(self.samples) * self.samples
        whole = len(rows) if len(rows) == num_prompts * self.samples else len(rows) // part * part
        try:
            examples = [Example(**row) for row in rows[:whole]]
        except TypeError as error:
            raise DataError(f"{path}: holds no examples of this version ({error}). Remove the folder") from None
        write_lines(path, rows[:whole])  # a part that was cut off is done again
        return examples


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
