"""Tests by input and expected result; the results never enter a sandbox."""

from __future__ import annotations

import json
import math
import os
import select
import time
from collections.abc import Sequence
from typing import Any

from oncurve.sandbox import Limits
from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent
from oncurve.sandbox.inside.codec import NotData, Payload, check
from oncurve.sandbox.instance import Child, Sandbox
from oncurve.sandbox.program_results import (
    EXHAUSTED,
    ProgramVerdict,
    TestResult,
    result_of_end,
    result_of_failure,
    result_of_silence,
)
from oncurve.sandbox.program_tests import ProgramCase, ProgramCases

_NUMBER_TAGS = ("i", "f")
_MAX_SHOWN = 120
FLOAT_TOLERANCE = 1e-6
"""Of a number where a float is expected, relative to it where it is larger than 1."""


def run_cases(sandbox: Sandbox, sources: Sequence[str], tests: ProgramCases, *, limits: Limits) -> ProgramVerdict:
    """One result per case, every case in a fresh process.

    Raises SandboxDied.
    """
    results: list[TestResult] = []
    num_exhausted = 0
    end = time.monotonic() + limits.program_seconds
    for case in tests.cases:
        if num_exhausted >= limits.max_exhausted_tests or time.monotonic() >= end:
            results.append(TestResult("not_run", "earlier tests ran out of time or memory"))
            continue
        if tests.function is None:
            result = _run_script(sandbox, sources, case, limits=limits)
        else:
            result = _run_call(sandbox, sources, case, tests.function, limits)
        num_exhausted += result.kind in EXHAUSTED
        results.append(result)
    return ProgramVerdict(tuple(results))


def _run_call(sandbox: Sandbox, sources: Sequence[str], case: ProgramCase, function: str, limits: Limits) -> TestResult:
    job = {"mode": "answer", "sources": list(sources), "function": function, "args": list(case.args)}
    max_bytes = max(limits.output_bytes, 2 * len(json.dumps(case.expected)))
    deadline = time.monotonic() + limits.wall_seconds
    child = sandbox.child(limits=limits)
    try:
        child.connection.send({**job, "kwargs": dict(case.kwargs)}, deadline)
        frame = child.connection.receive(deadline, max_bytes)
        if frame["k"] != "return":
            return result_of_failure(frame)
        value = frame.get("value")
        check(value)
    except NotData as error:
        return TestResult("not_data", str(error))
    except ChildMisbehaved as error:
        return TestResult("too_much_output", str(error))
    except ChildSilent:
        return result_of_silence(child.finish(), limits)
    except ChildGone:
        return result_of_end(child.finish(), limits)
    finally:
        child.finish()
    if same_value(value, case.expected):
        return TestResult("passed")
    return TestResult("wrong", f"got {_shown(value)}")


def _run_script(sandbox: Sandbox, sources: Sequence[str], case: ProgramCase, *, limits: Limits) -> TestResult:
    deadline = time.monotonic() + limits.wall_seconds
    max_bytes = max(limits.output_bytes, 2 * len(case.expected))
    child = sandbox.child(limits=limits, stdin=case.stdin.encode("utf-8", "surrogatepass"), wants_output=True)
    try:
        child.connection.send({"mode": "script", "sources": list(sources)}, deadline)
        output = read_output(child, max_bytes, deadline)
        failure = last_words(child, deadline)
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
    text = output.decode("utf-8", "replace")
    if same_output(text, case.expected):
        return TestResult("passed")
    return TestResult("wrong", f"printed {text[:_MAX_SHOWN]!r}")


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


def last_words(child: Child, deadline: float) -> dict[str, Any] | None:
    """What a script raised, if it says so; returns when the script has ended."""
    words = None
    try:
        words = child.connection.receive(deadline, 100_000)
        child.connection.receive(deadline, 100_000)
    except ChildGone:
        return words
    raise ChildMisbehaved("more messages than one")


def same_value(actual: Payload, expected: Payload) -> bool:
    """Whether a returned value is the expected one.

    Lists and tuples are equal if their items are, as are sets and frozensets; a boolean equals only a boolean, an
    integer only exactly that number, and where a float is expected a number may differ by
    ``FLOAT_TOLERANCE * max(1, |expected|)``. The values are compared as they were sent, without building them.
    """
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(actual) is type(expected) and actual == expected
    wanted = _number(expected)
    if wanted is not None:
        return _same_number(_number(actual), wanted)
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
    return {"t": "l", "z": "s"}.get(tag, tag)


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
    ``FLOAT_TOLERANCE * max(1, |expected|)``; everything else must be the same.
    """
    ours = [line.split() for line in actual.rstrip().splitlines()]
    theirs = [line.split() for line in expected.rstrip().splitlines()]
    return len(ours) == len(theirs) and all(
        len(left) == len(right) and all(_same_word(one, other) for one, other in zip(left, right, strict=True))
        for left, right in zip(ours, theirs, strict=True)
    )


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if "." not in expected or len(actual) > 40 or len(expected) > 40:
        return False
    try:
        return _same_number(float(actual), float(expected))
    except ValueError:
        return False


def _shown(payload: Payload) -> str:
    text = json.dumps(payload)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
