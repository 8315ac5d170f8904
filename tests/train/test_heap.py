"""Does the memory that a step leaves behind serve the next one?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource, sys, torch
from oncurve.train.heap import keep_freed_memory
if getattr(ctypes.CDLL(None), "mallopt", None) is None:
    print("absent"); sys.exit()
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def step():
    parts = [torch.ones(3_000_000) for _ in range(12)]
    return sum(float(part[-1]) for part in parts)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keep: bool, **environment: str) -> tuple[bool, int]:
    """Whether memory is kept, and how often five steps of 144 MB each had to ask for some."""
    command = [sys.executable, "-c", STEPS, "keep" if keep else "leave"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "absent":
        pytest.skip("the C library is not glibc")
    kept, count = done.stdout.split()
    return kept == "True", int(count)


def test_a_second_step_asks_for_no_memory() -> None:
    (kept, asked), (_, asked_otherwise) = faults(keep=True), faults(keep=False)
    assert kept
    assert asked < asked_otherwise / 10


def test_settings_of_ones_own_go_first() -> None:
    kept, _ = faults(keep=True, MALLOC_TRIM_THRESHOLD_="1000000")
    assert not kept
