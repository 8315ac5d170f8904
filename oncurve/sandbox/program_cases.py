"""Tests by input and expected result; the results never enter a sandbox."""

from __future__ import annotations

import json
import math
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent
from oncurve.sandbox.inside.codec import Payload
from oncurve.sandbox.instance import Child, Sandbox
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.program_calls import call
from oncurve.sandbox.program_checkers import BrokenChecker, Checker
from oncurve.sandbox.program_results import (
    EXHAUSTED,
    ProgramVerdict,
    TestResult,
    result_of_end,
    result_of_failure,
    result_of_silence,
)
from oncurve.sandbox.program_tests import MISSING, ProgramCase, ProgramCases

_NUMBER_TAGS = ("i", "f")
_NUMBER = re.compile(r"(?!.{41})[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_MAX_EXCERPT = 120
FLOAT_TOLERANCE = 1e-6
"""Tolerance of a number where a float is expected, relative where that is larger than 1."""


Decide = Callable[[ProgramCase, Payload], TestResult]
"""Judges an output of the program, or the value that it returned, on a case."""


def run_cases(
    sandbox: Sandbox, sources: Sequence[str], tests: ProgramCases, *, limits: Limits, judge: Sandbox | None = None
) -> ProgramVerdict:
    """One result per case, every case in a fresh process; a checker runs in the sandbox of the judge.

    Raises SandboxDied.
    """
    try:
        decide = _decision(tests, judge, limits)
        return ProgramVerdict(tuple(_results(sandbox, sources, tests, decide, limits)))
    except BrokenChecker as error:
        return ProgramVerdict(broken=str(error))


def _results(
    sandbox: Sandbox, sources: Sequence[str], tests: ProgramCases, decide: Decide, limits: Limits
) -> Iterator[TestResult]:
    num_exhausted = 0
    end = time.monotonic() + limits.program_seconds
    for case in tests.cases:
        if num_exhausted >= limits.max_exhausted_tests or time.monotonic() >= end:
            yield TestResult("not_run", "earlier tests ran out of time or memory")
            continue
        if tests.function is None:
            result = _run_script(sandbox, sources, case, decide, limits)
        else:
            result = _run_call(sandbox, sources, case, tests.function, decide, limits)
        num_exhausted += result.kind in EXHAUSTED
        yield result


def _decision(tests: ProgramCases, judge: Sandbox | None, limits: Limits) -> Decide:
    """The way to judge outputs: by equality, or by the checker of the tests."""
    if tests.checker is None or judge is None:
        return _by_equality if tests.function else _by_text
    checker = Checker(judge, tests.checker, limits)

    def by_checker(case: ProgramCase, output: Payload) -> TestResult:
        arguments: Payload = case.stdin if tests.function is None else ["l", *case.args]
        if case.kwargs:
            arguments = ["d", *(part for pair in case.kwargs.items() for part in pair)]
        return checker.decide(arguments, output, None if case.expected == MISSING else case.expected)

    return by_checker


def _by_equality(case: ProgramCase, value: Payload) -> TestResult:
    if any(same_value(value, expected) for expected in (case.expected, *case.also)):
        return TestResult("passed")
    return TestResult("wrong", f"got {_excerpt(value)}")


def _by_text(case: ProgramCase, output: Payload) -> TestResult:
    if same_output(output, case.expected):
        return TestResult("passed")
    return TestResult("wrong", f"printed {output[:_MAX_EXCERPT]!r}")


def _run_call(
    sandbox: Sandbox, sources: Sequence[str], case: ProgramCase, function: str, decide: Decide, limits: Limits
) -> TestResult:
    job = {"mode": "answer", "sources": list(sources), "function": function, "args": list(case.args)}
    max_bytes = max(limits.output_bytes, 2 * len(json.dumps(case.expected)))
    value = call(sandbox, {**job, "kwargs": dict(case.kwargs)}, limits, max_bytes=max_bytes)
    return value if isinstance(value, TestResult) else decide(case, value)


def _run_script(
    sandbox: Sandbox, sources: Sequence[str], case: ProgramCase, decide: Decide, limits: Limits
) -> TestResult:
    deadline = time.monotonic() + limits.wall_seconds
    max_bytes = max(limits.output_bytes, 2 * len(case.expected))
    child = sandbox.child(limits=limits, stdin=case.stdin.encode("utf-8", "surrogatepass"), wants_output=True)
    try:
        child.connection.send({"mode": "script", "sources": list(sources)}, deadline)
        output = read_output(child, max_bytes, deadline)
        failure = last_message(child, deadline)
    except ChildMisbehaved as error:
        return TestResult("too_much_output", str(error))
    except ChildSilent:
        return result_of_silence(child.finish(), limits)
    except ChildGone:
        return result_of_end(child.finish(), limits)
    finally:
        child.finish()
    ended = child.finish()
    if ended.status > 0 and failure is not None:
        return result_of_failure(failure)
    if ended.status != 0:
        return result_of_end(ended, limits)
    return decide(case, output.decode("utf-8", "replace"))


def read_output(child: Child, max_bytes: int, deadline: float) -> bytes:
    """All that a script prints until it closes its output."""
    assert child.output is not None
    output = bytearray()
    poll = select.poll()
    poll.register(child.output, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise ChildSilent
        part = os.read(child.output, 1 << 16)
        if not part:
            return bytes(output)
        output += part
        if len(output) > max_bytes:
            raise ChildMisbehaved(f"more than {max_bytes} bytes of output")


def last_message(child: Child, deadline: float) -> dict[str, Any] | None:
    """The exception of a script, if it says so; returns when the script has ended."""
    message = None
    try:
        message = child.connection.receive(deadline, 100_000)
        child.connection.receive(deadline, 100_000)
    except ChildGone:
        return message
    raise ChildMisbehaved("more messages than one")


def same_value(actual: Payload, expected: Payload) -> bool:
    """Whether a returned value is the expected one.

    Lists and tuples are equal if their items are, as are sets and frozensets; a boolean equals only a boolean, an
    integer only exactly that number, and where a float is expected a number may differ by
    ``FLOAT_TOLERANCE * max(1, |expected|)``. The values are compared as they were sent, without building them.
    """
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(actual) is type(expected) and actual == expected
    number = _number(expected)
    if number is not None:
        return _same_number(_number(actual), number)
    if not isinstance(actual, list) or not isinstance(expected, list) or len(actual) != len(expected):
        return False
    if _family(actual[0]) != _family(expected[0]):
        return False
    ours, theirs = _items(actual), _items(expected)
    return all(same_value(left, right) for left, right in zip(ours, theirs, strict=True))


def _number(payload: Payload) -> int | float | None:
    if isinstance(payload, int | float) and not isinstance(payload, bool):
        return payload
    if isinstance(payload, list) and payload[0] in _NUMBER_TAGS:
        return int(payload[1], 16) if payload[0] == "i" else float(payload[1])
    return None


def _same_number(actual: int | float | None, expected: int | float) -> bool:
    if actual is None:
        return False
    if isinstance(expected, int):
        return actual == expected
    if math.isnan(expected):
        return actual != actual
    if math.isinf(expected):
        return actual == expected
    try:
        return abs(actual - expected) <= FLOAT_TOLERANCE * max(1.0, abs(expected))
    except OverflowError:
        return False


def _family(tag: str) -> str:
    """Kinds of values that count as equal share a letter."""
    return {"t": "l", "q": "l", "z": "s"}.get(tag, tag)


def _items(payload: list[Payload]) -> list[Payload]:
    """The items in an order that does not depend on how they were inserted."""
    if payload[0] in ("s", "z"):
        return sorted(payload[1:], key=json.dumps)
    if payload[0] == "d":
        pairs = [["t", key, value] for key, value in zip(payload[1::2], payload[2::2], strict=True)]
        return sorted(pairs, key=lambda pair: json.dumps(pair[1]))
    return payload[1:]


def same_output(actual: str, expected: str) -> bool:
    """Whether a script printed what was expected.

    Spaces at the ends of lines and empty lines at the end do not count. A number with a decimal point may differ by
    ``FLOAT_TOLERANCE * max(1, |expected|)``, and an integer may be written as 3.0 or 1e+20; all else must be the same.
    """
    ours = [line.split() for line in actual.rstrip().splitlines()]
    theirs = [line.split() for line in expected.rstrip().splitlines()]
    return len(ours) == len(theirs) and all(
        len(left) == len(right)
        and all(_same_word(actual_word, other) for actual_word, other in zip(left, right, strict=True))
        for left, right in zip(ours, theirs, strict=True)
    )


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    if "." in expected or "e" in expected.lower():
        return _same_number(float(actual), float(expected))
    return not actual.lstrip("+-").isdigit() and Fraction(actual) == int(expected)


def _excerpt(payload: Payload) -> str:
    text = json.dumps(payload)
    return text if len(text) <= _MAX_EXCERPT else text[:_MAX_EXCERPT] + "…"
