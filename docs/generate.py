"""Which pages are made from code? Run this after changing what they show: python docs/generate.py"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from oncurve.observe.metrics import glossary_markdown

PAGES: dict[str, Callable[[], str]] = {"metrics.md": glossary_markdown}


def main() -> int:
    """Write the pages; with --check, only say which ones are out of date."""
    folder = Path(__file__).parent
    stale = [name for name, render in PAGES.items() if not _is_current(folder / name, render())]
    for name in stale:
        sys.stdout.write(f"docs/{name} {'is out of date' if '--check' in sys.argv else 'written'}\n")
        if "--check" not in sys.argv:
            (folder / name).write_text(PAGES[name](), encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv)


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    raise SystemExit(main())
