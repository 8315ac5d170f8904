"""Saving a run: when it is done, and what happens when it fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oncurve.core.algorithm import Algorithm
from oncurve.core.records import Group
from oncurve.data.curriculum import Curriculum
from oncurve.model.allocator import give_back
from oncurve.observe.manifest import available_bytes
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.checkpoint_manifest import prune
from oncurve.run.guards import Guards
from oncurve.run.settings import RunSection
from oncurve.run.state import Snapshot, SnapshotRoom, capture, restore, write
from oncurve.run_errors import CheckpointError

DAY_SECONDS = 86_400.0
SPARE = 0.8
"""Part of the available memory that a snapshot may take."""
WORTH_A_TIP_SECONDS = 60.0
"""Work at risk between two checkpoints below which no tip is given."""


def best_interval(*, step_seconds: float, save_seconds: float, failure_every_seconds: float = DAY_SECONDS) -> int:
    """The number of steps between checkpoints that loses least time, in steps.

        interval = sqrt(2 save_seconds failure_every_seconds)                 Young, CACM 17(9), 1974

    Saving costs save_seconds per interval, a failure half an interval of steps to be done again.

    >>> best_interval(step_seconds=17.0, save_seconds=2.0)
    35
    """
    seconds = math.sqrt(2 * max(save_seconds, 0.0) * failure_every_seconds)
    return max(1, round(seconds / step_seconds)) if step_seconds > 0 else 1


class Checkpointer:
    """Takes snapshots between steps and writes them in a thread, one at a time.

    ``mark`` remembers the small things at the end of every step, so that a step that is abandoned before it moved the
    weights leaves a run that can be saved.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        algorithm: Algorithm,
        data: Curriculum,
        guards: Guards,
        root: Path,
        *,
        section: RunSection,
        facts: Mapping[str, Any],
        moves_reference: bool = False,
        ahead: Callable[[int], Mapping[int, Sequence[Group]]] = lambda step: {},
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Each process copies and writes its share; process 0 seals, and tells the others what became of it. ``ahead``
        gives the groups that were finished before the steps that they belong to."""
        self.policy, self.algorithm, self.data, self.guards = policy, algorithm, data, guards
        self.root, self.section, self.facts = root, section, facts
        self.moves_reference, self.processes = moves_reference, policy.processes
        self.ahead = ahead
        self.notify = notify or (lambda text: None)
        self.last_saved = -1
        """Step of the newest snapshot that was taken."""
        self._marked: tuple[int, dict[str, Any]] = (-1, {})
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._write_seconds = 0.0
        self._has_proposed = False

    def mark(self, step: int, *, pending: Mapping[str, float] | None = None) -> None:
        """Remember where the run is after ``step`` steps; ``pending`` holds metrics that still miss a measurement."""
        state: dict[str, Any] = {
            "num_updates": self.policy.num_updates,
            "num_scheduled": self.policy.num_scheduled,
            "loss_scale": dict(vars(scale)) if (scale := self.policy.loss_scale) is not None else None,
            "tokens_per_microbatch": self.policy.tokens_per_microbatch,
            "entropy": self.algorithm.entropy.state_dict(),
            "curriculum": self.data.state(),
            "guards": self.guards.state(),
        }
        self._marked = (step, state if pending is None else {**state, "pending": dict(pending)})

    def load(self, folder: Path, manifest: Mapping[str, Any], *, fresh: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Go on from a verified checkpoint; ``fresh`` names what starts anew because the recipe was changed there."""
        state = restore(self.policy, folder, manifest)
        if "tokens_per_microbatch" not in fresh:
            self.policy.tokens_per_microbatch = int(state["tokens_per_microbatch"])
        if "entropy" not in fresh:
            self.algorithm.entropy.load_state_dict(state["entropy"])
        if "curriculum" not in fresh:
            self.data.load_state(state["curriculum"])
        self.guards.load_state(state["guards"])
        self.last_saved = int(manifest["step"])
        return state

    def after_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Save if it is due; the seconds that training waited for it, for the next record. All processes call it."""
        self._report()
        interval = self.section.save_every_steps
        if not interval or step % interval:
            return {}
        started = time.perf_counter()
        self.save(metrics)
        waited = time.perf_counter() - started
        self._propose(metrics.get("time/step_seconds", 0.0), waited)
        return {"time/save_seconds": waited}

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Take a snapshot of the marked step and start writing it; waits for the one before."""
        self.wait()
        step, state = self._marked
        measured = metrics or {}
        score = measured.get("evaluation/correct_fraction", measured.get("evaluation/mean_reward"))
        numbers = {"score": score, "kl": measured.get("policy/kl")}  # NaN where all completions were left out
        known = {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}
        facts = {**self.facts, **known}
        # A process will be as large again as it is now, while the snapshot is written: what is free now is for both.
        room = SnapshotRoom(SPARE * available_bytes(), self.root)
        give_back(always=True)
        snapshot = capture(
            self.policy, step=step, state=state, facts=facts, moves_reference=self.moves_reference, room=room
        )
        snapshot = replace(snapshot, ahead=self.ahead(step))
        self.last_saved = step
        self._thread = threading.Thread(target=self._write, args=[snapshot], name="checkpoint", daemon=True)
        self._thread.start()

    def save_marked(self) -> bool:
        """Save the marked step now if it is not saved yet and the weights are still those of its end; True if it is.

        Raises CheckpointError if it cannot be written.
        """
        step, state = self._marked
        self.wait()
        if step < 0 or self.last_saved == step:
            return step >= 0
        if state["num_updates"] != self.policy.num_updates:
            return False
        self.save()
        self.wait()
        return self.last_saved == step

    def wait(self) -> None:
        """Until what is being written is on the disk. Raises CheckpointError if it failed and the recipe says stop."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._report()

    def close(self) -> None:
        """Let what is being written come to its end, good or not."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        try:
            if write(snapshot, self.policy, self.root) is not None:
                prune(self.root, keep=self.section.keep_checkpoints, every=self.section.keep_every_steps)
        except CheckpointError as error:
            self._error = error
        except OSError as error:
            self._error = CheckpointError(f"{self.root}: an old checkpoint cannot be deleted: {error}")
        if snapshot.weights is not None:
            self._write_seconds = time.perf_counter() - started

    def _report(self) -> None:
        """Tell all processes the outcome of process 0's last write."""
        if not self.processes.broadcast_from_main(lambda: self._has_failed(stops=self.section.on_save_error == "stop")):
            return
        error, self._error = self._error, None
        self.last_saved = -1
        self.notify(f"NOT SAVED: {error}. Training continues; the next checkpoint is tried when it is due")

    def _has_failed(self, *, stops: bool) -> bool:
        if self._error is None or (self._thread is not None and self._thread.is_alive()):
            return False
        if stops:
            error, self._error, self.last_saved = self._error, None, -1
            raise CheckpointError(
                f"{error}. Free some space, then resume the run; "
                f"with run.on_save_error=continue a run trains on without checkpoints instead"
            )
        return True

    def _propose(self, step_seconds: float, waited: float) -> None:
        """Once the cost is known: how often saving would lose least."""
        if self._has_proposed or self._thread is None or self._write_seconds == 0.0 or step_seconds <= 0:
            return
        self._has_proposed = True
        best = best_interval(step_seconds=step_seconds, save_seconds=max(waited, 1e-3))
        steps = max(best, math.ceil(self._write_seconds / step_seconds))
        interval = self.section.save_every_steps
        if step_seconds * interval < WORTH_A_TIP_SECONDS or steps == interval:
            return
        self.notify(
            f"Tip: a checkpoint delays training by {waited:.2g} s. With about one failure per day, "
            f"run.save_every_steps={steps} is optimal (now {interval}: a failure costs at most "
            f"{interval * step_seconds:.3g} s)"
        )
