"""Reference answers of rows: the answer that a solution marks, and its typed value, read once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from oncurve.rewards.answer_locations import after_hash, last_boxed
from oncurve.rewards.grammar.equality import Reference, read_reference
from oncurve.rewards.grammar.lexemes import Unreadable
from oncurve.rewards.grammar.values import (
    Choice,
    Date,
    IntegerFamily,
    MatrixValue,
    Members,
    Named,
    Quantity,
    RealSet,
    Time,
    Truths,
    Value,
)
from oncurve.rewards.statement import formulas
from oncurve.wording import shortened

MAX_PROSE_WORDS = 12
"""A reference with more words around its mathematics is a whole solution, whose answer nobody marked."""
_SENTENCE = re.compile(r"[.;:]\s+[A-Z]|\n")
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")


def reference_text(row: Mapping[str, Any], column: str) -> str:
    """The reference answer of a row as text; empty, hence unreadable, if the row has none."""
    value = row.get(column)
    return "" if value is None else (marked_reference(str(value)) or "")


def marked_reference(text: str) -> str | None:
    r"""The answer in a reference: what a solution boxes or puts behind its last ``####``; None if it marks nothing.

    >>> marked_reference(r"Since $3^2=9$, it is $\boxed{9}$.")
    '9'
    """
    marked = last_boxed(text) or (after_hash(text) if re.search(r"(?m)^####(?!#)", text) else None)
    if marked is not None or not re.search(r"\d|\\", text):
        return marked or text
    words = _WORD.findall(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", _outside(text)))
    if len(words) > MAX_PROSE_WORDS or (len(words) > 4 and _SENTENCE.search(text.strip())):
        return None
    return text


def _outside(text: str) -> str:
    """The text around its formulas."""
    for start, end, _ in reversed(formulas(text)):
        text = f"{text[:start]} {text[end:]}"
    return re.sub(r"\\(?!text)[a-zA-Z]+", " ", text)


@lru_cache(maxsize=65_536)
def typed_reference(text: str) -> Reference | str:
    """The typed value of a reference, or the reason why it cannot be read."""
    try:
        return read_reference(text)
    except Unreadable as error:
        return str(error) or "it is no answer that the grammar knows"


def describe_references(rows: Iterable[Mapping[str, Any]], column: str = "answer") -> str:
    """A line with the types of the references of some rows, and the first that cannot be read with its reason."""
    counts: Counter[str] = Counter()
    first = ""
    for index, row in enumerate(rows):
        text = reference_text(row, column)
        typed = typed_reference(text)
        counts["unreadable" if isinstance(typed, str) else type_name(typed.value)] += 1
        if isinstance(typed, str) and not first:
            first = f"; row {index} has {shortened(str(row.get(column)), 60)!r}, which cannot be read: {typed}"
    kinds = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    return f"references by type: {kinds}{first}"


def type_name(value: Value) -> str:
    """The type of a value in a word or two, for people.

    >>> type_name(Choice("B"))
    'choice'
    """
    match value:
        case Choice() | Date() | Time():
            return type(value).__name__.lower()
        case Quantity():
            return "number" if not value.tree.symbols() and value.tree.kind == "number" else "expression"
        case Members():
            return value.kind
        case Named():
            return type_name(value.value)
        case Truths():
            return f"algebra of {value.kind}"
        case IntegerFamily():
            return "family"
        case RealSet() | MatrixValue():
            return "set of reals" if isinstance(value, RealSet) else "matrix"
        case _:
            return type(value).__name__.lower()
