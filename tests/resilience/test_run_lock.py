"""Does a lock name its owner, end with it, and count as stale only when the owner is dead?"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oncurve.core.errors import ConfigError
from oncurve.observe.lock import NAME, STALE_SECONDS, RunLock


def write_owner(folder: Path, *, host: str, pid: int, age_seconds: float) -> None:
    path = folder / NAME
    path.write_text(json.dumps({"pid": pid, "host": host, "since": "2026-01-01 00:00:00"}))
    then = time.time() - age_seconds
    os.utime(path, (then, then))


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on {socket.gethostname()}"):
        RunLock(tmp_path)
    lock.close()
    lock.close()
    assert lock.previous_owner is None
    RunLock(tmp_path).close()


def test_a_lock_of_a_dead_process_is_taken_over_and_its_owner_named(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from oncurve.observe.lock import RunLock; "
        "lock = RunLock(Path(sys.argv[1])); os._exit(0)"
    )
    dead = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    assert dead.wait() == 0
    lock = RunLock(tmp_path)
    assert lock.previous_owner is not None
    assert f"process {dead.pid} on {socket.gethostname()}" in lock.previous_owner
    lock.close()


def test_an_owner_on_another_machine_counts_as_dead_when_it_was_silent_for_long(tmp_path: Path) -> None:
    write_owner(tmp_path, host="another-machine", pid=1, age_seconds=10)
    with pytest.raises(ConfigError, match="process 1 on another-machine"):
        RunLock(tmp_path)
    write_owner(tmp_path, host="another-machine", pid=1, age_seconds=STALE_SECONDS + 10)
    lock = RunLock(tmp_path)
    assert "another-machine" in str(lock.previous_owner)
    lock.close()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0\0", '{"pid": "x"}'])
def test_a_lock_file_that_says_nothing_is_no_owner(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    then = time.time() - 2 * STALE_SECONDS
    os.utime(tmp_path / NAME, (then, then))
    RunLock(tmp_path).close()


def test_closing_leaves_no_thread_and_no_name(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    thread = lock._thread
    lock.close()
    assert not thread.is_alive()
    assert (tmp_path / NAME).read_text() == ""
