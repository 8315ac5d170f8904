"""Does a test that changes what a proof reads have proofs of its own?"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from shared_proofs import IS_SHARED

import oncurve.constants
from oncurve.core.records import Reward

Change = Callable[[pytest.MonkeyPatch], None]

READ: dict[str, Change] = {
    "a function of oncurve": lambda patch: patch.setattr("oncurve.model.same_model.why_another", lambda *_: None),
    "a class": lambda patch: patch.setattr(Reward, "error", "other"),
    "a constant of oncurve": lambda patch: patch.setattr(oncurve.constants, "anything", 1, raising=False),
    "a function of the system": lambda patch: patch.setattr(time, "anything", lambda: 0.0, raising=False),
    "an entry of a table": lambda patch: patch.setitem({}, "a", 1),
    "a variable of oncurve": lambda patch: patch.setenv("ONCURVE_ANYTHING", "1"),
}
UNREAD: dict[str, Change] = {
    "a value of an object": lambda patch: patch.setattr(SimpleNamespace(a=1), "a", 2),
    "a value of the system": lambda patch: patch.setattr(time, "anything", 1, raising=False),
    "a variable of others": lambda patch: patch.setenv("ANYTHING", "1"),
    "a folder": lambda patch: patch.chdir("."),
}


@pytest.mark.parametrize("change", READ.values(), ids=list(READ))
def test_what_a_proof_may_read_ends_the_sharing(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    assert IS_SHARED == [True]
    change(monkeypatch)
    assert IS_SHARED == [False]


@pytest.mark.parametrize("change", UNREAD.values(), ids=list(UNREAD))
def test_what_no_proof_reads_leaves_it(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert IS_SHARED == [True]
