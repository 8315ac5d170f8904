"""What workers run in tests of the pool."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def echo(payload: Any) -> Any:
    return payload


def misbehave(payload: dict[str, Any]) -> Any:  # noqa: C901, PLR0912
    """Does what the payload says, badly."""
    match payload["do"]:
        case "return":
            return payload["value"]
        case "raise":
            raise ValueError(payload["value"])
        case "spin":
            while True:
                pass
        case "power":
            return len(str(9**9**9))  # holds the interpreter's lock for as long as it lasts
        case "sleep":
            time.sleep(payload["value"])
            return "slept"
        case "memory":
            return len(bytearray(payload["value"]))
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "die once":
            flag = Path(payload["value"])
            if not flag.exists():
                flag.touch()
                os._exit(3)
            return "second time"
        case "print":
            print("x" * payload["value"])
            return "printed"
        case "facts":
            return {
                "environment": dict(os.environ),
                "modules": sorted({"torch", "transformers", "numpy", "__mp_main__"} & set(sys.modules)),
                "cwd": os.getcwd(),
                "pid": os.getpid(),
            }
        case "child":
            return subprocess.Popen(["sleep", "300"], process_group=0).pid
        case "child of its own session":
            return subprocess.Popen(["sleep", "300"], start_new_session=True).pid
        case "object":
            return object()
    raise AssertionError(payload)
