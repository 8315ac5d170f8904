"""Is nothing left of environments that crash, hang, die and leak, and is every failure counted as its kind?"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from hanging import Hanging


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return importlib.import_module("episode_soak")


def test_failures_are_counted_as_what_they_are_and_leave_nothing_behind(
    soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak.Misbehaving, "release", Hanging(monkeypatch))
    found = soak.soak(8 * 25, tmp_path, prompts=13, every=2, seconds=600.0)
    assert found["episodes"] == 8 * 26, "two whole steps"
    assert set(found["failures_by_behaviour"]) == set(soak.KINDS)
    assert found["failures_kept"] == found["failures_noted"]
    assert found["failures_with_a_reward"] == 0
    before, after = found["held_before"], found["held_at_the_end"]
    assert after["children"] == before["children"]
    assert after["open_files"] <= before["open_files"] + 4
    assert after["threads"] <= before["threads"] + 2
