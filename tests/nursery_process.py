"""The process that a nursery forks from: it answers questions, and its children become what they are asked to be."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing.spawn  # noqa: F401 - reads sys.executable now: children of its own have files of their parent
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nursery import write_stand_in

ROOT = Path(__file__).resolve().parents[1]
STATUS = [0]
"""What a child ends with."""


class Server:
    """Answers questions until nobody is left who could ask."""

    def __init__(self, address: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(address)
        self.listening.listen(64)
        self.woken, waking = socket.socketpair()
        self.woken.setblocking(False)
        waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waking.fileno())
        self.waking = waking
        self.ended: dict[int, int | None] = {}
        self.waiting: dict[int, list[socket.socket]] = {}
        self.tied: dict[int, socket.socket] = {}
        """Connections of those who end with their fork, and it with them."""
        self.answers: dict[int, Callable[[], bool]] = {
            self.listening.fileno(): self.answer,
            self.woken.fileno(): self.reap,
            0: lambda: bool(os.read(0, 1)),
        }
        for number in self.answers:
            self.selector.register(number, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """In a child what it is to do and its streams; None at the end."""
        self.asked: tuple[dict[str, Any], list[int]] | None = None
        while all(self.answers[key.fd]() for key, _ in self.selector.select() if key.fd in self.answers):
            pass
        if self.asked is None:
            for pid in [pid for pid, status in self.ended.items() if status is None]:
                with suppress(ProcessLookupError, PermissionError):  # a group whose leader has ended
                    (os.killpg if pid in self.tied else os.kill)(pid, signal.SIGKILL)
        return self.asked

    def answer(self) -> bool:
        connection, _ = self.listening.accept()
        connection.settimeout(10.0)
        try:
            with connection.makefile("rb") as file:
                length, streams, _, _ = socket.recv_fds(connection, 8, 3)
                message = json.loads(file.read(int.from_bytes(length, "big")))
        except (OSError, ValueError):  # who asked was killed while it did
            connection.close()
            return True
        connection.setblocking(True)
        if "start" not in message:
            pid = message.get("wait") or message["poll"]
            if self.ended[pid] is None and "wait" in message:
                self.waiting.setdefault(pid, []).append(connection)
            else:
                self.say(connection, self.ended[pid])
            return True
        pid = os.fork()
        if pid == 0:
            self.asked = message, streams
            return False
        self.ended[pid] = None
        for stream in streams:
            os.close(stream)
        if message.get("is_tied"):
            self.tie(connection, pid)
        else:
            self.say(connection, pid)
        return True

    def tie(self, connection: socket.socket, pid: int) -> None:
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        with suppress(ConnectionError):
            connection.sendall(b"%d\n" % pid)
        self.tied[pid] = connection
        self.answers[connection.fileno()] = lambda: self.follow(pid)
        self.selector.register(connection, selectors.EVENT_READ)

    def follow(self, pid: int) -> bool:
        """Whoever is tied to a fork says nothing: when there is something to read, it is gone."""
        try:
            self.tied[pid].recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:  # it was meant for a connection with this number that was closed just now
            return True
        except ConnectionError:
            pass  # killed before it has read the number of its fork: gone as well
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self.untie(pid)
        return True

    def untie(self, pid: int) -> None:
        connection = self.tied.pop(pid)
        self.selector.unregister(connection)
        del self.answers[connection.fileno()]
        self.say(connection, self.ended[pid])

    def say(self, connection: socket.socket, answer: int | None) -> None:
        with connection, suppress(ConnectionError):  # who asked may have given up
            connection.sendall(json.dumps(answer).encode())

    def reap(self) -> bool:
        with suppress(BlockingIOError):
            self.woken.recv(4096)
        for pid in [pid for pid, status in self.ended.items() if status is None]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.ended[pid] = os.waitstatus_to_exitcode(status)
                for connection in self.waiting.pop(pid, ()):
                    self.say(connection, self.ended[pid])
                if pid in self.tied:
                    self.untie(pid)
        return True


def _let_go_of_files() -> None:
    """Close all but the streams for others: the numbers stay taken, since objects of the parent still close them."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
            if int(name) > 2 and int(name) != nothing.fileno():
                with suppress(OSError):  # that of the listing itself
                    os.fstat(int(name))
                    os.dup2(nothing.fileno(), int(name), inheritable=False)


def _as_python(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Be a Python with these words that has just been started; its exit code."""
    _name_process(words)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(environment)
    try:
        _run_words(list(words), environment.get("PYTHONPATH", ""))
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as Python does at its top
        traceback.print_exc()
        return 1
    return 0


LIBRARIES = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def _name_process(words: Sequence[str]) -> None:
    """Have ``ps`` and /proc show this command line."""
    if sys.platform == "linux":
        numbers = Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        start, end = int(numbers[45]), int(numbers[46])
        text = "\0".join([sys.executable, *words]).encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _run_words(words: list[str], more: str) -> None:
    """The module, the code or the program that a command line of Python names."""
    if words[0] == "-u":
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    own = [str(ROOT)] if "oncurve" in sys.modules else []
    sys.path[:] = [os.getcwd(), *filter(None, more.split(os.pathsep)), *own, *LIBRARIES]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] in ("-c", "-"):
        code, given = (words[1], words[2:]) if words[0] == "-c" else (sys.stdin.read(), words[1:])
        sys.argv, sys.path[0] = [words[0], *given], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _arm(module: str, name: str, call: int) -> None:
    """Have a function kill its process at one of its calls."""
    owner = importlib.import_module(module)
    original, numbers = getattr(owner, name), iter(range(1, 10**9))

    def armed(*args: object, **options: object) -> object:
        if next(numbers) == call:
            os.kill(os.getpid(), 9)
        return original(*args, **options)

    setattr(owner, name, armed)


def _become(message: Mapping[str, Any], streams: Sequence[int]) -> int:
    """In the child: its streams and limits, and then the Python; its exit code."""
    import resource

    for place, stream in enumerate(streams):
        os.dup2(stream, place)
    _let_go_of_files()
    if message.get("is_tied"):
        os.setpgid(0, 0)  # so that it can be ended with its children
    os.chdir(message["cwd"])
    if message["file_limit"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(message["file_limit"]),) * 2)
    if message["user"] is not None:
        os.setgid(int(message["user"]))
        os.setuid(int(message["user"]))
    if message["die_in"] is not None:
        _arm(*message["die_in"])
    return _as_python(message["start"], message["env"])


def _end() -> None:
    """The last thing that a child does: memory is not given back object by object, which takes a third of a second."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(STATUS[0])


def _main(address: str, module: str) -> None:
    atexit.register(_end)  # the first that is registered is called last
    sys.executable = write_stand_in(Path(address).with_name("python"), sys.executable, address)
    gc.disable()
    importlib.import_module(module)
    assert threading.active_count() == 1
    gc.enable()
    gc.freeze()  # so that the collector of a child writes to no page of its parent, which would copy it
    server = Server(address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    asked = server.serve()
    if asked is not None:
        STATUS[0] = _become(*asked)
    else:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[3])
