"""One HTML file of a run: template, style, scripts and data inline, rollouts as compressed blocks, one per step.

Prompts and completions are written by strangers and by a model: they reach the page only inside base64 or escaped JSON,
the scripts put them into the document as text and never as markup, and the policy in the page's head allows no script
but the one whose hash it names. A block is unpacked in the page when it is looked at.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from oncurve.observe.record import read_rows, recorded_steps, rollouts_path

MAX_EPISODE_CHARACTERS = 20_000
"""Most characters of a prompt or completion; a note takes the place of the rest."""
TEXT_BUDGET = 19 * 2**20
"""Bytes of all blocks with texts in a page; steps that do not fit are left out evenly, and the page says so."""
TOKEN_BUDGET = 6 * 2**20
"""Bytes of all blocks with log-probabilities of tokens."""
_CALL_CHARACTERS = 500


@dataclass
class Blocks:
    """Rollouts as they are put into a page."""

    texts: dict[int, str] = field(default_factory=dict)
    """Step to the packed list of its groups."""
    tokens: dict[int, str] = field(default_factory=dict)
    """Step to the packed token boundaries and log-probabilities of its first groups, where they were recorded."""
    recorded: list[int] = field(default_factory=list)
    """All steps whose rollouts are in the run folder."""
    with_tokens: int = 0
    """Steps that were read and have log-probabilities of tokens in the run folder."""


def read_step(run: Path, step: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """The groups of a step as a page shows them, and what is known about their tokens.

    Raises DataError if the file is missing or broken.
    """
    rows = _rows(run, step)
    return [_group(row) for row in rows], [_tokens(row) for row in rows]


def make_blocks(run: Path, *, text_budget: int = TEXT_BUDGET, token_budget: int = TOKEN_BUDGET) -> Blocks:
    """The rollouts of a run, as many steps as fit into the budgets.

    Steps are tried in an order that covers the run evenly however early it ends, first and last step first.
    """
    blocks = Blocks(recorded=recorded_steps(run))
    text_left, token_left = text_budget, token_budget
    for step in spread(blocks.recorded):
        rows = _rows(run, step)
        packed = pack([_group(row) for row in rows])
        if len(packed) > text_left:
            break
        blocks.texts[step] = packed
        text_left -= len(packed)
        if not any(_has_tokens(row) for row in rows):
            continue
        blocks.with_tokens += 1
        if token_left and len(packed := pack([_tokens(row) for row in rows])) <= token_left:
            blocks.tokens[step] = packed
            token_left -= len(packed)
        else:
            token_left = 0  # later ones that are small by chance would make the choice uneven
    return blocks


def spread(steps: Sequence[int]) -> Iterator[int]:
    """All steps, the first and the last first, then always in the middle of the largest gaps.

    >>> list(spread([10, 20, 30, 40, 50]))
    [10, 50, 30, 20, 40]
    """
    if not steps:
        return
    yield steps[0]
    if len(steps) > 1:
        yield steps[-1]
    gaps = [(0, len(steps) - 1)]
    while gaps:
        halves: list[tuple[int, int]] = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle < high:
                yield steps[middle]
                halves += [(low, middle), (middle, high)]
        gaps = halves


def pack(value: Any) -> str:
    """A value as base64 of raw deflate of JSON, which a browser unpacks with DecompressionStream."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(packer.compress(as_json(value).encode()) + packer.flush()).decode("ascii")


def as_json(value: Any) -> str:
    """Compact JSON that stands in any encoding: what is not ASCII is escaped, half a surrogate pair included."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> float | None:
    """A number, or None for what is not finite or no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def shorten(text: Any, limit: int = MAX_EPISODE_CHARACTERS) -> str:
    """A text as far as a page shows it."""
    whole = text if isinstance(text, str) else "" if text is None else str(text)
    if len(whole) <= limit:
        return whole
    return f"{whole[:limit]} [... {len(whole) - limit:,} more characters in the run folder]"


def _rows(run: Path, step: int) -> list[dict[str, Any]]:
    return read_rows(rollouts_path(run, step), may_be_torn=False)


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": row.get("index"),
        "prompt": shorten(row.get("prompt")),
        "answer": shorten(row.get("answer")),
        "completions": [_completion(completion) for completion in _completions(row)],
    }


def _completions(row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return row.get("completions") or ()


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = row.get("parts") or {}
    fields = {
        "text": shorten(row.get("text")),
        "tokens": row.get("num_tokens"),
        "end": row.get("finish_reason"),
        "version": row.get("policy_version"),
        "reward": _rounded(row.get("reward")),
        "parts": {str(name): _rounded(value) for name, value in parts.items()},
        "error": row.get("error"),
        "detail": shorten(row.get("detail"), 500),
        "advantage": _rounded(row.get("advantage")),
        **episode_texts(row),
    }
    return {key: value for key, value in fields.items() if value not in (None, "", {})}


def episode_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """The turns of a completion with tools, as far as a page shows them; empty for a plain one."""
    segments = row.get("segments")
    if not isinstance(segments, list):
        return {}
    texts, left = _cut_segments(segments, MAX_EPISODE_CHARACTERS)
    branches = []
    for branch in row.get("branches") or ():
        own, left = _cut_segments(branch["segments"], left)
        branches.append({"segments": own, "own_prompt": shorten(branch.get("prompt"))})
    calls = [
        {
            key: shorten(value, _CALL_CHARACTERS) if isinstance(value, str) else finite(value)
            for key, value in call.items()
        }
        for call in row.get("calls") or ()
    ]
    return {
        "segments": texts,
        "turns": row.get("turns"),
        "calls": [{key: value for key, value in call.items() if value is not None} for call in calls],
        "waited": _rounded(row.get("waiting_seconds")),
        "own_prompt": shorten(row.get("own_prompt")),
        "failure": row.get("failure"),
        "branches": branches or None,
    }


def _cut_segments(segments: Iterable[Any], left: int) -> tuple[list[list[Any]], int]:
    """Segments with at most so many characters together, and how many are left."""
    cut_segments = []
    for is_policy, text, *size in segments:
        cut_segments.append([int(bool(is_policy)), shorten(text, max(left, 0)), size[0] if size else 0])
        left -= len(str(text))
    return cut_segments, left


def _has_tokens(row: Mapping[str, Any]) -> bool:
    return any("token_lengths" in completion and "logprobs" in completion for completion in _completions(row))


def _tokens(row: Mapping[str, Any]) -> list[Any] | None:
    """For each completion its token lengths and hundredths of a nat below probability 1; None if not recorded."""
    if not _has_tokens(row):
        return None
    return [
        [completion["token_lengths"], [round(-100 * value) for value in completion["logprobs"]]]
        if "token_lengths" in completion
        else None
        for completion in _completions(row)
    ]


def _rounded(value: Any) -> float | None:
    number = finite(value)
    return None if number is None else float(f"{number:.5g}")


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
    template = read_part("head.html") + read_part("page.html")
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
