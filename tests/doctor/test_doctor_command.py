"""Does `oncurve doctor RUN` read a run folder and say what is wrong?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doctor_cases import CONFIG, case, paid
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, DataError
from oncurve.doctor.case import Case, read_case
from oncurve.doctor.diagnose import diagnose
from oncurve.observe.record import write_lines


def folder(path: Path, given: Case) -> Path:
    """A run folder with what the case knows."""
    write_lines(path / "metrics.jsonl", given.metrics)
    (path / "config.yaml").write_text(yaml.safe_dump(dict(given.config)))
    write_lines(path / "evaluations" / "base.jsonl", given.examples)
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_a_healthy_run_has_nothing_to_report(tmp_path: Path) -> None:
    code, text = run(str(folder(tmp_path, case())))
    assert code == 0
    assert "Nothing to report." in text
    assert "steps 1 to 40" in text


def test_a_sick_run_is_told_with_numbers_and_a_remedy(tmp_path: Path) -> None:
    code, text = run(str(folder(tmp_path, case({"policy/clip_fraction": 0.9}))))
    assert code == 1
    assert "SEVERE  Most of the gradient is clipped away" in text
    assert "policy/clip_fraction = 0.9 (steps 1 to 40)" in text
    assert "-> Make fewer updates on each batch" in text


def test_json_holds_what_the_text_says(tmp_path: Path) -> None:
    sick = case({"reward/error_fraction": 0.02})
    code, text = run(str(folder(tmp_path, sick)), "--json")
    told = json.loads(text)
    assert code == 0, "a warning is no failure"
    assert told["steps"] == 40
    assert [found["check"] for found in told["findings"]] == [found.check for found in diagnose(sick)]
    assert told["findings"][0]["evidence"][0] == {"key": "reward/error_fraction", "value": 0.02, "steps": [1, 40]}


def test_a_folder_is_read_as_the_case_it_came_from(tmp_path: Path) -> None:
    given = case(examples=paid(right=0.0, wrong=1.0))
    read = read_case(folder(tmp_path, given))
    assert read.config == CONFIG
    assert diagnose(read) == diagnose(given)
    assert read_case(tmp_path / "metrics.jsonl").examples == ()


def test_rollouts_tell_how_old_the_weights_were_and_what_was_paid(tmp_path: Path) -> None:
    folder(tmp_path, case())
    completion = {"text": "<answer> 4 </answer>", "reward": 1.0, "policy_version": 36}
    write_lines(tmp_path / "rollouts" / "step_000040.jsonl", [{"answer": "4", "completions": [completion] * 2}])
    read = read_case(tmp_path)
    assert read.lags == {40: 3}
    assert read.examples[-1]["completion"] == "<answer> 4 </answer>"
    assert "stale_weights" in [finding.check for finding in diagnose(read)]


def test_a_run_that_has_just_started_can_be_asked(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "evaluation/correct_fraction": 0.3}])
    code, text = run(str(tmp_path))
    assert code == 0
    assert "no training step is finished yet" in text


@pytest.mark.parametrize(("made", "part"), [("", "no run folder"), ("metrics.jsonl", "no step")])
def test_what_is_no_run_is_refused(tmp_path: Path, made: str, part: str) -> None:
    if made:
        (tmp_path / made).write_text('{"reward/mean": 1}\n')
    with pytest.raises(DataError, match=part):
        read_case(tmp_path)


def test_a_broken_recipe_is_named(tmp_path: Path) -> None:
    folder(tmp_path, case())
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml"):
        read_case(tmp_path)


def test_the_command_asks_for_a_run() -> None:
    with pytest.raises(ConfigError, match="name the folder of a run"):
        run()


def test_the_doctor_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    folder(tmp_path, case())
    code = (
        f"import sys; sys.argv = ['oncurve', 'doctor', {str(tmp_path)!r}]\n"
        "from oncurve.cli.app import app\n"
        "app(standalone_mode=False)\n"
        "sys.stderr.write(str(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Nothing to report" in done.stdout
    assert done.stderr == "[]"
