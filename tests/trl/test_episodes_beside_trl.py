"""Do TRL and oncurve train the same tokens with the same loss, for episodes in which the policy's turns are forced?"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def _written_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of these tests are written and not drawn: the model finds them unlikely, which ends a real run."""
    monkeypatch.setattr("oncurve.run.guards.MISMATCH_LIMIT", float("inf"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("trl", reason="TRL is not installed")
    path = Path(__file__).parents[2] / "benchmarks" / "learning" / "trl_episodes.py"
    spec = importlib.util.spec_from_file_location("trl_episodes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["tools", "environments_by_name"])
def test_masks_losses_and_gradients_are_those_of_trl(form: str, script: ModuleType, tmp_path: Path) -> None:
    model = script.speaking_model(tmp_path / "model")
    result = script.beside(form, model, tmp_path, "dapo")
    assert result["rows"] == script.STEPS * script.PROMPTS * script.GROUP
    assert result["rows_that_differ"] == 0
    assert result["told_tokens"] > 100, "tools were called, and answered"
    assert result["reward"]["largest_difference"] < 1e-6
    assert result["loss"]["largest_difference"] < 1e-6
    assert max(result["loss"]["trl"], key=abs) != 0
    assert result["grad_norm"]["largest_difference"] < 1e-5 * max(result["grad_norm"]["trl"])
