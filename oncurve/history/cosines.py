"""The direction of learning under another reward, at the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncurve.history.past import PastRun
from oncurve.history.regrade import Regrade
from oncurve.history.replay import replay
from oncurve.observe.step_record import recorded_steps
from oncurve.run.checkpoint_manifest import checkpoints_in


def add_cosines(
    regraded: Regrade,
    run: PastRun,
    other: str | Callable[..., Any] | None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Add the cosine of the gradient that was taken and of the one that the reward asks for.

    For every step that begins at a checkpoint and has a record; the completions are not sampled again.
    """
    there, graded = set(recorded_steps(run.path)), {step.step for step in regraded.steps}
    steps = [done + 1 for done, _ in checkpoints_in(run.path / "checkpoints") if done + 1 in there & graded]
    for index, step in enumerate(steps):
        change = replay(run.path, step, reward=other, recorded=True, is_change=True).change
        assert change is not None
        regraded.cosines[step] = change.cosine
        if on_progress is not None:
            on_progress(index + 1, len(steps))
    if not steps:
        regraded.notes.append(
            "no gradients were compared: no step with a record (run.record=all) begins at a checkpoint that is left"
        )
