"""Programs are isolated, or refused with what to install; never run unprotected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.core.errors import OncurveError
from oncurve.sandbox import probe, tiers
from oncurve.sandbox.failures import SandboxUnavailable
from oncurve.sandbox.inside import landlock
from oncurve.sandbox.instance import Sandbox
from oncurve.sandbox.interpreter import SANDBOX_UID, as_user, interpreter_for_sandbox
from oncurve.sandbox.pool import SandboxPool
from oncurve.sandbox.tiers import choose_isolation, describe_isolation


@pytest.fixture(autouse=True)
def _fresh_reports() -> Iterator[None]:
    tiers._report.cache_clear()
    yield
    tiers._report.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes some kinds of isolation fail their trial, and the others pass it."""
    monkeypatch.setattr(tiers, "_missing", lambda name: None)
    monkeypatch.setattr(probe, "problem_with", lambda name: "it leaks" if name in names else None)


def test_the_strongest_isolation_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    assert choose_isolation() == "bubblewrap"
    assert choose_isolation("landlock") == "bubblewrap"


def test_the_weaker_isolation_is_taken_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "bubblewrap")
    with pytest.raises(SandboxUnavailable, match=r'allow="landlock", accepts it'):
        choose_isolation()
    assert choose_isolation("landlock") == "landlock"


def test_without_isolation_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "bubblewrap", "landlock")
    for allow in ("bubblewrap", "landlock"):
        with pytest.raises(SandboxUnavailable, match="it leaks"):
            SandboxPool(allow=allow)  # type: ignore[arg-type]
    assert describe_isolation().strongest is None
    assert issubclass(SandboxUnavailable, OncurveError)


def test_without_the_command_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        choose_isolation()


def test_without_namespaces_the_message_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "bubblewrap", "landlock")
    with pytest.raises(SandboxUnavailable, match="apparmor_restrict_unprivileged_userns"):
        choose_isolation()


def test_other_systems_and_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="it needs Linux, this is darwin"):
        choose_isolation("landlock")
    monkeypatch.undo()
    tiers._report.cache_clear()
    name = os.uname()
    fake = os.uname_result((name.sysname, name.nodename, name.release, name.version, "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: fake)
    with pytest.raises(SandboxUnavailable, match="no table of system calls for riscv64"):
        choose_isolation("landlock")


def test_a_kernel_without_landlock_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    report = next(report for report in describe_isolation().tiers if report.name == "landlock")
    assert not report.works
    assert "5.13" in report.remedy


def test_a_sandbox_that_lets_something_out_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_missing", lambda name: None)  # also where bubblewrap is not installed
    monkeypatch.setattr(probe, "_achieved_in", lambda sandbox: ["open a socket"])
    with pytest.raises(SandboxUnavailable, match="a trial program could open a socket"):
        choose_isolation()


def test_the_trial_program_gets_out_where_nothing_holds_it() -> None:
    source = f"{probe._PROGRAM}\nimport json\nprint(json.dumps(attempts('/etc/hosts', [])))"
    user = SANDBOX_UID if os.geteuid() == 0 else 0  # not as root: it does try to write to the root folder
    command = as_user(user, [interpreter_for_sandbox(user).executable, "-c", source])
    ended = subprocess.run(command, env={"A": "b"}, cwd="/", capture_output=True, text=True, check=True)
    reached = json.loads(ended.stdout)
    assert {"open a socket", "read a file of the trainer", "start a process", "read /etc/passwd"} <= set(reached)
    assert "see a foreign environment variable" in reached
    Path("/dev/shm/oncurve").unlink(missing_ok=True)


def test_the_report_is_for_people() -> None:
    text = describe_isolation().text
    assert text.startswith("strongest isolation for programs: ")
    assert "bubblewrap: " in text
    assert "landlock: " in text


def test_a_sandbox_that_does_not_start_is_a_problem_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "_launch", lambda *_: (_ for _ in ()).throw(OSError("no processes left")))
    assert probe.problem_with("landlock") == "the sandbox could not be started: no processes left"
