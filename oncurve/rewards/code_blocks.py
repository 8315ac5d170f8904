"""Extraction of the program from a completion's fenced code blocks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from oncurve.rewards.answers import after_thinking

_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})[ \t]*(.*)$")
_PYTHON = re.compile(r"(python|py|ipython|sage)[\d.]*\b|\{[ \t]*\.?(python|py)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """One block of code between fences."""

    language: str
    """What follows the opening fence, such as "python"; empty if nothing does."""
    content: str
    """The lines between the fences, without the indentation of the fence."""


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """Every fenced block from first to last, with any fence spelling and any line ends.

    A block that never closes, as in a completion that was cut off or stopped at the fence, ends with the text. However
    long a text is, all of it is read: the end of a program is another program.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    margin, fence, language, content = "", "", "", []
    for line in lines:
        match = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if not fence:
            if match and not (match[2][0] == "`" and "`" in match[3]):
                margin, fence, language, content = match[1], match[2], match[3].rstrip(), []
        elif match and match[2].startswith(fence) and not match[3].strip():
            yield FencedBlock(language, "\n".join(content))
            fence = ""
        else:
            content.append(line.removeprefix(margin))
    if fence:
        yield FencedBlock(language, "\n".join(content))


def last_program(text: str) -> str | None:
    """The last fenced block marked as Python; without one, the last block without a mark, then the last of any.

    Blocks within the thinking count only if none follows it. A draft is followed by the final program, and a program
    by an unmarked block with an example of its output; neither is what is to be run.

    >>> last_program("A draft:\\n```py\\nx = 1\\n```\\n~~~ Python3\\r\\nx = 2\\r\\n~~~\\nIt prints\\n```\\n2\\n```")
    'x = 2'
    """
    blocks = list(fenced_blocks(after_thinking(text))) or list(fenced_blocks(text))
    for is_wanted in (_is_python, _is_unmarked, bool):
        found = [block for block in blocks if is_wanted(block) and block.content.strip()]
        if found:
            return found[-1].content
    return None


def program_in(text: str, *, require_fence: bool = True) -> str | None:
    """The program of a completion; without ``require_fence`` also one that stands in an answer tag or by itself."""
    found = last_program(text)
    if found is not None or require_fence:
        return found
    bare = (_answer_tag(text) or after_thinking(text)).replace("\r\n", "\n")
    return textwrap.dedent(bare).strip("\n") if bare.strip() else None


def _answer_tag(text: str) -> str | None:
    """What stands between the last ``<answer>`` and the first ``</answer>`` after it, however long."""
    _, opening, rest = text.rpartition("<answer>")
    content, closing, _ = rest.partition("</answer>")
    return content.strip() if opening and closing else None


def _is_python(block: FencedBlock) -> bool:
    return _PYTHON.match(block.language) is not None


def _is_unmarked(block: FencedBlock) -> bool:
    return not block.language
