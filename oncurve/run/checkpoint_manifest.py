"""Manifests of checkpoint folders, with checksums, and moves that are atomic."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from oncurve import __version__
from oncurve.observe.manifest import FileSum, flush
from oncurve.observe.record import METRICS, parse_yaml
from oncurve.run_errors import CheckpointError

MANIFEST = "manifest.json"
"""Written last; a folder without it was never finished."""
TRAINER_STATE = "trainer_state.json"
"""A file that scripts for TRL look for in a checkpoint; nothing of it is trained with."""
OWN = ("trained", "optimizer", "reference", "ahead", "state")
"""Prefixes of the names of files that a run resumes from."""
FORMAT = 2
"""Number of the layout of a checkpoint, raised with every change of it: a version reads its own layout alone."""
_NAME = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old|deleted)-\d+")


def write_checkpoint_manifest(
    folder: Path, facts: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Flush every file of a folder to the disk and write its manifest: the facts, and size and SHA-256 of each file.

    ``known`` are files that other processes wrote, flushed and summed up.
    """
    files: dict[str, Mapping[str, Any]] = dict(known or {})
    for name, expected in files.items():
        if (size := (folder / name).stat().st_size) != expected["size"]:
            raise OSError(f"{name} has {size} bytes here, and {expected['size']} were written")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (name := path.relative_to(folder).as_posix()) not in files:
            files[name] = FileSum.of(path, flush=True).entry()
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(_render({**facts, "format": FORMAT, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush(path)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, after every file was found to be what the manifest says.

    Nothing of the folder is used before that: a flipped bit in a weight would train on silently.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    files: dict[str, Any] = manifest["files"]
    for name, expected in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / MANIFEST}: names {name!r}, which is outside of the folder")
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        try:
            wrong = FileSum.of(path).mismatch(expected)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        if wrong is not None:
            raise CheckpointError(f"{path}: {wrong}")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        known = name in files or name == MANIFEST or _is_beside(name, manifest)
        if not path.is_dir() and not known and not path.name.startswith("."):
            raise CheckpointError(f"{path}: is no part of the checkpoint. Move it elsewhere")
    return manifest


def _is_beside(name: str, manifest: Mapping[str, Any]) -> bool:
    """A file that is not resumed from: the state of a script's trainer, and the model around weights that are trained
    alone."""
    return name == TRAINER_STATE or (manifest.get("weights") == "trained" and not name.startswith(OWN))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest alone, checked against its own checksum. Raises CheckpointError if it is missing or changed."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        facts = {key: value for key, value in manifest.items() if key != "sha256"}
        is_whole = text == _render(facts)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON object"
        raise CheckpointError(f"{path}: cannot be read ({reason})") from None
    if not is_whole:
        raise CheckpointError(f"{path}: its content changed since it was written")
    if facts.get("format") != FORMAT or not isinstance(facts.get("files"), dict):
        raise CheckpointError(
            f"{path}: is a checkpoint of format {facts.get('format')}; oncurve {__version__} reads format {FORMAT}. "
            f"Resume with the version that wrote it"
        )
    return facts


def _render(facts: Mapping[str, Any]) -> str:
    """The one text that a manifest can have: its keys sorted, and the checksum of all of it."""
    body = json.dumps(facts, sort_keys=True, allow_nan=False)
    whole = {**facts, "sha256": hashlib.sha256(body.encode("utf-8")).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=2, allow_nan=False) + "\n"


def publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name; one of that name that was there is replaced, but for files beside the run's."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:  # there is none, or it is damaged and replaced
        manifest = {"files": {}}
    for path in folder.glob("*"):
        if path.name not in manifest["files"] and _is_beside(path.name, manifest):
            shutil.copy2(path, partial / path.name)
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what a killed writer left behind, and give an old folder its name back if the new one never came."""
    for path in sorted(root.glob(".*")) if root.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        name = root / match["name"]
        if match["kind"] == "old" and not name.exists():
            path.rename(name)
        else:
            shutil.rmtree(path, ignore_errors=True)


def checkpoints_in(root: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints, good or not, oldest first."""
    if not root.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in named if match)


def newest_good(root: Path, *, strict: bool, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, with its manifest; what is wrong with newer ones is said aloud.

    The model before the first step counts only as long as there never was another checkpoint: going back to it would
    be a start from scratch.

    Raises CheckpointError if there is none, or with ``strict`` if the newest one is broken.
    """
    checkpoints = checkpoints_in(root)
    problems: list[str] = []
    for step, path in reversed(checkpoints):
        if step == 0 and problems:
            break
        try:
            manifest = verify(path)
            if manifest.get("step") != step:
                raise CheckpointError(f"{path / MANIFEST}: belongs to step {manifest.get('step')}")
        except CheckpointError as error:
            problems.append(str(error))
            if strict:
                raise CheckpointError(
                    f"{error}. It is the newest checkpoint; without --strict the one before it is taken"
                ) from None
            warn(f"CHECKPOINT {path.name} IS BROKEN: {error}")
            continue
        if problems:
            warn(f"going on from {path.name}; the steps after it are done again")
        return path, manifest
    details = "".join(f"\n  {problem}" for problem in problems)
    raise CheckpointError(
        f"{root}: holds no good checkpoint to go on from{':' if details else '.'}{details}\n"
        f"A run never starts from scratch by itself: restore a checkpoint, or start a new run with `oncurve train`"
    )


def quarantine(root: Path, *, after: int) -> None:
    """Rename the checkpoints of later steps, which will be made again, so that none of them is ever taken."""
    for step, path in checkpoints_in(root):
        if step > after:
            target = path.with_name(f"left_behind_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def prune(root: Path, *, keep: int, every: int = 0) -> None:
    """Delete all but the newest ``keep`` checkpoints, the best by validation score, and those of every ``every`` steps.

    With ``every`` 0 none is kept for its step; with ``keep`` 0 all are.
    """
    checkpoints = checkpoints_in(root)
    scores = {path: score for _, path in checkpoints if (score := score_of(path)) is not None}
    best = max(scores, key=lambda path: (scores[path], path.name)) if scores else None
    for step, path in checkpoints[:-keep]:
        if path != best and not (every and step % every == 0):
            gone = path.with_name(f".{path.name}.deleted-{os.getpid()}")
            path.rename(gone)  # a folder that is half deleted must not have the name of a checkpoint
            shutil.rmtree(gone, ignore_errors=True)


def score_of(folder: Path) -> float | None:
    """The validation score of a checkpoint; None if it was not measured or its manifest cannot be read."""
    try:
        score = read_manifest(folder).get("score")
    except CheckpointError:
        return None
    return float(score) if isinstance(score, (int, float)) else None


Progress = Literal["absent", "unbegun", "begun", "finished"]
_BEFORE_ITS_FIRST_ROW = ("recipe.yaml", "config.yaml", "manifest.json", "log.txt", "status.json", METRICS)


def progress_of(path: Path) -> Progress:
    """``unbegun`` is a folder whose run died before it had a record or a checkpoint: there is nothing to lose."""
    if not (path / METRICS).is_file():
        return "absent"
    checkpoints = checkpoints_in(path / "checkpoints")
    if not checkpoints:
        return "begun" if (path / METRICS).stat().st_size or (path / "evaluations").exists() else "unbegun"
    is_measured = (path / "evaluations" / "trained.json").is_file() and (path / "model").is_dir()
    return "finished" if is_measured and checkpoints[-1][0] >= _requested_steps(path) else "begun"


def _requested_steps(path: Path) -> float:
    """The steps that the run's recipe asks for; without end if it cannot be read, for `resume` to say what is wrong."""
    try:
        return int(parse_yaml((path / "config.yaml").read_text(encoding="utf-8"))["run"]["steps"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return float("inf")


def clear_unbegun(path: Path) -> None:
    """Remove what such a run left, for it to be begun again."""
    for name in _BEFORE_ITS_FIRST_ROW:
        (path / name).unlink(missing_ok=True)
