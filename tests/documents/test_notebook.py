"""Does the notebook run from top to bottom on a CPU, and is it kept without outputs?"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "first_run.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "pip install 'oncurve[docs]'"
    nbformat = pytest.importorskip("nbformat", reason=f"nbformat is not installed: {needed}")
    nbclient = pytest.importorskip("nbclient", reason=f"nbclient is not installed: {needed}")
    pytest.importorskip("ipykernel", reason=f"ipykernel is not installed: {needed}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [
        output.get("text") or "".join(output.get("data", {}))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    assert any("trained: " in text and " of 100" in text for text in printed)
    assert any("'reward/short'" in text for text in printed)
    assert any("image/png" in text for text in printed)
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 2
