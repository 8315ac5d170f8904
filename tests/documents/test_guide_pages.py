"""Does the guide show what the code does: the defaults of its keys, its tables?"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oncurve.algorithm.table import resolve
from oncurve.recipe.schema import Config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_table_of_curves_is_made_of_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = script(ROOT / "benchmarks" / "learning" / "curves.py", monkeypatch)
    assert curves.PAGE.read_text(encoding="utf-8") == curves.page(), "run `python benchmarks/bench.py curves`"


def defaults() -> dict[str, Any]:
    """Every key with its default; the keys of an algorithm that are unset with what the row grpo says, in brackets."""
    config = Config.model_validate({"model": "embedded", "data": {"type": "jsonl"}, "policy": {"lora": {}}})
    row = resolve("grpo")
    found: dict[str, Any] = {}
    for section, keys in config.model_dump(exclude={"model", "rewards", "sft"}).items():
        for key, value in keys.items():
            from_row = section == "algorithm" and value is None and hasattr(row, key)
            found[f"{section}.{key}"] = f"({told(getattr(row, key))})" if from_row else told(value)
    found |= {f"policy.lora.{key}": told(value) for key, value in config.model_dump()["policy"]["lora"].items()}
    found["algorithm.scale_by_std"] = "(true)"  # part of the advantage group_std of that row
    assert row.advantage == "group_std"
    return found | {"policy.lora": told(Config.model_fields["policy"].default.lora)}


def told(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_default_is_that_of_the_schema() -> None:
    page = (DOCS / "hyperparameters.md").read_text(encoding="utf-8")
    pattern = r"^\| `((?:algorithm|rollouts|optimizer|run|policy|data|evaluation)\.[\w.]+)` \| `([^`]*)` \|"
    rows = re.findall(pattern, page, re.MULTILINE)
    assert len(rows) >= 30
    known = defaults()
    assert {key: shown for key, shown in rows if known.get(key) != shown} == {}
