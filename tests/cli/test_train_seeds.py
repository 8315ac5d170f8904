"""One command trains a recipe with several seeds, and ends with the table over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError

RECIPE = [
    "word_problems", "run.name=small", "run.steps=1", "run.prompts_per_step=2", "evaluation.num_prompts=4",
    "evaluation.every_steps=0", "rollouts.max_completion_tokens=8", "rollouts.type=auto", "data.limit=40",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("starts_forks")
def test_every_seed_has_a_run_and_what_is_finished_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    app(["train", *RECIPE, "--seeds", "0,1"], standalone_mode=False)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["small-seed0", "small-seed1"]
    said = capfd.readouterr().out
    assert "by recipe, over seeds" in said
    assert "oncurve compare runs/small-seed0 runs/small-seed1" in said
    before = (tmp_path / "runs" / "small-seed1" / "metrics.jsonl").read_bytes()
    app(["train", *RECIPE, "--seeds", "0,1", "--resume"], standalone_mode=False)
    assert (tmp_path / "runs" / "small-seed1" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "0,0", "0 1"])
def test_seeds_that_are_none_are_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="write different whole numbers from 0 on"):
        app(["train", "word_problems", "--seeds", text], standalone_mode=False)
