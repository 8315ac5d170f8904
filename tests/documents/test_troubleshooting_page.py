"""Does every message that the page on troubleshooting quotes exist in the code?"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from offenders import assert_none, at, line_of

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "watching.md"
PAGE = PATH.read_text(encoding="utf-8")
OURS = PAGE[: PAGE.index("\n### Messages of other software")]
QUOTED = {
    found[1].strip("`"): line_of(OURS, found.start()) for found in re.finditer(r"^\| `(.+?)` \| ", OURS, re.MULTILINE)
}
MESSAGES = [message for message in QUOTED if len(message.replace("…", "").split()) > 2]


@cache
def literals() -> tuple[str, ...]:
    """Every text in the source, with … where a value is put in."""
    found: list[str] = []
    for path in (ROOT / "oncurve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def says(text: str, message: str) -> bool:
    """The parts of the message between its … stand in the text, in their order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    return re.search(".*".join(parts), text, re.DOTALL) is not None


def test_there_are_messages_to_look_up() -> None:
    assert len(MESSAGES) >= 8


def test_every_quoted_message_exists_in_the_code() -> None:
    unsaid = [message for message in MESSAGES if not any(says(text, message) for text in literals())]
    assert_none(f"{at(PATH, QUOTED[message])} no code says: {message}" for message in unsaid)


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert not any(says(text, "the moon is … away from the recipe") for text in literals())
