"""A command of oncurve on a GPU that is not there, and what tests need of it.

    python tests/pretend_gpu.py train word_problems policy.device=cuda run.steps=10

``PRETEND_GPU_BYTES`` sets the size of its memory, ``PRETEND_GPU_FAIL_AT`` what runs out of memory
(``allocation:100``, ``allocation:update:3``, ``operation:aten::mm.out:5``), ``PRETEND_GPU_REPORT`` where to write what
each part of the command asked of the device; the table is printed as well.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TESTS.parent), str(TESTS)) if path not in sys.path]

from pretend.loading import wait_for_torch  # noqa: E402


class PretendGpu:
    """Functions and commands in processes that have a pretend GPU, while this one has none."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for what passes between the processes."""
        self.folder, self._number = folder, 0
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "pretend.child"], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        self._answer("ready")

    def __enter__(self) -> PretendGpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._server:  # closes its pipes, at which it ends
            pass

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of a module gives there. Arguments and result are pickled; the function's name is enough."""
        path = inspect.unwrap(function).__code__.co_filename
        return self._ask((path, function.__name__), args, self.folder, {})[0]

    def command(self, *words: str, folder: Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """The exit code of a command of oncurve in a folder, and what it printed."""
        return self._ask(None, words, folder, environment or {})

    def _ask(self, function: Any, args: Any, folder: Path, environment: Mapping[str, str]) -> tuple[Any, str]:
        self._number += 1
        result, output = (self.folder / f"{kind}-{self._number}" for kind in ("result", "output"))
        asked = {
            "call": pickle.dumps((function, args)).hex(),
            "folder": str(folder),
            "environment": dict(environment),
            "result": str(result),
            "output": str(output),
        }
        assert self._server.stdin is not None
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        code = self._answer()
        printed = output.read_text(errors="replace")
        assert result.exists(), f"the process with the pretend GPU ended with {code}:\n{printed}"
        is_done, found = pickle.loads(result.read_bytes())
        assert is_done, f"{printed}\n{found}"
        return found, printed

    def _answer(self, expected: str | None = None) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline().strip()
        assert line, "the process with the pretend GPU is gone"
        assert expected is None or line == expected, line
        return line


def main() -> None:
    """Run the command line with the pretend GPU."""
    wait_for_torch()
    from pretend.report import counted_command

    sys.argv[0] = "oncurve"
    counted_command()


if __name__ == "__main__":
    main()
