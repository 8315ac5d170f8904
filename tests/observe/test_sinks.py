"""Do trackers get what metrics.jsonl gets, and does none of them ever stop a run?"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from oncurve.core.errors import ConfigError
from oncurve.observe import sinks
from oncurve.observe.sinks import Tracker, open_tracker
from oncurve.recipe.load import parse_config
from oncurve.run.settings import RunSection

RECIPE = "model: embedded\ndata: {type: word_problems}\nrun: {track: [tensorboard, wandb]}\n"


class Memory:
    """A sink that keeps its rows, or fails when asked to."""

    name = "memory"
    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, *, broken: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.broken, self.is_closed = broken, False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.broken:
            raise OSError("the line is dead")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


def tracked(**run: Any) -> dict[str, Any]:
    return {"run": run, "optimizer": {"learning_rate": 1e-5}}


def test_without_a_name_or_a_key_nothing_is_tracked(tmp_path: Path) -> None:
    assert open_tracker(tmp_path, tracked(), environment={}).sinks == []
    assert open_tracker(tmp_path, {}, environment={}).sinks == []
    assert list(tmp_path.iterdir()) == []


def test_an_empty_list_means_nothing_although_there_is_a_key(tmp_path: Path) -> None:
    assert open_tracker(tmp_path, tracked(track=[]), environment={"WANDB_API_KEY": "k"}).sinks == []


@pytest.mark.proves("F121")
def test_a_key_in_the_environment_chooses_its_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks._SINKS, "wandb", lambda folder, config, first_step: Memory())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert len(open_tracker(tmp_path, tracked(), environment={"WANDB_API_KEY": "k"}).sinks) == 1


def test_a_key_without_the_package_is_said_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    assert open_tracker(tmp_path, tracked(), environment={"WANDB_API_KEY": "k"}, notify=said.append).sinks == []
    assert said
    assert "not installed" in said[0]


@pytest.mark.parametrize("name", list(sinks._SINKS))
def test_a_named_sink_that_is_not_installed_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [known for known in sys.modules if name in known.split(".")]:  # torch.utils.tensorboard, too
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"names {name}.*pip install"):
        open_tracker(tmp_path, tracked(track=[name]))


def test_a_sink_that_fails_is_left_out_and_said_once() -> None:
    said: list[str] = []
    broken, fine = Memory(broken=True), Memory()
    tracker = Tracker([broken, fine], notify=said.append)
    for step in range(3):
        tracker.write(step, {"reward/mean": 0.5})
    tracker.close()
    assert [step for step, _ in fine.rows] == [0, 1, 2]
    assert len(said) == 1
    assert "memory failed" in said[0]
    assert "the line is dead" in said[0]
    assert fine.is_closed
    assert not broken.is_closed


def test_what_is_not_finite_stays_out() -> None:
    memory = Memory()
    Tracker([memory]).write(1, {"step": 1, "policy/kl": math.nan, "policy/loss": math.inf, "reward/mean": 1.0})
    assert memory.rows == [(1, {"reward/mean": 1.0})]


def test_a_recipe_may_name_exactly_the_sinks_that_there_are() -> None:
    track = RunSection.model_fields["track"].annotation
    assert set(get_args(get_args(get_args(track)[0])[0])) == set(sinks._SINKS)
    assert parse_config(RECIPE).run.track == ("tensorboard", "wandb")


def test_tensorboard_shows_the_rows_and_the_resolved_recipe(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = parse_config(RECIPE).model_dump(mode="json")
    config["run"]["track"] = ["tensorboard"]
    tracker = open_tracker(tmp_path, config)
    for step in range(4):
        tracker.write(step, {"reward/mean": step / 4, "policy/kl": math.nan})
    tracker.close()
    events = read_events(tmp_path)
    assert [(point.step, point.value) for point in events.Scalars("reward/mean")] == [(k, k / 4) for k in range(4)]
    assert "policy/kl" not in events.Tags()["scalars"]
    [shown] = events.Tensors("config/text_summary")
    assert "type: word_problems" in shown.tensor_proto.string_val[0].decode()


def test_tensorboard_forgets_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, values in ((0, [0.0, 0.1, 0.2, 0.3]), (2, [0.5, 0.6])):
        tracker = open_tracker(tmp_path, tracked(track=["tensorboard"]), first_step=first)
        for step, value in enumerate(values, start=first + 1):
            tracker.write(step, {"reward/mean": value})
        tracker.close()
    points = [(point.step, round(point.value, 3)) for point in read_events(tmp_path).Scalars("reward/mean")]
    assert points == [(1, 0.0), (2, 0.1), (3, 0.5), (4, 0.6)]


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tracking" / "tensorboard")).Reload()


@pytest.mark.proves("F121")
def test_wandb_offline_keeps_the_rows_and_the_resolved_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = parse_config(RECIPE).model_dump(mode="json")
    config["run"]["track"] = ["wandb"]
    tracker = open_tracker(tmp_path / "run", config)
    for step in range(3):
        tracker.write(step, {"reward/mean": step / 4, "policy/kl": math.nan})
    tracker.close()
    wandb.teardown()  # its service writes on until it ends, which is when the process does
    [file] = (tmp_path / "run" / "tracking").rglob("*.wandb")
    records = list(read_wandb(file))
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row["reward/mean"]) for row in history] == [(k, k / 4) for k in range(3)]
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    logged = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert logged["data"]["type"] == "word_problems"
    assert logged["optimizer"] == config["optimizer"]
    assert run.project == "oncurve"
    assert run.run_id == (tmp_path / "run" / "tracking" / "wandb_id.txt").read_text().strip()


def read_wandb(file: Path) -> Iterator[Any]:
    """The records of a file of Weights & Biases: blocks of 32 KiB as in LevelDB's log, after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_trackio_is_called_with_the_resolved_recipe_and_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append(("log", (step, metrics)))

        def finish(self) -> None:
            calls.append(("finish", None))

    module = ModuleType("trackio")
    module.init = lambda **given: calls.append(("init", given)) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    tracker = open_tracker(tmp_path / "mine", tracked(track=["trackio"]))
    tracker.write(3, {"reward/mean": 0.5})
    tracker.close()
    config = tracked(track=["trackio"])
    init = {"project": "oncurve", "name": "mine", "resume": "allow", "config": config}
    assert calls == [("init", init), ("log", (3, {"reward/mean": 0.5})), ("finish", None)]
