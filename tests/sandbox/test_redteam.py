"""No hostile program gets paid, gets out, reads a secret, leaves a process or takes longer than it may."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sandbox_tiers import TIERS

from oncurve.sandbox.interpreter import as_user, interpreter_for_sandbox
from oncurve.sandbox.tiers import describe_isolation

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "redteam" / "run_programs.py"
ORDINARY_USER = 64990


def rows() -> list[dict[str, Any]]:
    path = SCRIPT.with_name("programs.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


PACKAGES = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
QUICK = [row["id"] for row in rows() if row["category"] != "exhaust"]


def exhausting(tier: str, *, as_another_user: bool = False) -> list[str]:
    """Programs that use something up. What the kernel takes a process's time by knows neither tiers nor users.

    Those that only compute until it does, a second each, are run in the strongest isolation that works here.
    """
    is_first = not as_another_user and tier == describe_isolation().strongest
    rest = [row for row in rows() if row["category"] == "exhaust"]
    return [row["id"] for row in rest if is_first or not row.get("only_computes")]


def run(command: list[str], tier: str, *only: str, once: bool = False) -> dict[str, Any]:
    arguments = ["-B", str(SCRIPT), "--tier", tier, *(["--only", *only] if only else []), *["--once"] * once]
    environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": PACKAGES}
    ended = subprocess.run(
        [*command, *arguments], env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=280
    )
    assert ended.stdout, ended.stderr[-2000:]
    return json.loads(ended.stdout)


def test_there_are_many_programs_of_every_kind() -> None:
    kinds = Counter(row["category"] for row in rows())
    assert sum(kinds.values()) - kinds["control"] >= 60
    assert set(kinds) == {"control", "broken", "fake_pass", "exfiltrate", "damage", "exhaust"}
    assert len({row["id"] for row in rows()}) == len(rows())


@pytest.mark.proves("F105", "D7")
@pytest.mark.parametrize("tier", TIERS)
def test_nothing_gets_out_and_nothing_is_paid(tier: str) -> None:
    report = run([sys.executable], tier, *QUICK)
    assert report["problems"] == []
    assert report["programs"] == len(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(None, marks=pytest.mark.nightly)], ids=["two", "all"])
@pytest.mark.parametrize("tier", TIERS)
def test_no_program_exhausts_anything(tier: str, count: int | None) -> None:
    long = exhausting(tier)[:count]
    report = run([sys.executable], tier, *long)
    assert report["problems"] == []
    assert report["programs"] == len(long)


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.nightly
def test_programs_as_an_ordinary_user(tier: str, tmp_path: Path) -> None:
    """With one style of tests each: how a program is called does not depend on the user, nor does its time."""
    if os.geteuid() != 0:
        pytest.skip("the run as this user was one as an ordinary user")
    python = interpreter_for_sandbox(ORDINARY_USER).executable
    reading = [python, "-c", f"import pydantic; open({str(SCRIPT)!r}).read()"]
    probe = subprocess.run(as_user(ORDINARY_USER, reading), env={"PYTHONPATH": PACKAGES}, cwd="/", check=False)
    if probe.returncode != 0 or shutil.which("bwrap") is None:
        pytest.skip("an ordinary user cannot read this source tree")
    report = run(as_user(ORDINARY_USER, [python]), tier, *QUICK, *exhausting(tier, as_another_user=True), once=True)
    assert report["problems"] == []
    assert report["user"] == ORDINARY_USER
