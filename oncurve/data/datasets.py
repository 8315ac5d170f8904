"""Loading rows: read, renamed, adapted, filtered, and some of them held out."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import RAW_ANSWER
from oncurve.data.chat_template import MESSAGES, read_messages, text_of_messages
from oncurve.data.sources import MAKERS, Row, StoredRows, open_stored, read_generated
from oncurve.rewards.answer_locations import last_boxed
from oncurve.rewards.grammar.choices import LETTERS
from oncurve.wording import counted, did_you_mean, listed

DatasetType = Literal[
    "word_problems",
    "program_problems",
    "calculator_problems",
    "calculator_chains",
    "generated",
    "gsm8k",
    "math",
    "jsonl",
    "csv",
    "huggingface",
]
Adapt = Callable[[str, Row], Row | None]
"""A row, with its source for messages, in our columns; None for one in a form that it does not know."""
DATASET_TYPES: tuple[str, ...] = get_args(DatasetType)

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "question": ("problem", "prompt", "query", "input", "instruction", "text"),
    "answer": ("label", "target", "ground_truth", "final_answer", "expected_answer", "gold", "output", "solution"),
    "solution": ("rationale", "reasoning", "explanation", "answer"),
}
"""Usual names of our columns in other data sets, for the hint in an error."""

_NUMBER = re.compile(r"([-−+]?)\s*[$€£]?\s*([-−]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s${}][^${}]*)\$")


def load_rows(
    type: str,
    *,
    path: str | Path | None = None,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    seed: int = 0,
    limit: int | None = None,
    levels: tuple[int, ...] = (1, 2),
    function: str | None = None,
    needs_answer: bool = True,
    adapt: Adapt | None = None,
) -> Sequence[Row]:
    """The rows of a data set, each with "question" and "answer" as text; every column of the source is kept.

    The order of work: read, rename by ``columns`` (ours: theirs), adapt, cut to ``limit``.

    - "word_problems": the embedded task; ``limit`` problems of ``levels``, generated from ``seed``;
    - "program_problems": functions to write, with tests; ``limit`` problems, generated from ``seed``;
    - "calculator_problems", "calculator_chains": for a calculator, likewise;
    - "generated": ``limit`` rows that ``function`` makes;
    - "gsm8k": the answer is what follows "####", 1,000 written as 1000; what stands before it is "solution";
    - "math": "problem" is the question; the answer is its column or else the last balanced box of "solution";
    - "jsonl": one JSON object per line;
    - "csv": a CSV or TSV file, the first line of which names the columns;
    - "huggingface": a hub name, a folder or a file that the ``datasets`` library reads.

    ``path`` is a hub name, a file, or a folder with one file per split (``test.jsonl``, ``gsm8k_test.jsonl``).
    One file is one split, whatever ``split`` says. "gsm8k" and "math" without a path are fetched from the hub.
    ``adapt`` sees every row before its type does; None of it leaves the row to the type.

    Without ``needs_answer`` the rows of files may lack the column, for rewards that look at no answer. More than a
    million rows of a JSON lines file or of the ``datasets`` library are read when they are asked for.

    Raises ConfigError for an unknown type or a missing setting, DataError for everything that the data lack.
    """
    if type not in DATASET_TYPES:
        hint = did_you_mean(type, DATASET_TYPES)
        raise ConfigError(f"data.type: there is no {type!r}. {hint}Use one of {listed(DATASET_TYPES)}.")
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit is {limit}. Keep at least one row, or leave it out to keep all.")
    if type in MAKERS or function is not None:
        located = read_generated(type, split, limit, seed=seed, levels=levels, function=function)
    else:
        located = open_stored(type, path, split=split, subset=subset)
    adapted = partial(_renamed_and_adapted, type, columns=columns or {}, needs_answer=needs_answer, adapt=adapt)
    if not isinstance(located, list):
        return StoredRows(located, adapted)[:limit]
    return [adapted(source, row) for source, row in located][:limit]


def _refuse_bare_prompt(source: str, row: Row) -> None:
    """Raises DataError for a prompt beside which nothing is a completion or an answer."""
    if "prompt" in row and not any(name in row for name in ("question", "answer", *USUAL_NAMES["answer"])):
        raise DataError(
            f"{source}: a prompt without a completion. Columns: {listed(row)}. Write {{prompt, completion}}, or set "
            f"data.columns: {{completion: <its name>}}"
        )


def adapt_python_rows(
    rows: Sequence[Row], *, columns: Mapping[str, str] | None = None, adapt: Adapt | None = None
) -> list[Row]:
    """Rows of a Python program with "question" and "answer" as text; every other column is kept.

    A question under a usual name, such as "prompt" or "problem", is found without ``columns``, and so is an answer;
    rows without any answer get an empty one, for rewards that need none.

    Raises DataError for everything that the rows lack.
    """
    adapted = adapter_of_python_rows(rows[0] if rows else {}, columns or {}, adapt)
    return [adapted(f"row {number}", dict(row)) for number, row in enumerate(rows)]


def adapter_of_python_rows(first: Row, columns: Mapping[str, str], adapt: Adapt | None) -> Callable[[str, Row], Row]:
    """The same for one row after the other; the ``first`` says under which names questions and answers stand."""
    names = dict(columns)
    for ours in ("question", "answer"):
        usual = [name for name in USUAL_NAMES[ours] if name in first]
        if ours not in names and ours not in first and usual:
            names[ours] = usual[0]

    def adapted(source: str, row: Row) -> Row:
        own = adapt(source, _renamed(source, row, columns)) if adapt else None
        return own or _adapted("given", source, _renamed(source, row, names), needs_answer=False)

    return adapted


def save_rows(rows: Iterable[Mapping[str, Any]], path: str | Path, *, overwrite: bool = False) -> Path:
    """Writes rows as JSON lines, whole or not at all.

    Raises DataError if the file exists and may not be overwritten.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise DataError(f"{path}: the file exists already. Choose another name, or allow overwriting.")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def question_key(question: str) -> str:
    """The key under which two questions are the same: their text without regard to case and white space.

    >>> question_key("How  many\\nshells?") == question_key("how many shells?")
    True
    """
    return " ".join(question.casefold().split())


def drop_repeats(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """The rows whose question did not come before, in their order, and how many were dropped."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(question_key(row["question"]), row)
    return list(first.values()), len(rows) - len(first)


def problem_key(row: Mapping[str, Any], *, by_row: bool = False) -> str:
    """The key under which two rows are the same problem: their question, or ``by_row`` all their columns."""
    if not by_row:
        return question_key(str(row["question"]))
    from oncurve.data.fingerprint import rows_fingerprint  # lazy

    return rows_fingerprint([row]).text


def shared_rows(
    rows: Sequence[Mapping[str, Any]], evaluation_rows: Sequence[Mapping[str, Any]], *, by_row: bool = False
) -> list[tuple[int, int]]:
    """Places of the rows that are evaluated too, each with that of the first such evaluation row."""
    evaluated: dict[str, int] = {}
    for index, row in enumerate(evaluation_rows):
        evaluated.setdefault(problem_key(row, by_row=by_row), index)
    keys = (problem_key(row, by_row=by_row) for row in rows)
    return [(index, evaluated[key]) for index, key in enumerate(keys) if key in evaluated]


def count_rows(rows: Sequence[Row], what: str) -> str:
    """The number of rows, and of their questions where some occur again: "240 test of 4 questions"."""
    text = f"{len(rows):,} {what}"
    if isinstance(rows, StoredRows):
        return text
    questions = len({question_key(str(row["question"])) for row in rows})
    return text if questions == len(rows) else f"{text} of {counted(questions, 'question')}"


def hold_out(
    rows: Sequence[Row],
    *,
    count: int | None = None,
    fraction: float | None = None,
    seed: int = 0,
    by_row: bool = False,
) -> tuple[Sequence[Row], list[Row]]:
    """Rows to train on and rows held out, chosen by a hash of the question and not by its index.

        held out:  hash(seed, question) < fraction        or the ``count`` rows with the smallest hashes

    A question falls on the same side in whatever order the rows come and however often it occurs; with
    ``fraction`` it stays there when rows are added. Both lists keep the order of ``rows``. With ``count``, a
    question that occurs several times can bring a few rows more. ``by_row``, rows of one question with other columns
    are problems of their own, and the hash is that of the whole row. Use it to pick few-shot examples too: they
    must leave the rows that are trained on. Of rows that are read on demand, indices are drawn instead.

    Raises ConfigError unless exactly one of the two sizes is given, DataError if a side would be empty.
    """
    if (count is None) == (fraction is None):
        raise ConfigError("a held-out split needs either a count or a fraction of the rows. Give exactly one.")
    if isinstance(rows, StoredRows):
        number = count if fraction is None else round(fraction * len(rows))
        return rows.split(min(number or 0, len(rows)), seed=seed)
    hashes = _hashes(rows, seed, by_row)
    bound = fraction if fraction is not None else _bound(hashes, count or 0)
    train, held_out = [], []
    for row, value in zip(rows, hashes, strict=True):
        (held_out if value < bound else train).append(row)
    if not train or not held_out:
        amount = f"{count} rows" if fraction is None else f"a fraction of {fraction}"
        raise DataError(
            f"holding out {amount} of {len(rows)} leaves {len(train)} rows to train on and {len(held_out)} held "
            f"out. Both must have some: {_why(rows)}"
        )
    return train, held_out


def draw_rows(rows: Sequence[Row], count: int, *, seed: int, by_row: bool = False) -> list[Row]:
    """The rows that ``hold_out`` would choose, all of them where there are no more than ``count``."""
    if len(rows) <= count:
        return list(rows)
    if isinstance(rows, StoredRows):
        return rows.split(count, seed=seed)[1]
    hashes = _hashes(rows, seed, by_row)
    bound = _bound(hashes, count)
    return [row for row, value in zip(rows, hashes, strict=True) if value < bound]


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """A data set at a glance."""

    num_rows: int
    num_repeated: int
    """Rows whose question came before."""
    columns: tuple[str, ...]
    """Every column that occurs, in order of appearance."""
    question_characters: tuple[int, float, int]
    """Shortest, median and longest question."""
    solution_characters: tuple[int, float, int] | None
    """The same of the worked solutions; None if no row has one."""
    answer_kinds: Mapping[str, int]
    """Number of answers that are an "integer", a "decimal" or "text"."""

    def describe(self) -> str:
        """The same in a few lines for the console."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.answer_kinds.items() if count)
        lines = [
            f"{counted(self.num_rows, 'row')}, {counted(self.num_repeated, 'repeated question')}",
            f"columns: {', '.join(self.columns)}",
            *([f"answers: {kinds}"] if kinds else []),
        ]
        for name, spread in (("question", self.question_characters), ("solution", self.solution_characters)):
            if spread is not None:
                lines.append(f"{name}: {spread[0]:,} to {spread[2]:,} characters, median {spread[1]:,.0f}")
        return "\n".join(lines)


def statistics(rows: Sequence[Row]) -> RowStatistics:
    """Counts and lengths of the rows that a run will see.

    Raises DataError for no rows at all.
    """
    if not rows:
        raise DataError("there are no rows to describe. Check data.path and data.split.")
    solutions = [row["solution"] for row in rows if isinstance(row.get("solution"), str)]
    kinds = [_kind_of_number(row["answer"]) for row in rows if row["answer"] not in ("", None)]
    return RowStatistics(
        num_rows=len(rows),
        num_repeated=drop_repeats(rows)[1],
        columns=tuple(dict.fromkeys(column for row in rows for column in row)),
        question_characters=_spread([row["question"] for row in rows]),
        solution_characters=_spread(solutions) if solutions else None,
        answer_kinds={kind: kinds.count(kind) for kind in ("integer", "decimal", "text")},
    )


def canonical_number(text: str) -> str:
    """One way to write a number: no currency, no commas, no idle zeros; any other text comes back stripped.

    >>> [canonical_number(text) for text in ("1,000", "$18.00", " -0.50 ", "x + 1")]
    ['1000', '18', '-0.5', 'x + 1']
    """
    text = text.strip()
    match = _NUMBER.fullmatch(text.rstrip("."))
    if match is None or not any(character.isdigit() for character in text):
        return text
    outer, inner, whole, decimals = match.groups()
    whole = whole.replace(",", "").lstrip("0") or "0"
    decimals = (decimals or "").rstrip("0")
    is_negative = bool({outer, inner} & {"-", "−"}) and (whole != "0" or decimals != "")
    number = f"{whole}.{decimals}" if decimals else whole
    return f"-{number}" if is_negative else number


def _renamed(source: str, row: Row, columns: Mapping[str, str]) -> Row:
    """The row with our names added; the source's own names stay, since a reward function may ask for them."""
    return row | {ours: _value(source, row, theirs, ours=ours) for ours, theirs in columns.items()}


def _renamed_and_adapted(
    type: str, source: str, row: Row, *, columns: Mapping[str, str], needs_answer: bool, adapt: Adapt | None
) -> Row:
    row = _renamed(source, row, columns)
    own = adapt(source, row) if adapt else None
    if adapt and own is None:
        _refuse_bare_prompt(source, row)
    return own or _adapted(type, source, row, needs_answer=needs_answer)


def _adapted(type: str, source: str, row: Row, *, needs_answer: bool) -> Row:
    match type:
        case "gsm8k":
            row = _gsm8k_row(source, row)
        case "math":
            row = _math_row(source, row)
        case _:
            row = _lettered(row)
    answer_in_row = row.get("answer", "")
    if isinstance(answer_in_row, float) and math.isnan(answer_in_row):  # how tables say that there is none
        answer_in_row = None
        row = row | {"answer": None}
    is_empty = row.get("answer") is None or (type != "given" and not str(row["answer"]).strip())
    answer = "" if is_empty and not needs_answer else _text(source, row, "answer").strip()
    raw_answer = (
        {RAW_ANSWER: answer_in_row}
        if answer_in_row is None or isinstance(answer_in_row, (list, tuple, Mapping, bool))
        else {}
    )
    return row | _question(source, row) | {"answer": answer} | raw_answer


def _question(source: str, row: Row) -> Row:
    """The question as text, and its messages where it is a list of them.

    Raises DataError for a question that is neither text, a number nor a list of messages, and for pictures beside it.
    """
    for name in ("image", "images"):
        if row.get(name) is not None and not (isinstance(row[name], (list, tuple)) and not row[name]):
            raise DataError(f"{source}: has pictures in {name!r}, which no model here reads. Take the column out.")
    value = _value(source, row, "question")
    if not isinstance(value, str) and callable(to_list := getattr(value, "tolist", None)):  # of numpy, from parquet
        value = to_list()
    if isinstance(value, (list, tuple)):
        messages = read_messages(source, value, column="question")
        return {"question": text_of_messages(messages), MESSAGES: messages}
    if isinstance(value, (bool, bytes, Mapping)):
        raise DataError(
            f"{source}: 'question' is {value!r:.60}. Give text, or a list of messages such as "
            f"[{{role: user, content: text}}], or set data.columns."
        )
    return {"question": _text(source, row, "question")}


def _lettered(row: Row) -> Row:
    """MMLU's form, ``choices`` and the index of the right one, with the options in the question and their letters."""
    options, answer = row.get("choices"), row.get("answer")
    if not isinstance(options, (list, tuple)) or isinstance(answer, bool) or not isinstance(answer, int):
        return row
    if not 0 <= answer < len(options) <= len(LETTERS):
        return row
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return row | {"question": "\n".join([str(row.get("question") or ""), *lines]), "answer": LETTERS[answer]}


def _gsm8k_row(source: str, row: Row) -> Row:
    solution, mark, gold = _text(source, row, "answer").rpartition("####")
    if not mark or not gold.strip():
        raise DataError(
            f"{source}: the answer does not end in '#### number'. Use data.type: jsonl if answers stand alone."
        )
    return row | {"answer": canonical_number(gold), "solution": solution.strip()}


def _math_row(source: str, row: Row) -> Row:
    row = row | {"question": row["problem"] if "problem" in row else _value(source, row, "question")}
    answers = row.get("answer")
    if isinstance(answers, list) and answers:
        return row | {"answer": ", ".join(map(str, answers))}
    if str(answers or "").strip():
        return row
    solution = _text(source, row, "solution")
    bare = _BARE_BOX.findall(solution)
    answer = last_boxed(solution) or (bare[-1] if bare else None)
    if not answer:
        raise DataError(rf"{source}: the solution has no \boxed{{...}}. Add an answer column, or drop the row.")
    return row | {"answer": answer}


def _value(source: str, row: Row, column: str, *, ours: str | None = None) -> Any:
    """One column of a row; ``ours`` is our name for it when the recipe renames it."""
    if column in row:
        return row[column]
    usual = [name for name in USUAL_NAMES.get(ours or column, ()) if name in row]
    near = get_close_matches(column, row, n=1) or usual
    hint = f"Nearest: {near[0]!r}. " if near else ""
    remedy = f"Set data.columns: {{{ours or column}: {near[0] if near else '<its name>'}}}."
    answered = [name for name, value in row.items() if _is_answered(value)]
    if answered and not near:
        remedy = f"{answered[0]!r} ends with an answer: write it and the question into columns of their own."
    by_line = ""
    if source.partition(", line")[0].endswith((".csv", ".tsv")):
        by_line = ", by the first line of the file"
        remedy += " If that line is a row, write a line of names above it."
    raise DataError(f"{source}: there is no column {column!r}. Columns{by_line}: {listed(row)}. {hint}{remedy}")


def _is_answered(value: object) -> bool:
    """A conversation whose last word is the assistant's, in one of the two usual forms."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, Mapping) and (last.get("role") == "assistant" or last.get("from") == "gpt")


def _text(source: str, row: Row, column: str) -> str:
    """A column as text: numbers, lists and objects as JSON, a whole float without its ``.0``."""
    value = _value(source, row, column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str):
        value = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    if not value.strip():
        content = "empty" if row.get(column) == "" else f"{row.get(column)!r}"
        raise DataError(
            f"{source}: {column!r} is {content}. Fill it in or drop the row; if another column has it, set "
            f"data.columns: {{{column}: ITS_NAME}}."
        )
    return value


def _why(rows: Sequence[Row]) -> str:
    if len({question_key(row["question"]) for row in rows}) < 2:
        return "all rows have the same question. Check data.columns, which names the column of the question."
    return "set evaluation.num_prompts to fewer problems, or name others with evaluation.data."


def _hashes(rows: Sequence[Row], seed: int, by_row: bool) -> list[float]:
    """Numbers in [0, 1), each of which depends on its row's problem and the seed alone."""
    keys = (f"{seed}\n{problem_key(row, by_row=by_row)}" for row in rows)
    digests = (blake2b(key.encode(), digest_size=8).digest() for key in keys)
    return [(int.from_bytes(digest, "big") >> 11) / 2**53 for digest in digests]


def _bound(hashes: Sequence[float], count: int) -> float:
    """The smallest bound that leaves at least ``count`` hashes below it."""
    if count < 1:
        return 0.0
    ordered = sorted(hashes)
    return next((value for value in ordered[count:] if value > ordered[count - 1]), 1.0)


def _kind_of_number(answer: str) -> str:
    number = canonical_number(answer)
    if not _NUMBER.fullmatch(number) or not any(character.isdigit() for character in number):
        return "text"
    return "decimal" if "." in number else "integer"


def _spread(texts: Sequence[str]) -> tuple[int, float, int]:
    lengths = [len(text) for text in texts]
    return min(lengths), float(median(lengths)), max(lengths)
