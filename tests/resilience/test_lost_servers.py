"""Does a run whose rollout servers are killed, stopped and replaced sample what an undisturbed one does?

A completion is a function of its step's weights, its prompt and its place, wherever it is sampled. So equal rollouts at
every step mean that none was lost, none was made twice, and none came from other weights.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Child, Nursery
from safetensors.torch import load_file
from sampled import assert_same_completions, rollouts

SIZES: dict[str, dict[str, Any]] = {
    "rollouts": {"max_completion_tokens": 48},
    "evaluation": {"every_steps": 9},
    "run": {"steps": 18, "prompts_per_step": 3, "save_every_steps": 5},
}
PATIENCE = {"silent_seconds": 1.0, "push_seconds": 20.0, "request_seconds": 30.0, "gone_seconds": 60.0}


@dataclass
class Served:
    child: Child
    url: str

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.child.kill(number)


@pytest.fixture
def serve(nursery: Nursery, checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[Callable[[], Served]]:
    """Start a server that leaves its address in a registry."""
    children: list[Child] = []

    def start() -> Served:
        child = nursery.start("serve", checkpoints["qwen2"], "--port", 0, "--registry", tmp_path / "registry")
        children.append(child)
        wait_for(lambda: child.log.exists() and ("serving on" in child.output or not child.is_running()))
        found = re.search(r"serving on (\S+)", child.output)
        assert found, child.output
        return Served(child, found[1])

    yield start
    for child in children:
        if child.is_running():
            child.kill(signal.SIGKILL)
            child.wait()


def wait_for(is_so: Callable[[], Any], seconds: float = 100.0, *, told: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, told()
        time.sleep(0.002)


def reaches(run: Path, step: int, phase: str) -> bool:
    """The run is in this phase of this step, or in a later step."""
    try:
        now = json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return False
    return now["step"] > step or (now["step"] == step and now["phase"] == phase)


def on_servers(tmp_path: Path, **deadlines: float) -> dict[str, Any]:
    return {
        **SIZES["rollouts"],
        "type": "servers",
        "registry": str(tmp_path / "registry"),
        "deadlines": PATIENCE | deadlines,
    }


def assert_as_undisturbed(run: Path, clean: Path) -> None:
    """The same completions at every step, and the same weights up to rounding: sums come in other orders."""
    assert_same_completions(run, clean)
    assert len(rollouts(run)) == SIZES["run"]["steps"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["completion/max_staleness_steps"] for row in rows if row["step"]} == {0.0}
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, clean))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def clean(nursery: Nursery, recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    status, said = nursery.run("train", recipe(folder, **SIZES))
    assert status == 0, said
    return folder / "run"


@pytest.mark.nightly
@pytest.mark.proves("F65")
def test_a_run_with_two_servers_is_the_run_without_any(
    nursery: Nursery, recipe: Callable[..., Path], serve: Callable[[], Served], clean: Path, tmp_path: Path
) -> None:
    serve(), serve()
    status, said = nursery.run("train", recipe(tmp_path, **SIZES | {"rollouts": on_servers(tmp_path)}))
    assert status == 0, said
    assert_as_undisturbed(tmp_path / "run", clean)
    assert not list(tmp_path.glob("weights-*")), "published weights are removed"


@pytest.mark.nightly
@pytest.mark.proves("F72")
def test_a_trainer_that_is_killed_and_resumed_sends_all_weights_once(
    nursery: Nursery, recipe: Callable[..., Path], serve: Callable[[], Served], tmp_path: Path
) -> None:
    server = serve()
    rollouts_section = on_servers(tmp_path) | {"deltas": {}, "weights_address": "127.0.0.1:0"}
    changes = {"rollouts": rollouts_section, "optimizer": {"learning_rate": 1e-5, "warmup_updates": 0}}
    trainer = nursery.start("train", recipe(tmp_path, **SIZES | changes))
    wait_for(lambda: reaches(tmp_path / "run", 8, "train") or not trainer.is_running(), told=lambda: trainer.output)
    trainer.kill(signal.SIGKILL)
    trainer.wait()
    status, said = nursery.run("resume", tmp_path / "run")
    assert (status, server.child.is_running()) == (0, True), said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sent = [row["weights/sent_fraction"] for row in rows if "weights/sent_fraction" in row]
    assert len(sent) == SIZES["run"]["steps"]
    assert sent[0] == 1.0
    assert [share for share in sent[1:] if share > 0.5] == [1.0], "of the first step of the resumed trainer"
    assert not list(tmp_path.rglob("weights-*")), "published weights are removed"


STEADY = {"epsilon": 1e-5}
"""Far above rounding: with 1e-8 Adam makes a whole step of a gradient that is only the rounding of a sum."""


@pytest.mark.nightly
def test_two_trainers_with_servers_make_the_run_of_one_alone(
    nursery: Nursery, recipe: Callable[..., Path], serve: Callable[[], Served], tmp_path: Path
) -> None:
    sizes = SIZES | {"run": {"steps": 6, "prompts_per_step": 3, "save_every_steps": 0}, "optimizer": STEADY}
    status, said = nursery.run("train", recipe(tmp_path / "alone", **sizes))
    assert status == 0, said
    first, _ = serve(), serve()
    both = recipe(tmp_path / "both", **sizes | {"rollouts": on_servers(tmp_path)})
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    trainers = nursery.python(*torchrun, "-m", "oncurve", "train", both)
    run = tmp_path / "both" / "run"
    wait_for(lambda: reaches(run, 2, "sample") or not trainers.is_running(), told=lambda: trainers.output)
    first.kill()
    assert trainers.wait() == 0, trainers.output
    assert [sampled(run, step) for step in range(1, 7)] == [
        sampled(tmp_path / "alone" / "run", step) for step in range(1, 7)
    ]
    ours, theirs = (load_file(place / "model" / "model.safetensors") for place in (run, tmp_path / "alone" / "run"))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-4, rtol=0)
    assert json.loads((run / "manifest.json").read_text())["processes"] == 2


def sampled(run: Path, step: int) -> list[tuple[Any, ...]]:
    """The completions of a step and their rewards; sums over two processes round otherwise than over one."""
    lines = (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [
        (one["text"], one["num_tokens"], one["finish_reason"], one["policy_version"], one["reward"])
        for line in lines
        for one in json.loads(line)["completions"]
    ]


@pytest.mark.proves("F67", "D4")
@pytest.mark.nightly
def test_a_run_goes_on_as_if_nothing_had_happened_to_its_servers(
    nursery: Nursery, recipe: Callable[..., Path], serve: Callable[[], Served], clean: Path, tmp_path: Path
) -> None:
    run, first, second = tmp_path / "run", serve(), serve()
    trainer = nursery.start("train", recipe(tmp_path, **SIZES | {"rollouts": on_servers(tmp_path)}))

    def at(step: int, phase: str = "sample") -> None:
        wait_for(lambda: reaches(run, step, phase) or not trainer.is_running(), told=lambda: trainer.output)
        assert trainer.is_running(), trainer.output

    at(2)
    first.kill()  # while it samples
    at(4)
    second.kill(signal.SIGSTOP)  # nobody answers, and nobody refuses
    third = serve()  # joins with the base's weights
    at(6)
    second.kill(signal.SIGCONT)  # its answers are late, and its weights old
    at(8)
    third.kill(signal.SIGSTOP)
    at(9, "train")
    third.kill()  # its update was under way
    second.kill()
    time.sleep(1.0)  # all connections are refused
    fourth = serve()
    at(13)
    fourth.kill(signal.SIGTERM)  # told to go: ends what it has
    fifth = serve()
    assert fourth.child.wait() == 0, fourth.child.output
    assert trainer.wait() == 0, trainer.output
    assert_as_undisturbed(run, clean)
    assert fifth.child.is_running()


@pytest.mark.proves("F129")
@pytest.mark.nightly
def test_a_run_without_servers_saves_and_ends_and_goes_on_later(
    nursery: Nursery, recipe: Callable[..., Path], serve: Callable[[], Served], clean: Path, tmp_path: Path
) -> None:
    run, server = tmp_path / "run", serve()
    changes = SIZES | {"rollouts": on_servers(tmp_path, gone_seconds=1.0)}
    trainer = nursery.start("train", recipe(tmp_path, **changes))
    wait_for(lambda: reaches(run, 13, "sample"))
    server.kill()
    assert trainer.wait() == 5, trainer.output
    assert "no rollout server was ready" in " ".join(trainer.output.split())
    assert server.url in trainer.output
    saved = sorted(path.name for path in (run / "checkpoints").glob("step_*"))[-1]
    assert saved == f"step_{json.loads((run / 'status.json').read_text())['step']:06d}", "the last whole step is saved"
    serve()
    status, said = nursery.run("resume", run)
    assert status == 0, said
    assert_as_undisturbed(run, clean)
