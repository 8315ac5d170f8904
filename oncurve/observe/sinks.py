"""TensorBoard, Weights & Biases and trackio: each gets the rows of metrics.jsonl."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import yaml

from oncurve.errors import ConfigError

SinkName = Literal["tensorboard", "wandb", "trackio"]
AliasSet = Literal["trl", "tutorials"]
Say = Callable[[str], None]

FOLDER = "tracking"
"""Inside the run folder: what the sinks keep on disk."""

ALIASES: dict[AliasSet, dict[str, str]] = {
    "trl": {
        "reward/mean": "reward",
        "reward/std": "reward_std",
        "group/zero_signal_fraction": "frac_reward_zero_std",
        "completion/mean_tokens": "completions/mean_length",
        "completion/min_tokens": "completions/min_length",
        "completion/max_tokens": "completions/max_length",
        "completion/truncated_fraction": "completions/clipped_ratio",
        "policy/entropy": "entropy",
        "policy/kl": "kl",
        "policy/clip_fraction": "clip_ratio/region_mean",
        "policy/loss": "loss",
        "policy/gradient_norm": "grad_norm",
        "policy/learning_rate": "learning_rate",
        "policy/entropy_coef": "entropy_coef",
        "mismatch/max_ratio": "sampling/importance_sampling_ratio/max",
        "time/step_seconds": "step_time",
    },
    "tutorials": {
        "reward/mean": "average_reward",
        "reward/correct": "accuracy",
        "reward/format": "format_reward",
        "policy/kl": "kl",
        "policy/loss": "loss/policy",
        "evaluation/correct_fraction": "val_accuracy",
    },
}
"""Names under which other trainers and tutorials log the same quantity, for people who compare."""

_INSTALL = {
    "tensorboard": "pip install 'oncurve[track]'",
    "wandb": "pip install 'oncurve[track]'",
    "trackio": "pip install trackio",
}
_OWN_REWARDS = ("mean", "std", "min", "max", "error_fraction", "timeout_fraction")


class Sink(Protocol):
    """Something that takes the rows of a run."""

    name: str
    failures: tuple[type[Exception], ...]
    """What its library raises when a row cannot be taken."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; ``step`` counts steps done."""
        ...

    def close(self) -> None:
        """Until everything is written."""
        ...


class TensorBoard:
    """Event files in ``tracking/tensorboard`` of the run folder: `tensorboard --logdir runs`. Needs no torch."""

    name = "tensorboard"
    failures: tuple[type[Exception], ...] = (OSError, ValueError)

    def __init__(self, folder: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """``first_step``: steps that a resumed run keeps; TensorBoard forgets what came after them."""
        writer = _library("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        self._shapes = importlib.import_module("tensorboard.compat.proto.tensor_shape_pb2")
        self._writer = writer.EventFileWriter(str(folder / FOLDER / "tensorboard"))
        if first_step:
            session = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(first_step + 1, session_log=session)
        self._write_text("config", "```yaml\n" + yaml.safe_dump(dict(config), sort_keys=False) + "```")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point on every curve."""
        value = self._summaries.Summary.Value
        points = [value(tag=key, simple_value=number) for key, number in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=points))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _write_text(self, tag: str, text: str) -> None:
        shape = self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)])
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        value = self._summaries.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._add(0, summary=self._summaries.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases:
    """A run at Weights & Biases; with WANDB_MODE=offline everything stays in ``tracking`` until `wandb sync`.

    Project and entity are those of the environment (WANDB_PROJECT, else "oncurve"; WANDB_ENTITY). A resumed run goes on
    under the same id.
    """

    name = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """``config`` is the resolved recipe: it is what is logged as the run's settings."""
        wandb = _library("wandb", "wandb")
        self.failures: tuple[type[Exception], ...] = (wandb.Error, OSError, ValueError)
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "oncurve"),
                name=folder.name,
                id=_run_id(place),
                resume="allow",
                dir=str(place),
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except self.failures as error:
            raise ConfigError(
                f"run.track: Weights & Biases cannot be reached: {error}. Set WANDB_API_KEY or WANDB_MODE=offline, or "
                f"leave wandb out of run.track."
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row, with the step as an ordinary column: a resumed run may write a step again."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Upload or write what is left."""
        self._run.finish()


class Trackio:
    """A local trackio project named "oncurve", or a space of the hub if TRACKIO_SPACE_ID names one.

    Not installed with ``oncurve[track]``, since it brings a web server: pip install trackio.
    """

    name = "trackio"
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError)

    def __init__(self, folder: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """``config`` is the resolved recipe."""
        trackio = _library("trackio", "trackio")
        self._run = trackio.init(project="oncurve", name=folder.name, resume="allow", config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class Tracker:
    """All sinks of a run. One that fails is left out from then on, and said so once: tracking never stops training."""

    def __init__(
        self, sinks: Sequence[Sink] = (), *, aliases: Sequence[AliasSet] = (), notify: Say = lambda text: None
    ) -> None:
        """``aliases`` adds the names of these sets; ``notify`` shows a message to a person."""
        self.sinks, self._aliases, self._say = list(sinks), tuple(aliases), notify

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics.jsonl to every sink; what is not finite is left out."""
        row = {key: float(value) for key, value in metrics.items() if key != "step" and math.isfinite(value)}
        row |= aliased(row, self._aliases)
        for sink in list(self.sinks):
            self._guarded(sink, lambda sink=sink: sink.write(step, row))

    def close(self) -> None:
        """Close every sink; calling it twice is harmless."""
        for sink in list(self.sinks):
            self._guarded(sink, sink.close)
        self.sinks = []

    def _guarded(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except sink.failures as error:
            self.sinks.remove(sink)
            self._say(f"{sink.name} failed and is left out from here on; metrics.jsonl has everything: {error}")


def open_tracker(
    folder: Path,
    config: Mapping[str, Any],
    *,
    first_step: int = 0,
    notify: Say = lambda text: None,
    environment: Mapping[str, str] = os.environ,
) -> Tracker:
    """The sinks that the resolved recipe names in ``run.track``; without that key, those with a key in the environment.

    An empty list in the recipe means no sink, whatever the environment holds.

    Raises ConfigError if a named sink is not installed or cannot be reached.
    """
    section = config.get("run") or {}
    named = section.get("track")
    names = list(named) if named is not None else _keyed(environment, notify)
    sinks = [_SINKS[name](folder, config, first_step=first_step) for name in names]
    return Tracker(sinks, aliases=section.get("track_aliases") or (), notify=notify)


def aliased(metrics: Mapping[str, float], sets: Sequence[AliasSet]) -> dict[str, float]:
    """The metrics once more, under the names of other trainers.

    >>> aliased({"reward/mean": 0.5, "reward/brevity": 0.1}, ["trl"])
    {'reward': 0.5, 'rewards/brevity/mean': 0.1}
    """
    named = {ALIASES[chosen][key]: value for chosen in sets for key, value in metrics.items() if key in ALIASES[chosen]}
    if "trl" in sets:
        parts = {key: key.removeprefix("reward/") for key in metrics if key.startswith("reward/")}
        named |= {f"rewards/{part}/mean": metrics[key] for key, part in parts.items() if part not in _OWN_REWARDS}
    return named


def _keyed(environment: Mapping[str, str], notify: Say) -> list[str]:
    """Sinks whose key is in the environment, if they are installed."""
    if not environment.get("WANDB_API_KEY"):
        return []
    if importlib.util.find_spec("wandb") is None:
        notify(f"WANDB_API_KEY is set and wandb is not installed: nothing is tracked there. {_INSTALL['wandb']}")
        return []
    return ["wandb"]


def _library(sink: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.track names {sink}, which cannot be imported ({error}). "
            f"{_INSTALL[sink]}, or leave it out of run.track."
        ) from error


def _run_id(place: Path) -> str:
    """The id of the run at Weights & Biases, made once and kept beside its files."""
    file = place / "wandb_id.txt"
    if not file.is_file():
        file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


_SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
