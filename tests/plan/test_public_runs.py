"""Published runs beside the plan: the page says what is planned today, and why where the two are far apart."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def public_runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_runs", ROOT / "benchmarks" / "gpu" / "public_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "public_runs", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_results_are_those_of_the_planner(public_runs: ModuleType) -> None:
    rows = [public_runs.row_of(run) for run in public_runs.RUNS]
    assert rows == json.loads(public_runs.RESULTS.read_text(encoding="utf-8")), "python benchmarks/gpu/public_runs.py"
    assert public_runs.table(rows) in public_runs.PAGE.read_text(encoding="utf-8")
    assert all(row["reason"] for row in rows if abs(row["ratio"] - 1) > public_runs.CLOSE)
