"""The example of the core imports nothing else of the package, and learns."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "core" / "digits.py"


def test_it_imports_the_core_alone() -> None:
    nodes = ast.walk(ast.parse(EXAMPLE.read_text(encoding="utf-8")))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    ours = {module for module in imported if module.startswith("oncurve")}
    assert ours
    assert all(module.startswith("oncurve.core.") for module in ours)


def test_it_learns() -> None:
    rows = runpy.run_path(str(EXAMPLE))["main"]()
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.6
