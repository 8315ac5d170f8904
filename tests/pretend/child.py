"""A process with a pretend GPU that has imported all that is slow, and splits off a fresh one for each thing to run."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def _module(path: str) -> ModuleType:
    """The module of a file, whose neighbours it may import."""
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def command(*words: str) -> int:
    """Run a command of oncurve as a user types it; its exit code."""
    from pretend.report import counted_command

    sys.argv = ["oncurve", *words]
    try:
        counted_command()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return leaving.code or 0
    return 0


def _run(asked: dict[str, Any]) -> None:
    """In a process of its own: one function, or a command; its result or its error goes to a file."""
    os.chdir(asked["folder"])
    os.environ.update(asked["environment"])
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from pretend import device

    device.obey(os.environ)
    try:
        function, args = pickle.loads(bytes.fromhex(asked["call"]))
        found = (True, (command if function is None else getattr(_module(function[0]), function[1]))(*args))
    except BaseException:  # noqa: BLE001 - whatever it was, the test has to see it
        found = (False, traceback.format_exc())
    sys.stdout.flush()
    Path(asked["result"]).write_bytes(pickle.dumps(found))


def serve() -> None:
    """Run what standard input asks for, a line each; answer each with a line."""
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    from pretend.loading import wait_for_torch

    gc.disable()
    wait_for_torch()
    import oncurve.cli.app
    import oncurve.run.builder
    import oncurve.run.session  # noqa: F401

    gc.freeze()  # the collector of a child has nothing to look for in what it was forked with
    gc.enable()
    print("ready", flush=True)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _run(json.loads(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
