"""Does `oncurve sample` write a prompt as the run did that made the model?"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app

SHORT = {"evaluation": {"num_prompts": 2}, "rollouts": {"max_completion_tokens": 4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "shown"),
    [([{"prompt": f"{n} and one is", "completion": f" {n + 1}"} for n in range(12)], "\n4 and one is"),
     ([{"question": f"{n} + 1?", "solution": "so", "answer": str(n + 1)} for n in range(12)], "User: 4 and one is")],
    ids=["whole prompts", "template"],
)  # fmt: skip
def test_the_prompt_of_a_question_is_that_of_the_run(
    rows: list[dict[str, str]], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = oncurve.sft("embedded", rows, run={"prompts_per_step": 4, "steps": 1, "name": "taught"}, **SHORT)
    ended = CliRunner().invoke(app, ["sample", str(run.folder), "4 and one is", "--max-tokens", "2"])
    assert ended.exit_code == 0, ended.output
    assert shown in ended.output
    ended = CliRunner().invoke(app, ["sample", str(run.folder), "4", "--max-tokens", "2", "--template", "boxed"])
    assert "Question: 4" in ended.output
