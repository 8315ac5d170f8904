"""Checkpoints of a run under TRL's names, and the trainer's state beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import is_run
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.checkpoint_manifest import checkpoints_in, verify
from oncurve.run.resume import run_and_step
from oncurve.run.state import restore
from oncurve.run_errors import CheckpointError
from oncurve.wording import did_you_mean


class NoCheckpoint(CheckpointError, ValueError):
    """There is nothing to go on from: a ValueError, as in TRL."""


def find_run(checkpoint: str | bool, output_dir: str) -> tuple[Path, int | None]:
    """The folder of a run to go on with, and the step to go back to: None for its newest checkpoint.

    A run is named by itself or by a checkpoint of it; otherwise it is the newest. Raises NoCheckpoint for none.
    """
    if not isinstance(checkpoint, (bool, str, Path)):
        raise NoCheckpoint(f"resume_from_checkpoint is {checkpoint!r}. Give the path of a checkpoint or a run, or True")
    if not isinstance(checkpoint, bool):
        path, step = run_and_step(Path(checkpoint).resolve())
        if is_run(path):
            return path, step
        output_dir = str(path)
    folder = Path(output_dir)
    runs = [path for path in folder.glob("*/") if is_run(path) and checkpoints_in(path / "checkpoints")]
    if not runs:
        raise NoCheckpoint(f"resume_from_checkpoint: {folder} holds no run of oncurve with a checkpoint")
    return max(runs, key=lambda path: path.stat().st_mtime), None


def name_checkpoint(saved: Path, output_dir: str, state: TrainerState) -> None:
    """Call a checkpoint ``checkpoint-N``, as TRL does, and put the trainer's state into it."""
    link = Path(output_dir) / f"checkpoint-{state.global_step}"
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(link)
    state.save_to_json(str(saved / TRAINER_STATE_NAME))
    for old in link.parent.glob("checkpoint-*"):
        if old.is_symlink() and (old == link or not old.exists()):
            old.unlink()  # of a checkpoint that was removed, or of an earlier run
    if not link.exists():
        link.symlink_to(saved.resolve().relative_to(link.parent.resolve()), target_is_directory=True)


def note_best(measured: Mapping[str, float], args: Any, state: TrainerState) -> bool:
    """Remember a measurement that is the best so far, by ``metric_for_best_model``, and say so.

    Raises ConfigError for a metric that nothing measures.
    """
    if args.metric_for_best_model is None:
        return False
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    if name not in measured:
        raise ConfigError(
            f"metric_for_best_model: no evaluation measures {name!r}. {did_you_mean(name, list(measured))}"
        )
    sign = 1 if args.greater_is_better else -1
    is_best = state.best_metric is None or sign * measured[name] > sign * state.best_metric
    if is_best:
        state.best_metric, state.best_global_step = measured[name], state.global_step
    return is_best


def load_best(policy: TrainedPolicy, state: TrainerState) -> None:
    """Put the weights of the best checkpoint into the policy. Raises CheckpointError if it cannot be read."""
    folder = Path(str(state.best_model_checkpoint)).resolve()
    restore(policy, folder, verify(folder))


def load_state(state: TrainerState, run: Path, step: int | None) -> None:
    """Put what the checkpoint of a step, or the newest one, says into the trainer's state, which rewards hold too."""
    checkpoints = dict(checkpoints_in(run / "checkpoints"))
    path = checkpoints[max(checkpoints) if step is None else step] / TRAINER_STATE_NAME if checkpoints else None
    if path is None or not path.is_file():
        return
    saved = TrainerState.load_from_json(str(path))
    for field in fields(saved):
        if field.name not in ("max_steps", "num_train_epochs", "logging_steps", "stateful_callbacks"):
            setattr(state, field.name, getattr(saved, field.name))
