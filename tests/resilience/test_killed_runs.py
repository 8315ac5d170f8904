"""Does a run that was killed anywhere end with the same bits as one that was not?"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lanes import gate

if TYPE_CHECKING:
    from nursery import Nursery

VARIANTS: dict[str, dict[str, Any]] = {
    "at three places": {},
    "plain": {},
    "several updates, dynamic sampling, a curriculum, a reference that moves": {
        "data": {"retire_above": 0.9, "prefer_half_solved": True},
        "algorithm": {"kl_coef": 0.05, "reference": "average", "reference_share": 0.5, "entropy_target": 0.5},
        "run": {"completions_per_update": 6, "refill_rounds": 2, "save_every_steps": 3},
    },
    "an adapter with dropout and a reference": {
        "algorithm": {"kl_coef": 0.05},
        "policy": {"lora": {"rank": 2, "alpha": 4.0, "dropout": 0.2}},
        "run": {"completions_per_update": 6},
    },
    "the sampler of transformers": {"rollouts": {"type": "transformers"}},
    "episodes in an environment": {
        "rollouts": {
            "environments": {"echo": f"{Path(__file__).with_name('echoing.py')}:Echoing"},
            "stop": ["a", "e", " "],
        },
    },
}
KILLS: dict[str, tuple[tuple[int, str], ...]] = {
    "at three places": ((1, "sample"), (3, "train"), (6, "save")),
    "plain": (
        (0, "measure"),
        (1, "sample"),
        (2, "grade"),
        (3, "train"),
        (3, "evaluate"),
        (4, "record"),
        (6, "save"),
        (8, "measure"),
    ),
    "several updates, dynamic sampling, a curriculum, a reference that moves": (
        (1, "refill"),
        (2, "train"),
        (4, "train"),
        (6, "save"),
    ),
    "an adapter with dropout and a reference": ((1, "train"), (4, "save")),
    "the sampler of transformers": ((3, "sample"),),
    "episodes in an environment": ((0, "measure"), (1, "sample"), (3, "sample"), (5, "sample"), (6, "train")),
}
"""Steps done and phase of each kill; the run is resumed after each."""


@pytest.mark.proves("F124", "D14")
@pytest.mark.parametrize("variant", gate(VARIANTS, "at three places"))
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    variant: str,
    nursery: Nursery,
    recipe: Callable[..., Path],
    kill_at: Callable[..., bool],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    changes = VARIANTS[variant]
    status, said = nursery.run("train", recipe(tmp_path / "clean", **changes))
    assert status == 0, said
    run, draw = tmp_path / "killed" / "run", random.Random(variant)
    child = nursery.start("train", recipe(tmp_path / "killed", **changes))
    for step, phase in KILLS[variant]:
        was_killed = kill_at(child, run, step=step, phase=phase, delay_seconds=draw.random() * 0.02)
        assert was_killed, child.output
        assert child.wait() == -9
        child = nursery.start("resume", run)
    assert child.wait() == 0, child.output
    assert_same(run, tmp_path / "clean" / "run")
    assert [path.name for path in (run / "checkpoints").glob(".*")] == [], "nothing half written stays"


@pytest.mark.nightly
def test_a_run_killed_while_it_writes_a_checkpoint_takes_the_one_before(
    nursery: Nursery,
    recipe: Callable[..., Path],
    finished: Path,
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    child = nursery.start("train", recipe(tmp_path))
    run = tmp_path / "run"
    while child.is_running() and not list((run / "checkpoints").glob(".step_000004.partial-*")):
        time.sleep(0.0002)
    child.kill()
    assert child.wait() == -9
    assert not (run / "checkpoints" / "step_000006").exists()
    status, said = nursery.run("resume", run)
    assert status == 0, said
    assert_same(run, finished)


WRITING = {
    "before anything is written": ("oncurve.run.state", "_write_share", 3),
    "between two files": ("oncurve.run.state", "save_file", 2),
    "before the manifest": ("oncurve.run.state", "write_checkpoint_manifest", 3),
    "before the rename": ("oncurve.run.state", "publish", 3),
    "before old ones are deleted": ("oncurve.run.checkpointer", "prune", 3),
}
"""Module, function and call at which a run dies: of steps 0, 2, 4 and so on, step 4 is the third."""


@pytest.mark.parametrize("moment", gate(WRITING, "before the rename"))
def test_a_run_killed_at_any_moment_of_writing_a_checkpoint_ends_with_the_same_bits(
    moment: str,
    nursery: Nursery,
    recipe: Callable[..., Path],
    finished: Path,
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    child = nursery.start("train", recipe(tmp_path), die_in=WRITING[moment])
    assert child.wait() == -9, child.output
    run = tmp_path / "run"
    whole = [path.name for path in sorted((run / "checkpoints").glob("step_*"))]
    assert whole[-1] == ("step_000004" if "deleted" in moment else "step_000002")
    status, said = nursery.run("resume", run)
    assert status == 0, said
    assert_same(run, finished)
    assert [path.name for path in (run / "checkpoints").glob(".*")] == []


def test_a_run_without_checkpoints_is_not_started_again_by_itself(
    nursery: Nursery, recipe: Callable[..., Path], kill_at: Callable[..., bool], tmp_path: Path
) -> None:
    child = nursery.start("train", recipe(tmp_path, run={"save_every_steps": 0}))
    assert kill_at(child, tmp_path / "run", step=2, phase="sample")
    child.wait()
    status, said = nursery.run("resume", tmp_path / "run")
    assert status == 6
    assert "holds no good checkpoint" in said
    assert "oncurve train" in said
    rows = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2], "nothing was cut back"


def test_no_sample_is_stale_and_no_prompt_comes_again_before_all_came(finished: Path) -> None:
    """The killed runs above have the same records, bit for bit."""
    groups = [
        json.loads(line)
        for path in sorted((finished / "rollouts").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(groups) == 24
    assert all(c["policy_version"] == group["step"] - 1 for group in groups for c in group["completions"])
    num_prompts = len({group["index"] for group in groups})
    indices = [group["index"] for group in groups]
    for first in range(0, len(indices) - num_prompts + 1, num_prompts):
        assert len(set(indices[first : first + num_prompts])) == num_prompts
