"""Do the commands of the page on evaluation run, and does it know every benchmark and every key of a result?"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.evaluate.benchmarks import find_benchmark, known_benchmarks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("oncurve ")]


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def test_commands_on_the_embedded_model_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [command for command in COMMANDS if " embedded " in command]
    assert len(chosen) >= 2
    for place, command in enumerate(chosen):
        short = [*words(command), "--limit", "8", "--output", f"out{place}"]
        result = CliRunner().invoke(app, short, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert (tmp_path / f"out{place}" / "results.md").is_file()
    check_keys(json.loads((tmp_path / "out1" / "results.json").read_text()))


def check_keys(results: dict[str, Any]) -> None:
    """Every key of a result is explained."""
    [entry] = results["benchmarks"].values()
    keys = {*results["model"], *results["sampler"], *entry, *entry["numbers"], *entry["prompt"]}
    keys |= {*entry["source"], *entry["contamination"], *entry["numbers"]["avg"]}
    known = set(re.findall(r"[a-z_0-9]+", PAGE))
    assert keys - known - {"title", "grader_name", "fraction", "num_training_rows"} == set()


def test_every_benchmark_stands_there_with_its_data_set_and_size() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", PAGE, re.MULTILINE))
    assert set(rows) >= set(known_benchmarks())
    for name, benchmark in known_benchmarks().items():
        assert not benchmark.rows or rows[name].startswith(f"{benchmark.rows:,} ")
        assert not benchmark.path or benchmark.path in rows[name]
        assert f"{benchmark.decoding.max_tokens:,} tokens" in rows[name]
        assert benchmark.decoding.samples == 1 or f"{benchmark.decoding.samples} at" in rows[name]


def test_the_benchmark_of_ones_own_loads(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    assert find_benchmark(str(tmp_path / "mine.yaml")).decoding.samples == yaml.safe_load(text)["decoding"]["samples"]
