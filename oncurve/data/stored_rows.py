"""Rows of large data sets, read when somebody asks for them."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from oncurve.core.errors import DataError

Row = dict[str, Any]
MANY_ROWS = 1_000_000
"""Rows of a file above which each is read and rendered when a step asks for it."""
_BLOCK_BYTES = 1 << 26


class Source(Protocol):
    """Raw rows that are read one by one."""

    fingerprint: str
    """Fingerprint of all that is stored."""

    def __len__(self) -> int: ...
    def __call__(self, index: int) -> tuple[str, Row]:
        """The row at a place, counted from 0, with that place for messages."""
        ...


class StoredRows(Sequence[Row]):
    """Rows of a file or table that stay there; ``adapt`` puts a raw one into our columns.

    Equal questions are not looked for: whoever holds rows out takes some of the indices.
    """

    def __init__(
        self, source: Source, adapt: Callable[[str, Row], Row], indices: np.ndarray[Any, Any] | None = None
    ) -> None:
        self._source, self._adapt = source, adapt
        self._indices = np.arange(len(source)) if indices is None else indices

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all that is stored, whichever rows of it these are."""
        return self._source.fingerprint

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> StoredRows: ...
    def __getitem__(self, index: int | slice) -> Row | StoredRows:
        """One row, or rows that are still not read."""
        if isinstance(index, slice):
            return self._at(self._indices[index])
        return self._adapt(*self._source(int(self._indices[index])))

    def split(self, count: int, *, seed: int) -> tuple[StoredRows, list[Row]]:
        """The rows without ``count`` of them, and those, drawn by the seed and in their order."""
        drawn = np.random.default_rng(seed).choice(len(self), count, replace=False, shuffle=False)
        is_held_out = np.zeros(len(self), dtype=bool)
        is_held_out[drawn] = True
        return self._at(self._indices[~is_held_out]), list(self._at(self._indices[is_held_out]))

    def _at(self, indices: np.ndarray[Any, Any]) -> StoredRows:
        return StoredRows(self._source, self._adapt, indices)


class JsonLines:
    """The lines of a file, by the places where they begin and end; blank ones are passed over."""

    def __init__(self, path: Path, parse: Callable[[str, bytes], Row]) -> None:
        self.path, self._parse = path, parse
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        digest, ends, start = hashlib.sha256(), [], 0
        while block := self._file.read(_BLOCK_BYTES):
            digest.update(block)
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 0x0A) + start)
            start += len(block)
        stops = np.concatenate([*ends, np.array([start])])
        starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
        self.numbers = np.flatnonzero(stops - starts > 1)
        self._spans = np.stack([starts[self.numbers], stops[self.numbers]], axis=1)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._spans)

    def __call__(self, index: int) -> tuple[str, Row]:
        """The object on the line at an index."""
        start, stop = (int(end) for end in self._spans[index])
        line = os.pread(self._file.fileno(), stop - start, start).removeprefix(b"\xef\xbb\xbf")
        where = f"{self.path}, line {int(self.numbers[index]) + 1}"
        if len(line) < stop - start - 3:
            raise DataError(f"{where}: the file has become shorter. Leave data alone while a run reads them.")
        return where, self._parse(where, line)


class StoredTable:
    """The rows of a data set of the ``datasets`` library, which stay on the disk."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name
        path = Path(name)
        if path.is_file():
            with path.open("rb") as file:
                self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            self.fingerprint = str(rows._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, index: int) -> tuple[str, Row]:
        """The row at an index."""
        return f"{self._name}, row {index + 1}", self._rows[index]
