"""Held-out examples of a run as groups: the completions of one problem in all its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncurve.observe.record import read_json, read_rows
from oncurve.report.blocks import episode_texts, finite, pack, shorten

BUDGET = 3 * 2**20
"""Bytes of the packed examples in a page; the last ones are left out, and the page says so."""


def example_groups(run: Path) -> list[dict[str, Any]]:
    """One group per held-out problem, its completions labelled by the measurement, earlier ones first.

    Raises DataError if a file is broken.
    """
    groups: dict[tuple[Any, str], dict[str, Any]] = {}
    for name in _names(run):
        for row in read_rows(run / "evaluations" / f"{name}.jsonl", may_be_torn=False):
            key = (row.get("index"), str(row.get("question")))
            group = groups.setdefault(key, _group(row))
            group["completions"].append(_completion(name, row))
    return list(groups.values())


def packed_examples(groups: list[dict[str, Any]], *, budget: int = BUDGET) -> tuple[str, int]:
    """The packed groups and how many of them fitted."""
    count = len(groups)
    packed = pack(groups)
    while len(packed) > budget and count > 1:
        count = max(1, min(count - 1, int(count * budget / len(packed))))
        packed = pack(groups[:count])
    return packed, count


def _names(run: Path) -> list[str]:
    """Measurements whose examples are there, in the order of their steps."""
    summaries = [(path.stem, read_json(path)) for path in sorted((run / "evaluations").glob("*.json"))]
    with_rows = [(summary.get("step") or 0, name) for name, summary in summaries if _rows_of(run, name).is_file()]
    return [name for _, name in sorted(with_rows)]


def _rows_of(run: Path, name: str) -> Path:
    return run / "evaluations" / f"{name}.jsonl"


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": row.get("index"),
        "prompt": shorten(row.get("question")),
        "answer": shorten(row.get("answer")),
        "completions": [],
    }


def _completion(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    sample = row.get("sample") or 0
    fields = {
        "label": name if not sample else f"{name} {sample + 1}",
        "text": shorten(row.get("completion")),
        "tokens": row.get("num_tokens"),
        "end": row.get("finish_reason"),
        "reward": finite(row.get("reward")),
        "category": row.get("category"),
        "detail": shorten(row.get("detail"), 500),
        **episode_texts(row.get("episode") or {}),
    }
    return {key: value for key, value in fields.items() if value not in (None, "")}
