"""TensorBoard, Weights & Biases and trackio: each gets the rows of metrics.jsonl."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import yaml

from oncurve.core.errors import ConfigError

Say = Callable[[str], None]

FOLDER = "tracking"
"""Inside the run folder: what the sinks keep on disk."""

_INSTALL = {
    "tensorboard": "pip install 'oncurve[track]'",
    "wandb": "pip install 'oncurve[track]'",
    "trackio": "pip install trackio",
}


class Sink(Protocol):
    """Something that takes the rows of a run."""

    name: str
    failures: tuple[type[Exception], ...]
    """Exceptions of its library when a row cannot be taken."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; ``step`` counts steps done."""
        ...

    def close(self) -> None:
        """Until everything is written."""
        ...


class TensorBoard:
    """Event files in ``tracking/tensorboard`` of the run folder: `tensorboard --logdir runs`."""

    name = "tensorboard"
    failures: tuple[type[Exception], ...] = (OSError, ValueError)

    def __init__(self, folder: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """``first_step``: steps that a resumed run keeps; TensorBoard forgets what came after them."""
        library = _library("tensorboard", "torch.utils.tensorboard")
        purge_step = first_step + 1 if first_step else None
        self._writer = library.SummaryWriter(str(folder / FOLDER / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("config", "```yaml\n" + yaml.safe_dump(dict(config), sort_keys=False) + "```", 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point on every curve."""
        for key, number in metrics.items():
            self._writer.add_scalar(key, number, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


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
        path = folder / FOLDER
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "oncurve"),
                name=folder.name,
                id=_run_id(path),
                resume="allow",
                dir=str(path),
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

    def __init__(self, sinks: Sequence[Sink] = (), *, notify: Say = lambda text: None) -> None:
        """``notify`` shows a message to a person."""
        self.sinks, self._say = list(sinks), notify

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics.jsonl to every sink; what is not finite is left out."""
        row = {key: float(value) for key, value in metrics.items() if key != "step" and math.isfinite(value)}
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
    named = (config.get("run") or {}).get("track")
    names = list(named) if named is not None else _keyed(environment, notify)
    sinks = [_SINKS[name](folder, config, first_step=first_step) for name in names]
    return Tracker(sinks, notify=notify)


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


def _run_id(folder: Path) -> str:
    """The id of the run at Weights & Biases, made once and kept beside its files."""
    file = folder / "wandb_id.txt"
    if not file.is_file():
        file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


_SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
