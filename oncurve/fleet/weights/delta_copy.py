"""A server's own copy of the newest weights, which differences bring up to date, and the routes to a version.

A copy is one version or the other: it is built beside the old one, its checksums are compared with those of the files
that the trainer would have written, and then it is renamed. What breaks in between costs the work, never the weights.
Nothing but the standard library and numpy is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oncurve.fleet.weights.delta import DELTA, Bytes, apply
from oncurve.fleet.weights.file_download import download, side_by_side
from oncurve.fleet.weights.weight_manifest import NAME, Link, WeightFile, check
from oncurve.observe.manifest import FileSum

COPY_VARIABLE = "ONCURVE_WEIGHTS_COPY"
"""Environment variable with the folder of the copy. A server that is started again goes on from what is there."""
PREFIX = "oncurve-copy-"


@dataclass(frozen=True, slots=True)
class Route:
    """A way from files that can be had to a version."""

    whole: Link | None
    """Begin with the files of this version; None: with what is here already."""
    links: tuple[Link, ...]
    """Then apply the differences of these, one after another."""

    @property
    def num_bytes(self) -> int:
        """That must be fetched."""
        begin = sum(file.size for file in self.whole.whole) if self.whole else 0
        return begin + sum(link.delta_bytes for link in self.links)


def find_routes(have: str | None, chain: Sequence[Link]) -> list[Route]:
    """All ways to the last version of a chain for who has the version ``have``, those with the fewest bytes first."""
    routes: list[Route] = []
    links: tuple[Link, ...] = ()
    for index in reversed(range(len(chain))):
        link = chain[index]
        if link.label == have:
            routes.append(Route(None, links))
        if link.whole:
            routes.append(Route(link, links))
        if link.base is None:
            break
        links = (link, *links)
        if index == 0 or chain[index - 1].label != link.base:
            routes += [Route(None, links)] if link.base == have else []
            break
    return sorted(routes, key=lambda route: route.num_bytes)


class DeltaCopy:
    """One copy, in a folder that several processes of a machine may share."""

    def __init__(self, root: Path | None = None, *, group: str | None = None) -> None:
        """Without a folder it is in one of its own, which is removed when this process ends. Processes of this machine
        with the same ``group`` share one, which is removed when the first of them ends."""
        named = os.environ.get(COPY_VARIABLE)
        if root is None and named:
            root = Path(named)
        elif root is None:
            root = Path(tempfile.mkdtemp(prefix=PREFIX)) if group is None else _common(group)
            atexit.register(shutil.rmtree, root, ignore_errors=True)
        self.root = root

    @contextlib.contextmanager
    def updated(self, message: Mapping[str, Any]) -> Iterator[list[Path]]:
        """The files of the announced version, whole, made of what is here and what must be fetched. Nobody replaces
        them inside of this.

        Raises ValueError if no way leads there; what was here stays.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self._alone():
            yield self._update(message)

    def _update(self, message: Mapping[str, Any]) -> list[Path]:
        chain = read_chain(message)
        label, files = _plain(chain[-1].label), [WeightFile(**file) for file in message["files"]]
        have, files_here = self._present()
        whys = []
        if have == label and files_here == files:
            paths = [self.root / label / file.name for file in files]
            wrong = side_by_side(_mismatch, list(zip(paths, files, strict=True)))
            if not any(wrong):
                return paths
            whys, have = [f"the copy here is damaged: {next(filter(None, wrong))}"], None
        for route in find_routes(have, chain):
            try:
                return self._go(route, have, files, message)
            except (ValueError, OSError) as error:
                whys.append(str(error))
        raise ValueError(f"{label} cannot be had: {'; '.join(whys) or 'no way leads there from what is here'}")

    def _go(self, route: Route, have: str | None, files: list[WeightFile], message: Mapping[str, Any]) -> list[Path]:
        """Build the version beside the copy, and let it take its place."""
        got = self._fetch(route, message)
        label = str(message["label"])
        partial, final = self.root / ".partial", self.root / label
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        old = None if have is None else self.root / have

        def build(file: WeightFile) -> None:
            start = got[route.whole.label, file.name] if route.whole else _of(old, file.name)
            steps = [
                got[link.label, file.name + DELTA] for link in route.links if (link.label, file.name + DELTA) in got
            ]
            _build(start, steps, partial / Path(file.name).name, file)

        side_by_side(build, files)
        facts = {"label": label, "files": [asdict(file) for file in files]}
        (partial / NAME).write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        self._tidy(label)
        return [final / file.name for file in files]

    def _fetch(self, route: Route, message: Mapping[str, Any]) -> dict[tuple[str, str], Path]:
        """All files of a way, by version and name."""
        sources = [(link.label, file) for link in route.links for file in link.deltas]
        if route.whole is not None:
            sources += [(route.whole.label, file) for file in route.whole.whole]
        paths = side_by_side(lambda pair: fetch_file(message, pair[0], pair[1], self._fetched(pair[0])), sources)
        return {(label, file.name): path for (label, file), path in zip(sources, paths, strict=True)}

    def _fetched(self, label: str) -> Path:
        return self.root / "fetched" / _plain(label)

    def _tidy(self, label: str) -> None:
        """Keep the copy alone."""
        for folder in self.root.iterdir():
            if folder.is_dir() and folder.name != label:
                shutil.rmtree(folder, ignore_errors=True)

    def _present(self) -> tuple[str | None, list[WeightFile]]:
        """The version of the copy, and its files; None and nothing where there is none."""
        for path in self.root.glob(f"*/{NAME}"):
            if not path.parent.name.startswith("."):
                with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                    facts = json.loads(path.read_text(encoding="utf-8"))
                    if facts["label"] == path.parent.name:
                        return facts["label"], [WeightFile(**file) for file in facts["files"]]
        return None, []

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes the folder inside of this: not another thread, not another process."""
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def read_chain(message: Mapping[str, Any]) -> tuple[Link, ...]:
    """The chain in a message. Raises ValueError for one that is damaged or does not lead to the announced version."""
    try:
        chain = tuple(
            Link(
                str(link["label"]),
                link["base"],
                tuple(WeightFile(**file) for file in link["deltas"]),
                tuple(WeightFile(**file) for file in link["whole"]),
            )
            for link in message["chain"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the chain of versions cannot be read: {error}") from None
    if not chain or chain[-1].label != message["label"]:
        raise ValueError(f"the chain of versions does not lead to {message['label']}")
    return chain


def fetch_file(message: Mapping[str, Any], label: str, file: WeightFile, folder: Path) -> Path:
    """A file of a version of the chain, whole: where it lies, if this machine sees it, otherwise in ``folder``.

    Raises ValueError if it cannot be had.
    """
    name = Path(file.name).name
    path = folder / name
    if path.is_file() and FileSum.of(path).mismatch(asdict(file)) is None:
        return path
    path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if message.get("folder"):
        path = Path(message["folder"]).parent / label / name
        check(path, asdict(file))
    else:
        base = str(message["address"]).rpartition("/")[0]
        download(f"{base}/{label}/{name}", message.get("token"), path, asdict(file))
    return path


def _common(group: str) -> Path:
    """A temporary folder for several processes of this user. Raises ValueError if it is somebody else's."""
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{os.getuid()}-{_plain(group)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ValueError(
            f"{folder} belongs to another user; set {COPY_VARIABLE} to a folder for the copy of the weights"
        )
    return folder


def _plain(name: str) -> str:
    """Raises ValueError for a name that leads elsewhere."""
    if name != Path(name).name or name in ("", "..", "fetched") or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a version")
    return name


def _of(folder: Path | None, name: str) -> Path:
    assert folder is not None
    return folder / Path(name).name


def _mismatch(pair: tuple[Path, WeightFile]) -> str | None:
    path, file = pair
    try:
        return FileSum.of(path).mismatch(asdict(file))
    except OSError as error:
        return str(error)


def _build(start: Path, steps: Sequence[Path], path: Path, file: WeightFile) -> None:
    built(start, steps, file).tofile(path)


def built(start: Path, steps: Sequence[Path], file: WeightFile) -> Bytes:
    """One file, made of an older one and its differences. Raises ValueError unless it is what the trainer has."""
    data = np.fromfile(start, np.uint8)
    for step in steps:
        data = apply(step.read_bytes(), data)
    if wrong := FileSum(data.size, hashlib.sha256(data.data).hexdigest()).mismatch(asdict(file)):
        raise ValueError(f"{file.name} as made of {start} and {len(steps)} differences: {wrong}")
    return data
