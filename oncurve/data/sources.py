"""Readers of raw rows from files, folders, the hub and generators, each row with its source for messages."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from glob import escape
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from oncurve.core.errors import ConfigError, DataError, Failure, attempt
from oncurve.wording import counted, did_you_mean, listed

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


Located = tuple[str, Row]
"""A row and where it stands, for example "data/train.jsonl, line 3"."""

HUB_NAMES: dict[str, tuple[str, str | None]] = {
    "gsm8k": ("openai/gsm8k", "main"),
    "math": ("nlile/hendrycks-MATH-benchmark", None),
}
"""The name and subset on the hub of a data set that is named without a path. That MATH has 12,000 training rows; its
500 test rows are MATH-500, and none of them is among the training rows."""

NO_NETWORK = (
    "Check its name and data.split. Without a network, put such rows into FOLDER/train.jsonl and FOLDER/test.jsonl, "
    "and give data.path=FOLDER and, where the recipe has evaluation.data, evaluation.data.path=FOLDER"
)
WRAPPERS = ("data", "rows", "examples", "instances", "items", "records", "train")
"""Under these names other programs write a list of rows into one object."""
HEAD = 4_096
"""Bytes of a file that tell whether it is one JSON array."""
LEAST_BYTES = 8
"""Least size of a row in a file."""
CSV_ENDINGS = (".csv", ".tsv")
FILE_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""The reader of the ``datasets`` library for one file, by its suffix."""

SAVED = ("dataset_dict.json", "state.json")
"""Files in a folder that the ``datasets`` library has saved a data set to."""


def read_json_lines(path: str | Path) -> list[Located]:
    """The objects of a JSON lines file, each with its line counted from 1; blank lines are passed over.

    A file that is one JSON array of objects has rows, counted from 1, in the place of lines.

    Raises DataError, with the line, for a file that is missing, empty, not UTF-8, or neither of the two.
    """
    try:
        text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}). Correct data.path.") from error
    if _begins_as_array(text[:HEAD]) and (rows := _array(path, text)):
        return [(source := f"{path}, row {number}", _object(source, row)) for number, row in enumerate(rows, 1)]
    numbered = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    if not numbered:
        raise DataError(f"{path}: the file is empty. Write one JSON object per line.")
    return [(source := f"{path}, line {number}", _parsed(source, line)) for number, line in numbered]


def _array(path: str | Path, text: bytes) -> list[Any]:
    """The members of a JSON array; none where it is not the whole of a text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return []
        raise DataError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno}). The file begins as one JSON "
            f"array of rows: correct it there, or write one JSON object per line."
        ) from error
    except (ValueError, RecursionError):  # what its lines are told for
        return []


def read_csv(path: Path) -> list[Located]:
    """The rows of a CSV or TSV file with its first line as names of columns; every value is text.

    Columns are separated by tabs in a .tsv file; by semicolons or tabs where the first line has these and no commas;
    else by commas.

    Raises DataError, with the line, for a file that is missing, empty, not UTF-8, has a row of another length, or
    begins with a row instead of names.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}). Correct data.path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start + 1}. Save the file as UTF-8.") from error
    head = text.lstrip().partition("\n")[0]
    others = [mark for mark in ";\t" if mark in head and "," not in head]
    delimiter = "\t" if path.suffix == ".tsv" else others[0] if others else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: list[Located] = []
    names: list[str] = []
    try:
        for values in reader:
            if not any(values):
                continue
            if not names:
                names = [name.strip() for name in values]
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise DataError(
                        f"{path}: the first line names two columns {twice!r}. Give them names of their own."
                    )
            elif len(values) != len(names):
                counts = f"{counted(len(values), 'value')} for {counted(len(names), 'column')} ({listed(names)})"
                raise DataError(
                    f"{path}, line {reader.line_num}: {counts}. Put quotation marks around values that have "
                    f"{delimiter!r} in them."
                )
            else:
                rows.append((f"{path}, line {reader.line_num}", dict(zip(names, values, strict=True))))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error}). Save the file as CSV again.") from error
    if not rows:
        raise DataError(f"{path}: there are no rows. The first line names the columns, each further line is a row.")
    _refuse_no_names(path, names, rows)
    return rows


def _refuse_no_names(path: Path, names: list[str], located: Sequence[Located]) -> None:
    """Raise DataError for a file of another separator, a row in place of names, or names in place of a row."""
    if again := next((source for source, row in located if [*row.values()] == names), None):
        raise DataError(f"{again}: names the columns once more. Remove this line.")
    rows = [row for _, row in located]
    if len(names) == 1 and (mark := _separator([*names, *(row[names[0]] for row in rows)])) is not None:
        raise DataError(
            f"{path}: has one column by commas, and every line has {mark!r} equally often. Separate columns by commas, "
            f"semicolons or tabs."
        )
    columns = {name: [row[name] for row in rows] for name in names}
    values = [name for name, column in columns.items() if _is_value(name, column)]
    often = [name for name, column in columns.items() if column.count(name) >= max(1, OFTEN * len(column))]
    is_row = values and 2 * len({*values, *often}) >= len(names)
    if is_row and names != [str(index) for index in range(len(names))]:
        raise DataError(
            f"{path}: the first line must name the columns, and looks like a row: it has {values[0]!r:.60}. Write a "
            f"line with {counted(len(names), 'name')} above it, such as 'question' and 'answer'."
        )


def _separator(lines: Sequence[str]) -> str | None:
    """A sign other than a usual one that separates all lines into as many parts; None where there is none."""
    signs = (sign for sign in dict.fromkeys(lines[0]) if not sign.isalnum() and sign not in " _-.?!'")
    return next((sign for sign in signs if len({line.count(sign) for line in lines}) == 1), None)


MAX_NAME_CHARACTERS = 60
OFTEN = 0.05
"""Share of a column from which a value is one of a few, such as labels."""
_NUMERIC = re.compile(r"[-+]?\d[\d.,]*")


def _is_value(name: str, column: Sequence[str]) -> bool:
    """The name of a column is what its rows hold: a sentence, or a number above numbers."""
    is_number = bool(_NUMERIC.fullmatch(name)) and all(_NUMERIC.fullmatch(value.strip()) for value in column)
    is_sentence = len(name) > MAX_NAME_CHARACTERS or name.endswith((".", "?", "!"))
    return is_number or is_sentence


MAKERS = {
    "word_problems": ("word_problems", "word_problems", "word problem"),
    "program_problems": ("program_problems", "program_problems", "program problem"),
    "calculator_problems": ("calculator_problems", "calculator_problems", "calculator problem"),
    "calculator_chains": ("calculator_problems", "calculator_problems", "calculator problem"),
}
"""Types of rows that are made on the spot: the module and the function that makes them, and what one is called."""


def read_generated(
    type: str, split: str, count: int | None, *, seed: int, levels: tuple[int, ...], function: str | None = None
) -> list[Located]:
    """The problems of a split that are made on the spot, as rows.

    Raises ConfigError without a count, DataError for a split or level that does not exist.
    """
    if count is None:
        raise ConfigError(f"data.limit: {type} are generated. Say how many, for example limit: 2000.")
    if function is not None:
        from oncurve.user_code import load_function  # lazy

        make = load_function(function, where="data.function")
        made = attempt(lambda: list(make(split, count, seed=seed)))
        if isinstance(made, Failure):
            raise DataError(f"data.function: {function} failed: {made.detail}")
        items: list[Any] = [asdict(item) if is_dataclass(item) and not isclass(item) else item for item in made]
        if wrong := [item for item in items if not isinstance(item, Mapping)]:
            raise DataError(f"data.function: {function} gave {wrong[0]!r:.80}, which is no row. Give dictionaries")
        return [(f"row {number} of {function}", dict(item)) for number, item in enumerate(items, 1)]
    if split not in ("train", "validation", "test"):
        raise DataError(f"{type}: there is no split {split!r}. Use train, validation or test.")
    what, made = MAKERS[type][-1], _make_problems(type, split, count, seed, tuple(levels))
    names = [field.name for field in fields(made[0])] if made else []
    return [(f"{what} {n}", {name: getattr(item, name) for name in names}) for n, item in enumerate(made, 1)]


@lru_cache(maxsize=8)
def _make_problems(type: str, split: str, count: int, seed: int, levels: tuple[int, ...]) -> Sequence[Any]:
    """The problems of a split, of texts and numbers alone. Thousands take a second, so they are made once in a process.

    A program or a notebook trains several times on the same.
    """
    module, function, _ = MAKERS[type]
    options = {
        "word_problems": {"levels": levels},
        "calculator_problems": {"operations": 1},
        "calculator_chains": {"operations": 2},
    }.get(type, {})
    return vars(import_module(f"oncurve.tasks.{module}"))[function](split, count, seed=seed, **options)


def read_stored(
    type: str, path: str | Path | None, *, split: str, subset: str | None = None, revision: str | None = None
) -> list[Located]:
    """The rows of a split that somebody stored, all of them.

    Raises what ``open_stored`` raises.
    """
    stored = open_stored(type, path, split=split, subset=subset, revision=revision)
    return stored if isinstance(stored, list) else [stored(index) for index in range(len(stored))]


def open_stored(
    type: str, path: str | Path | None, *, split: str, subset: str | None = None, revision: str | None = None
) -> list[Located] | Source:
    """The rows of a split that somebody stored: a JSON lines file, or whatever the ``datasets`` library reads.

    More than ``MANY_ROWS`` of a JSON lines file or of that library are not read yet.

    Raises ConfigError if a path is needed and missing, DataError if nothing can be read there.
    """
    if path is None:
        if type not in HUB_NAMES:
            raise ConfigError(f"data.path is missing: {type!r} needs a file, a folder or the name of a hub data set.")
        path, usual_subset = HUB_NAMES[type]
        subset = subset or usual_subset
    local = Path(path).expanduser()
    try:
        file = _split_file(local, type, split) if local.is_dir() else local
    except PermissionError as error:
        raise DataError(f"{local}: cannot be read ({error.strerror}). Correct data.path or its permissions.") from error
    if (type == "jsonl" and local.suffix not in CSV_ENDINGS) or (file is not None and file.suffix == ".jsonl"):
        if file is None:
            names = listed(sorted(entry.name for entry in local.glob("*.jsonl")))
            raise DataError(f"{local}: this folder has no {split}.jsonl, it has {names}. Name the file itself.")
        is_large = file.is_file() and file.stat().st_size > MANY_ROWS * LEAST_BYTES
        if is_large and not _begins_as_array(_head(file)):
            stored = JsonLines(file, _parsed)
            if len(stored) > MANY_ROWS:
                return stored
        return read_json_lines(file)
    if local.suffix in CSV_ENDINGS and (type == "csv" or local.is_file()):
        return read_csv(local)
    name = str(local) if local.exists() else str(path)
    rows = _from_hugging_face(name, split=split, subset=subset, revision=revision)
    if len(rows) > MANY_ROWS:
        return StoredTable(rows, name)
    return [(f"{name}, {split} row {number}", row) for number, row in enumerate(rows.to_list(), 1)]


def _parsed(source: str, line: bytes) -> Row:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start + 1}. Save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.colno}"
        raise DataError(f"{source}: not JSON ({reason}). Write one JSON object per line.") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{source}: a number has too many digits. Write it as text.") from error
    except RecursionError as error:
        raise DataError(f"{source}: nested too deep to be read. Write one flat JSON object per line.") from error
    return _object(source, value)


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(HEAD)


def _begins_as_array(head: bytes) -> bool:
    """The first bytes of a file begin a JSON array."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _object(source: str, value: Any) -> Row:
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else f"the value {json.dumps(value)[:40]}"
        raise DataError(f"{source}: {kind}, not an object. Write one JSON object {{...}} per row.")
    if value and all(isinstance(part, list) and part and isinstance(part[0], dict) for part in value.values()):
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in value.items())
        if len(value) > 1:
            raise DataError(
                f"{source}: one object that holds lists of rows ({sizes}). Write each to a file of its own."
            )
    if len(value) == 1 and isinstance(inner := next(iter(value.values())), list) and inner:
        [name] = value
        if name in WRAPPERS and all(isinstance(element, dict) for element in inner):
            raise DataError(
                f"{source}: one object that holds {counted(len(inner), 'row')} under {name!r}. Write the list alone, "
                f"or one JSON object per line."
            )
    return value


def _split_file(folder: Path, type: str, split: str) -> Path | None:
    """The JSON lines file of a split: ``test.jsonl``, else ``gsm8k_test.jsonl``, else the only ``*_test.jsonl``."""
    for name in (f"{split}.jsonl", f"{type}_{split}.jsonl"):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob(f"*[_-]{escape(split)}.jsonl"))
    if len(files) > 1:
        names = listed(file.name for file in files)
        raise DataError(f"{folder}: several files could be the split {split!r}: {names}. Name the file itself.")
    return files[0] if files else None


def _from_hugging_face(name: str, *, split: str, subset: str | None, revision: str | None) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    local = Path(name)
    builder = FILE_BUILDERS.get(local.suffix)
    if local.is_file() and builder is None:
        raise DataError(f"{name}: not a file of a known kind. Use one of {listed(FILE_BUILDERS)}.")
    if local.suffix in (".parquet", ".arrow") and not local.exists():
        raise DataError(f"data: there is no file {name} (in {Path.cwd()}). Name another data.path.")
    try:
        if local.is_file():
            loaded = datasets.load_dataset(str(builder), data_files=name, split="train")
        elif any((local / name).is_file() for name in SAVED):
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        if local.exists():
            raise DataError(
                f"{name}: the split {split!r} cannot be loaded ({reason}). Check data.path and data.split."
            ) from error
        raise DataError(
            f"{name}: the split {split!r} cannot be loaded: it is not on this machine, and the Hugging Face Hub cannot "
            f"be reached or has no such dataset. {NO_NETWORK}."
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            names = [str(split_name) for split_name in loaded]
            hint = did_you_mean(split, names)
            raise DataError(f"{name}: there is no split {split!r}. {hint}It has {listed(names)}: set data.split.")
        loaded = loaded[split]
    if not len(loaded):
        raise DataError(f"{name}: the split {split!r} has no rows. Choose another one with data.split.")
    return loaded
