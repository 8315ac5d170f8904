"""Steps as they were trained on, compact and exact: tokens, log-probabilities, rewards and advantages in Parquet.

One file per step, ``steps/step_000120.parquet``, with one row per completion; ``run.record=all`` writes it. Any tool
that reads Parquet reads it. A token takes about 5 bytes: its log-probability 4, since it is random, its id about 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oncurve.core.errors import DataError
from oncurve.core.records import Completion, Group, Prompt, Reward, Segment, ToolCall, packed
from oncurve.observe.record import to_json
from oncurve.run_errors import CheckpointError

FOLDER = "steps"
_OF_BRANCH = ("text", "token_ids", "sampler_logprobs", "finish_reason", "policy_version", "index")


@dataclass(frozen=True)
class RecordedGroups:
    """The groups of a step with what they earned."""

    groups: tuple[Group, ...]
    rewards: tuple[tuple[Reward, ...], ...]
    """A reward for each completion of each group."""
    advantages: tuple[tuple[float, ...], ...]


def step_path(run: Path, step: int) -> Path:
    """The record of a step; names sort like the steps."""
    return run / FOLDER / f"step_{step:06d}.parquet"


def recorded_steps(run: Path) -> list[int]:
    """The steps that have a record."""
    names = (path.stem.removeprefix("step_") for path in (run / FOLDER).glob("step_*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


def write_step(
    path: Path,
    groups: Sequence[Group],
    rewards: Sequence[Sequence[Reward]],
    advantages: Sequence[Sequence[float]],
) -> None:
    """Write a step under a temporary name and move it to ``path``. Raises CheckpointError where that fails."""
    import pyarrow as pa  # lazy
    import pyarrow.parquet as pq  # lazy

    rows = [
        _row(index, group, completion, reward, advantage)
        for index, (group, graded, weights) in enumerate(zip(groups, rewards, advantages, strict=True))
        for completion, reward, advantage in zip(group.completions, graded, weights, strict=True)
    ]
    is_single = all(row["logprobs"].dtype.itemsize == 4 for row in rows)
    wide = {"logprobs": pa.list_(pa.float32() if is_single else pa.float64())}
    types = {name: pa.list_(pa.int32()) for name in ("prompt_ids", "token_ids")} | wide
    types |= {name: pa.float64() for name in ("reward", "advantage")}
    table = pa.table({name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]} if rows else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        # random mantissas have nothing for a dictionary, and their bytes compress best one place at a time
        plain = ("logprobs", "token_ids", "prompt_ids")
        layout: dict[str, Any] = {
            "use_dictionary": [name for name in table.column_names if name not in plain],
            "use_byte_stream_split": ["logprobs.list.element"] if rows else False,
        }
        pq.write_table(table, unfinished, compression="zstd", write_statistics=False, **layout)
        unfinished.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the record of a step cannot be written ({error.strerror}). Make room"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_step(run: Path, step: int) -> RecordedGroups:
    """The groups of a step as they were trained on. Raises DataError if the record is missing or broken."""
    path = step_path(run, step)
    if not path.is_file():
        raise DataError(f"{path}: there is no record of step {step}. Runs with run.record=all have one.")
    return read_groups(path)


def read_groups(path: Path) -> RecordedGroups:
    """The groups of a file. Raises DataError if it is broken."""
    import pyarrow as pa  # lazy
    import pyarrow.parquet as pq  # lazy

    try:
        return _grouped(pq.read_table(path).to_pylist())
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: the record cannot be read ({error}). Restore or remove it.") from error


def _row(index: int, group: Group, completion: Completion, reward: Reward, advantage: float) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "group": index,
        "prompt_index": prompt.index,
        "prompt": prompt.text,
        "prompt_ids": prompt.prompt_ids,
        "row": to_json(prompt.row),
        "messages": None if prompt.messages is None else to_json(list(prompt.messages)),
        "index": completion.index,
        "text": completion.text,
        "token_ids": np.array(packed(completion.token_ids)),
        "logprobs": np.array(packed(completion.sampler_logprobs)),
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "versions": to_json(completion.versions) if completion.versions else None,
        "reward": reward.value,
        "error": reward.error,
        "detail": reward.detail,
        "parts": to_json(reward.parts),
        "advantage": advantage,
        "episode": _episode(completion),
    }


def _episode(completion: Completion) -> str | None:
    """An episode's record besides its tokens, as JSON; None for a plain completion."""
    if not (completion.segments or completion.failure or completion.own_prompt is not None or completion.branches):
        return None
    earned = completion.environment_reward
    return to_json(
        {
            "prompt_ids": completion.prompt_ids,
            "own_prompt": completion.own_prompt,
            "observation": completion.observation,
            "versions": completion.versions,
            "segments": [[part.is_policy, part.start, part.end, part.text] for part in completion.segments],
            "calls": [[call.name, call.arguments, call.answer, call.error, call.turn] for call in completion.calls],
            "failure": completion.failure,
            "failure_detail": completion.failure_detail,
            "earned": None if earned is None else [earned.value, earned.parts, earned.error, earned.detail],
            "branches": [
                [*(getattr(branch, name) for name in _OF_BRANCH), _episode(branch)] for branch in completion.branches
            ],
        }
    )


def _grouped(rows: Sequence[Mapping[str, Any]]) -> RecordedGroups:
    indices = sorted({row["group"] for row in rows})
    kinds = [[row for row in rows if row["group"] == index] for index in indices]
    return RecordedGroups(
        groups=tuple(Group(_prompt(kind[0]), tuple(map(_completion, kind))) for kind in kinds),
        rewards=tuple(tuple(map(_reward, kind)) for kind in kinds),
        advantages=tuple(tuple(row["advantage"] for row in kind) for kind in kinds),
    )


def _prompt(row: Mapping[str, Any]) -> Prompt:
    messages = None if row["messages"] is None else tuple(json.loads(row["messages"]))
    return Prompt(row["prompt"], tuple(row["prompt_ids"]), row["prompt_index"], json.loads(row["row"]), messages)


def _reward(row: Mapping[str, Any]) -> Reward:
    return Reward(row["reward"], json.loads(row["parts"]), row["error"], row["detail"])


def _completion(row: Mapping[str, Any]) -> Completion:
    episode = json.loads(row["episode"]) if row["episode"] else {}
    return Completion(
        prompt_ids=tuple(episode.get("prompt_ids", row["prompt_ids"])),
        token_ids=row["token_ids"],
        text=row["text"],
        sampler_logprobs=row["logprobs"],
        finish_reason=row["finish_reason"],
        policy_version=row["policy_version"],
        index=row["index"],
        versions=tuple(map(tuple, episode.get("versions", json.loads(row.get("versions") or "[]")))),
        **_of_episode(episode, row),
    )


def _of_episode(episode: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    if not episode:
        return {}
    earned = episode["earned"]
    return {
        "own_prompt": episode["own_prompt"],
        "observation": episode.get("observation", ""),
        "segments": tuple(Segment(*part) for part in episode["segments"]),
        "calls": tuple(ToolCall(*call) for call in episode["calls"]),
        "failure": episode["failure"],
        "failure_detail": episode["failure_detail"],
        "environment_reward": None if earned is None else Reward(*earned),
        "branches": tuple(_branches(episode["branches"], row)),
    }


def _branches(branches: Sequence[Sequence[Any]], row: Mapping[str, Any]) -> Iterator[Completion]:
    for *values, episode in branches:
        own = dict(zip(_OF_BRANCH, values, strict=True))
        yield _completion({**row, **own, "logprobs": own["sampler_logprobs"], "episode": episode})
