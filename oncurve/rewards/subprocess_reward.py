"""Reward functions in a process of their own, which may hang or exhaust the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Prompt, Reward, Segment, ToolCall
from oncurve.rewards.custom import from_function
from oncurve.rewards.section import UNKNOWN_LENGTH, RunLength
from oncurve.rewards.worker_pool import Outcome, WorkerPool
from oncurve.user_code import load_function


class SubprocessReward:
    """A function of somebody's, run in processes with a time and a memory limit.

    It is named by ``module:name`` or ``path/to/file.py:name``, because every process imports it for itself; a closure
    or state shared with the trainer is out of reach. One item is one group, so that functions that compare the
    completions of a group still can. What the function breaks is an error of the item, never a zero: its limits are its
    author's to keep.
    """

    waits: Literal[True] = True

    def __init__(
        self,
        location: str,
        *,
        name: str | None = None,
        timeout_seconds: float = 10.0,
        batch_seconds: float = 120.0,
        memory_gib: float = 4.0,
        workers: int = 1,
        nan_is_none: bool = False,
        length: RunLength = UNKNOWN_LENGTH,
    ) -> None:
        module, _, function = location.rpartition(":")
        self.name, self.nan_is_none, self.length = name or function, nan_is_none, length
        self.location = f"{Path(module).resolve()}:{function}" if module.endswith(".py") else location
        self._pool = WorkerPool(
            "oncurve.rewards.subprocess_reward:call",
            workers=workers,
            timeout_seconds=timeout_seconds,
            batch_seconds=batch_seconds,
            memory_gib=memory_gib,
        )

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        pairs = zip(prompts, completions, strict=True)
        items = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].prompt_ids)]
        rows = ([[asdict(prompt), _fields(completion)] for prompt, completion in item] for item in items)
        settings = {"location": self.location, "nan_is_none": self.nan_is_none, "length": self.length}
        outcomes = self._pool.map({**settings, "rows": listed} for listed in rows)
        return [
            reward for item, outcome in zip(items, outcomes, strict=True) for reward in _rewards_of(outcome, len(item))
        ]

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()


def _rewards_of(outcome: Outcome, num_completions: int) -> list[Reward]:
    if outcome.error is None:
        return [Reward(**fields) for fields in outcome.result]
    kind = "timeout" if outcome.error in ("timeout", "not_run") else "crashed"
    return [Reward(value=None, error=kind, detail=outcome.detail)] * num_completions


def call(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The rewards of one item; runs in a grading process."""
    prompts = [_prompt_of(prompt) for prompt, _ in payload["rows"]]
    completions = [_completion_of(completion) for _, completion in payload["rows"]]
    function = _loaded(payload["location"], payload["nan_is_none"], RunLength(*payload["length"]))
    return [asdict(reward) for reward in grade(function, prompts, completions)]


@lru_cache(maxsize=8)
def _loaded(location: str, nan_is_none: bool, length: RunLength) -> RewardFunction:
    return from_function(load_function(location), nan_is_none=nan_is_none, length=length)


def _prompt_of(fields: dict[str, Any]) -> Prompt:
    messages = fields["messages"] and tuple(fields["messages"])
    return Prompt(**{**fields, "prompt_ids": tuple(fields["prompt_ids"]), "messages": messages})


def _completion_of(fields: dict[str, Any]) -> Completion:
    reward = fields["environment_reward"]
    parts: dict[str, Any] = {
        "prompt_ids": tuple(fields["prompt_ids"]),
        "segments": tuple(Segment(**part) for part in fields["segments"]),
        "calls": tuple(ToolCall(**call) for call in fields["calls"]),
        "environment_reward": reward and Reward(**reward),
        "branches": tuple(map(_completion_of, fields["branches"])),
    }
    return Completion(**{**fields, **parts})


def _fields(completion: Completion) -> dict[str, Any]:
    fields = asdict(replace(completion, environment=None, branches=()))
    numbers = {name: list(fields[name]) for name in ("token_ids", "sampler_logprobs")}
    return fields | numbers | {"branches": [_fields(branch) for branch in completion.branches]}
