"""Is a user of a CPU told of the arithmetic that his processor does faster, where it matters?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.run import ways

SHORT = ("run.steps=1", "run.prompts_per_step=2", "algorithm.group_size=2", "evaluation.num_prompts=2", "run.name=one")


@pytest.mark.parametrize(
    ("has_it", "weights", "kind", "is_said"),
    [
        (True, 1000, "auto", True),
        (False, 1000, "auto", False),
        (True, 50_000_000, "auto", False),
        (True, 1000, "bfloat16", False),
    ],
)
def test_a_large_model_in_float32_on_a_processor_with_bfloat16(
    has_it: bool, weights: int, kind: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_it})
    monkeypatch.setattr(ways, "WORTH_SAYING", weights)
    words = ["train", "word_problems", f"run.folder={tmp_path}", "policy.device=cpu", f"policy.compute_type={kind}"]
    done = CliRunner().invoke(app, [*words, *SHORT], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = "policy.compute_type=bfloat16 (weights and optimizer stay in float32)"
    assert (told in done.output) == is_said
    assert (told in (tmp_path / "one" / "log.txt").read_text()) == is_said
