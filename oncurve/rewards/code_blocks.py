"""Extraction of the program from a completion's fenced code blocks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from oncurve.rewards.answer_locations import answer_tag
from oncurve.rewards.thinking import after_thinking

_OPENING = re.compile(r"(?P<before>[^`~]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^`]*)$")
_LANGUAGE = re.compile(r"(?:[\w+#.-]+|\{[^{}]*\})?(?:[ \t]+\w+=.*)?")
_CLOSING = re.compile(r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})(?P<after>[^`~]*)$")
_BEHIND = re.compile(r"[ \t]*$|\s*[</.,;:!?|*)\]].*|[ \t]+\S.*")
"""May follow a closing fence: nothing, a tag, a stop, or words; a word that touches it opens another block."""
_TRIPLE_QUOTE = re.compile("\"{3}|'{3}")
MAX_TRIED_BLOCKS = 50
_PYTHON = re.compile(r"(python|py|ipython|sage)[\d.]*\b|\{[ \t]*\.?(python|py)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """One block of code between fences."""

    language: str
    """Language after the opening fence, such as "python"; "" if there is none."""
    content: str
    """The lines between the fences, without the indentation of the fence."""


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """Every fenced block from first to last, with any fence spelling and any line ends.

    A block that never closes, as in a completion that was cut off or stopped at the fence, ends with the text. However
    long a text is, all of it is read: the end of a program is another program. A fence inside of a docstring that ends
    in the same block, as around an example, closes nothing.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    margin, fence, language, content = "", "", "", []
    num_tried = 0
    quote: str | None = None
    for index, line in enumerate(lines):
        has_fence = "```" in line or "~~~" in line
        num_tried += has_fence and quote is not None
        if not fence:
            if opening := _opening(line) if has_fence else None:
                margin, fence, language = opening
                content, quote = [], None
        elif has_fence and quote and num_tried < MAX_TRIED_BLOCKS and _ends_behind(lines[index:], quote, fence):
            content.append(line.removeprefix(margin))
        elif has_fence and (last := _last_line(line, fence)) is not None:
            if last.strip(" \t>"):
                content.append(last.removeprefix(margin))
            yield FencedBlock(language, "\n".join(content))
            fence = ""
        else:
            content.append(line.removeprefix(margin))
            quote = _open_quote(line, quote)
    if fence:
        yield FencedBlock(language, "\n".join(content))


def _open_quote(line: str, quote: str | None) -> str | None:
    """The triple quote that is open behind a line, if ``quote`` is open before it."""
    for mark in _TRIPLE_QUOTE.findall(line):
        if quote is None:
            quote = mark
        elif mark == quote:
            quote = None
    return quote


def _ends_behind(lines: Sequence[str], quote: str, fence: str) -> bool:
    """A later fence closes the block: the first one behind which no triple quote is open, as ``quote`` is here."""
    still_open: str | None = quote
    for index, line in enumerate(lines):
        if index and still_open is None and fence in line:
            return _last_line(line, fence) is not None
        still_open = _open_quote(line, still_open)
    return False


def _opening(line: str) -> tuple[str, str, str] | None:
    """Margin, fence and language of a line that opens a block, also behind text; None for any other line."""
    match = _OPENING.match(line)
    if match is None:
        return None
    before, language = match["before"], match["language"].rstrip()
    if before.strip(" \t>") and not _LANGUAGE.fullmatch(language):
        return None
    return (before if not before.strip(" \t>") else ""), match["fence"], language


def _last_line(line: str, fence: str) -> str | None:
    """The text before the fence on a line that closes a block; None if it closes none."""
    match = _CLOSING.match(line)
    if match is None or not match["fence"].startswith(fence) or not _BEHIND.fullmatch(match["after"]):
        return None
    before = match["before"].strip(" \t>")
    is_text = before and (match["after"].strip(" \t<>/|.,;:!?") and not re.match(r"\s*</?\w+>|\s*<\|", match["after"]))
    is_quoted = any(before.count(quote) % 2 for quote in ("'", '"', "#"))
    return None if is_text or is_quoted else match["before"]


def last_program(text: str, names: Collection[str] = ()) -> str | None:
    """The last fenced block marked as Python; without one, the last block without a mark, then the last of any.

    Blocks within the thinking never count. Behind the program may stand a block that only says something, or, where its
    ``names`` are known, one that only uses them: the last block that defines one of them is the program.

    >>> last_program("A draft:\\n```py\\nx = 1\\n```\\n~~~ Python3\\r\\nx = 2\\r\\n~~~\\nIt prints\\n```\\n2\\n```")
    'x = 2'
    """
    blocks = list(fenced_blocks(after_thinking(text)))
    for matches in (lambda block: _PYTHON.match(block.language), lambda block: not block.language, bool):
        contents = [block.content for block in blocks if matches(block) and block.content.strip()]
        defining = [content for content in contents if _defines(content, names)]
        with_code = [content for content in contents[-MAX_TRIED_BLOCKS:] if _has_code(content)]
        if contents:
            return (defining or with_code or contents)[-1]
    return None


def _defines(content: str, names: Collection[str]) -> bool:
    pattern = "|".join(map(re.escape, names))
    return (
        bool(names)
        and re.search(rf"(?m)^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{pattern})\b", content) is not None
    )


def _has_code(content: str) -> bool:
    """Whether a block is more than comments; one that cannot be parsed may be a program that fails."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in content.splitlines())


def program_in(text: str, *, require_fence: bool = True, names: Collection[str] = ()) -> str | None:
    """The program of a completion; without ``require_fence`` also one that stands in an answer tag or by itself."""
    spoken = after_thinking(text)
    program = last_program(spoken, names)
    if program is not None or require_fence:
        return program
    bare = (answer_tag(spoken) or spoken).replace("\r\n", "\n")
    return textwrap.dedent(bare).strip("\n") if bare.strip() else None
