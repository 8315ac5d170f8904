"""A process that has its libraries loaded, and a child of it for each script: in a box without a network.

A child may write into folders of scripts alone. Loading the libraries anew for each script takes most of its time.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from trl_stand_ins import MODEL

from oncurve.observe.run_model import EMBEDDED

LOADED = {
    "trl": ("trl", "trl.trainer.grpo_trainer", "trl.rewards"),
    "oncurve": ("oncurve.cli.app", "oncurve.trl.grpo_trainer", "oncurve.trl.run_script"),
}
"""Modules to load, by the library under which scripts run."""
BOTH = ("transformers.models.auto", "transformers.trainer", "peft", "datasets", "pandas", "openai", "math_verify")


class Box:
    """Scripts under one library, one after another."""

    def __init__(self, library: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        shutil.copytree(EMBEDDED, self.root / MODEL)
        config = self.root / MODEL / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1 << 15}))
        command = [*boxed(str(self.root)), sys.executable, "-W", "ignore", str(Path(__file__).resolve()), library]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "HOME": str(self.root)}
        named = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([named] if named else [])])
        self.process = subprocess.Popen(
            command, cwd=self.root, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, place: Path, words: list[str], environment: dict[str, str], limit_seconds: int) -> Any:
        """How a script in a folder below the root ended; None where it took longer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {"place": str(place), "words": words, "environment": environment, "limit": limit_seconds}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        code = json.loads(self.process.stdout.readline())
        if code is None:
            return None
        out, err = ((place / name).read_text(encoding="utf-8", errors="replace") for name in (".out", ".err"))
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        """End the process and remove what scripts wrote."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.root, ignore_errors=True)


def boxed(place: str) -> list[str]:
    """Words that begin a command which may write into one folder alone and has no network; what PYTHONPATH names is
    readable. Raises SystemExit without bubblewrap: what others wrote runs in no other box."""
    if shutil.which("bwrap") is None:
        raise SystemExit("bubblewrap is not installed, and scripts of others are not run without it")
    shown = ["--tmpfs", "/"]  # where scripts may write to folders of their own machines, and nothing stays
    for path in sorted(Path("/").iterdir()):
        if path.is_symlink():
            shown += ["--symlink", os.readlink(path), str(path)]
        elif path.name not in ("dev", "proc", "tmp", "home"):
            shown += ["--ro-bind", str(path), str(path)]
    shown += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--bind", place, place]
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        shown += ["--ro-bind", folder, folder] if Path(folder).is_dir() else []
    return ["bwrap", *shown, "--unshare-net", "--unshare-pid", "--die-with-parent", "--chdir", place]


def serve(library: str) -> None:
    """Run what comes in, a line each, and answer with the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in (*BOTH, *LOADED[library]):
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(run_child(library, asked))
        answers.write(json.dumps(wait_for(child, asked["limit"])) + "\n")
        answers.flush()


def wait_for(child: int, limit_seconds: int) -> int | None:
    """The exit code of a child; None where it had to be ended."""
    until = time.monotonic() + limit_seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_child(library: str, asked: dict[str, Any]) -> int:
    """The exit code of a script that is run in this process."""
    os.chdir(asked["place"])
    for stream, name in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(asked["environment"], HOME=asked["place"])
    code = 0
    try:
        importlib.import_module("trl_scripts").run_here(asked["words"], library)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:  # noqa: BLE001 whatever a script raises
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
