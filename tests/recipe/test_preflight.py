"""Is a mistake that a look at the disk can find told before torch and the model are loaded?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oncurve.core.errors import OncurveError
from oncurve.recipe.load import load_config, parse_config
from oncurve.recipe.preflight import check_cheaply

RECIPE = "model: embedded\ndata: {path: rows.jsonl}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=gone.jsonl", r"data\.path: there is no file gone\.jsonl"),
        ("data.template=r1zero", r"data\.template: there is no 'r1zero'"),
        ("model=empty", "no config.json"),
        ("model=./gone", "no such folder"),
        ("rewards=[{type: custom, function: gone.py:f}]", "there is no file gone.py"),
        ("evaluation.data={path: gone.csv}", r"evaluation\.data\.path: there is no file gone\.csv"),
    ],
)
def test_what_is_missing_is_found(override: str, said: str, here: Path) -> None:
    with pytest.raises(OncurveError, match=said):
        check_cheaply(parse_config(RECIPE, [override]))


def test_two_missing_files_are_one_message(here: Path) -> None:
    wrong = parse_config(RECIPE, ["data.path=a.jsonl", "rewards=[{type: custom, function: b.py:f}]"])
    with pytest.raises(OncurveError, match=r"(?s)a\.jsonl.*b\.py"):
        check_cheaply(wrong)


def test_a_name_that_is_taken_is_found(here: Path) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    (here / "runs" / "mine" / "metrics.jsonl").write_text("")
    with pytest.raises(OncurveError, match=r"already holds a run.*run\.name.*oncurve resume runs/mine"):
        check_cheaply(parse_config(RECIPE), new_folder=Path("runs/mine"))


def test_the_ending_of_a_file_is_its_type(here: Path) -> None:
    assert parse_config(RECIPE).data.type == "jsonl"
    assert parse_config("model: embedded\ndata: {path: rows.csv}\n").data.type == "csv"


def test_nothing_heavy_is_loaded_for_it(here: Path) -> None:
    code = (
        "import sys\nfrom oncurve.cli.app import app\ntry:\n    app(['train', 'r.yaml', 'data.path=gone.jsonl'])\n"
        "except Exception as error:\n    print(error)\nprint('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    (here / "r.yaml").write_text(RECIPE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "there is no file gone.jsonl" in done.stdout
    assert done.stdout.endswith("False False\n")


def test_a_folder_that_cannot_be_written_is_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncurve.recipe.preflight.os.access", lambda place, mode: False)  # root may write anywhere
    with pytest.raises(OncurveError, match=r"cannot be written there, since .* is read-only\. Choose run\.folder"):
        check_cheaply(parse_config(RECIPE, []), new_folder=here / "runs" / "new")
    assert not (here / "runs").exists()


@pytest.mark.parametrize("key", ["rollouts.tools=[gone.py:f]", "rollouts.environments={a: 'gone.py:f'}"])
def test_files_of_tools_are_looked_for(key: str, here: Path) -> None:
    with pytest.raises(OncurveError, match=rf"{key.partition('=')[0]}: there is no file gone\.py"):
        check_cheaply(parse_config(RECIPE, [key]))


def test_one_tool_that_is_no_list_is_one_message(here: Path) -> None:
    recipe = here / "recipes" / "r.yaml"
    recipe.parent.mkdir()
    recipe.write_text("model: embedded\ndata: {type: word_problems}\nrollouts: {tools: calc.py}\n")
    with pytest.raises(OncurveError, match=r"rollouts\.tools: this must be a list"):
        load_config(recipe, [])
