"""Is a snapshot of one step and only one, and does a policy come back from it bit for bit?"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import oncurve.run.checkpointer as saving
from oncurve.algorithm.presets import build
from oncurve.data.curriculum import Curriculum
from oncurve.policy.distributed import Processes
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
from oncurve.run.checkpointer import Checkpointer, best_interval
from oncurve.run.guards import Guards
from oncurve.run.settings import RunSection
from oncurve.run.state import SnapshotRoom, capture, checksum, from_plain, restore, to_plain, write
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from oncurve.core.records import Prompt
    from oncurve.policy.trained_policy import TrainedPolicy

MakePolicy = Callable[..., "TrainedPolicy"]


def step(policy: TrainedPolicy, *, seed: int) -> None:
    """One update with a gradient that no model would give."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    policy.update()


def state_of(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    return {**{k: v.clone() for k, v in policy.model.state_dict().items()}, **policy.backend.optimizer_tensors()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.proves("F124", "D42")
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_policy_comes_back_bit_for_bit_and_goes_on_alike(
    architecture: str, make_policy: MakePolicy, tmp_path: Path
) -> None:
    policy: TrainedPolicy = make_policy(architecture)
    for number in range(3):
        step(policy, seed=number)
    snapshot = capture(
        policy,
        step=3,
        state={"num_updates": policy.num_updates, "num_scheduled": policy.num_scheduled},
        facts={"score": None},
    )
    folder = write(snapshot, policy, tmp_path)
    assert folder == tmp_path / "step_000003"
    fresh: TrainedPolicy = make_policy(architecture)
    restore(fresh, folder, verify(folder))
    assert fresh.num_updates == 3
    assert_equal(state_of(fresh), state_of(policy))
    for one in (policy, fresh):
        step(one, seed=9)
    assert_equal(state_of(fresh), state_of(policy))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("can").input_ids == [66, 256]
    assert_equal(dict(loaded.state_dict()), snapshot.weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_snapshot_that_memory_is_too_short_for_lies_in_a_file_without_a_name(
    is_full: bool, make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: TrainedPolicy = make_policy("qwen2")
    step(policy, seed=0)
    reserved: list[int] = []

    def reserve(descriptor: int, start: int, size: int) -> None:
        reserved.append(size)
        if is_full:
            raise OSError(28, "No space left on device")
        os.truncate(descriptor, size)

    monkeypatch.setattr("oncurve.run.state.os.posix_fallocate", reserve)
    kept: dict[str, Any] = {"step": 1, "state": {}, "facts": {}}
    half = sum(tensor.nbytes for tensor in capture(policy, **kept).optimizer.values()) / 2
    assert not reserved
    open_before = len(os.listdir("/proc/self/fd"))
    shifted = capture(policy, room=SnapshotRoom(half, tmp_path), **kept)
    if not is_full:
        assert len(os.listdir("/proc/self/fd")) == open_before
    usual = capture(policy, **kept)
    assert 0 < len(reserved) < len(shifted.optimizer) + len(shifted.weights or {})
    assert not list(tmp_path.iterdir())
    assert_equal({**(shifted.weights or {}), **shifted.optimizer}, {**(usual.weights or {}), **usual.optimizer})


def test_weights_that_are_frozen_are_not_written_again(
    make_policy: MakePolicy, tiny_model: Any, tmp_path: Path
) -> None:
    def half_frozen(seed: int = 0) -> TrainedPolicy:
        model = tiny_model("llama", seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        return make_policy(model)

    policy = half_frozen()
    step(policy, seed=1)
    folder = write(capture(policy, step=1, state={"num_updates": 1, "num_scheduled": 1}, facts={}), policy, tmp_path)
    assert folder is not None
    names = {path.name for path in folder.iterdir()}
    assert names == {"manifest.json", "state.json", "optimizer.safetensors", "trained.safetensors"}
    assert all("q_proj" in name for name in load_file(folder / "trained.safetensors"))
    fresh = half_frozen()
    restore(fresh, folder, verify(folder))
    assert_equal(state_of(fresh), state_of(policy))
    with pytest.raises(CheckpointError, match="trains other weights"):
        restore(make_policy("llama"), folder, verify(folder))


@pytest.mark.proves("F16")
def test_a_reference_that_moves_is_saved_and_one_that_stands_still_is_not(
    make_policy: MakePolicy, tiny_model: Any, tmp_path: Path
) -> None:
    policy: TrainedPolicy = make_policy("qwen2", reference=tiny_model("qwen2").requires_grad_(False))
    step(policy, seed=1)
    policy.move_reference(0.3)
    for moves in (False, True):
        taken = capture(policy, step=1, state={"num_updates": 1, "num_scheduled": 1}, facts={}, moves_reference=moves)
        folder = write(taken, policy, tmp_path / str(moves))
        assert folder is not None
        assert (folder / "reference.safetensors").exists() == moves
    fresh: TrainedPolicy = make_policy("qwen2", reference=tiny_model("qwen2").requires_grad_(False))
    restore(fresh, folder, verify(folder))
    assert fresh.reference is not None
    assert policy.reference is not None
    assert_equal(dict(fresh.reference.state_dict()), dict(policy.reference.state_dict()))


def test_a_checkpoint_of_another_model_does_not_fit(make_policy: MakePolicy, tmp_path: Path) -> None:
    policy: TrainedPolicy = make_policy("llama")
    folder = write(capture(policy, step=1, state={"num_updates": 0, "num_scheduled": 0}, facts={}), policy, tmp_path)
    assert folder is not None
    with pytest.raises(CheckpointError, match="does not fit the recipe's model"):
        restore(make_policy("qwen2"), folder, verify(folder))


def test_what_all_processes_hold_alike_is_written_by_the_first(make_policy: MakePolicy, tmp_path: Path) -> None:
    policy = make_policy()
    snapshot = capture(policy, step=1, state={"num_updates": 0, "num_scheduled": 0}, facts={})
    policy.processes = Processes(rank=1, count=2)
    assert write(snapshot, policy, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def make_saver(
    make_policy: MakePolicy, make_prompts: Callable[..., list[Prompt]], tmp_path: Path
) -> Callable[..., Checkpointer]:
    def make(policy: TrainedPolicy | None = None, **options: Any) -> Checkpointer:
        keys = {name: options.pop(name) for name in RunSection.model_fields.keys() & options.keys()}
        settings = {"section": RunSection(**{"save_every_steps": 1} | keys), "facts": {"world_size": 1}} | options
        algorithm = build("grpo", group_size=2, max_completion_tokens=4)
        data = Curriculum(make_prompts("a", "b"), 1)
        return Checkpointer(policy or make_policy(), algorithm, data, Guards(), tmp_path / "checkpoints", **settings)

    return make


def test_what_is_written_beside_the_training_never_mixes_two_steps(
    make_saver: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held up until the weights have moved twice."""
    moved, order = threading.Event(), []
    original = saving.write

    def slow(snapshot: Any, *args: Any, **named: Any) -> Any:
        moved.wait(20)
        order.append(snapshot.step)
        return original(snapshot, *args, **named)

    monkeypatch.setattr(saving, "write", slow)
    saver = make_saver()
    step(saver.policy, seed=1)
    expected = {name: tensor.clone() for name, tensor in state_of(saver.policy).items()}
    saver.mark(1)
    saver.save()
    assert saver.last_saved == 1
    step(saver.policy, seed=2)
    step(saver.policy, seed=3)
    moved.set()
    saver.mark(3)
    saver.save()  # waits for the first
    assert order[0] == 1
    saver.wait()
    folder = saver.root / "step_000001"
    verify(folder)
    saved = {
        **dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()),
        **load_file(folder / "optimizer.safetensors"),
    }
    assert_equal(saved, expected)
    assert json.loads((folder / "state.json").read_text())["num_updates"] == 1


def test_what_training_left_in_memory_goes_back_before_a_snapshot_takes_as_much_again(
    make_saver: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(saving, "give_back", lambda **options: told.append(options))
    monkeypatch.setattr(saving, "capture", lambda *given, **named: told.append("snapshot") or capture(*given, **named))
    saver = make_saver()
    saver.mark(1)
    saver.save()
    saver.wait()
    assert told == [{"always": True}, "snapshot"]


def test_a_failed_write_stops_or_is_said_and_tried_again(make_saver: Callable[..., Checkpointer]) -> None:
    said: list[str] = []
    saver = make_saver(on_save_error="continue", notify=said.append)
    saver.root.write_text("in the way")
    saver.mark(1)
    saver.after_step(1, {})
    saver.wait()
    assert "NOT SAVED" in said[0]
    assert saver.last_saved == -1
    saver.root.unlink()
    saver.mark(2)
    saver.after_step(2, {})
    saver.wait()
    assert verify(saver.root / "step_000002")["step"] == 2
    strict = make_saver(save_every_steps=2)
    strict.root = saver.root / "step_000002" / "state.json"
    strict.mark(2)
    strict.after_step(2, {})
    with pytest.raises(CheckpointError, match=r"cannot be written.*run.on_save_error=continue"):
        strict.wait()


def test_a_step_that_has_moved_the_weights_cannot_be_saved_as_the_one_before(
    make_saver: Callable[..., Checkpointer],
) -> None:
    saver = make_saver()
    saver.mark(1)
    step(saver.policy, seed=1)
    assert not saver.save_marked()
    saver.mark(2)
    assert saver.save_marked()
    assert [path.name for path in saver.root.iterdir()] == ["step_000002"]


@pytest.mark.proves("F125")
def test_the_best_checkpoint_by_held_out_score_stays(make_saver: Callable[..., Checkpointer]) -> None:
    saver = make_saver(keep_checkpoints=1)
    for number, score in enumerate((0.2, 0.9, math.nan, 0.3), start=1):
        saver.mark(number)
        saver.after_step(number, {"evaluation/correct_fraction": score})
    saver.wait()
    assert sorted(path.name for path in saver.root.iterdir()) == ["step_000002", "step_000004"]


def test_a_checkpoint_is_due_at_its_interval_with_score_and_kl_and_is_taken_once(
    make_saver: Callable[..., Checkpointer],
) -> None:
    saver = make_saver(save_every_steps=2, keep_checkpoints=9)
    assert not saver.save_marked()
    metrics = {"policy/kl": 0.5, "evaluation/mean_reward": 0.25}
    unknown = {"policy/kl": math.nan}
    for number, more in ((1, {}), (2, {}), (4, {"evaluation/correct_fraction": 0.75}), (6, unknown)):
        saver.mark(number)
        assert (saver.after_step(number, metrics | more).keys() == {"time/save_seconds"}) == (number > 1)
    taken = saver._thread
    assert saver.save_marked()
    assert taken is not None
    assert not taken.is_alive()
    found = {path.name: verify(path) for path in sorted(saver.root.iterdir())}
    assert [(name, facts["score"]) for name, facts in found.items()] == [
        ("step_000002", 0.25), ("step_000004", 0.75), ("step_000006", 0.25)
    ]  # fmt: skip
    assert (found["step_000002"]["kl"], found["step_000002"]["weights"], found["step_000002"]["world_size"]) == (
        0.5, "whole", 1
    )  # fmt: skip
    assert found["step_000006"]["kl"] is None


def test_a_saver_puts_back_what_it_marked_but_what_a_change_made_meaningless(
    make_saver: Callable[..., Checkpointer],
) -> None:
    saver = make_saver()
    saver.policy.tokens_per_microbatch, saver.guards.num_silent = 77, 4
    saver.mark(3, pending={"reward/mean": 0.5})
    step(saver.policy, seed=1)
    saver.mark(4, pending={"reward/mean": 0.5})
    saver.save()
    saver.wait()
    folder = saver.root / "step_000004"
    for fresh, tokens in ((frozenset(), 77), (frozenset({"tokens_per_microbatch", "entropy", "curriculum"}), 5)):
        other = make_saver()
        other.policy.tokens_per_microbatch = 5
        state = other.load(folder, verify(folder), fresh=fresh)
        assert state["pending"] == {"reward/mean": 0.5}
        assert (other.policy.tokens_per_microbatch, other.guards.num_silent, other.last_saved) == (tokens, 4, 4)
        assert (other.policy.num_updates, other.policy.num_scheduled) == (1, 1)


@pytest.mark.parametrize(
    ("step_seconds", "interval", "written", "said"),
    [
        (2.0, 50, 1.0, "run.save_every_steps=7 is optimal (now 50: a failure costs at most 100 s)"),
        (2.0, 50, 41.0, "run.save_every_steps=21 is optimal"),
        (1.2, 50, 1.0, "run.save_every_steps=11 is optimal (now 50: a failure costs at most 60 s)"),
        (1.19, 50, 1.0, None),
        (30.0, 2, 60.0, None),
        (30.0, 2, 61.0, "run.save_every_steps=3 is optimal"),
        (2.0, 50, 0.0, None),
        (0.0, 50, 1.0, None),
    ],
)
def test_an_interval_is_proposed_where_it_is_worth_a_word(
    step_seconds: float, interval: int, written: float, said: str | None, make_saver: Callable[..., Checkpointer]
) -> None:
    told: list[str] = []
    saver = make_saver(save_every_steps=interval, notify=told.append)
    saver._thread, saver._write_seconds = threading.Thread(), written
    for _ in range(2):
        saver._propose(step_seconds, 1e-4)
    assert [said in text for text in told if said] == ([] if said is None else [True])
    assert len(told) == (said is not None)


def test_the_interval_that_loses_least_time_follows_young() -> None:
    assert best_interval(step_seconds=10, save_seconds=50, failure_every_seconds=3600) == 60
    assert best_interval(step_seconds=1e6, save_seconds=1) == 1
    assert best_interval(step_seconds=0, save_seconds=1) == 1


def test_the_proposal_is_made_once_and_from_measured_times(make_saver: Callable[..., Checkpointer]) -> None:
    said: list[str] = []
    saver = make_saver(notify=said.append, save_every_steps=50)
    for number in range(50, 250, 50):
        saver.mark(number)
        saver.after_step(number, {"time/step_seconds": 2.0})
        saver.wait()
    assert sum("run.save_every_steps=" in text for text in said) == 1


def test_small_things_come_back_as_they_were() -> None:
    state = {"a": math.inf, "b": [1.5, -math.inf, None], "c": {"1": True}, "d": 0.1 + 0.2}
    assert from_plain(json.loads(json.dumps(to_plain(state), allow_nan=False))) == state
    assert math.isnan(from_plain(to_plain(math.nan)))


def test_a_checksum_depends_on_every_name_shape_type_and_bit() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    first = checksum(tensors.items())
    assert first == checksum(reversed(list(tensors.items())))
    others = [
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": torch.zeros(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)},
        {"a": torch.zeros(2, 3), "b": torch.ones(1) + 2**-23},
    ]
    assert len({first, *(checksum(other.items()) for other in others)}) == 5
    assert checksum([]) is None


def test_nothing_is_printed_while_saving(make_saver: Callable[..., Checkpointer]) -> None:
    screen = Console(file=io.StringIO())
    saver = make_saver(notify=screen.print)
    saver.mark(1)
    saver.save()
    saver.wait()
    assert screen.file.getvalue() == ""  # type: ignore[attr-defined]


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
