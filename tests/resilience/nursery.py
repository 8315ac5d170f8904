"""How does a test get many real processes of the command line without paying for the imports each time?

One process imports everything and then forks a child for every command. A child is a process of its own: it can be
killed, signalled and waited for like any other, and it runs the command as a user types it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_SELF = Path(__file__).resolve()


@dataclass
class Child:
    """One command in one process."""

    pid: int
    log: Path
    nursery: Nursery
    status: int | None = None

    def kill(self, number: int = 9) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status; minus the number of the signal that ended it."""
        if self.status is None:
            self.status = self.nursery.ask({"wait": self.pid})
        return self.status

    def is_running(self) -> bool:
        if self.status is None and self.nursery.ask({"poll": self.pid}) is not None:
            self.wait()
        return self.status is None

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Nursery:
    """The process that forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("MPLBACKEND", "agg")
        self.process = subprocess.Popen(
            [sys.executable, str(_SELF)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(
        self,
        *words: object,
        file_limit: int | None = None,
        user: int | None = None,
        env: Mapping[str, str] | None = None,
        die_in: tuple[str, str, int] | None = None,
    ) -> Child:
        """``oncurve`` with these words.

        ``file_limit`` is the largest file in bytes that it may write; ``die_in`` names a module, a function in it and
        the number of the call at which it is killed before the function does anything.
        """
        self.count += 1
        log = self.folder / f"output_{self.count}.txt"
        limits = {"file_limit": file_limit, "user": user, "env": dict(env or {}), "die_in": die_in}
        pid = self.ask({"start": [str(word) for word in words], "log": str(log), **limits})
        assert pid is not None
        return Child(pid, log, self)

    def run(self, *words: object, **limits: object) -> tuple[int, str]:
        """Exit status and everything that was said."""
        child = self.start(*words, **limits)  # type: ignore[arg-type]
        return child.wait(), child.output

    def ask(self, message: Mapping[str, object]) -> int | None:
        sent, received = self.process.stdin, self.process.stdout
        assert sent is not None
        assert received is not None
        sent.write(json.dumps(message) + "\n")
        sent.flush()
        return json.loads(received.readline())

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


def _become(words: Sequence[str], log: str, message: Mapping[str, object]) -> None:
    """In the child: the command line, as the console script runs it."""
    import resource

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, number in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(target, number)
    os.environ.update(message["env"])  # type: ignore[call-overload]
    if message["file_limit"] is not None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(message["file_limit"]),) * 2)  # type: ignore[call-overload]
    if message["user"] is not None:
        os.setgid(int(message["user"]))  # type: ignore[call-overload]
        os.setuid(int(message["user"]))  # type: ignore[call-overload]
    if message["die_in"] is not None:
        _arm(*message["die_in"])  # type: ignore[misc]
    sys.argv = ["oncurve", *words]
    from oncurve.cli.app import main

    main()
    raise SystemExit(0)


def _arm(module: str, name: str, call: int) -> None:
    """Have a function kill its process at one of its calls."""
    owner = importlib.import_module(module)
    original, numbers = getattr(owner, name), iter(range(1, 10**9))

    def armed(*args: object, **options: object) -> object:
        if next(numbers) == call:
            os.kill(os.getpid(), 9)
        return original(*args, **options)

    setattr(owner, name, armed)


NEEDED = (
    "oncurve.commands.examine",
    "oncurve.commands.runs",
    "oncurve.session.resume",
    "oncurve.rewards.custom",
    "oncurve.rollouts.engine.engine",
    "oncurve.session.session",
    "oncurve.session.training",
    "torch.distributed.fsdp",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
)
"""What most commands import. None of it may start a thread, which a fork would lose."""


def _serve(requests: IO[str]) -> None:
    for name in NEEDED:
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # so that the collector of a child writes to no page of its parent, which would copy it
    ended: dict[int, int] = {}

    def reap(pid: int, options: int) -> int | None:
        if pid not in ended:
            found, status = os.waitpid(pid, options)
            if found == 0:
                return None
            ended[pid] = os.waitstatus_to_exitcode(status)
        return ended[pid]

    for line in requests:
        message = json.loads(line)
        if "start" in message:
            answer: int | None = os.fork()
            if answer == 0:
                _become(message["start"], message["log"], message)
        elif "wait" in message:
            answer = reap(message["wait"], 0)
        else:
            answer = reap(message["poll"], os.WNOHANG)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.stdin)
