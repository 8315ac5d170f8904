"""Do a few hundred mutated recipes, data files and run folders give a clear message or work, and nothing else?"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from lanes import gate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COUNTS = {"first": (0, 160), "more": (160, 240)}
"""Of cases: the number of the first, and how many."""


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return importlib.import_module("fuzz")


@pytest.mark.parametrize("cases", gate(COUNTS, "first"))
def test_mutated_inputs_end_with_a_message_or_work(
    cases: str, fuzz: ModuleType, tokenizer: PreTrainedTokenizerFast
) -> None:
    first, count = COUNTS[cases]
    counts = fuzz.run_cases(count, tokenizer, first=first)
    assert sum(sum(found.values()) for found in counts.values()) == count
    for kind, found in counts.items():
        assert found.get("message", 0) > 10, f"{kind}: hardly anything was broken, so hardly anything was tried"
    assert sum(found.get("worked", 0) for found in counts.values()) > 10


def test_a_traceback_would_be_noticed(
    fuzz: ModuleType, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, *words: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(fuzz, "load_config", broken)
    with pytest.raises(KeyError):
        fuzz.run_cases(5, tokenizer)


def test_a_file_outside_would_be_noticed(
    fuzz: ModuleType, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stray(path: Path, *words: object) -> None:
        (path.parent.parent / "stray").touch()

    monkeypatch.setattr(fuzz, "load_config", stray)
    with pytest.raises(AssertionError, match="outside of its folder"):
        fuzz.run_case(0, tokenizer)
