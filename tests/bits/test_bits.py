"""Do runs end with the same bits as before, whatever was moved or rewritten?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bits.runs import EXPECTED, IN_PROCESSES, RUNS, kind_of_machine

if TYPE_CHECKING:
    from nursery import Nursery


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The values of this kind of machine."""
    known, kind = json.loads(EXPECTED.read_text(encoding="utf-8")), kind_of_machine()
    if kind not in known:
        pytest.skip(
            f"no values for {kind}. Write them at a commit whose numbers are right: python tests/bits/runs.py --write"
        )
    return known[kind]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_the_same_bits_as_before(name: str, expected: dict[str, str], tmp_path: Path) -> None:
    if name not in expected:
        pytest.skip(f"no value of {name} for this kind of machine: python tests/bits/runs.py --write")
    assert RUNS[name](tmp_path) == expected[name]


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_processes_of_their_own_end_with_the_same_bits_as_before(
    name: str, expected: dict[str, str], tmp_path: Path, nursery: Nursery
) -> None:
    def start(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
        return nursery.python(*command[1:], env=env, cwd=cwd).wait()

    assert IN_PROCESSES[name](tmp_path, start) == expected[name]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(expected: dict[str, str]) -> None:
    assert expected["killed_and_resumed"] == expected["from_recipe"]
