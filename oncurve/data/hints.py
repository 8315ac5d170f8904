"""Hint behind a question that only a teacher reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oncurve.core.errors import DataError
from oncurve.core.records import SOURCE_ROW
from oncurve.data.chat_template import MESSAGES
from oncurve.wording import listed

COLUMN = re.compile(r"\{(\w+)\}")


def with_hint(row: Mapping[str, Any], hint: str, *, index: int) -> dict[str, Any]:
    r"""The row with a hint behind its question, its columns in the place of their names.

    Raises DataError for a column that the row lacks, and for a row that came with messages.

    >>> with_hint({"question": "2+3?", "answer": "5"}, "It is {answer}.", index=0)["question"]
    '2+3?\nIt is 5.'
    """
    source = row.get(SOURCE_ROW) or row
    if MESSAGES in row or isinstance(source.get("prompt"), list):
        raise DataError(
            f"row {index}: algorithm.teacher_hint has no place in a prompt of messages. Give rows with a question"
        )

    def value(match: re.Match[str]) -> str:
        value_of_column = source.get(match[1], row.get(match[1]))
        if value_of_column is None:
            raise DataError(
                f"row {index}: algorithm.teacher_hint asks for {match[0]}, and there is no such column. Columns: "
                f"{listed(source)}"
            )
        return str(value_of_column)

    return {**row, "question": f"{row['question']}\n{COLUMN.sub(value, hint)}"}
