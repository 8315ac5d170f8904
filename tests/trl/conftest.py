"""What tests of scripts for TRL share: rows made up, and a script in an empty folder."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from oncurve.cli.app import app
from oncurve.trl.settings import SETTINGS

HEAD = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

SHORT = dict(output_dir="out", max_steps=2, num_generations=4, per_device_train_batch_size=8, max_completion_length=8,
             bf16=False, use_cpu=True, learning_rate=1e-4)

def rows(n=24):
    return Dataset.from_list([{"prompt": f"How much is {i} + 1?", "gold": i + 1} for i in range(n)])

def correct(completions, gold, **kwargs):
    return [float(str(g) in c) for c, g in zip(completions, gold)]

"""


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and nothing accepted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SETTINGS, "accepted", set())
    monkeypatch.setattr(SETTINGS, "version", None)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Sums, as TRL wants them: a prompt and columns for rewards."""
    return [{"prompt": f"How much is {number} + 1?", "gold": number + 1} for number in range(24)]


@pytest.fixture
def trl() -> Callable[..., Result]:
    """`oncurve trl` on a script that is written on the spot."""

    def run(text: str, *arguments: str, head: str = HEAD, before: tuple[str, ...] = ()) -> Result:
        Path("train.py").write_text(textwrap.dedent(head) + textwrap.dedent(text))
        return CliRunner().invoke(app, ["trl", *before, "train.py", *arguments])

    return run
