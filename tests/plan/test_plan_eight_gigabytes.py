"""Does the recipe for a consumer GPU fit into its memory, as planned?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app


@pytest.mark.proves("F50")
@pytest.mark.parametrize("overrides", [[], ["rollouts.type=engine"]])
def test_the_recipe_for_eight_gigabytes_fits_into_them(overrides: list[str], tmp_path: Path) -> None:
    card = "{memory_gib: 8.0, bandwidth: 448, bf16: 81, link: 32, priced: null, source: null}"
    (tmp_path / "mine.yaml").write_text(f"EIGHT: {card}\n")
    words = ["plan", "gsm8k_lora_8gb", *overrides, "--gpu", "EIGHT", "--devices", str(tmp_path / "mine.yaml"), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["fits"], found["memory"]
    assert found["setup"]["method"] == "lora"
