"""Does the memory that a step leaves behind serve the next one?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = """
import ctypes, resource, sys, torch
from oncurve.train import heap
if getattr(ctypes.CDLL(None), "mallopt", None) is None:
    print("absent"); sys.exit()
is_set = getattr(heap, sys.argv[1])()
def step():
    parts = [torch.ones(3_000_000) for _ in range(12)]
    return sum(float(part[-1]) for part in parts)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(is_set, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str, **environment: str) -> tuple[bool, int]:
    """Whether it could be set, and how often five steps of 144 MB each had to ask for memory."""
    command = [sys.executable, "-c", STEPS, way]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "absent":
        pytest.skip("the C library is not glibc")
    is_set, count = done.stdout.split()
    return is_set == "True", int(count)


def test_a_second_step_asks_for_no_memory() -> None:
    (is_kept, asked), (is_given_back, asked_again) = faults("keep_freed_memory"), faults("give_back_freed_memory")
    assert is_kept
    assert is_given_back
    assert asked < asked_again / 10


@pytest.mark.parametrize("way", ["keep_freed_memory", "give_back_freed_memory"])
def test_settings_of_ones_own_go_first(way: str) -> None:
    is_set, _ = faults(way, MALLOC_TRIM_THRESHOLD_="1000000")
    assert not is_set


GIVEN_BACK = """
import ctypes, sys, torch
from oncurve.train import heap
if getattr(ctypes.CDLL(None), "mallopt", None) is None:
    print("absent"); sys.exit()
getattr(heap, sys.argv[1])()
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
before = resident()
for _ in range(3):  # the C library learns to keep blocks from those that go
    parts = [(torch.ones(600_000), torch.ones(1_000)) for _ in range(40)]
    small = [part for _, part in parts]
    del parts
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is resident")
@pytest.mark.parametrize(("way", "is_kept"), [("keep_freed_memory", True), ("give_back_freed_memory", False)])
def test_memory_between_tensors_that_live_on_is_kept_or_goes_back(way: str, is_kept: bool) -> None:
    """Of 96 MB between small tensors."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK, way], env=env, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "absent":
        pytest.skip("the C library is not glibc")
    assert (int(done.stdout) > 60_000) is is_kept
