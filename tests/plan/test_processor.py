"""Is a CPU planned with the cores, the clock and the instructions that it has?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oncurve.plan import processor

FACTS = "processor\t: {}\nphysical id\t: 0\ncore id\t: {}\ncpu MHz\t\t: 800.0\nflags\t\t: fpu avx fma\n\n"
TWO_THREADS_A_CORE = "".join(FACTS.format(number, number // 2) for number in range(8))
WIDE = TWO_THREADS_A_CORE.replace("fma", "fma avx512f")
ARM = "".join(f"processor\t: {n}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n\n" for n in range(4))


@pytest.mark.parametrize(
    ("cpuinfo", "base", "quota", "usable", "rate"),
    [
        (TWO_THREADS_A_CORE, "3000000", "max 100000", range(8), 4 * 3.0 * 32),
        (WIDE, "3000000", "max 100000", range(8), 4 * 3.0 * 64),
        (WIDE, "3000000", "max 100000", (0, 2), 2 * 3.0 * 64),
        (WIDE, "3000000", "150000 100000", range(8), 1.5 * 3.0 * 64),
        (WIDE, None, None, range(8), 4 * 0.8 * 64),
        (ARM, None, None, range(4), 4 * 2.5 * 16),
        (None, None, None, range(2), 2 * 2.5 * 16),
    ],
    ids=["AVX", "AVX-512", "two of its cores", "a container", "a virtual machine", "ARM", "another system"],
)
def test_its_rate_is_cores_times_clock_times_operations(
    cpuinfo: str | None,
    base: str | None,
    quota: str | None,
    usable: range,
    rate: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in (("CPUINFO", cpuinfo), ("BASE_CLOCK", base), ("QUOTA", quota)):
        monkeypatch.setattr(processor, name, tmp_path / name)
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable), raising=False)
    assert processor.processor_rate.__wrapped__() == pytest.approx(rate / 1e3)
