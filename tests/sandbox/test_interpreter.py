"""The sandbox runs this Python, or a copy of it that its user can read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oncurve.sandbox import interpreter
from oncurve.sandbox.failures import SandboxUnavailable
from oncurve.sandbox.interpreter import SANDBOX_UID, as_user, interpreter_for_sandbox

UID = SANDBOX_UID if os.geteuid() == 0 else 0


def test_the_interpreter_runs_as_the_sandbox_s_user() -> None:
    python = interpreter_for_sandbox(UID)
    ended = subprocess.run(
        as_user(UID, [python.executable, "-s", "-S", "-P", "-c", "import os, ctypes; print(os.getuid())"]),
        env={}, cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(ended.stdout) == (UID or os.getuid())


def test_no_environment_reaches_the_interpreter_on_its_way() -> None:
    command = as_user(UID, [interpreter_for_sandbox(UID).executable, "-c", "import os; print(len(os.environ))"])
    ended = subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, check=True)
    assert int(ended.stdout) <= 1  # Python itself sets LC_CTYPE


def test_a_copy_belongs_to_us_and_is_written_by_nobody_else(tmp_path: Path) -> None:
    made = interpreter._copy(interpreter.Interpreter(os.path.realpath("/proc/self/exe"), ()), tmp_path)
    assert made is not None
    for path in (Path(made.executable), Path(made.libraries[0]), Path(made.prefix)):
        mode = path.stat().st_mode
        assert not mode & (stat.S_IWGRP | stat.S_IWOTH)
        assert mode & stat.S_IROTH
    assert interpreter._copy(interpreter.Interpreter(os.path.realpath("/proc/self/exe"), ()), tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == [Path(made.prefix).name]


def test_a_folder_that_others_can_write_to_is_not_taken_for_our_copy(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    folder.chmod(0o777)
    assert not interpreter._is_ours(folder)
    folder.chmod(0o755)
    assert interpreter._is_ours(folder)
    (tmp_path / "link").symlink_to(folder)
    assert not interpreter._is_ours(tmp_path / "link")


def test_without_a_python_for_the_sandbox_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_problem_with", lambda python, uid: "Permission denied")
    monkeypatch.setattr(interpreter, "_shared_folders", lambda: iter(()))
    with pytest.raises(SandboxUnavailable, match="cannot run Python as another user"):
        interpreter_for_sandbox.__wrapped__(UID)


def test_an_old_copy_that_does_not_run_is_made_anew_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied: list[Path] = []

    def copy(python: interpreter.Interpreter, folder: Path) -> interpreter.Interpreter:
        copied.append(folder)
        return interpreter.Interpreter(str(folder / "copy" / "bin" / "python"), ())

    monkeypatch.setattr(interpreter, "_problem_with", lambda python, uid: "broken" if len(copied) < 4 else None)
    monkeypatch.setattr(interpreter, "_shared_folders", lambda: iter((tmp_path / "a", tmp_path / "b")))
    monkeypatch.setattr(interpreter, "_copy", copy)
    assert interpreter_for_sandbox.__wrapped__(UID).executable == str(tmp_path / "b" / "copy" / "bin" / "python")
    assert copied == [tmp_path / "a"] * 2 + [tmp_path / "b"] * 2


def test_a_python_that_starts_has_no_problem_and_one_that_fails_has() -> None:
    own = os.geteuid()
    assert interpreter._problem_with(interpreter.Interpreter(sys.executable, ()), own) is None
    assert interpreter._problem_with(interpreter.Interpreter("/bin/false", ()), own) is not None
    assert "No such file" in (interpreter._problem_with(interpreter.Interpreter("/no/python", ()), own) or "")
