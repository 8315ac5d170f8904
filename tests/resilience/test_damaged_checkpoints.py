"""Is every kind of damage to a checkpoint found before a weight is used, named, and got around?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncurve.run.checkpoint_manifest import (
    MANIFEST,
    checkpoints_in,
    newest_good,
    prune,
    quarantine,
    sweep,
    verify,
    write_checkpoint_manifest,
)
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from nursery import Nursery

FILES = (
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
DAMAGES = ("cut", "emptied", "a bit flipped", "gone", "longer", "replaced by a link")


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "emptied":
            path.write_bytes(b"")
        case "a bit flipped":
            changed = bytearray(content)
            changed[len(changed) // 3] ^= 4
            path.write_bytes(changed)
        case "gone":
            path.unlink()
        case "longer":
            path.write_bytes(content + b"\n")
        case _:
            path.unlink()
            path.symlink_to("/etc/hostname")


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """The checkpoints of steps 6 and 8 of a real run."""
    copied = Path(shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints"))
    shutil.rmtree(copied / "step_000004")
    return copied


def chosen(root: Path, *, strict: bool = False) -> tuple[str, str]:
    said: list[str] = []
    path, _ = newest_good(root, strict=strict, warn=said.append)
    return path.name, "\n".join(said)


def test_a_checkpoint_holds_exactly_these_files(root: Path) -> None:
    assert sorted(path.name for path in (root / "step_000008").iterdir()) == sorted(FILES)
    assert chosen(root) == ("step_000008", "")


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_any_damage_to_any_file_is_named_and_the_checkpoint_before_is_taken(file: str, how: str, root: Path) -> None:
    damage(root / "step_000008" / file, how)
    name, said = chosen(root)
    assert name == "step_000006"
    assert f"step_000008/{file}" in said
    assert "going on from step_000006" in said
    with pytest.raises(CheckpointError, match="--strict"):
        chosen(root, strict=True)


def test_every_single_bit_of_a_manifest_counts(root: Path) -> None:
    path = root / "step_000008" / MANIFEST
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=MANIFEST):
                verify(path.parent)


def test_the_manifest_of_another_checkpoint_is_found_out(root: Path) -> None:
    shutil.copy(root / "step_000006" / MANIFEST, root / "step_000008" / MANIFEST)
    assert chosen(root)[0] == "step_000006"
    shutil.rmtree(root / "step_000008")
    (root / "step_000006").rename(root / "step_000009")
    with pytest.raises(CheckpointError, match="belongs to step 6"):
        chosen(root)


def test_an_empty_folder_and_a_stranger_among_the_files_are_broken(root: Path) -> None:
    (root / "step_000006" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    shutil.rmtree(root / "step_000008")
    (root / "step_000008").mkdir()
    with pytest.raises(CheckpointError) as caught:
        chosen(root)
    assert "step_000008/manifest.json: cannot be read (No such file or directory)" in str(caught.value)
    assert "step_000006/pytorch_model.bin: is no part of the checkpoint" in str(caught.value)
    assert "never starts from scratch by itself" in str(caught.value)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_a_manifest_cannot_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    (tmp_path / "outside").write_text("x")
    (tmp_path / "checkpoints" / "outside").write_text("x")
    write_checkpoint_manifest(folder, {"step": 1})
    manifest = json.loads((folder / MANIFEST).read_text())
    from oncurve.run.checkpoint_manifest import _render

    facts = {key: value for key, value in manifest.items() if key != "sha256"}
    (folder / MANIFEST).write_text(_render({**facts, "files": {name: {"size": 1, "sha256": "0"}}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        verify(folder)


def test_the_model_before_training_does_not_stand_in_for_broken_checkpoints(tmp_path: Path) -> None:
    for step in (0, 4):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        (folder / "state.json").write_text("{}")
        write_checkpoint_manifest(folder, {"step": step})
    (tmp_path / "step_000004" / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"step_000004/state\.json: has 0 bytes"):
        newest_good(tmp_path, strict=False, warn=lambda text: None)
    shutil.rmtree(tmp_path / "step_000004")
    assert newest_good(tmp_path, strict=False, warn=lambda text: None)[0].name == "step_000000"


def make_checkpoints(root: Path, scores: dict[int, float | None]) -> None:
    for step, score in scores.items():
        folder = root / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        write_checkpoint_manifest(folder, {"step": step, "score": score})


@pytest.mark.proves("F123")
def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, {5: 0.1, 40: 0.7, 200: 0.3, 1000: None, 1_000_000: 0.2})
    (tmp_path / "step_notes.txt").touch()
    (tmp_path / "model").mkdir()
    prune(tmp_path, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model", "step_000040", "step_001000", "step_1000000", "step_notes.txt"]
    assert [step for step, _ in checkpoints_in(tmp_path)] == [40, 1000, 1_000_000]


def test_what_a_killed_writer_left_is_swept_and_an_old_folder_gets_its_name_back(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, {2: None, 4: None})
    (tmp_path / "step_000004").rename(tmp_path / ".step_000004.old-77")
    for name in (".step_000006.partial-77", ".step_000001.deleted-77", ".step_000002.old-78", ".mine"):
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "step_000002", "step_000004"]
    assert verify(tmp_path / "step_000004")["step"] == 4


def test_checkpoints_of_steps_that_are_done_again_are_set_aside(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, {2: None, 4: None, 6: None})
    quarantine(tmp_path, after=2)
    assert [step for step, _ in checkpoints_in(tmp_path)] == [2]
    assert sorted(path.name for path in tmp_path.glob("left*")) == [
        "left_behind_step_000004",
        "left_behind_step_000006",
    ]


def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one_to_the_same_bits(
    nursery: Nursery, stopped: Path, finished: Path, assert_same: Callable[[Path, Path], None]
) -> None:
    broken = stopped / "checkpoints" / "step_000006" / "model.safetensors"
    damage(broken, "a bit flipped")
    status, said = nursery.run("resume", stopped, "--strict")
    assert status == 6
    assert "model.safetensors: its content changed" in said
    status, said = nursery.run("resume", stopped)
    assert status == 0, said
    assert "WARNING CHECKPOINT step_000006 IS BROKEN" in said
    assert "resuming after step 4 of 8" in said
    assert "model: trained with" in said
    assert_same(stopped, finished)


def test_without_a_good_checkpoint_nothing_is_done(nursery: Nursery, stopped: Path) -> None:
    for folder in (stopped / "checkpoints").iterdir():
        damage(folder / "optimizer.safetensors", "cut")
    before = (stopped / "metrics.jsonl").read_bytes()
    status, said = nursery.run("resume", stopped)
    assert status == 6
    assert said.count("optimizer.safetensors: has") == 4, "each twice: when it is found, and in the end"
    assert "Traceback" not in said
    assert (stopped / "metrics.jsonl").read_bytes() == before
