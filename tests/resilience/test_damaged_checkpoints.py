"""Is every kind of damage to a checkpoint found before a weight is used, named, and got around?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncurve.run.checkpoint_manifest import (
    MANIFEST,
    newest_good,
    verify,
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
