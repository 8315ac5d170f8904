"""A sandbox: what its processes can and cannot do, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_tiers import TIERS

from oncurve.sandbox import startup
from oncurve.sandbox.connection import ChildGone, ChildSilent
from oncurve.sandbox.failures import SandboxDied
from oncurve.sandbox.inside.codec import decode, encode
from oncurve.sandbox.instance import Ended, Sandbox
from oncurve.sandbox.limits import Limits

LIMITS = Limits(cpu_seconds=1, wall_seconds=3.0, memory_mib=256)


@pytest.fixture(params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(tier=request.param, limits=LIMITS)
    yield made
    made.close()


def call(sandbox: Sandbox, source: str, *args: Any) -> Any:
    """What function f of a program returns."""
    child = sandbox.child(limits=LIMITS)
    deadline = time.monotonic() + 20.0
    job = {"mode": "answer", "sources": [source], "function": "f", "args": [encode(arg) for arg in args]}
    try:
        child.connection.send({**job, "kwargs": {}}, deadline)
        reply = child.connection.receive(deadline, 1_000_000)
    finally:
        child.finish()
    return decode(reply["value"]) if reply["k"] == "return" else (reply["k"], *reply.get("names", ())[:1])


def end_of(sandbox: Sandbox, source: str) -> Ended:
    """How the process of a program ends that never answers."""
    child = sandbox.child(limits=LIMITS)
    deadline = time.monotonic() + 20.0
    try:
        child.connection.send(
            {"mode": "answer", "sources": [source], "function": "f", "args": [], "kwargs": {}}, deadline
        )
        child.connection.receive(deadline, 1_000_000)
    except ChildGone:
        pass
    return child.finish()


def test_a_function_is_called_with_data_and_returns_data(sandbox: Sandbox) -> None:
    assert call(sandbox, "def f(*a):\n    return {1: a}", [1, (2, None)], "ü\udc80", 2**99) == {
        1: ([1, (2, None)], "ü\udc80", 2**99)
    }


def test_nothing_of_one_program_reaches_the_next(sandbox: Sandbox) -> None:
    first = "import builtins, sys, os\nbuiltins.left = sys.left = 1\nos.environ['left'] = '1'\n"
    first += "try:\n    open('/tmp/left', 'w').close()\nexcept OSError: pass\ndef f(): return os.getpid()"
    second = "import builtins, sys, os\ndef f():\n    return (hasattr(builtins, 'left') or hasattr(sys, 'left') or "
    second += "'left' in os.environ or os.path.exists('/tmp/left'), os.getpid())"
    pid = call(sandbox, first)
    assert call(sandbox, second)[0] is False
    assert call(sandbox, second)[1] != pid
    assert sandbox.num_starts == 1


def test_what_cannot_be_cleaned_quickly_is_thrown_away_with_the_sandbox() -> None:
    if "bubblewrap" not in [tier.values[0] for tier in TIERS if not tier.marks]:
        pytest.skip("only bubblewrap has a folder to write to")
    sandbox = Sandbox(tier="bubblewrap", limits=LIMITS)
    seen = "import os\ndef f():\n    return os.listdir('/tmp')"
    for dirt in (
        "os.makedirs('/tmp/a/b')",
        "os.chmod('/tmp', 0)",
        "[open(f'/tmp/{n}', 'w') and None for n in range(50)]",
    ):
        call(sandbox, f"import os\ndef f():\n    {dirt}")
        assert call(sandbox, seen) == []
    assert 2 <= sandbox.num_starts <= 4
    sandbox.close()


@pytest.mark.proves("F105")
def test_the_world_of_a_program_is_small(sandbox: Sandbox) -> None:
    names = call(sandbox, "import os\ndef f(): return sorted(os.environ)")
    assert set(names) <= {*startup.ENVIRONMENT, "LC_CTYPE", "LD_LIBRARY_PATH", "PWD"}
    assert call(sandbox, "import sys\ndef f(): return [p for p in sys.path if 'site-packages' in p]") == []
    assert call(sandbox, "def f(): return open('/etc/hostname').read()")[0] == "raise"
    assert call(sandbox, "import os\ndef f(): return os.getuid()") != 0


def test_text_hashes_are_the_same_in_every_sandbox(sandbox: Sandbox) -> None:
    source = "def f(): return hash('oncurve')"
    first = call(sandbox, source)
    sandbox.close()
    assert call(sandbox, source) == first


@pytest.mark.proves("F105")
def test_limits_hold(sandbox: Sandbox) -> None:
    assert call(sandbox, "def f(): return len(bytearray(10**9))") == ("raise", "MemoryError")
    assert call(sandbox, "import os\ndef f(): os.fork()") == ("raise", "PermissionError")
    ended = end_of(sandbox, "def f():\n    while True: pass")
    assert ended.status in (-signal.SIGXCPU, -signal.SIGKILL)
    assert ended.cpu_seconds < 3.0


def test_how_a_process_ended_is_known(sandbox: Sandbox) -> None:
    assert end_of(sandbox, "import os\ndef f(): os._exit(7)").status == 7
    assert end_of(sandbox, "import os\ndef f(): os.abort()").status == -signal.SIGABRT


def test_a_process_that_never_answers_is_ended(sandbox: Sandbox) -> None:
    child = sandbox.child(limits=LIMITS)
    deadline = time.monotonic() + 0.5
    source = "import time, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(1000)"
    child.connection.send({"mode": "answer", "sources": [source], "function": "f", "args": [], "kwargs": {}}, deadline)
    with pytest.raises(ChildSilent):
        child.connection.receive(deadline, 1000)
    start = time.monotonic()
    assert child.finish().status == -signal.SIGKILL
    assert time.monotonic() - start < 30.0  # it sleeps for 1000 s
    assert child.finish().status == -signal.SIGKILL


def test_a_sandbox_that_was_killed_is_noticed_and_starts_again(sandbox: Sandbox) -> None:
    assert call(sandbox, "def f(): return 1") == 1
    process = sandbox._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(SandboxDied):
        call(sandbox, "def f(): return 1")
    assert call(sandbox, "def f(): return 2") == 2
    assert sandbox.num_starts == 2


def test_closing_ends_every_process_and_can_be_repeated(sandbox: Sandbox) -> None:
    child = sandbox.child(limits=LIMITS)
    process = sandbox._process
    assert process is not None
    descriptors = len(os.listdir("/proc/self/fd"))
    sandbox.close()
    sandbox.close()
    assert not Path(f"/proc/{process.pid}").exists()
    with pytest.raises(SandboxDied):
        child.finish()
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_no_descriptor_is_left_open_per_process(sandbox: Sandbox) -> None:
    call(sandbox, "def f(): return 1")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        call(sandbox, "def f(): return 1")
        end_of(sandbox, "import os\nos._exit(1)")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_sandbox_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncurve.sandbox.startup.interpreter_command", lambda _: ["/bin/sh", "-c", "echo no >&2"])
    sandbox = Sandbox(tier="landlock", limits=LIMITS)
    with pytest.raises(SandboxDied, match="did not start: no"):
        sandbox.start()
    sandbox.close()
