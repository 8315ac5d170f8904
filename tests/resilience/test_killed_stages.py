"""Does a supervised stage on 200 rows, and GRPO from it, end with the same bits when each of them is killed?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncurve.observe.record import read_metrics

if TYPE_CHECKING:
    from nursery import Nursery

SMALL = ["evaluation.num_prompts=8", "evaluation.num_prompts_during=8", "evaluation.every_steps=2",
         "run.save_every_steps=2", "rollouts.max_completion_tokens=24"]  # fmt: skip
STAGE = ["sft", "word_problems", "run.name=warm", "data.limit=200", "sft.epochs=1", "run.prompts_per_step=25", *SMALL]
AFTER = ["train", "word_problems", "run.name=after", "run.steps=4", "run.prompts_per_step=4", *SMALL]


@pytest.mark.proves("F36")
@pytest.mark.nightly
def test_a_chain_of_stages_that_is_killed_ends_with_the_same_bits(
    nursery: Nursery, kill_at: Callable[..., bool], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    for words, name in ((STAGE, "warm"), ([*AFTER, f"model={clean / 'warm'}"], "after")):
        status, said = nursery.run(*words, f"run.folder={clean}")
        assert status == 0, said
        child = nursery.start(*words, f"run.folder={killed}")  # from the model that was not killed: the same recipe
        for step, phase in ((1, "train"), (3, "train")):
            assert kill_at(child, killed / name, step=step, phase=phase), child.output
            assert child.wait() == -9
            child = nursery.start("resume", killed / name)
        assert child.wait() == 0, child.output
        assert_same(killed / name, clean / name)
    assert [row["step"] for row in read_metrics(clean / "warm")][-1] == 8
    page = (clean / "after" / "report.html").read_text()
    assert str(clean / "warm") in page
