"""Escape test: a program that tries to get out of a sandbox and reports what it could do."""

from __future__ import annotations

import os
import tempfile
import time

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent
from oncurve.sandbox.failures import SandboxDied, SandboxUnavailable
from oncurve.sandbox.inside.codec import decode, encode
from oncurve.sandbox.instance import Sandbox
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.startup import ENVIRONMENT, TierName

_PROGRAM = """
import os, socket

def succeeds(action):
    try:
        return action() is not False
    except (OSError, ValueError):
        return False

def reads(path):
    with open(path, "rb") as file:
        return bool(file.read(1))

def starts_process():
    if os.fork() == 0:
        os._exit(0)

def attempts(canary, harmless):
    parent = os.getppid()
    tried = {
        "start a process": starts_process,
        "open a socket": lambda: socket.socket().close(),
        "signal another process": lambda: os.kill(parent, 0),
        "read a file of the trainer": lambda: reads(canary),
        "read the environment of another process": lambda: reads("/proc/%d/environ" % parent),
        "read /etc/passwd": lambda: reads("/etc/passwd"),
        "write next to a file of the trainer": lambda: open(canary + ".new", "w").close(),
        "write to /dev/shm": lambda: open("/dev/shm/oncurve", "w").close(),
        "write to the root folder": lambda: open("/oncurve", "w").close(),
        "become root": lambda: os.setuid(0),
        "see a foreign environment variable": lambda: bool(set(os.environ) - set(harmless)),
    }
    return [name for name, action in tried.items() if succeeds(action)]
"""
_PROBE_SECONDS = 20.0


def problem_with(tier: TierName) -> str | None:
    """The reason why programs cannot be run in this isolation here; None if they can and nothing gets out."""
    sandbox = Sandbox(tier=tier, limits=Limits())
    try:
        achieved = _achieved_in(sandbox)
    except (SandboxDied, SandboxUnavailable, ChildGone, ChildMisbehaved, ChildSilent) as error:
        return " ".join(str(error).split()) or f"the trial program did not answer ({type(error).__name__})"
    finally:
        sandbox.close()
    return f"a trial program could {', '.join(achieved)}" if achieved else None


def _achieved_in(sandbox: Sandbox) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="oncurve-canary-") as folder:
        canary = os.path.join(folder, "canary")
        with open(canary, "w") as file:
            file.write("secret")
        os.chmod(canary, 0o644)
        os.chmod(folder, 0o777)
        harmless = [*ENVIRONMENT, "LD_LIBRARY_PATH", "PWD", "LC_CTYPE"]
        job = {"mode": "answer", "sources": [_PROGRAM], "function": "attempts", "kwargs": {}}
        deadline = time.monotonic() + _PROBE_SECONDS
        child = sandbox.child(limits=Limits())
        try:
            child.connection.send({**job, "args": [encode(canary), encode(harmless)]}, deadline)
            reply = child.connection.receive(deadline, 100_000)
        finally:
            child.finish()
    if reply["k"] != "return":
        raise SandboxDied(f"the trial program failed: {reply.get('text', '')}")
    return decode(reply["value"])
