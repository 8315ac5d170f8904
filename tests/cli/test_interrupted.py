"""Is Ctrl-C one line at every moment of a start, and never a traceback?"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oncurve.cli import app

AT_IMPORT = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
real, asked = builtins.__import__, False

def importing(name, *more, **options):
    global asked
    if name == {name!r} and not asked:
        asked = True
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *more, **options)

builtins.__import__ = importing
sys.argv = ["oncurve", "train", "word_problems", "run.steps=1"]
real("oncurve.__main__").__main__.main()
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("typer", "oncurve: stopped\n"),
        ("oncurve.recipe.load", "oncurve: stopped\n"),
        ("torch", "oncurve: stopped"),
    ],
)
def test_an_interrupted_start_is_one_line(name: str, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT.format(name=name)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode in (130, -signal.SIGINT)  # the second is what a shell shows as 130
    assert not (tmp_path / "runs").exists()


def test_questions_end_with_the_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["oncurve", "sample", "embedded"])
    monkeypatch.setattr("builtins.input", _at_the_end)
    app.main()
    assert "Traceback" not in capsys.readouterr().err


def _at_the_end(*_: object) -> str:
    raise EOFError
