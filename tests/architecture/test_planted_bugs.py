"""The bugs that a benchmark plants can still be planted."""

from __future__ import annotations

import sys

import pytest
from source import PACKAGE

sys.path.insert(0, str(PACKAGE.parent / "benchmarks" / "faults"))

from planted_bugs import BUGS, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}: {bug.what}")
def test_a_planted_bug_has_its_place_and_tests(bug: Bug) -> None:
    assert (PACKAGE / bug.file).read_text(encoding="utf-8").count(bug.right) == 1
    assert all((PACKAGE.parent / place).exists() for place in bug.where)
