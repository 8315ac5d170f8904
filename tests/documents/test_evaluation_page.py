"""Do the commands of the page on evaluation run, and does it know every benchmark?"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.recipe.load import load_config
from oncurve.run.measuring import BENCHMARKS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("oncurve ")]


def test_commands_on_the_embedded_model_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [command for command in COMMANDS if " embedded " in command]
    assert len(chosen) >= 2
    for place, command in enumerate(chosen):
        words = [*shlex.split(command, comments=True)[1:], "evaluation.num_prompts=8", "--output", f"out{place}"]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert (tmp_path / f"out{place}" / "evaluations" / "evaluation.json").is_file()


def test_every_benchmark_stands_there_with_its_data_set_and_size() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", PAGE, re.MULTILINE))
    for path in BENCHMARKS.glob("*.yaml"):
        config, row = load_config(path, ["model=embedded"]), rows[path.stem]
        assert path.stem == "jsonl" or row.startswith(f"{config.evaluation.num_prompts:,} ")
        assert not config.data.path or config.data.path in row
        assert f"{config.rollouts.max_completion_tokens:,} tokens" in row
        assert config.evaluation.samples == 1 or f"{config.evaluation.samples} at" in row


def test_the_benchmark_of_ones_own_loads(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    assert load_config(tmp_path / "mine.yaml", ["model=embedded"]).evaluation.samples == 8
