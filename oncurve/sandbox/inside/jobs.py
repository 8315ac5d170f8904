"""Jobs of a freshly forked process."""

from __future__ import annotations

import io
import sys

from . import frames, judge, program


def run(fd: int) -> None:
    """Reads one job from the socket and does it."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), "utf-8", "surrogateescape")
        for fd in (1, 2)
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    job = frames.receive(fd)
    match job["mode"]:
        case "answer":
            program.answer(fd, job)
        case "script":
            program.run_as_script(fd, job)
        case "serve":
            program.serve(fd, job)
        case "judge":
            judge.run(fd, job)
