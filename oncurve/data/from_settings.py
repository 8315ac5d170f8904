"""The rows of a data section, and how long a prompt made of one may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.records import SOURCE_ROW
from oncurve.data.datasets import Adapt, adapt_python_rows, adapter_of_python_rows, load_rows
from oncurve.data.settings import DataSection, DemonstrationsData, PythonData
from oncurve.data.sources import StoredRows, StoredTable
from oncurve.rewards.parameters import columns_of

Rows = Sequence[dict[str, Any]]

FIRST_ROWS = 1_000
"""Rows that are looked at where there are many; the others are taken to have the same columns."""


def make_rows(
    data: DataSection,
    *,
    seed: int,
    objects: Rows | StoredTable | None = None,
    needs_answer: bool = True,
    demonstrated: bool = False,
) -> Rows:
    """The rows of a data section; ``objects`` are those that a Python program passed. ``demonstrated`` rows may hold
    completions, messages or text instead of answers.

    Without ``needs_answer`` rows of files may have none.

    Raises ConfigError where such rows are needed and missing.
    """
    if isinstance(data, DemonstrationsData):
        if not demonstrated:
            raise ConfigError("data.type is demonstrations, which have no answers to reward. Train with `oncurve sft`")
        from oncurve.data.demonstrations import taught_rows  # lazy

        return taught_rows(data.task, count=data.limit, lesson_fraction=data.lesson_fraction, seed=seed)
    adapt: Adapt | None = None
    if demonstrated:
        from oncurve.data.demonstrations import demonstrated_row as adapt  # lazy
    if isinstance(data, PythonData):
        if objects is None:
            raise ConfigError(
                "data.type is given: the rows were passed from Python, and a recipe cannot hold them. Train or resume "
                "from the program, with oncurve.Trainer and the same rows; or write them to a file for data.type=jsonl"
            )
        if isinstance(objects, StoredTable):
            adapted = adapter_of_python_rows(objects(0)[1], data.columns, adapt)
            return StoredRows(objects, adapted)[: data.limit]
        return adapt_python_rows(objects, columns=data.columns, adapt=adapt)[: data.limit]

    extra = data.model_dump(include={"levels", "function"})
    return load_rows(
        data.type,  # type: ignore[attr-defined]  # every section of the union has one
        path=data.path,
        split=data.split,
        subset=data.subset,
        columns=data.columns or None,
        limit=data.limit,
        seed=seed,
        needs_answer=needs_answer,
        adapt=adapt,
        **extra,
    )


def shared_columns(rows: tuple[Rows, Rows, Rows, Rows]) -> list[str]:
    """Columns that a reward function may ask for: those of the training and of the evaluation rows."""
    train, _, during, test = rows
    train = train[:FIRST_ROWS] if isinstance(train, StoredRows) else train
    return columns_of(*([row.get(SOURCE_ROW) or row for row in part] for part in (train, during, test)))
