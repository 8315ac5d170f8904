"""How are vLLM servers started and ended on this machine? In an environment and a group of processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from oncurve.errors import ConfigError
from oncurve.rollouts.servers.vllm_version import check_version

PYTHON_VARIABLE = "ONCURVE_VLLM_PYTHON"
KV_CACHE_BYTES = 2**28
"""On a CPU vLLM would reserve a large share of all memory, and a second server another."""
ENDING_SECONDS = 10.0
RESTART_SECONDS = 2.0

_SUPERVISOR = """
import os, signal, subprocess, sys, threading
def end(): os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda number, frame: None)
threading.Thread(target=lambda: (sys.stdin.buffer.read(), end()), daemon=True).start()
subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL)
end()
"""
"""Leads the group: ends it when the trainer is gone, however it went, and when the first process is, since vLLM's
others would stay behind."""


class VllmServers:
    """Some vLLM servers with the same model, each in a group of processes. One that ends is started again."""

    def __init__(
        self,
        model: str,
        count: int,
        *,
        python: str | None,
        dtype: str,
        on_cpu: bool,
        logs: Path,
        options: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``python`` is that of an environment with vLLM; None reads ONCURVE_VLLM_PYTHON.

        Raises ConfigError if there is none.
        """
        self.python = find_python(python)
        self.model, self.dtype, self.on_cpu, self.options, self.logs = model, dtype, on_cpu, tuple(options), logs
        self.ports = free_ports(count)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self._say = say
        self._ended = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="oncurve-vllm-"))
        (self._folder / "oncurve").symlink_to(Path(__file__).resolve().parents[2])
        self.logs.mkdir(parents=True, exist_ok=True)
        for port in self.ports:
            self._start(port)
        self._watcher = threading.Thread(target=self._watch, name="vllm-servers", daemon=True)
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, port: int) -> list[str]:
        """How one server is started. ``vllm serve`` is no way to: the CPU build's name is another."""
        own = ["--host", "127.0.0.1", "--port", str(port), "--model", self.model, "--served-model-name", "policy"]
        own += ["--dtype", self.dtype, "--generation-config", "vllm", "--enable-scale-out"]
        own += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend":"file"}']
        own += ["--worker-extension-cls", "oncurve.rollouts.servers.inside_vllm.plugin.WeightExtension"]
        if self.on_cpu:
            own += ["--enforce-eager", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *own, *self.options]

    def environment(self) -> dict[str, str]:
        """Without what belongs to the trainer's own environment."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
        kept |= {"PYTHONPATH": str(self._folder), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        kept |= {"DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.on_cpu:
            kept |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
            kept |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            kept.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // max(len(self.ports), 1))))
        return kept

    def _start(self, port: int) -> None:
        log = (self.logs / f"vllm_{port}.txt").open("ab")
        with log:
            self._processes[port] = subprocess.Popen(
                [sys.executable, "-c", _SUPERVISOR, *self.command(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )

    def _watch(self) -> None:
        while not self._ended.wait(RESTART_SECONDS):
            for port, process in list(self._processes.items()):
                if process.poll() is not None:
                    _close_pipe(process)
                    self._say(f"the vLLM server on port {port} has ended; it is started again. See {self.logs}")
                    self._start(port)


def _end_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def find_python(python: str | None) -> str:
    """The python with vLLM. Raises ConfigError if none is named, if it is not there, or if its vLLM is too old."""
    named = python or os.environ.get(PYTHON_VARIABLE)
    if not named:
        raise ConfigError(
            f"rollouts.vllm_servers needs an environment with vLLM, apart from this one. Set rollouts.vllm_python or "
            f"{PYTHON_VARIABLE} to its python; docs/servers.md says how to make it"
        )
    found = shutil.which(named)
    if found is None:
        raise ConfigError(f"rollouts.vllm_python: {named!r} is no program. Give the path of a python with vLLM")
    check_version(found)
    return found


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
