"""Python in the sandbox: a session of calls, each with the names that earlier ones defined, or one function."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import SandboxPool, Workplace
from oncurve.sandbox.program_cases import last_message, read_output

MAX_CODE_CHARACTERS = 20_000
_RUN = """
def _oncurve_run(code):
    import ast
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), globals())
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), globals())
        if value is not None:
            print(repr(value))
"""
"""Runs in the sandbox: prints the value of the last expression, as an interactive interpreter does."""


_CALL = """
def _oncurve_call(name, arguments, mark):
    import asyncio, inspect, json
    value = globals()[name](**json.loads(arguments))
    if inspect.isawaitable(value):
        async def awaited():
            return await value
        value = asyncio.run(awaited())
    print(mark + json.dumps(value, default=str) + mark)
"""
"""Runs in the sandbox: prints what a function gives, as JSON between two marks."""
_NAMED = 'import sys; sys.modules["tool"] = sys.modules[__name__]; __name__ = "tool"'
"""A name that is not ``__main__``, under which the module is also found: dataclasses look it up."""


class CodeFailed(Exception):
    """The code raised, ran too long or printed too much; the text says which."""


class PythonSessions:
    """Sessions that share a pool of sandboxes, which is started when it is first needed."""

    def __init__(self, *, wall_seconds: float) -> None:
        self.limits = replace(Limits(), wall_seconds=wall_seconds, output_bytes=200_000)
        self._pool: SandboxPool | None = None
        self._lock = threading.Lock()

    def open(self) -> PythonSession:
        """A session without any names."""
        return PythonSession(self)

    def pool(self) -> SandboxPool:
        """The sandboxes. Raises SandboxUnavailable where nothing isolates code."""
        with self._lock:
            if self._pool is None:
                self._pool = SandboxPool(limits=self.limits)
            return self._pool

    def call(self, source: str, function: str, arguments: Mapping[str, Any]) -> Any:
        """The result of a function of this source code, called in a fresh process; arguments and result are JSON.

        Raises CodeFailed for what the code does wrong, SandboxDied.
        """
        mark = secrets.token_hex(16)
        call = f"_oncurve_call({function!r}, {json.dumps(dict(arguments))!r}, {mark!r})"
        output = self.output([_NAMED, source, _CALL, call])
        parts = output.split(mark)
        if len(parts) != 3:
            raise CodeFailed("it ended before it returned anything")
        return json.loads(parts[1])

    def output(self, sources: list[str]) -> str:
        """The output of source codes that run one after the other in a fresh process.

        Raises CodeFailed for what they do wrong, SandboxDied.
        """
        return self.pool().submit(lambda workplace: self._output(workplace, sources)).result()

    def close(self) -> None:
        """End the sandboxes."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _output(self, workplace: Workplace, sources: list[str]) -> str:
        limits = self.limits
        deadline = time.monotonic() + limits.wall_seconds
        child = workplace.program.child(limits=limits, stdin=b"", wants_output=True)
        try:
            child.connection.send({"mode": "script", "sources": sources}, deadline)
            output = read_output(child, limits.output_bytes, deadline)
            failure = last_message(child, deadline)
        except ChildMisbehaved as error:
            raise CodeFailed(f"it gave {error}") from None
        except ChildSilent:
            raise CodeFailed(f"it did not end within {limits.wall_seconds:g} s") from None
        except ChildGone:
            raise CodeFailed("its process ended early") from None
        finally:
            child.finish()
        ended = child.finish()
        if failure is not None and ended.status > 0:
            names, text = failure.get("names"), str(failure.get("text", ""))[:500]
            kind = names[0] if isinstance(names, list) and names else "an exception"
            raise CodeFailed(f"{kind}: {text}" if text else str(kind))
        if ended.status < 0:
            raise CodeFailed("it used more time or memory than it may")
        return output.decode("utf-8", "replace")


@dataclass(eq=False)
class PythonSession:
    """Every call runs in a fresh process, behind what earlier calls ran; one that fails leaves nothing behind."""

    sessions: PythonSessions
    earlier: list[str] = field(default_factory=list)

    def run(self, code: str) -> str:
        """The code's output, and the value of its last expression.

        Raises CodeFailed for what the code does wrong, SandboxDied.
        """
        if len(code) > MAX_CODE_CHARACTERS:
            raise CodeFailed(f"the code is longer than {MAX_CODE_CHARACTERS} characters")
        mark = secrets.token_hex(16)
        call = f"_oncurve_run({code!r})"
        sources = [_RUN, *self.earlier, f"print({mark!r}, flush=True)", call]
        output = self.sessions.output(sources)
        self.earlier.append(call)
        return output.rpartition(f"{mark}\n")[2].rstrip("\n")
