"""What does a freshly forked process do?"""

from __future__ import annotations

import sys

from . import frames, judge, program


def run(fd: int) -> None:
    """Reads one job from the socket and does it."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
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
