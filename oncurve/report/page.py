"""Assembly of one HTML file: template, style, scripts and data inline, under a strict content policy.

Prompts and completions are written by strangers and by a model: they reach the page only inside base64 or escaped JSON,
the scripts put them into the document as text and never as markup, and the policy in the page's head allows no script
but the one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from oncurve.report.blocks import as_json

PAGES = Path(__file__).resolve().parent / "pages"
SCRIPTS = ("base.js", "data.js", "charts.js", "overview.js", "episode.js", "explorer.js", "runs.js", "main.js")
"""In this order they make up one script."""


def render(title: str, boot: Mapping[str, Any], *, blocks: Mapping[str, str] | None = None, live: bool = False) -> str:
    """A page: ``boot`` is read when it opens, each of the ``blocks`` (packed texts by id) when somebody looks at it.

    Only a ``live`` page may fetch, and only from where it came.
    """
    return "".join(pieces(title, boot, blocks=blocks, live=live))


def pieces(
    title: str, boot: Mapping[str, Any], *, blocks: Mapping[str, str] | None = None, live: bool = False
) -> Iterator[str]:
    """The page of ``render`` in parts, since it may be large."""
    css, script = read_part("style.css"), _script()
    template = read_part("page.html")
    filled = {
        "TITLE": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "POLICY": policy(css, script, live=live),
        "STYLE": css,
        "SCRIPT": script,
        "BOOT": in_markup(as_json(dict(boot))),
    }
    head, tail = template.split("{{BLOCKS}}")
    yield fill(head, filled)
    for name, packed in (blocks or {}).items():
        yield f'<script type="text/plain" id="{html.escape(name)}">{packed}</script>\n'
    yield fill(tail, filled)


def in_markup(json_text: str) -> str:
    """JSON that no parser of HTML takes for the end of its element: the signs of markup are escaped.

    >>> in_markup('"</script>"')
    '"\\\\u003c/script\\\\u003e"'
    """
    return json_text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Each marker replaced once, from the left, so that nothing that was put in is looked at again."""
    done: list[str] = []
    rest = template
    while "{{" in rest:
        before, rest = rest.split("{{", 1)
        name, rest = rest.split("}}", 1)
        done += [before, values[name]]
    return "".join([*done, rest])


def policy(style: str, script: str | None = None, *, live: bool = False) -> str:
    """The policy of a page: its own style, its script if it has one, and if it is ``live`` fetching as well."""
    sources = {
        "default-src": "'none'",
        "script-src": "'none'" if script is None else _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in sources.items())


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


@cache
def read_part(name: str) -> str:
    """A file that pages are made of."""
    return (PAGES / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    body = "\n".join(map(read_part, SCRIPTS))
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'
