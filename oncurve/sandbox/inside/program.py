"""Running a graded program: for a value, as a script, or as the other end of a test's calls."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import inspect
import os
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from . import codec, frames
from .caught import Caught, describe
from .remote import Peer

Job = dict[str, Any]


def load(sources: Sequence[str], name: str) -> ModuleType:
    """Runs source texts one after the other as one module."""
    module = ModuleType(name)
    sys.modules[name] = module
    for ending in ("exit", "quit"):
        setattr(builtins, ending, Quitter(ending, "end of file"))
    for number, source in enumerate(sources, start=1):
        exec(compile(source, f"<program {number}>", "exec", dont_inherit=True), module.__dict__)
    return module


def find(module: ModuleType, name: str) -> Any:
    """The object of that name; a method of that name on a class called Solution counts as well.

    Raises NameError.
    """
    if name in module.__dict__:
        return module.__dict__[name]
    solution = module.__dict__.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"the program does not define {name!r}")


def answer(fd: int, job: Job) -> None:
    """Calls one function of the program once and sends what it returned."""
    reply: Job = {}
    with Caught() as caught:
        function = find(load(job["sources"], "solution"), job["function"])
        arguments = [codec.decode(item) for item in job["args"]]
        named = {key: codec.decode(item) for key, item in job["kwargs"].items()}
        result = function(*arguments, **named)
        reply = {"k": "return", "value": codec.encode(asyncio.run(result) if inspect.iscoroutine(result) else result)}
    frames.send(fd, reply if caught.error is None else _failure(caught.error))


def run_as_script(fd: int, job: Job) -> None:
    """Runs the program as ``__main__``; its output goes where the outside reads it, its exit status to the kernel."""
    with Caught() as caught:
        load(job["sources"], "__main__")
    status = _exit_status(caught.error)
    if caught.error is not None and status:
        frames.send(fd, _failure(caught.error))
    with Caught():
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with Caught():
                stream.flush()
    os._exit(status)


def serve(fd: int, job: Job) -> None:
    """Loads the program, then answers calls until the other end is gone."""
    module = ModuleType("solution")
    with Caught() as caught:
        module = load(job["sources"], "solution")
    if caught.error is not None:
        frames.send(fd, _failure(caught.error))
        return
    frames.send(fd, {"k": "loaded"})
    peer = Peer(fd, find=lambda name: find(module, name), is_tested=True)
    with Caught():
        peer.serve()


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, codec.NotData):
        return {"k": "stop", "kind": "not_data", "text": str(error)}
    return describe(error)


def _exit_status(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
