"""Prompts and completions for tests of rewards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import settings

from oncurve.core.records import Completion, Prompt

STEADY = settings(deadline=None, derandomize=True, database=None)
"""Examples are the same in every run, and a busy machine fails none of them."""


def prompt_of(
    answer: object = "5",
    *,
    index: int = 0,
    text: str = "2 + 3? <think>",
    row: Mapping[str, Any] | None = None,
    messages: tuple[Mapping[str, str], ...] | None = None,
) -> Prompt:
    """A prompt whose row holds the reference answer."""
    columns = {"answer": answer} if row is None else row
    return Prompt(text=text, prompt_ids=(1, index), index=index, row=columns, messages=messages)


def completion_of(text: str, *, index: int = 0, prompt_index: int = 0, num_tokens: int = 3) -> Completion:
    """A completion with a text and some number of tokens."""
    return Completion(
        prompt_ids=(1, prompt_index),
        token_ids=tuple(range(num_tokens)),
        text=text,
        sampler_logprobs=(0.0,) * num_tokens,
        finish_reason="stop",
        policy_version=0,
        index=index,
    )


def with_tokens(*token_ids: int) -> Completion:
    """A completion with given tokens."""
    return Completion(
        prompt_ids=(1, 0),
        token_ids=token_ids,
        text="",
        sampler_logprobs=(0.0,) * len(token_ids),
        finish_reason="stop",
        policy_version=0,
        index=0,
    )


def children() -> set[int]:
    """The processes that this one has started and that are not yet gone, zombies included."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(folder.name))
    return found
