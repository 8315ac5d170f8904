"""Do the notebooks run from top to bottom on a CPU, with public names only, and are they kept without outputs?"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from oncurve.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *fewer: tuple[str, str]) -> tuple[Any, str]:
    """The notebook with the outputs of a run in that folder, and all that its cells show.

    ``fewer`` are numbers that make a reader's run longer, and what is put there instead.
    """
    needed = "pip install 'oncurve[docs]'"
    nbformat = pytest.importorskip("nbformat", reason=f"nbformat is not installed: {needed}")
    nbclient = pytest.importorskip("nbclient", reason=f"nbclient is not installed: {needed}")
    pytest.importorskip("ipykernel", reason=f"ipykernel is not installed: {needed}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    for usual, small in fewer:
        [cell] = [cell for cell in notebook.cells if usual in cell.source]
        cell.source = cell.source.replace(usual, small)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = "".join(
        output.get("text", "") + "".join(f"{kind} {value}" for kind, value in output.get("data", {}).items())
        for output in outputs
    )
    return notebook, shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_nothing_of_oncurve_but_itself(path: Path) -> None:
    source = "\n".join(line for code in code_of(path) for line in code.splitlines() if not line.startswith("%"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert not [one.name for one in node.names if one.name.startswith("oncurve.")]
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("oncurve")


@pytest.mark.nightly
def test_the_first_run_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = run(
        "first_run.ipynb", tmp_path, monkeypatch,
        ("evaluation.num_prompts=100", "evaluation.num_prompts=8"), ('{"num_prompts": 20}', '{"num_prompts": 4}'),
        ('"run.steps=6"', '"run.steps=6", "run.prompts_per_step=4", "evaluation.every_steps=0"'),
    )  # fmt: skip
    assert "trained: " in shown
    assert "'reward/short'" in shown
    assert "image/png" in shown
    assert "<table>" in shown
    assert "step 6/6" in shown
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 2


@pytest.mark.nightly
def test_a_run_is_watched_stopped_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, shown = run(
        "watch.ipynb", tmp_path, monkeypatch, ('{"num_prompts": 40}', '{"num_prompts": 4}'),
        ('"prompts_per_step": 12', '"prompts_per_step": 4'), ("curve[-1] > 0.5", "curve[-1] > 0.1"),
    )  # fmt: skip
    assert "stopped after step" in shown
    assert "step 12/12" in shown  # after resuming
    figures = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("image/png" in output["data"] for output in figures) == 1  # one plot, updated in place
    assert (tmp_path / "runs" / "watched" / "report.html").is_file()


@pytest.mark.nightly
def test_a_tool_and_agents_train_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = run("agent.ipynb", tmp_path, monkeypatch, ('"prompts_per_step": 8', '"prompts_per_step": 4'))
    assert "step 3: reward" in shown
    assert "policy:" in shown
    assert "rows of an episode: 3.0" in shown
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 3


@pytest.mark.proves("F78")
def test_the_notebook_is_python_that_uses_what_is_there() -> None:
    cells = json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sources
    commands = [line for source in sources for line in source.splitlines() if re.match(r"\s*[!%]", line)]
    for source in sources:
        ast.parse("\n".join("pass" if re.match(r"\s*[!%]", line) else line for line in source.splitlines()))
    used = {word for line in commands for word in re.findall(r"\boncurve ([a-z]+)\b", line)}
    assert used <= known
