"""Cost of a reward that takes its time: measured on one completion, and what follows for a check, a step and a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from oncurve.core.records import Completion, Prompt, Reward
from oncurve.data.check import Grade
from oncurve.recipe.schema import Config
from oncurve.wording import counted, duration

SLOW_SECONDS = 0.1
"""A reward that takes longer for one completion has its cost told, and its progress shown."""
SLICE = 8
"""Completions that a slow reward grades between two looks at its progress."""
LINE_SECONDS = 10.0
"""Time between two lines of progress where the output is no terminal."""


class MeteredGrade:
    """Grading during a check: its first completion alone, to tell the cost before the others are graded.

    The second completion is measured as well where the first is slow, since processes start with the first.
    """

    def __init__(self, grade: Grade, config: Config, *, num_completions: int, console: Console) -> None:
        """``num_completions`` are graded by the whole check, about."""
        self.grade, self.config, self.console = grade, config, console
        self.num_completions, self.num_graded = num_completions, 0
        self.seconds: float | None = None
        """Seconds of one completion; None before the first is graded."""
        self._next_line = 0.0

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion, as without the meter."""
        rewards = self._measured(prompts, completions) if self.seconds is None and completions else []
        self.num_graded += len(rewards)
        rest = slice(len(rewards), None)
        grade = self._slowly if self.is_slow else self.grade
        rest_rewards = grade(prompts[rest], completions[rest])
        self.num_graded += len(rest_rewards)
        return [*rewards, *rest_rewards]

    @property
    def is_slow(self) -> bool:
        """The reward was measured, and takes its time."""
        return self.seconds is not None and self.seconds >= SLOW_SECONDS

    def _measured(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """The rewards of the first completion, and of the second where that was slow; their cost is told."""
        rewards: list[Reward] = []
        for index in range(min(2, len(completions))):
            started = time.perf_counter()
            rewards += self.grade(prompts[index : index + 1], completions[index : index + 1])
            self.seconds = time.perf_counter() - started
            if not self.is_slow:
                return rewards
        self.console.print(self.describe(), markup=False, highlight=False, soft_wrap=True)
        return rewards

    def describe(self) -> str:
        """A sentence on what the reward costs."""
        config, seconds = self.config, self.seconds or 0.0
        step = config.algorithm.num_rows(config.run.prompts_per_step)
        costs = (
            f"this check takes {duration(seconds * self.num_completions)} "
            f"({counted(self.num_completions, 'completion')})",
            f"a step {duration(seconds * step)} ({counted(step, 'completion')})",
            f"the run {duration(seconds * step * config.run.steps)} ({counted(config.run.steps, 'step')})",
        )
        return (
            f"the reward takes {seconds:.2g} s for one completion. One after the other, {costs[0]}, {costs[1]} and "
            f"{costs[2]}. data.limit=50 checks fewer rows"
        )

    def _slowly(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """Graded slice by slice, with progress and the time that is left."""
        rewards: list[Reward] = []
        total = max(self.num_completions, self.num_graded + len(completions))
        with Progress(console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task("grading", total=total)
            for start in range(0, len(completions), SLICE):
                progress.update(task, completed=self.num_graded + start)
                self._print_progress(self.num_graded + start, total)
                part = slice(start, start + SLICE)
                rewards += self.grade(prompts[part], completions[part])
        return rewards

    def _print_progress(self, num_graded: int, total: int) -> None:
        """A plain line now and then, where no terminal shows a bar."""
        if self.console.is_terminal or time.perf_counter() < self._next_line:
            return
        self._next_line = time.perf_counter() + LINE_SECONDS
        left = duration((self.seconds or 0.0) * (total - num_graded))
        self.console.print(f"graded {num_graded:,} of {total:,}, {left} left", markup=False, highlight=False)
