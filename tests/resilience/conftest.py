"""What the tests of surviving share: a nursery of processes, a run that takes a second, and what must be equal."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from nursery import Child, Nursery

TREE: dict[str, Any] = {
    "data": {"type": "jsonl", "template": "question_only"},
    "algorithm": {"type": "grpo", "group_size": 4},
    "rollouts": {"max_completion_tokens": 12},
    "policy": {"tokens_per_microbatch": 100},
    "optimizer": {"learning_rate": 1e-2, "warmup_updates": 2},
    "evaluation": {"num_prompts": 4, "num_prompts_during": 3, "every_steps": 2},
    "run": {"steps": 8, "prompts_per_step": 3, "save_every_steps": 2, "keep_checkpoints": 3, "rollouts_every_steps": 1},
}
"""Four steps of data for eight steps, so that prompts come again."""


@pytest.fixture(scope="session")
def recipe(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A recipe file for a tiny model and tiny data, with sections changed: ``recipe(folder, run={...})``."""
    place = tmp_path_factory.mktemp("data")
    rows = [{"question": f"{number} words and {number * 7}", "answer": str(number)} for number in range(20)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "mine.py").write_text("def even(completion, answer):\n    return float(len(completion) % 2 == 0)\n")

    def make(folder: Path, *, name: str = "run", **changes: dict[str, Any]) -> Path:
        tree: dict[str, Any] = json.loads(json.dumps(TREE))
        tree["model"] = str(checkpoints["qwen2"])
        tree["rewards"] = [{"type": "custom", "function": f"{place / 'mine.py'}:even"}]
        tree["data"]["path"] = str(place / "data.jsonl")
        tree["run"] |= {"folder": str(folder), "name": name}
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return make


@pytest.fixture(scope="session")
def finished(nursery: Nursery, recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed; read only."""
    folder = tmp_path_factory.mktemp("finished")
    status, said = nursery.run("train", recipe(folder))
    assert status == 0, said
    return folder / "run"


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run as it is when it dies after step 7: checkpoints of steps 4 and 6, nothing of the end."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step_000008")
    shutil.rmtree(run / "model")
    for path in (run / "evaluations").glob("trained*"):
        path.unlink()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000004", "step_000006"]
    return run


def kill_at(
    child: Child,
    run: Path,
    *,
    step: int,
    phase: str,
    delay_seconds: float = 0.0,
    number: int = 9,
    instead: Child | None = None,
) -> bool:
    """Signal a run, or another process of it ``instead``, when its status says so, or anything later.

    False if it ended before.
    """
    order = ("measure", "sample", "grade", "refill", "train", "evaluate", "record", "save")
    place = order.index(phase)
    looks = 0
    while True:
        looks += 1
        try:
            now = json.loads((run / "status.json").read_text())
            is_there = now["pid"] == child.pid and (now["step"], order.index(now["phase"])) >= (step, place)
        except (OSError, ValueError):
            is_there = False
        if is_there:
            time.sleep(delay_seconds)
            if child.is_running():
                (instead or child).kill(number)
                return True
            return False
        if looks % 20 == 0 and not child.is_running():  # asking costs more than reading
            return False
        time.sleep(0.0005)


def untimed(path: Path) -> str:
    """Kept completions without the time that their episodes waited."""
    return re.sub(r'"waiting_seconds": [\d.e-]+', '"waiting_seconds": 0', path.read_text())


def result_of(run: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was killed."""
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    free = ("time/", "memory/", "speed/")
    sampled: dict[str, Any] = {}
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        sampled[path.name] = [json.loads(line) for line in untimed(path).splitlines()]
    weights = sorted([*(run / "model").glob("*.safetensors"), *last.glob("*.safetensors"), last / "state.json"])
    return {
        "files": {f"{path.parent.name}/{path.name}": path.read_bytes() for path in weights},
        "metrics": [{key: value for key, value in row.items() if not key.startswith(free)} for row in rows],
        "rollouts": sampled,
        "trained": untimed(run / "evaluations" / "trained.jsonl"),
        "base": untimed(run / "evaluations" / "base.jsonl"),
    }


def assert_same(run: Path, clean: Path) -> None:
    """Bit for bit the same, with a message that says where not."""
    one, other = result_of(run), result_of(clean)
    assert one["metrics"] == other["metrics"]
    assert one["rollouts"] == other["rollouts"]
    assert one["files"].keys() == other["files"].keys()
    assert [name for name in one["files"] if one["files"][name] != other["files"][name]] == []
    assert one == other


@pytest.fixture(scope="session", name="assert_same")
def _assert_same() -> Callable[[Path, Path], None]:
    return assert_same


@pytest.fixture(scope="session", name="kill_at")
def _kill_at() -> Callable[..., bool]:
    return kill_at
