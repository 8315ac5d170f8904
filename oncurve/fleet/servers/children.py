"""Rollout servers that a run starts on this machine: each in a group of processes of its own, which ends with the
trainer, however that ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from oncurve.core.errors import ConfigError, OncurveError
from oncurve.fleet.weights.store import MEMORY, own_prefix

log = logging.getLogger(__name__)

ENDING_SECONDS = 10.0
RESTART_SECONDS = 2.0
DEVICES = "CUDA_VISIBLE_DEVICES"

_SUPERVISOR = """
import ctypes, glob, os, shutil, signal, subprocess, sys, threading
def end(): os.killpg(0, signal.SIGKILL)
def end_after_trainer():
    sys.stdin.buffer.read()
    for folder in glob.glob(sys.argv[1] + "*"): shutil.rmtree(folder, ignore_errors=True)
    end()
def die_with_parent():
    if sys.platform == "linux": ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda number, frame: None)
threading.Thread(target=end_after_trainer, daemon=True).start()
subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent).wait()
end()
"""
"""Leads the group: ends it when the trainer is gone, however it went, and when the first process is, since others of
its group would stay behind. That process ends with its leader, too. Weights that a killed trainer left in the machine's
memory would stay there: they are removed by their names."""


class ChildServers:
    """Some servers that belong to a trainer. One that ends is started again."""

    def __init__(
        self,
        count: int,
        *,
        name: str,
        logs: Path,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        devices: Sequence[str] = (),
    ) -> None:
        """``command`` gives the words for a port; ``devices`` the GPUs that each server sees, as CUDA names them."""
        if devices and len(devices) != count:
            raise ValueError(f"{count} servers, but GPUs for {len(devices)}")
        self.name, self.logs = name, logs
        self.ports = free_ports(count)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self._command, self._environment = command, dict(environment)
        self.notify: Callable[[str], None] = lambda text: None
        """Takes the message about a server that ended."""
        self._devices = dict(zip(self.ports, devices, strict=False))
        self._ended = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.logs.mkdir(parents=True, exist_ok=True)
        for port in self.ports:
            self._start(port)
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-servers", daemon=True)
        self._watcher.start()

    def process_of(self, url: str) -> subprocess.Popen[bytes]:
        """The leader of a server's group."""
        return self._processes[int(url.rsplit(":", maxsplit=1)[1])]

    def restart(self, url: str) -> None:
        """End a server that is of no use any more; it is started again as any that ended."""
        if url in self.urls:
            _end_group(self.process_of(url), signal.SIGKILL)

    def close(self) -> None:
        """End all of them."""
        self._ended.set()
        self._watcher.join()
        for process in self._processes.values():
            _end_group(process, signal.SIGTERM)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            _end_group(process, signal.SIGKILL)
            process.wait()
            _close_pipe(process)

    def environment(self, port: int) -> dict[str, str]:
        """The environment of the server at a port: it sees its own GPUs alone."""
        return self._environment | ({DEVICES: self._devices[port]} if port in self._devices else {})

    def _start(self, port: int) -> None:
        log = (self.logs / f"{self.name}_{port}.txt").open("ab")
        with log:
            self._processes[port] = subprocess.Popen(
                [sys.executable, "-c", _SUPERVISOR, str(MEMORY / own_prefix()), *self._command(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment(port),
                start_new_session=True,
            )

    def _watch(self) -> None:
        while not self._ended.wait(RESTART_SECONDS):
            for port, process in list(self._processes.items()):
                if process.poll() is not None:
                    _end_group(process, signal.SIGKILL)  # whoever its leader left behind
                    _close_pipe(process)
                    self._start(port)
                    self._tell(f"the {self.name} server on port {port} has ended and is started again. See {self.logs}")

    def _tell(self, text: str) -> None:
        """A full disk or a closed terminal keeps no server from coming back."""
        try:
            self.notify(text)
        except (OSError, OncurveError) as error:
            log.warning("%s (and telling of it failed: %s)", text, error)


def own_environment(servers: int) -> dict[str, str]:
    """The environment of a server: all but the trainer's rank. Cores are shared out where nobody said."""
    rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        key: value for key, value in os.environ.items() if key not in rank_variables and not key.startswith("SLURM_")
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // max(servers, 1))))
    return environment


def serve_command(model: str, *, settings: Sequence[str] = ()) -> Callable[[int], list[str]]:
    """The command that starts ``oncurve serve`` on a port; ``settings`` are key=value pairs."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    return lambda port: [sys.executable, "-m", "oncurve", "serve", model, "--port", str(port), *chosen]


def gpu_shares(
    visible: Sequence[str], *, trainers: int, servers: int, gpus_per_server: int, instead: str = ""
) -> list[str]:
    """Which GPUs each server sees: those behind the trainers' own, in order.

    >>> gpu_shares(["0", "1", "2", "5"], trainers=1, servers=1, gpus_per_server=2)
    ['1,2']

    Raises ConfigError if there are not so many; ``instead`` is what to type for sampling without servers.
    """
    needed = trainers + servers * gpus_per_server
    if needed > len(visible):
        raise ConfigError(
            f"rollouts.vllm_servers is {servers} with rollouts.tensor_parallel {gpus_per_server}, and {trainers} "
            f"GPU{'s' * (trainers > 1)} train: that takes {needed} GPUs, and this process sees {len(visible)}. "
            f"Lower one of them, or let the process that trains sample: `{instead or 'rollouts.type=engine'}`"
        )
    own = visible[trainers:]
    return [",".join(own[index * gpus_per_server : (index + 1) * gpus_per_server]) for index in range(servers)]


def own_gpu(visible: Sequence[str], *, trainers: int) -> list[str]:
    """The GPU that trains, for the one server that shares it.

    >>> own_gpu(["2", "3"], trainers=1)
    ['2']

    Raises ConfigError if several train: a server cannot be on all of their GPUs.
    """
    if trainers > 1:
        raise ConfigError(
            f"rollouts.sleep puts a server on the GPU of the one process that trains, and "
            f"{trainers} train. Set `rollouts.sleep=false`, or start one process"
        )
    return [visible[0]]


def visible_gpus(count: int) -> list[str]:
    """The names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES may have chosen them."""
    named = [name.strip() for name in os.environ.get(DEVICES, "").split(",") if name.strip()]
    return named[:count] if len(named) >= count else [str(index) for index in range(count)]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _end_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
