"""The run folder: written as the run goes, read back by every report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Group, Numbers, Reward
from oncurve.observe.lock import RunLock
from oncurve.observe.manifest import redact, redact_tree
from oncurve.observe.measure import episode_row
from oncurve.observe.sinks import Tracker
from oncurve.observe.tokens import TokenRecord
from oncurve.run_errors import CheckpointError

METRICS = "metrics.jsonl"
"""One JSON object per step."""
_OWN_FILES = (
    METRICS,
    "recipe.yaml",
    "config.yaml",
    "manifest.json",
    "log.txt",
    "status.json",
    "rollouts",
    "steps",
    "evaluations",
    "checkpoints",
    "tracking",
)


def refuse_existing(path: Path, *, chosen_by: str = "run.name or run.folder") -> None:
    """Raise ConfigError where a folder holds a run already, or is a file; ``chosen_by`` is what names the folder."""
    blocking = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None)
    if blocking is not None:
        raise ConfigError(f"{blocking}: is a file, not a folder. Choose another {chosen_by}.")
    if any((path / name).exists() for name in _OWN_FILES):
        raise ConfigError(
            f"{path}: already holds a run. Choose another {chosen_by}, resume it with `oncurve resume {path}` or, if "
            f"a Python program made it, with its trainer's resume(), or delete the folder."
        )


class RunFolder:
    """The folder of one run, locked against a second writer until it is closed.

    ``recipe.yaml`` (as given), ``config.yaml`` (resolved), ``manifest.json``, ``metrics.jsonl``, ``rollouts/``,
    ``steps/``, ``evaluations/``, ``checkpoints/``, ``log.txt``, ``status.json``. Files that are written at once appear
    whole or not at all; lines are written one by one, so that a killed run loses at most its last line. What looks like
    a key is never written.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None, lock: RunLock | None = None) -> None:
        """Creates a folder for a new run, or continues one after ``resume_step`` (steps done).

        Rows, rollouts and evaluations of later steps are dropped then, since those steps are done again. Whoever
        looked at the checkpoints under a ``lock`` hands it over.

        Raises ConfigError if the folder holds a run already, is in use, or cannot be written.
        """
        self.path = Path(path)
        if resume_step is None:
            refuse_existing(self.path)
        self.tracker = Tracker()
        self._lock = lock or lock_run(self.path, is_new=resume_step is None)
        try:
            if resume_step is not None:
                self._forget_after(resume_step)
            self._metrics = (self.path / METRICS).open("ab", buffering=0)
            self._log = (self.path / "log.txt").open("ab", buffering=0)
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"{self.path}: cannot be used as a run folder ({error.strerror}). Choose another."
            ) from error
        except DataError:
            self._lock.close()
            raise

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; made by whoever writes the first one."""
        return self.path / "checkpoints"

    def write_start(self, recipe: str, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Write what the run was asked to do, in its own words and resolved, and where it started."""
        resolved = to_yaml(redact_tree(dict(config)))
        with self._telling():
            write_text(self.path / "recipe.yaml", redact(recipe))
            write_text(self.path / "config.yaml", resolved)
            write_json(self.path / "manifest.json", redact_tree(dict(manifest)))

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of ``metrics.jsonl``. ``step`` counts steps done; 0 is the model before training.

        A step may get more than one row (its evaluation comes later); reading merges them.
        """
        line = to_json({"step": int(step), **{key: float(value) for key, value in metrics.items()}}) + "\n"
        with self._telling():
            _write_all(self._metrics, line)
        self.tracker.write(step, metrics)

    def forget_row(self, step: int) -> None:
        """Drop the row of a step that will be recorded again."""
        rows = [row for row in read_rows(self.path / METRICS) if row.get("step") != step]
        self._metrics.close()
        with self._telling():
            write_lines(self.path / METRICS, rows)
            self._metrics = (self.path / METRICS).open("ab", buffering=0)

    def write_status(self, step: int, phase: str) -> None:
        """Write the run's progress as ``status.json``: steps done, what it is doing, its process."""
        with self._telling():
            replace_text(self.path / "status.json", to_json({"step": step, "phase": phase, "pid": os.getpid()}) + "\n")

    def sync(self) -> None:
        """Until every row so far is on the disk: a checkpoint must not outlive the rows that lead to it."""
        with self._telling():
            os.fsync(self._metrics.fileno())

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[Reward]],
        advantages: Sequence[Sequence[float]] | None = None,
        *,
        tokens: TokenRecord | None = None,
    ) -> Path:
        """Everything that was sampled in a step, one line per prompt, for people to read; ``tokens`` adds details."""
        weights = advantages if advantages is not None else [[None] * len(row) for row in rewards]
        detail = tokens or TokenRecord(None, num_groups=0)
        lines = (
            _group_row(
                step, group, graded, weight, [detail.entries(index, completion) for completion in group.completions]
            )
            for index, (group, graded, weight) in enumerate(zip(groups, rewards, weights, strict=True))
        )
        path = rollouts_path(self.path, step)
        with self._telling():
            write_lines(path, lines)
        return path

    def write_evaluation(
        self, name: str, rows: Iterable[Mapping[str, Any]], summary: Mapping[str, Any], *, analysis: str | None = None
    ) -> Path:
        """An evaluation: ``evaluations/<name>.jsonl`` its examples, ``.json`` its counts, ``.md`` its analysis."""
        folder = self.path / "evaluations"
        with self._telling():
            write_lines(folder / f"{name}.jsonl", rows)
            write_json(folder / f"{name}.json", summary)
            if analysis is not None:
                write_text(folder / f"{name}.md", analysis)
        return folder / f"{name}.jsonl"

    def log(self, text: str) -> None:
        """Adds lines to ``log.txt``, each with the time (UTC)."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with self._telling():
            _write_all(self._log, "".join(f"{now}  {line}\n" for line in redact(text).splitlines() or [""]))

    def close(self) -> None:
        """Closes the files and gives the lock back; calling it twice is harmless."""
        self.tracker.close()
        self._metrics.close()
        self._log.close()
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A full disk or a vanished folder is a message, and the run ends where it can be resumed."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the run folder cannot be written ({error.strerror}). The checkpoints in it are "
                f"untouched: make room or bring the folder back, then resume the run"
            ) from error

    def _forget_after(self, step: int) -> None:
        rows = [row for row in read_rows(self.path / METRICS) if step_of(row, self.path / METRICS) <= step]
        write_lines(self.path / METRICS, rows)
        for path in sorted([*self.path.glob("rollouts/step_*.jsonl"), *self.path.glob("steps/step_*.parquet")]):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                path.unlink()
        for path in (self.path / "evaluations").glob("*.json"):
            if step_of(read_json(path), path) > step:
                path.with_suffix(".jsonl").unlink(missing_ok=True)
                path.unlink()


def nearest_runs(path: Path) -> str:
    """Where a run is, behind a place that is none: around it or inside it."""
    if around := next((parent for parent in path.resolve().parents[:2] if (parent / METRICS).is_file()), None):
        return f"Its run is {around}."
    inside = sorted(file.parent for file in path.glob(f"*/{METRICS}"))
    if inside:
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        return f"Runs in it: {', '.join(map(str, inside[:3]))}{more}."
    return "Name the folder that `oncurve train` made."


def lock_run(path: Path, *, is_new: bool = False) -> RunLock:
    """The right to write a run folder, which is made if the run is new.

    Raises ConfigError if there is no run, another process writes it, or it cannot be written.
    """
    if not is_new and not (path / METRICS).is_file():
        raise ConfigError(f"{path}: no run to resume, {METRICS} is missing. {nearest_runs(path)}")
    try:
        if is_new:
            path.mkdir(parents=True, exist_ok=True)
        return RunLock(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be used as a run folder ({error.strerror}). Choose another.") from error


def _write_all(file: FileIO, text: str) -> None:
    """Every byte of a text, however little of it one write takes."""
    rest = memoryview(text.encode("utf-8", errors="backslashreplace"))
    while rest:
        rest = rest[file.write(rest) :]


def replace_text(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all, without waiting for the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _group_row(
    step: int,
    group: Group,
    rewards: Sequence[Reward],
    advantages: Sequence[float | None],
    details: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    completions = [
        {
            "text": completion.text,
            "num_tokens": completion.num_tokens,
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            **({"versions": completion.versions} if completion.versions else {}),
            "reward": reward.value,
            "parts": dict(reward.parts),
            "error": reward.error,
            "detail": reward.detail,
            "advantage": advantage,
            **episode_row(completion),
            **detail,
        }
        for completion, reward, advantage, detail in zip(group.completions, rewards, advantages, details, strict=True)
    ]
    return {
        "step": step,
        "index": group.prompt.index,
        "prompt": group.prompt.text,
        "answer": group.prompt.row.get("answer"),
        "completions": completions,
    }


def to_yaml(tree: Mapping[str, Any]) -> str:
    """A recipe or a part of one as YAML, its keys in their order."""
    dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
    return yaml.dump(dict(tree), Dumper=dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str) -> Any:
    """The content of a YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)


def to_json(value: Any) -> str:
    """One line of strict JSON: a number that is not finite is null, an unknown object its text."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, Real)):  # the first is found at once, the second is asked of an abstract class
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, Numbers)):
        return [_plain(item) for item in value]
    return str(value)


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    write_pieces(path, [text])


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object, for people as well."""
    write_text(path, json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines, one per row."""
    write_pieces(path, (to_json(row) + "\n" for row in rows))


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Writes text under a temporary name beside ``path`` and moves it there at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def rollouts_path(run: Path, step: int) -> Path:
    """The file of a step's rollouts."""
    return run / "rollouts" / f"step_{step:06d}.jsonl"


def recorded_steps(run: Path) -> list[int]:
    """Steps whose rollouts are in a run folder, in their order."""
    names = (path.stem.removeprefix("step_") for path in (run / "rollouts").glob("step_*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_rows(path: Path, *, may_be_torn: bool = True) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; see ``iterate_rows``."""
    return list(iterate_rows(path, may_be_torn=may_be_torn))


def iterate_rows(path: Path, *, may_be_torn: bool = True) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, one after the other.

    A last line without its line break is what a killed writer leaves behind, and is dropped if it ``may_be_torn``.

    Raises DataError naming file and line for anything else that is no JSON object, and if the file is missing.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise TypeError(f"a {type(row).__name__}")
                except (ValueError, TypeError) as error:
                    if may_be_torn and not line.endswith("\n"):
                        return
                    raise DataError(f"{path}: line {number} is not a JSON object. Restore or remove it.") from error
                yield row
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Name a run folder or its {METRICS}.") from error


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run by step: rows of one step merged, later values over earlier ones, null as NaN.

    ``path`` is a run folder or its ``metrics.jsonl``. A torn last line is dropped.

    Raises DataError for a missing file, a broken line elsewhere, or a row without a step.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in iterate_metrics(path):
        values = {key: math.nan if value is None else value for key, value in row.items()}
        merged.setdefault(row["step"], {}).update(values)
    return [merged[step] for step in sorted(merged)]


def iterate_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl`` as they were written, each with a whole number as its step."""
    file = Path(path) / METRICS if Path(path).is_dir() else Path(path)
    for number, row in enumerate(iterate_rows(file), start=1):
        step_of(row, file, number)
        yield row


def step_of(row: Mapping[str, Any], file: Path, number: int | None = None) -> int:
    """The number of the step that an object belongs to. Raises DataError naming file and row if it has none."""
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        if file.name != METRICS and number is not None:
            raise DataError(
                f"{file}: row {number} has no step, so this is no {METRICS} of a run. Name the run's folder."
            )
        raise DataError(f"{file}: {'it' if number is None else f'row {number}'} has no step. Restore or remove it.")
    return step


def read_rollouts(run: str | Path, step: int) -> list[dict[str, Any]]:
    """The groups of one step as ``write_rollouts`` wrote them. Raises DataError if the file is missing or broken."""
    return read_rows(rollouts_path(Path(run), step), may_be_torn=False)


def json_if_there(path: Path) -> dict[str, Any]:
    """One JSON object of a run, such as a manifest; empty where it was not written. Raises DataError if broken."""
    return read_json(path) if path.is_file() else {}


def read_manifest(run: str | Path) -> dict[str, Any]:
    """The place and code from which a run started. Raises DataError if the file is missing or broken."""
    return read_json(Path(run) / "manifest.json")


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON object, such as a manifest. Raises DataError if it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}, not a JSON object.")
    return value


def _nothing(*_: Any, **__: Any) -> Any:
    """Write nothing: another process does."""


class NullRunFolder(RunFolder):
    """The folder of a run that another process writes: the same calls, and no file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tracker = Tracker()

    write_start = write_metrics = forget_row = write_status = write_rollouts = write_evaluation = _nothing
    sync = log = close = _nothing
