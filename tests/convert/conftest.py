"""What tests of the converter share: TRL's own losses, and scripts written on the spot."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import HEAD, TRAINER

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))  # trl_reference


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A training script in an empty folder, which becomes the one where commands run."""
    monkeypatch.chdir(tmp_path)

    def write(config: str, trainer: str = TRAINER, head: str = HEAD) -> Path:
        path = tmp_path / "train.py"
        path.write_text("\n".join(textwrap.dedent(part).strip() for part in (head, config, trainer)) + "\n")
        return path

    return write
