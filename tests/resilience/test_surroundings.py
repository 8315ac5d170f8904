"""What does a run do on a full disk, in a folder that is not its own, and with another recipe than it had?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from oncurve.run.checkpoint_manifest import verify

if TYPE_CHECKING:
    from nursery import Nursery

TOO_SMALL = 60_000
"""Bytes: more than any file of a tiny run but its weights."""


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_cannot_save_ends_with_a_message_and_keeps_the_checkpoint_before(
    nursery: Nursery, stopped: Path, finished: Path, assert_same: Callable[[Path, Path], None]
) -> None:
    status, said = nursery.run("resume", stopped, file_limit=TOO_SMALL)
    assert status == 6
    assert "step_000008: the checkpoint cannot be written" in said
    assert "Older ones are untouched" in said
    assert "Traceback" not in said, said[-1500:]
    assert verify(stopped / "checkpoints" / "step_000006")["step"] == 6
    assert [path.name for path in (stopped / "checkpoints").glob(".*")] == []
    status, said = nursery.run("resume", stopped)
    assert status == 0, said
    assert_same(stopped, finished)


def test_a_run_that_may_go_on_without_saving_says_so_each_time(
    nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    path = recipe(tmp_path, run={"on_save_error": "continue", "steps": 5})
    status, said = nursery.run("train", path, file_limit=TOO_SMALL)
    assert said.count("NOT SAVED") == 3, "after steps 2 and 4, and at the end"
    assert status == 6, "the final model cannot be written either, and that is no checkpoint to do without"
    assert "model: the checkpoint cannot be written" in said
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4, 5]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_one_message(
    nursery: Nursery, recipe: Callable[..., Path], small_disk: Path, tmp_path: Path
) -> None:
    path = recipe(
        tmp_path, run={"folder": str(small_disk), "save_every_steps": 1, "keep_checkpoints": 100, "steps": 40}
    )
    status, said = nursery.run("train", path)
    assert status == 6, said
    assert "No space left on device" in said
    assert "Traceback" not in said, said[-1500:]
    good = [verify(place)["step"] for place in (small_disk / "run" / "checkpoints").glob("step_*")]
    assert good


@pytest.fixture
def open_to_all(recipe: Callable[..., Path], checkpoints: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A recipe whose data, and model where it is ``readable``, another user may read."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    def make(*, readable: bool) -> Path:
        model = Path(shutil.copytree(checkpoints["qwen2"], tmp_path / "tiny"))
        for file in model.iterdir():
            file.chmod(0o644)
        path = recipe(tmp_path, run={"folder": str(tmp_path / "closed")})
        tree = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(tree | {"model": str(model)}))
        (tmp_path / "closed").mkdir(mode=0o755)
        for folder in (tmp_path, *tmp_path.parents[:3], Path(tree["data"]["path"]).parent):
            folder.chmod(0o755)
        model.chmod(0o755 if readable else 0o700)
        return path

    return make


NOBODY: dict[str, Any] = {"user": 65534, "env": {"HOME": "/tmp", "HF_HOME": "/tmp"}}


def test_a_folder_that_may_not_be_written_is_a_message(
    nursery: Nursery, open_to_all: Callable[..., Path], tmp_path: Path
) -> None:
    status, said = nursery.run("train", open_to_all(readable=True), **NOBODY)
    assert "Traceback" not in said, said[-1500:]
    assert status in (2, 6), said
    assert str(tmp_path / "closed") in said.replace("\n", ""), "it is this folder that is told about"
    assert list((tmp_path / "closed").iterdir()) == []


def test_a_model_that_may_not_be_read_is_a_message(
    nursery: Nursery, open_to_all: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = open_to_all(readable=False)
    (tmp_path / "closed").chmod(0o777)  # the run could be written, so that the model is what is wrong
    status, said = nursery.run("train", recipe, **NOBODY)
    assert "Traceback" not in said, said[-1500:]
    assert status in (2, 6), said
    assert str(tmp_path / "tiny") in said.replace("\n", "")


def test_a_recipe_that_changed_is_shown_and_refused(nursery: Nursery, stopped: Path) -> None:
    before = (stopped / "metrics.jsonl").read_bytes()
    status, said = nursery.run("resume", stopped, "algorithm.group_size=6", "run.keep_checkpoints=5")
    assert status == 2
    assert "algorithm.group_size: 4 -> 6" in said
    assert "keep_checkpoints" not in said, "a key that changes no number may change"
    assert "--allow-change" in said
    assert (stopped / "metrics.jsonl").read_bytes() == before


def test_data_that_changed_are_shown_and_refused(nursery: Nursery, stopped: Path, tmp_path: Path) -> None:
    config = (stopped / "config.yaml").read_text()
    [line] = [line for line in config.splitlines() if line.strip().startswith("path:") and line.endswith("data.jsonl")]
    original = Path(line.split(": ")[1])
    text = original.read_text()
    try:
        original.write_text(text.replace("3 words", "3 apples"))
        status, said = nursery.run("resume", stopped)
    finally:
        original.write_text(text)
    assert status == 2
    assert "the training prompts" in said


def test_a_change_that_is_allowed_goes_on_and_is_remembered(
    nursery: Nursery, stopped: Path, kill_at: Callable[..., bool]
) -> None:
    child = nursery.start("resume", stopped, "run.steps=12", "optimizer.learning_rate=0.001", "--allow-change")
    assert kill_at(child, stopped, step=9, phase="train"), child.output
    child.wait()
    status, said = nursery.run("resume", stopped)
    assert status == 0, said
    rows = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[6]["policy/learning_rate"] == 0.01
    assert rows[7]["policy/learning_rate"] == 0.001
    status, said = nursery.run("resume", stopped)
    assert status == 2
    assert "this run is finished" in said


def test_missing_records_and_a_missing_recipe_are_said(nursery: Nursery, stopped: Path, finished: Path) -> None:
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]) + '{"step": 9, "rew')
    (stopped / "config.yaml").unlink()
    status, said = nursery.run("resume", stopped)
    assert status == 0, said
    assert "no record of 1 step, done already, such as 3" in said
    assert "the recipe in the checkpoint is taken" in said
    assert steps_of(stopped) == [0, 1, 2, 4, 5, 6, 7, 8]
    ours, clean = (path / "model" / "model.safetensors" for path in (stopped, finished))
    assert ours.read_bytes() == clean.read_bytes()


def test_a_run_that_is_going_on_is_not_resumed_and_its_owner_is_named(
    nursery: Nursery, recipe: Callable[..., Path], kill_at: Callable[..., bool], tmp_path: Path
) -> None:
    child = nursery.start("train", recipe(tmp_path, run={"steps": 200}))
    run = tmp_path / "run"
    while not (run / "status.json").exists() and child.is_running():
        pass
    status, said = nursery.run("resume", run)
    assert status == 2
    assert f"process {child.pid} on " in said
    child.kill()
    child.wait()
    status, said = nursery.run("resume", run, "run.steps=1", "--allow-change")
    assert f"Previous process {child.pid}" in said


@pytest.mark.proves("D46")
def test_no_key_of_recipe_environment_or_command_line_is_written_down(
    nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    token, password = "hf_" + "a1B2" * 8, "correct horse battery"
    path = recipe(tmp_path, run={"steps": 1})
    path.write_text(path.read_text() + f"# {password} is in the environment\n")
    status, said = nursery.run("train", path, f"policy.revision={token}", env={"MY_SECRET": password})
    assert status == 0, said
    texts = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(texts) > 10
    assert not any(token.encode() in text or password.encode() in text for text in texts)
    assert any(b"[hidden]" in text for text in texts)


def test_no_pickle_is_written_anywhere(finished: Path) -> None:
    names = {path.suffix for path in finished.rglob("*") if path.is_file()}
    assert not names & {".pt", ".pth", ".bin", ".pkl", ".ckpt"}
    for path in finished.rglob("*"):
        if path.is_file():
            start = path.read_bytes()[:4]
            assert start[:2] != b"\x80\x04", path
            assert start != b"PK\x03\x04", path


@pytest.mark.proves("F128")
def test_a_run_may_be_moved_before_it_goes_on(
    nursery: Nursery, stopped: Path, finished: Path, assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    moved = Path(shutil.move(stopped, tmp_path / "elsewhere"))
    status, said = nursery.run("resume", moved)
    assert status == 0, said
    assert_same(moved, finished)


@pytest.mark.proves("F127")
def test_a_run_that_leaves_its_reference_goes_back_and_raises_the_coefficient(
    nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {"on_kl_alarm": "return", "save_every_steps": 1, "keep_checkpoints": 20, "steps": 10}
    path = recipe(tmp_path, algorithm={"kl_coef": 0.001}, optimizer={"learning_rate": 0.003}, run=changes)
    status, said = nursery.run("train", path)
    assert status in (0, 7), said
    assert "Going back to step" in said
    assert "Raise algorithm.kl_coef" in said
    assert "algorithm.kl_coef: 0.001 -> 0.002" in said
    assert "kl_coef: 0.002" in (tmp_path / "run" / "config.yaml").read_text() or "kl_coef=0.004" in said
    steps = steps_of(tmp_path / "run")
    assert steps == list(range(len(steps)))
    if status == 7:
        assert said.count("Going back to step") == 3, "three times are enough to see that it does not help"
