"""What a seed makes stays: recipes, papers and starting models name seeds and not rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import pytest

from oncurve.tasks import calculator_problems, program_problems, word_problems
from oncurve.tasks.word_problems import LEVELS

MADE: dict[str, tuple[Callable[[], Sequence[Any]], str]] = {
    "word problems": (lambda: word_problems.word_problems("train", 200, seed=7, levels=LEVELS), "068abd7319c6767e"),
    "word problems, test": (
        lambda: word_problems.word_problems("test", 100, seed=7, levels=LEVELS),
        "4866ccad5eccc342",
    ),
    "word lessons": (lambda: word_problems.lessons(200, seed=7, levels=LEVELS), "1710bd1e614cd514"),
    "word demonstrations": (lambda: word_problems.demonstrations(200, seed=7, levels=LEVELS), "68a501a85a37eb52"),
    "sums": (lambda: calculator_problems.calculator_problems("train", 100, seed=7), "9fd82aaa335e8b13"),
    "chains": (
        lambda: calculator_problems.calculator_problems("validation", 100, seed=7, operations=2),
        "8303f2e0e3fb27e3",
    ),
    "lessons of sums": (lambda: calculator_problems.calculator_lessons(200, seed=7), "fde531bdcbff480d"),
    "lessons of chains": (
        lambda: calculator_problems.calculator_lessons(200, seed=7, operations=2),
        "25632779814fbb92",
    ),
    "calls for sums": (lambda: calculator_problems.calculator_demonstrations(200, seed=7), "46d15cebd1107766"),
    "calls for chains": (
        lambda: calculator_problems.calculator_demonstrations(200, seed=7, operations=2),
        "ec4c43ecd7d7340e",
    ),
    "programs": (lambda: program_problems.program_problems("train", 200, seed=7), "f785c0b5415f1e04"),
    "program lessons": (lambda: program_problems.program_lessons(200, seed=7), "d5ae69b3ff22cd50"),
    "program demonstrations": (lambda: program_problems.program_demonstrations(200, seed=7), "168a87c0d70ee35a"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_known_seed_makes_known_rows(name: str) -> None:
    make, digest = MADE[name]
    assert sha256("\n".join(map(repr, make())).encode()).hexdigest()[:16] == digest
