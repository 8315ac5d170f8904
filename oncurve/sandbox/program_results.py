"""Results of a program's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from oncurve.sandbox.instance import Ended
from oncurve.sandbox.limits import Limits

Kind = Literal[
    "passed",
    "wrong",
    "raised",
    "exited",
    "timeout",
    "memory",
    "crashed",
    "not_data",
    "too_much_output",
    "not_run",
    "killed_sandbox",
]
"""Outcome of one test. Everything but "passed" is the program's own doing and earns nothing."""

_KINDS: tuple[Kind, ...] = get_args(Kind)
EXHAUSTED: tuple[Kind, ...] = ("timeout", "memory")
"""Kinds of failure that cost the grader more than others."""
_KILLED = -9
_OUT_OF_TIME = -24
_SYSTEM_CALL_KILLED = -31


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test."""

    __test__ = False

    kind: Kind
    detail: str = ""
    """One line: what was raised, returned or exceeded."""
    was_starved: bool = False
    """The clock ran out while the program was computing but had got little of the processor."""


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """The results of all tests of one program."""

    results: tuple[TestResult, ...] = ()
    broken: str = ""
    """Fault of the tests themselves; "" if there is none."""

    @property
    def num_passed(self) -> int:
        """Tests that passed."""
        return sum(result.kind == "passed" for result in self.results)

    @property
    def passed_fraction(self) -> float:
        """Share of the tests that passed; 0 without any."""
        return self.num_passed / len(self.results) if self.results else 0.0

    @property
    def is_correct(self) -> bool:
        """All tests passed, and there are some."""
        return bool(self.results) and self.num_passed == len(self.results)

    @property
    def kind(self) -> Kind:
        """The kind of the first test that did not pass; "passed" if all did."""
        for result in self.results:
            if result.kind != "passed":
                return result.kind
        return "passed"

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.broken:
            return f"the tests cannot be run: {self.broken}"
        line = f"{self.num_passed} of {len(self.results)} tests passed"
        for number, result in enumerate(self.results, start=1):
            if result.kind != "passed":
                return f"{line}; test {number}: {result.kind}{': ' if result.detail else ''}{result.detail}"
        return line


def same_for_all(result: TestResult, count: int) -> ProgramVerdict:
    """The verdict when one thing decides over all tests."""
    return ProgramVerdict((result,) * max(count, 1))


def known_kind(name: object) -> Kind:
    """A kind by its name; an unknown one counts as raised."""
    for kind in _KINDS:
        if kind == name:
            return kind
    return "raised"


def result_of_end(ended: Ended, limits: Limits) -> TestResult:
    """The result of a test whose process ended before any answer."""
    was_computing = ended.cpu_seconds >= 0.5 * limits.cpu_seconds  # the kernel's two clocks differ by that much
    if ended.status == _OUT_OF_TIME or (ended.status == _KILLED and was_computing):
        return TestResult("timeout", f"used its {limits.cpu_seconds} s of processor time")
    if ended.status == _KILLED:
        return TestResult("memory", "killed by the system, most likely for its memory")
    if ended.status < 0:
        name = "a system call that is not allowed" if ended.status == _SYSTEM_CALL_KILLED else f"signal {-ended.status}"
        return TestResult("crashed", f"ended by {name}")
    return TestResult("exited", f"exited with status {ended.status}")


def result_of_silence(ended: Ended, limits: Limits) -> TestResult:
    """The result of a test in which nothing came before the deadline."""
    was_starved = 0.1 * limits.cpu_seconds < ended.cpu_seconds
    return TestResult("timeout", f"no answer within {limits.wall_seconds:g} s", was_starved)


def result_of_failure(frame: dict[str, object]) -> TestResult:
    """The result of a test in which the program raised or refused, as it told itself."""
    text = str(frame.get("text", ""))[:300]
    if frame["k"] == "stop":
        return TestResult("not_data", text)
    listed = frame.get("names")
    names = [str(name)[:100] for name in listed] if isinstance(listed, list) else []
    name = names[0] if names else "an exception"
    detail = f"{name}: {text}" if text else name
    line = frame.get("line")
    if isinstance(line, int) and line > 0:
        detail += f" (line {line})"
    if "MemoryError" in names:
        return TestResult("memory", detail)
    return TestResult("exited" if "SystemExit" in names else "raised", detail)
