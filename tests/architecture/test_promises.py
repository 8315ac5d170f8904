"""Is every promise in the list shown by a test, and every mark of a test in the list?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from offenders import assert_none, at

TESTS = Path(__file__).resolve().parents[1]
LIST = TESTS / "promises.txt"


def marks(text: str) -> Iterator[tuple[str, int]]:
    """The promises that the tests of a file are marked with, each with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.proves":
            yield from ((ast.literal_eval(number), node.lineno) for number in node.args)


def test_every_promise_is_shown_by_a_test_and_every_mark_is_in_the_list() -> None:
    lines = enumerate(LIST.read_text(encoding="utf-8").splitlines(), 1)
    promised = {text.split()[0]: number for number, text in lines if not text.startswith("#")}
    shown = {
        number: at(path, line)
        for path in TESTS.rglob("test_*.py")
        if "mark.proves" in (text := path.read_text(encoding="utf-8"))
        for number, line in marks(text)
    }
    assert len(promised) > 200
    assert_none(
        f"{at(LIST, promised[number])} no test is marked with {number}" for number in set(promised) - set(shown)
    )
    assert_none(f"{shown[number]} {number} is not in {LIST.name}" for number in set(shown) - set(promised))


def test_a_mark_is_found() -> None:
    assert list(marks('import pytest\n@pytest.mark.proves("F1", "D2")\ndef test_it(): ...\n')) == [("F1", 2), ("D2", 2)]
