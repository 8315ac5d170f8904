"""What runs have sampled, and whether two of them have sampled the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def rollouts(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows that a run has kept of its completions, by file."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    # split at "\n" alone: a text may hold other signs that end a line for str.splitlines
    return {path.name: [json.loads(line) for line in path.read_text().split("\n") if line] for path in files}


def without_logprobs(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything else in those rows: prompts, texts, rewards, advantages, versions of the weights."""
    rows = rollouts(run)
    for row in (row for kept in rows.values() for row in kept):
        row["completions"] = [{**one, "logprobs": len(one["logprobs"])} for one in row["completions"]]
    return rows


def logprobs(run: Path) -> list[float]:
    rows = (row for kept in rollouts(run).values() for row in kept)
    return [number for row in rows for one in row["completions"] for number in one["logprobs"]]


def assert_same_completions(run: Path, other: Path) -> None:
    """Everything is the same but the last digit of a log-probability.

    Where sampling happens elsewhere sums come in other orders, and the third decimal may round the other way.
    """
    assert without_logprobs(run) == without_logprobs(other)
    assert logprobs(run) == pytest.approx(logprobs(other), abs=0.0011, rel=0.0)
