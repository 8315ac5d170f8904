"""Real processes on this machine: each runs a function and leaves what it returns in a file."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _work(rank: int, port: int, task: Callable[..., Any], folder: Path, options: dict[str, Any]) -> None:
    """One process: joins the others, does the task, leaves its result or its error."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from oncurve.policy.distributed import start

    silent_seconds, timeout_seconds = options.pop("silent_seconds", 60.0), options.pop("timeout_seconds", 100.0)
    try:
        processes = start(torch.device("cpu"), timeout_seconds=timeout_seconds, silent_seconds=silent_seconds)
        with processes.watched():
            torch.save(task(processes, **options), folder / f"{rank}.pt")
        processes.close()
    except BaseException as error:  # a process of a test leaves its reason, whatever it is
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def launch(
    count: int, task: Callable[..., Any], folder: Path, *, grace_seconds: float = 200.0, **options: Any
) -> list[multiprocessing.process.BaseProcess]:
    """Start ``count`` processes and wait for the end of the first and, shortly, of the others.

    They are forked, so that none imports torch and what it needs for this again; what they compute with is made in
    them.
    """
    import peft  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import oncurve.policy.lora
    import oncurve.policy.trained_policy  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    os.environ["WORLD_SIZE"] = str(count)
    try:
        context = multiprocessing.get_context("fork")
        started = [
            context.Process(target=_work, args=(rank, port, task, folder, dict(options))) for rank in range(count)
        ]
        for process in started:
            process.start()
    finally:
        del os.environ["WORLD_SIZE"]
    for process in started:
        process.join(grace_seconds if process is started[0] or grace_seconds > 100 else 0)
    for process in started:
        if process.is_alive():
            process.kill()
            process.join()
    return list(started)


def run(count: int, task: Callable[..., Any], folder: Path, **options: Any) -> list[Any]:
    """What each of ``count`` processes returned, by rank. Fails if one of them failed."""
    started = launch(count, task, folder, **options)
    errors = {path.name: path.read_text() for path in sorted(folder.glob("*.error"))}
    assert not errors, errors
    assert [process.exitcode for process in started] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]
