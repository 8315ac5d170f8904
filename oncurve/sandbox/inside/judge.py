"""Test code that judges a program in another sandbox."""

from __future__ import annotations

import importlib
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from . import frames
from .assertions import (
    RECORD,
    SOLUTION_MODULES,
    free_names,
    imported_from_solution,
    result_per_assertion,
    shadowed_builtin,
)
from .caught import Caught, text_of
from .pytest_stand_in import calls_of, stand_in
from .remote import CallStopped, Peer, RemoteFunction

Record = Callable[[str, str], None]
"""Takes how a test ended, "passed" or a kind of failure, and one line about it."""


_KINDS = {AssertionError: "wrong", MemoryError: "memory"}


class _Solution(ModuleType):
    """The module that test code imports as the program."""

    def __init__(self, name: str, peer: Peer) -> None:
        super().__init__(name)
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.name(name)


class _Judge:
    """Runs one piece of test code and reports every result as it comes."""

    def __init__(self, fd: int, job: dict[str, Any]) -> None:
        self._fd = fd
        self._nonce = job.pop("nonce")
        self._job = job
        self._peer = Peer(fd, is_tested=False)
        self._num_results = 0
        self._num_passed = 0
        self._num_calls_to_define = 0
        self._unsendable = ""
        self.num_tests = 0
        self.namespace: dict[str, Any] = {"__name__": "tests", RECORD: self.test}

    def record(self, kind: str, detail: str = "") -> None:
        """Sends one result."""
        self._num_results += 1
        self._num_passed += kind == "passed"
        self._send({"k": "result", "kind": kind, "detail": detail})

    @contextmanager
    def test(self, _number: int = 0) -> Iterator[None]:
        """A block that is one test: whatever it raises is its result and ends there."""
        with Caught() as caught:
            yield
        self.record(*self.outcome(caught.error))

    def outcome(self, error: BaseException | None) -> tuple[str, str]:
        """The outcome of a test that raised this."""
        if error is None:
            return "passed", ""
        if isinstance(error, CallStopped):
            if error.kind == "unsendable":
                self._unsendable = error.text
            return error.kind, error.text
        kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "raised")
        return kind, f"{type(error).__name__}: {text_of(error)}"

    def define(self) -> None:
        """Runs the set-up code and the definitions of the test code, with the program's names in place."""
        job, source = self._job, self._job["code"]
        for statement in job["setup"]:
            exec(compile(statement, "<setup>", "exec", dont_inherit=True), self.namespace)
        missing = {name for name in free_names(source) if name not in self.namespace}
        named = missing | imported_from_solution(source)
        self._peer.allows_objects = any(name[:1].isupper() for name in named)
        for name in named:
            if name[:1].isupper() and name.endswith(("Error", "Exception")):
                self._peer.exceptions[name] = type(name, (Exception,), {})
        for module in SOLUTION_MODULES:
            sys.modules[module] = _Solution(module, self._peer)
        for name in sorted(missing & sys.stdlib_module_names):
            self.namespace[name] = importlib.import_module(name)
            missing.discard(name)
        entry_point = job["entry_point"]
        if entry_point is None and not named:
            entry_point = shadowed_builtin(source)
        for name in sorted(missing):
            self._provide(name)
        if entry_point is not None:
            self.namespace[entry_point] = RemoteFunction(self._peer, entry_point)
            if "await " in source or "asyncio" in source:
                self._provide(entry_point)
        self._num_calls_to_define = self._peer.num_calls

    def _provide(self, name: str) -> None:
        if name in self._peer.exceptions:
            self.namespace[name] = self._peer.exceptions[name]
            return
        with Caught():  # a name that the program lacks is missed when a test reads it
            self.namespace[name] = self._peer.name(name)
            if isinstance(self.namespace[name], type):
                self._peer.exceptions[name] = self.namespace[name]

    def perform(self) -> None:
        """Runs the tests in the style that they are written in."""
        match self._job["style"]:
            case "asserts":
                tree, self.num_tests = result_per_assertion(self._job["code"])
                exec(compile(tree, "<tests>", "exec", dont_inherit=True), self.namespace)
            case "check":
                tree, self.num_tests = result_per_assertion(self._job["code"])
                exec(compile(tree, "<tests>", "exec", dont_inherit=True), self.namespace)
                self.namespace["check"](self.namespace[self._job["entry_point"]])
            case "pytest":
                sys.modules["pytest"] = stand_in()
                exec(compile(self._job["code"], "<tests>", "exec", dont_inherit=True), self.namespace)
                tests = list(calls_of(self._job["code"], self.namespace))
                self.num_tests = len(tests)
                for call in tests:
                    with self.test():
                        call()
            case "unittest":
                exec(compile(self._job["code"], "<tests>", "exec", dont_inherit=True), self.namespace)
                self._run_test_cases()

    def _run_test_cases(self) -> None:
        cases = [
            value
            for value in self.namespace.values()
            if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"
        ]
        suites = [unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases]
        self.num_tests = sum(suite.countTestCases() for suite in suites)
        for suite in suites:
            suite.run(_Results(self))

    def finish(self, error: BaseException | None) -> None:
        """Says that there are no more results, how many there should be, and what is wrong with the tests if they are.

        They are at fault if they fail before the program had a say in anything.
        """
        kind, detail = self.outcome(error)
        has_called = self._peer.num_calls > self._num_calls_to_define
        if self._unsendable:
            broken = self._unsendable
        elif not has_called and isinstance(error, ImportError | SyntaxError):
            broken = detail
        elif self._peer.num_calls == 0 and self._num_passed == 0:
            broken = detail or "the tests end before they ask anything of the program"
        else:
            broken = ""
        total = max(self._num_results + (error is not None), self.num_tests)
        if error is None and self._num_results and self._job["style"] != "unittest":
            total = self._num_results
        if total == 0:
            broken = broken or "the test code holds no test"
        self._send({"k": "done", "kind": kind, "detail": detail, "total": total, "broken": broken})

    def _send(self, frame: frames.Frame) -> None:
        frames.send(self._fd, {**frame, "nonce": self._nonce})


class _Results(unittest.TestResult):
    """One result per test method; a method with subtests passes if they all do."""

    def __init__(self, judge: _Judge) -> None:
        super().__init__()
        self._judge = judge
        self._failed: set[str] = set()

    def addSuccess(self, test: unittest.TestCase) -> None:
        """The method ended by itself."""
        if test.id() not in self._failed:
            self._judge.record("passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """An assertion did not hold."""
        self._fail(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """Something was raised."""
        self._fail(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        """A part of the method ended."""
        if err is not None:
            self._fail(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """A skipped test says nothing and does not count."""
        self._judge.num_tests -= 1

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        """A test that should fail did not."""
        self._judge.record("wrong", "unexpected success")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        """A test that should fail did."""
        self._judge.record("passed")

    def _fail(self, test: unittest.TestCase, err: Any) -> None:
        if test.id() not in self._failed:
            self._failed.add(test.id())
            self._judge.record(*self._judge.outcome(err[1]))


def run(fd: int, job: dict[str, Any]) -> None:
    """Judges the program at the other end of the socket."""
    judge = _Judge(fd, job)
    with Caught() as caught:
        judge.define()
        judge.perform()
    judge.finish(caught.error)
