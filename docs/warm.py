"""How do the commands of many pages run without importing torch for each of them?

A server imports what most of them need and forks for every command: it must start no thread itself.

    python docs/warm.py SOCKET                 the server; it writes a line when it is ready
    python docs/warm.py SOCKET -m oncurve ...  as `python -m oncurve ...`, in a fork of it
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "matplotlib.pyplot",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "oncurve.commands.benchmark_run",
    "oncurve.commands.examine",
    "oncurve.commands.plan",
    "oncurve.commands.publish",
    "oncurve.session.upload",
    "oncurve.commands.runs",
    "oncurve.session.training",
)


def serve(address: str) -> None:
    """Answer every request with a fork that does what it asks and says how it ended."""
    import importlib

    sys.path.insert(0, str(ROOT))
    for name in NEEDED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(16)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            asked, _ = listening.accept()
            message, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
            if os.fork() == 0:
                listening.close()
                code = act(*json.loads(message), streams=streams)
                asked.sendall(str(code).encode())
                os._exit(code)
            asked.close()
            for stream in streams:
                os.close(stream)
            _reap()


def _reap() -> None:
    """Forget the forks that have ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def act(words: list[str], folder: str, environment: dict[str, str], *, streams: list[int]) -> int:
    """Be `python WORDS` in a folder; the exit code."""
    import traceback

    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    try:
        _run(words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:  # noqa: BLE001 - as Python does at its top
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run(words: list[str]) -> None:
    """The module, the file, the code or the standard input that a command line of Python names."""
    import runpy

    sys.path.insert(0, os.getcwd())
    if words[:1] == ["-m"]:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[:1] in (["-c"], ["-"], []):
        sys.argv = words[:1] + words[2:]
        code = words[1] if words[:1] == ["-c"] else sys.stdin.read()
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def ask(address: str, words: list[str]) -> int:
    """Have the server do it, with the folder, the environment and the streams of this process; the exit code."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address)
        socket.send_fds(asking, [json.dumps([words, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
        return int(asking.recv(16) or b"70")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    raise SystemExit(ask(sys.argv[1], sys.argv[2:]))
