"""Which cases of a parametrized test the gate runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def gate(names: Iterable[Any], *kept: Any) -> list[Any]:
    """For ``parametrize``: all of the names, those that are not kept for the gate marked nightly."""
    every = list(names)
    assert set(kept) <= set(every), f"no such case: {set(kept) - set(every)}"
    cases = [(name, name if isinstance(name, tuple) else (name,)) for name in every]
    return [name if name in kept else pytest.param(*case, marks=pytest.mark.nightly) for name, case in cases]
