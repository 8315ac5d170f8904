"""Checkers: code of a task that decides whether an output is right, for tasks with many right outputs."""

from __future__ import annotations

from typing import Any

from oncurve.sandbox.inside.codec import Payload
from oncurve.sandbox.instance import Sandbox
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.program_calls import call
from oncurve.sandbox.program_results import TestResult

FUNCTION = "check"
"""``check(input, output, expected)`` returns True or 1 for a right output, and a number below 1 for a wrong one."""
_LOADED = "def __is_checker__(): return callable(check)"
_OWN_FAULT = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "AttributeError", "UnboundLocalError")


class BrokenChecker(Exception):
    """The checker cannot be run, whatever it is given."""


class Checker:
    """A checker in a sandbox of its own, which is not the program's: neither sees the other, only data crosses.

    Raises BrokenChecker if the code has no function ``check``.
    """

    def __init__(self, sandbox: Sandbox, code: str, limits: Limits) -> None:
        self._sandbox, self._sources, self._limits = sandbox, [code, _LOADED], limits
        reply = self._ask("__is_checker__")
        if reply is not True:
            reason = reply.detail if isinstance(reply, TestResult) else "check is no function"
            raise BrokenChecker(f"the checker cannot be loaded: {reason}")

    def decide(self, arguments: Payload, output: Payload, expected: Payload) -> TestResult:
        """The result of one test.

        A checker that fails on this output and accepts the expected one could not read the output, which is wrong.

        Raises BrokenChecker if it fails on the expected output as well.
        """
        verdict = self._ask(FUNCTION, arguments, output, expected)
        if not isinstance(verdict, TestResult):
            if isinstance(verdict, bool | int | float) and 0 <= verdict <= 1:
                return TestResult("passed") if verdict == 1 else TestResult("wrong", "the checker refuses it")
            verdict = TestResult("wrong", f"the checker returned {str(verdict)[:60]} instead of True or False")
        is_own_fault = verdict.detail.split(":")[0] in _OWN_FAULT or verdict.kind == "wrong"
        if expected is not None:
            control = verdict if expected == output else self._ask(FUNCTION, arguments, expected, expected)
            is_own_fault = isinstance(control, TestResult) or control != 1
        if is_own_fault:
            raise BrokenChecker(f"the checker failed: {verdict.kind}: {verdict.detail}")
        return TestResult("wrong", f"the checker could not read the output: {verdict.detail}")

    def _ask(self, function: str, *args: Payload) -> Any:
        job = {"mode": "answer", "sources": self._sources, "function": function, "args": list(args), "kwargs": {}}
        return call(self._sandbox, job, self._limits, max_bytes=self._limits.output_bytes)
