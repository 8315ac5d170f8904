"""A run of the past as Python objects: its recipe, its metrics, and the groups of every recorded step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.core.batch import Batch, collate, stack_rewards
from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.observe.record import METRICS, nearest_runs, read_manifest, read_metrics, read_rollouts
from oncurve.observe.step_record import RecordedGroups, read_step, recorded_steps
from oncurve.recipe.load import read_run_config
from oncurve.recipe.schema import Config
from oncurve.run.builder import make_algorithm
from oncurve.run.rendered import split_rows


@dataclass(frozen=True)
class PastStep:
    """One recorded step."""

    number: int
    """Steps done after it; the first is 1."""
    groups: tuple[Group, ...]
    rewards: tuple[tuple[Reward, ...], ...]
    """A reward for each completion of each group."""
    advantages: Float[Tensor, "P G"]
    """As they were trained on."""
    metrics: Mapping[str, float]
    has_tokens: bool
    """The tokens and log-probabilities are there, and not only the texts."""

    @property
    def batch(self) -> Batch:
        """The batch that was trained on; nothing is masked. Raises DataError without the tokens."""
        if not self.has_tokens:
            raise DataError(f"step {self.number} was recorded without its tokens; run.record=all records them")
        return collate(self.groups, self.advantages)

    def __repr__(self) -> str:
        count = sum(len(group.completions) for group in self.groups)
        return f"<step {self.number}: {len(self.groups)} groups, {count} completions>"


class PastRun:
    """A run folder, read when it is asked for. Nothing in it is changed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ConfigError where there is no run."""
        self.path = Path(path)
        if not (self.path / METRICS).is_file():
            raise ConfigError(f"{self.path}: no run, {METRICS} is missing. {nearest_runs(self.path)}")
        self._exact = set(recorded_steps(self.path))

    @cached_property
    def config(self) -> Config:
        """The recipe, resolved. Raises ConfigError if it cannot be read."""
        file = self.path / "config.yaml"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror}). Restore it.") from error
        return read_run_config(text, source=str(file))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, one per step."""
        return read_metrics(self.path)

    @property
    def num_processes(self) -> int:
        """Number of processes of this machine that do a step of the run again as it was done.

        1 for weights held in parts, whose gradient is shown whole, and where the run had more GPUs than are here.
        """
        try:
            facts = read_manifest(self.path)
        except DataError:
            return 1
        count = int(facts.get("processes") or 1)
        is_cut = self.config.policy.parallel in ("fsdp", "deepspeed")
        lacks = bool((facts.get("hardware") or {}).get("gpus")) and count > torch.cuda.device_count()
        return 1 if is_cut or lacks else count

    @property
    def steps(self) -> list[int]:
        """The steps whose completions are recorded."""
        return sorted(self._exact | {int(path.stem[5:]) for path in (self.path / "rollouts").glob("step_*.jsonl")})

    def step(self, number: int) -> PastStep:
        """A recorded step. Raises DataError if it has no record, and names those that have one."""
        if number not in self.steps:
            raise DataError(f"{self.path}: step {number} is not recorded. {self._describe_steps()}")
        recorded = read_step(self.path, number) if number in self._exact else self._from_texts(number)
        metrics = next((row for row in self.metrics if row["step"] == number), {})
        weights = torch.tensor(recorded.advantages)
        return PastStep(number, recorded.groups, recorded.rewards, weights, metrics, number in self._exact)

    def _describe_steps(self) -> str:
        steps = self.steps
        if not steps:
            return "None is."
        listed = ", ".join(map(str, steps[:12])) + (f" ... {steps[-1]}" if len(steps) > 12 else "")
        return f"Recorded: {listed}. With run.record=all every step is."

    def _from_texts(self, number: int) -> RecordedGroups:
        """The groups of a step that was written for people: texts, without the tokens."""
        rows = read_rollouts(self.path, number)
        return RecordedGroups(
            groups=tuple(self._group(row) for row in rows),
            rewards=tuple(
                tuple(
                    Reward(completion["reward"], completion["parts"], completion["error"], completion["detail"])
                    for completion in row["completions"]
                )
                for row in rows
            ),
            advantages=tuple(
                tuple(completion["advantage"] or 0.0 for completion in row["completions"]) for row in rows
            ),
        )

    def _group(self, row: Mapping[str, Any]) -> Group:
        rows, row_index = self._rows, row["index"]
        columns: Mapping[str, Any] = rows[row_index] if 0 <= row_index < len(rows) else {}
        if not columns or str(columns.get("answer")) != str(row["answer"]):
            columns = {"answer": row["answer"]}
        prompt = Prompt(row["prompt"], (), row["index"], columns)
        return Group(
            prompt, tuple(_text_only(row_index, completion) for row_index, completion in enumerate(row["completions"]))
        )

    @cached_property
    def _rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of the data; empty where the data cannot be loaded any more."""
        try:
            return split_rows(self.config)[0]
        except (ConfigError, DataError):
            return []


def open_run(path: str | os.PathLike[str]) -> PastRun:
    """A run folder as Python objects: ``open_run("runs/x").step(217).groups``.

    Steps are there whole if the run had ``run.record=all``, as texts if they were written for its report.

    Raises ConfigError where there is no run.
    """
    return PastRun(path)


def advantages_under(
    config: Config, groups: Sequence[Group], rewards: Sequence[Sequence[Reward]]
) -> Float[Tensor, "P G"]:
    """The advantages that a recipe's algorithm gives to rewards of groups of one size."""
    return make_algorithm(config).advantages(stack_rewards(groups, rewards))


def _text_only(index: int, row: Mapping[str, Any]) -> Completion:
    """A completion whose tokens were not recorded: as many as there were, all of them 0."""
    count = row["num_tokens"]
    return Completion((), (0,) * count, row["text"], (0.0,) * count, row["finish_reason"], row["policy_version"], index)
