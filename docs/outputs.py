"""Are the outputs shown in the guide those that its blocks print? Runs the blocks of a page, compares or writes them.

Blocks marked python or bash run in a scratch folder, in the order of the page; those of python share one namespace. A
block marked text directly behind one shows what it printed. One behind a line `<!-- not run: REASON -->` is left alone.

    python docs/outputs.py docs/grpo.md              # which outputs differ
    python docs/outputs.py docs/grpo.md --write      # put the new ones into the page
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and the lines between its fences."""

    language: str
    first: int
    """Index of the opening fence."""
    last: int
    """Index of the closing fence."""
    runs: bool


def blocks(lines: list[str]) -> Iterator[Block]:
    """Every fenced block of a page."""
    place = 0
    while place < len(lines):
        if lines[place].startswith("```"):
            last = next(at for at in range(place + 1, len(lines)) if lines[at].startswith("```"))
            language = lines[place].removeprefix("```").strip()
            is_left = place > 0 and lines[place - 1].startswith("<!-- not run")
            yield Block(language, place, last, language in ("python", "bash") and not is_left)
            place = last
        place += 1


def renewed(page: Path) -> str:
    """The page with the outputs that its blocks print now.

    Raises CalledProcessError or whatever a block raises where one fails.
    """
    lines = page.read_text(encoding="utf-8").split("\n")
    found = list(blocks(lines))
    outputs: list[tuple[Block, list[str]]] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        sys.path.insert(0, scratch)
        try:
            namespace: dict[str, object] = {"__name__": "__main__"}
            for block, following in zip(found, [*found[1:], None], strict=True):
                if not block.runs:
                    continue
                printed = run(block.language, "\n".join(lines[block.first + 1 : block.last]) + "\n", namespace)
                if following and following.language == "text" and following.first == block.last + 1:
                    outputs.append((following, [line.rstrip() for line in printed.rstrip("\n").split("\n")]))
        finally:
            sys.path.remove(scratch)
    for block, shown in reversed(outputs):
        lines[block.first + 1 : block.last] = shown
    return "\n".join(lines)


def run(language: str, source: str, namespace: dict[str, object]) -> str:
    """What one block prints."""
    if language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "<page>", "exec"), namespace)
        return printed.getvalue()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path})
    return done.stdout


def main() -> None:
    """Compare or write the outputs of the pages that are named."""
    for name in (word for word in sys.argv[1:] if word != "--write"):
        page = Path(name).resolve()
        text = renewed(page)
        if text != page.read_text(encoding="utf-8"):
            sys.stdout.write(f"{name}: outputs differ\n")
            if "--write" in sys.argv:
                page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
