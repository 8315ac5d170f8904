"""A step that was done again, beside the record of the run: the same bits, or the first difference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncurve.core.records import Completion
from oncurve.history.past import PastRun
from oncurve.observe.record import read_metrics
from oncurve.observe.step_record import read_step, recorded_steps
from oncurve.run.checkpoint_manifest import checkpoints_in, read_manifest

_CLOCKED = re.compile(r"^(?:time|memory|speed)/|_seconds$|^weights/")
"""Metrics that no two runs share."""


def compare(run: PastRun, folder: Path, start: int, last: int) -> tuple[list[str], list[str]]:
    """Everything that is the same, and the first difference from the record."""
    mine, compared = {row["step"]: row for row in read_metrics(folder)}, []
    num_metrics, num_completions = 0, 0
    for number in range(start + 1, last + 1):
        difference, count = _completions_differ(run, folder, number)
        num_completions += count
        if not difference:
            was = next((row for row in run.metrics if row["step"] == number), {})
            difference, count = _metrics_differ(was, mine.get(number, {}), number)
            num_metrics += count
        if difference:
            return compared, [difference]
    if num_completions:
        compared.append(f"{num_completions} completions")
    compared.append(f"{num_metrics} metrics")
    weights = _weights_differ(run.path, folder, last)
    if weights is None:
        return compared, []
    if weights:
        return compared, [weights]
    return [*compared, f"the weights after step {last}"], []


def _completions_differ(run: PastRun, folder: Path, number: int) -> tuple[str, int]:
    """The first completion of a step that differs, and how many were compared."""
    if number not in recorded_steps(run.path):
        return "", 0
    was, now = read_step(run.path, number), read_step(folder, number)
    if [group.prompt.index for group in was.groups] != [group.prompt.index for group in now.groups]:
        return f"step {number}: other prompts were drawn", 0
    for index, (old, new) in enumerate(zip(was.groups, now.groups, strict=True)):
        for recorded, other in zip(old.completions, new.completions, strict=True):
            where = f"step {number}, prompt {old.prompt.index}, completion {recorded.index}"
            if difference := _tokens_differ(recorded, other):
                return f"{where}: {difference}", 0
            rewards = was.rewards[index][recorded.index], now.rewards[index][recorded.index]
            if rewards[0].value != rewards[1].value:
                return f"{where}: reward {rewards[0].value} in the record, {rewards[1].value} now", 0
            weights = was.advantages[index][recorded.index], now.advantages[index][recorded.index]
            if weights[0] != weights[1]:
                return f"{where}: advantage {weights[0]} in the record, {weights[1]} now", 0
    return "", sum(len(group.completions) for group in was.groups)


def _tokens_differ(recorded: Completion, other: Completion) -> str:
    for index, (old, new) in enumerate(zip(recorded.token_ids, other.token_ids, strict=False)):
        if old != new:
            return f"token {index} is {old} in the record, {new} now"
    if len(recorded.token_ids) != len(other.token_ids):
        return f"{len(recorded.token_ids)} tokens in the record, {len(other.token_ids)} now"
    for index, (old, new) in enumerate(zip(recorded.sampler_logprobs, other.sampler_logprobs, strict=True)):
        if old != new:
            return f"log-probability of token {index} is {old!r} in the record, {new!r} now"
    return ""


def _metrics_differ(was: Mapping[str, Any], now: Mapping[str, Any], number: int) -> tuple[str, int]:
    """The first metric of a step that differs, and how many were compared."""
    keys = [key for key in was if key in now and not _CLOCKED.search(key)]
    for key in keys:
        if was[key] != now[key] and not (math.isnan(was[key]) and math.isnan(now[key])):
            return f"step {number}: {key} is {was[key]!r} in the record, {now[key]!r} now", 0
    return "", len(keys)


def _weights_differ(run: Path, folder: Path, last: int) -> str | None:
    """Whether the weights after the last step have another checksum; None where one of them was not kept."""
    checkpoints = [dict(checkpoints_in(folder_of_run / "checkpoints")).get(last) for folder_of_run in (run, folder)]
    if checkpoints[0] is None or checkpoints[1] is None:
        return None
    files = [read_manifest(checkpoint).get("files", {}) for checkpoint in checkpoints if checkpoint is not None]
    names = [name for name in files[0] if name.endswith(".safetensors")]
    other = [name for name in names if files[0][name] != files[1].get(name)]
    return f"step {last}: other weights afterwards ({', '.join(other)})" if other else ""
