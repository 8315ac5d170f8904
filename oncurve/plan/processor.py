"""The nominal rate of this machine's processor, from what the system tells of it."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PER_CYCLE = (("avx512f", 64), ("fma", 32), ("avx", 16), ("asimd", 16), ("neon", 8))
"""Float32 operations of a core in a cycle, two units that multiply and add, by the widest instructions it has."""
OTHERS_PER_CYCLE, OTHERS_GHZ = 16, 2.5
"""Guessed. The same, and the clock, where the system does not tell."""
CPUINFO = Path("/proc/cpuinfo")
BASE_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


@cache
def processor_rate() -> float:
    """Nominal TFLOP/s in float32: cores of this process x clock x operations in a cycle.

    Two threads of one core count once. Instructions for bfloat16, with which some processors are faster, do not count.
    """
    processors = list(_processors())
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    own = [facts for facts in processors if int(facts["processor"]) in usable]
    own = own or [{"processor": str(number)} for number in usable]
    cores = {(facts.get("physical id", ""), facts.get("core id", facts["processor"])) for facts in own}
    words = (own[0].get("flags") or own[0].get("Features") or "").split()
    per_cycle = next((count for word, count in PER_CYCLE if word in words), OTHERS_PER_CYCLE)
    return min(len(cores), _quota()) * _gigahertz(own[0]) * per_cycle / 1e3


def _processors() -> Iterator[dict[str, str]]:
    """The facts of each processor in /proc/cpuinfo; none where there is no such file."""
    if platform.system() != "Linux" or not CPUINFO.exists():
        return
    for part in CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        pairs = (line.split(":", 1) for line in part.splitlines() if ":" in line)
        facts = {name.strip(): value.strip() for name, value in pairs}
        if facts.get("processor", "").isdigit():
            yield facts


def _gigahertz(facts: dict[str, str]) -> float:
    """The clock under load, which a processor at rest does not show."""
    if BASE_CLOCK.exists():
        return float(BASE_CLOCK.read_text()) / 1e6
    return float(facts.get("cpu MHz", 1e3 * OTHERS_GHZ)) / 1e3


def _quota() -> float:
    """Cores that a container may use at a time; no limit: infinity."""
    limit, _, period = QUOTA.read_text().partition(" ") if QUOTA.exists() else ("max", "", "")
    return math.inf if limit == "max" else float(limit) / float(period)
