"""Does `oncurve train --processes 2` end where one process ends, with one set of files?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from oncurve.observe.record import read_metrics

if TYPE_CHECKING:
    from nursery import Nursery

SHORT = (
    "run.steps=2",
    "run.prompts_per_step=6",
    "run.rollouts_every_steps=1",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=32",
    "evaluation.num_prompts=8",
    "evaluation.every_steps=0",
    "optimizer.learning_rate=1e-4",
    "optimizer.epsilon=1e-5",
)


def train(nursery: Nursery, folder: Path, name: str, *arguments: str) -> Path:
    own = (*SHORT, f"run.folder={folder}", f"run.name={name}", *arguments)
    status, said = nursery.run("train", "word_problems", *own)
    assert status == 0, said[-4000:]
    return folder / name


@pytest.mark.proves("F69")
def test_two_processes_make_the_run_of_one(nursery: Nursery, tmp_path: Path) -> None:
    alone = train(nursery, tmp_path, "alone")
    both = train(nursery, tmp_path, "both", "--processes", "2")
    one, two = (load_file(run / "model" / "model.safetensors") for run in (alone, both))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    rows, others = read_metrics(alone), read_metrics(both)
    assert [row["step"] for row in others] == [row["step"] for row in rows]
    for mine, theirs in zip(rows[1:], others[1:], strict=True):
        for key in ("reward/mean", "tokens/sampled", "tokens/trained", "group/with_signal_fraction"):
            assert mine.get(key) == theirs.get(key), key
    assert sorted(path.name for path in (alone / "rollouts").iterdir()) == sorted(
        path.name for path in (both / "rollouts").iterdir()
    )
