"""Whatever happens between a trainer and its servers: are their weights those of the version that they name?"""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_histories import play

from oncurve.fleet.weights import delta_copy, store

pytestmark = pytest.mark.timeout(1800)  # seconds of work, on a machine that has none to give


@pytest.mark.proves("F72")
@pytest.mark.parametrize("number", [12, pytest.param(150, marks=pytest.mark.nightly)])
def test_random_histories_end_with_the_newest_weights_and_never_with_others(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "flush", lambda path: None)
    monkeypatch.setattr("os.fsync", lambda file: None)
    found = play(range(number), tmp_path)
    assert found.wrong == 0, found.events
    assert found.stuck == 0, found.events
    assert found.samples > 10 * number
    for event in ("refused", "killed", "go_back", "flip", "late", "swap"):
        assert found.events[event] > 0, f"the histories must show what they are to show: {found.events}"


def test_the_histories_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksum of the result, weights that nobody published are sampled from."""
    monkeypatch.setattr(store, "flush", lambda path: None)
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr(delta_copy.FileSum, "mismatch", lambda self, expected: None)
    assert any(play(range(first, first + 20), tmp_path).wrong for first in range(0, 200, 20))
