"""Tests by code: one sandbox judges the program in another, and every message passes through here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent
from oncurve.sandbox.inside.codec import NotData, check
from oncurve.sandbox.inside.frames import Frame
from oncurve.sandbox.instance import Child, Sandbox
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import Workplace
from oncurve.sandbox.program_results import (
    EXHAUSTED,
    ProgramVerdict,
    TestResult,
    known_kind,
    result_of_end,
    result_of_failure,
    result_of_silence,
    same_for_all,
)
from oncurve.sandbox.program_tests import TestProgram

MAX_NESTED_CALLS = 50
"""Deeper calls back and forth between a test and a program end the program."""
_JUDGE_BYTES = 64 << 20


def run_test_program(
    workplace: Workplace, sources: Sequence[str], tests: TestProgram, *, limits: Limits
) -> ProgramVerdict:
    """The results that test code gives a program, one per assertion or test method.

    The program is started again when it has ended, so that one test that kills it does not decide over the others.

    Raises SandboxDied.
    """
    program = _Program(workplace.program, sources, limits)
    try:
        failure = program.load()
        if failure is not None:
            return same_for_all(failure, tests.count)
        return _Trial(workplace.judge, program, tests, limits).run()
    finally:
        program.close()


class _Program:
    """The program's end: answers one message with one message, whatever the program does."""

    def __init__(self, sandbox: Sandbox, sources: Sequence[str], limits: Limits) -> None:
        self._sandbox = sandbox
        self._sources = list(sources)
        self._limits = limits
        self._child: Child | None = None
        self._callers: list[str] = []
        self._num_exhausted = 0
        self._deadline = 0.0
        self.was_starved = False
        """Some call ran out of time on a busy machine."""
        self.has_answered = False
        """The program had a say in something."""

    def load(self) -> TestResult | None:
        """Starts the program; None if it is ready to be called."""
        self._callers = []
        self._deadline = time.monotonic() + self._limits.wall_seconds
        self._child = self._sandbox.child(limits=self._limits)
        reply = self._exchange({"mode": "serve", "sources": self._sources})
        if isinstance(reply, dict) and reply["k"] == "loaded":
            return None
        self.close()
        return result_of_failure(reply) if isinstance(reply, dict) else reply

    def forward(self, frame: Frame) -> Frame:
        """Gives the program what the test sent, and says what it sent back; "stop" if nothing that can be used."""
        self.has_answered = True
        failure = self._make_ready(frame)
        reply = failure or self._exchange(frame)
        if isinstance(reply, dict):
            reply = self._checked(reply)
        if isinstance(reply, dict) and reply["k"] == "raise":
            self._num_exhausted += "MemoryError" in reply["names"]
        if isinstance(reply, TestResult):
            self.close()
            return {"k": "stop", "kind": reply.kind, "text": reply.detail}
        return reply

    def close(self) -> None:
        """Ends the program if it runs."""
        self._callers = []
        if self._child is not None:
            child, self._child = self._child, None
            child.finish()

    def _make_ready(self, frame: Frame) -> TestResult | None:
        if not self._callers:
            self._deadline = time.monotonic() + self._limits.wall_seconds
        if self._num_exhausted >= self._limits.max_exhausted_tests:
            return TestResult("not_run", "earlier tests ran out of time or memory")
        if self._child is None:
            if self._callers or not isinstance(frame.get("to"), str):
                return TestResult("exited", "the object went with the process that held it")
            failure = self.load()
            if failure is not None:
                return failure
        if frame["k"] == "call":
            self._callers.append("test")
        else:
            self._callers.pop()
        return None

    def _exchange(self, frame: Frame) -> Frame | TestResult:
        child = self._child
        assert child is not None
        try:
            child.connection.send(frame, self._deadline)
            return child.connection.receive(self._deadline, self._limits.output_bytes)
        except ChildMisbehaved as error:
            return TestResult("too_much_output", str(error))
        except ChildSilent:
            result = result_of_silence(child.finish(), self._limits)
        except ChildGone:
            result = result_of_end(child.finish(), self._limits)
        self._num_exhausted += result.kind in EXHAUSTED
        self.was_starved |= result.was_starved
        return result

    def _checked(self, reply: Frame) -> Frame | TestResult:
        """The reply reduced to what a reply may hold."""
        try:
            clean = _clean(reply)
        except NotData as error:
            return TestResult("not_data", str(error))
        if clean["k"] == "stop":
            return result_of_failure(clean)
        if clean["k"] == "call":
            self._callers.append("program")
            return clean if len(self._callers) < MAX_NESTED_CALLS else TestResult("raised", "calls nested too deep")
        if not self._callers or self._callers.pop() != "test":
            return TestResult("not_data", "an answer without a call")
        return clean


def _clean(reply: Frame) -> Frame:
    """A message of the program with only known fields in it, all of them data.

    Raises NotData.
    """
    kind = reply["k"]
    if kind == "return":
        changes = _list(reply.get("args"))
        for payload in (reply.get("value"), *changes):
            check(payload, allow_references=True)
        return {"k": kind, "value": reply.get("value"), "args": changes, "printed": _printed(reply)}
    if kind == "call" and isinstance(reply.get("to"), int) and reply.get("op") == "call":
        args, kwargs = _list(reply.get("args")), reply.get("kwargs")
        if not isinstance(kwargs, dict):
            raise NotData("malformed data")
        for payload in (*args, *kwargs.values()):
            check(payload, allow_references=True)
        return {"k": kind, "to": reply["to"], "op": "call", "args": args, "kwargs": kwargs}
    if kind in ("raise", "stop"):
        names = [str(name)[:100] for name in _list(reply.get("names") or [])][:20]
        line = reply.get("line")
        text = str(reply.get("text"))[:300]
        line = line if isinstance(line, int) else 0
        return {"k": kind, "names": names, "text": text, "line": line, "printed": _printed(reply)}
    raise NotData("a message of no known kind")


def _printed(reply: Frame) -> str:
    """The program's output during a call."""
    text = reply.get("printed", "")
    return text if isinstance(text, str) else ""


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NotData("malformed data")
    return value


class _Trial:
    """The test's end: collects results until the test code is done or gone."""

    def __init__(self, sandbox: Sandbox, program: _Program, tests: TestProgram, limits: Limits) -> None:
        self._sandbox = sandbox
        self._program = program
        self._tests = tests
        self._limits = limits
        self._nonce = secrets.token_hex(16)
        self._results: list[TestResult] = []

    def run(self) -> ProgramVerdict:
        """The verdict."""
        limits = replace(
            self._limits, cpu_seconds=10 + 2 * self._limits.cpu_seconds, memory_mib=2 * self._limits.memory_mib
        )
        end = time.monotonic() + limits.program_seconds
        judge = self._sandbox.child(limits=limits)
        job = {"mode": "judge", "nonce": self._nonce, "code": self._tests.code, "setup": list(self._tests.setup)}
        try:
            judge.connection.send({**job, "style": self._tests.style, "entry_point": self._tests.entry_point}, end)
            while True:
                frame = judge.connection.receive(end, _JUDGE_BYTES)
                if frame["k"] == "done":
                    return self._finished(frame)
                if frame["k"] == "result":
                    self._record(frame)
                else:
                    judge.connection.send(self._program.forward(frame), end)
        except ChildSilent:
            return self._unfinished(result_of_silence(judge.finish(), limits))
        except (ChildGone, ChildMisbehaved):
            return self._unfinished(result_of_end(judge.finish(), limits))
        finally:
            judge.finish()

    def _record(self, frame: Frame) -> None:
        self._check_secret(frame)
        kind = known_kind(frame["kind"])
        was_starved = kind == "timeout" and self._program.was_starved
        self._results.append(TestResult(kind, str(frame["detail"]), was_starved))

    def _finished(self, frame: Frame) -> ProgramVerdict:
        self._check_secret(frame)
        if frame["broken"]:
            return ProgramVerdict(broken=str(frame["broken"]))
        missing = int(frame["total"]) - len(self._results)
        if missing > 0 and frame["kind"] != "passed":
            self._results.append(TestResult(known_kind(frame["kind"]), str(frame["detail"])))
            missing -= 1
        self._results += [TestResult("not_run", "the test code did not get there")] * missing
        return ProgramVerdict(tuple(self._results))

    def _unfinished(self, result: TestResult) -> ProgramVerdict:
        """The test code ended early: by what the program gave it, or by itself if the program gave it nothing."""
        if not self._program.has_answered:
            return ProgramVerdict(broken=f"the test code ended by itself: {result.detail}")
        missing = max(self._tests.count - len(self._results), 1)
        late = replace(result, detail=f"the test did not survive the program's answer: {result.detail}")
        return ProgramVerdict((*self._results, *(late,) * missing))

    def _check_secret(self, frame: Frame) -> None:
        if frame.get("nonce") != self._nonce:
            raise ChildMisbehaved("a result without the secret of this run")
