"""How do the processes of a run work as one? The only door to torch.distributed.

Every process holds the same batch; only computing is divided. What crosses between them: completions and rewards (each
process samples and grades its share), sums of gradients, and statistics.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oncurve.batch import Batch
from oncurve.errors import ConfigError, TrainingError
from oncurve.records import Mean

T = TypeVar("T")
BUCKET_NUMBERS = 1 << 25
"""Numbers of a gradient that are summed over the processes in one go: 128 MiB in float32."""
BEAT_SECONDS = 1.0
"""How often a process says that it lives."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them. Alone, every exchange is with itself."""

    rank: int = 0
    """Number of this process among all, from 0. Process 0 writes files and shows progress."""
    count: int = 1
    silent_seconds: float = 60.0
    """A process that says nothing for so long counts as lost."""
    _pulse: _Pulse | None = None

    @property
    def is_main(self) -> bool:
        """This process writes files and shows progress."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What every process gave, in the order of their ranks. All must call it."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, which all must call. Zeros elsewhere leave a value as it is."""
        if self.count == 1:
            return tensor
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    def all(self, is_true: bool) -> bool:
        """Whether it is true in every process. All must call it."""
        return int(self.add(torch.tensor(int(is_true)))) == self.count

    def add_means(self, statistics: Mapping[str, Mean]) -> dict[str, Mean]:
        """Statistics of all processes, added as those of microbatches are. All must call it."""
        sums: dict[str, Mean] = {}
        for part in self.gather(dict(statistics)):
            for key, mean in part.items():
                sums[key] = sums[key] + mean if key in sums else mean
        return sums

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes; none counts as zero. Does nothing alone."""
        if self.count == 1:
            return
        for bucket in _buckets(parameters):
            pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([piece.flatten() for piece in pieces])
            dist.all_reduce(flat)
            for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = total.view_as(parameter)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turns what torch says when another process is lost into a message that names the process.

        Raises TrainingError for a lost process; other errors are told to the others and pass through.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            lost = None if self._pulse is None or isinstance(error, TrainingError) else self._pulse.lost()
            if lost is None:
                self.tell(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
                raise
            raise TrainingError(
                f"{lost}, so process {self.rank} of {self.count} cannot go on. Start again with `oncurve resume`"
            ) from error

    def tell(self, what: str) -> None:
        """Leave a last word, for the message of the others."""
        if self._pulse is not None:
            self._pulse.say(what)

    def close(self) -> None:
        """Take leave of the others."""
        if self._pulse is not None:
            self._pulse.stop()
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = Processes()
"""A run in one process."""


class _Pulse:
    """A thread that says every second that this process lives, and ends it when another one fell silent.

    Owns a connection of its own to the store of the run: the one that torch uses may be waiting for something.
    """

    def __init__(self, rank: int, count: int, silent_seconds: float) -> None:
        self.rank, self.count, self.silent_seconds = rank, count, silent_seconds
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, timeout=timedelta(seconds=silent_seconds), wait_for_workers=False)
        self._store = dist.PrefixStore("oncurve", store)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._beat(0)
        self._thread = threading.Thread(target=self._live, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take leave, so that silence means nothing."""
        self._stopping.set()
        self._thread.join()
        with self._lock:
            self._try(lambda: self._store.set(f"left/{self.rank}", "1"))

    def say(self, what: str) -> None:
        """Leave a last word."""
        with self._lock:
            self._try(lambda: self._store.set(f"word/{self.rank}", what))

    def lost(self) -> str | None:
        """Which other process failed or is silent, after waiting long enough to tell; None if all of them live."""
        deadline = time.monotonic() + min(self.silent_seconds, 5 * BEAT_SECONDS)
        while time.monotonic() < deadline:
            for rank in self._others():
                if word := self._read(f"word/{rank}"):
                    return f"process {rank} failed ({word.decode(errors='replace')})"
            time.sleep(BEAT_SECONDS / 4)
            self._look()
        silent = {rank: time.monotonic() - since for rank, (_, since) in self._seen.items()}
        quiet = [rank for rank in self._others() if silent.get(rank, 0.0) > 3 * BEAT_SECONDS]
        return f"process {quiet[0]} is gone (silent for {silent[quiet[0]]:.0f} s)" if quiet else None

    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    def _live(self) -> None:
        number = 0
        while not self._stopping.wait(BEAT_SECONDS):
            number += 1
            self._beat(number)
            self._look()
            for rank, (_, since) in list(self._seen.items()):
                silence = time.monotonic() - since
                if silence > self.silent_seconds and not self._read(f"left/{rank}"):
                    sys.stderr.write(
                        f"oncurve: process {rank} of {self.count} is silent for {silence:.0f} s; "
                        f"process {self.rank} ends. Start again with `oncurve resume`\n"
                    )
                    sys.stderr.flush()
                    os._exit(TrainingError.exit_code)  # the main thread may be waiting for the silent one

    def _beat(self, number: int) -> None:
        with self._lock:
            self._try(lambda: self._store.set(f"beat/{self.rank}", str(number)))

    def _look(self) -> None:
        """Note when each of the others was last heard of."""
        for rank in self._others():
            beat = self._read(f"beat/{rank}") or b""
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, time.monotonic())

    def _read(self, key: str) -> bytes | None:
        with self._lock:
            return self._try(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _try(self, call: Callable[[], T]) -> T | None:
        """The result of asking the store; None if it is gone with the process that kept it."""
        try:
            return call()
        except (RuntimeError, dist.DistError):
            return None


def start(device: torch.device, *, timeout_seconds: float = 1800.0, silent_seconds: float = 60.0) -> Processes:
    """Join the processes that torchrun (or anything that sets its variables) started; alone without them.

    Raises ConfigError for variables that make no sense.
    """
    count = environment_count()
    if count == 1:
        return ALONE
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set. Start with `oncurve train` or torchrun"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, dist.DistError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TrainingError(
            f"the {count} processes did not find each other at {place}: {' '.join(str(error).split())[:300]}"
        ) from None
    rank = dist.get_rank()
    return Processes(rank, count, silent_seconds, _Pulse(rank, count, silent_seconds))


def environment_count() -> int:
    """How many processes the launcher started. Raises ConfigError if it says no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"the environment variable WORLD_SIZE is {text!r}; it counts processes. Unset it")
    return int(text)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type after the other, as many together as make a good message."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in kinds.values():
        bucket: list[nn.Parameter] = []
        for parameter in same:
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET_NUMBERS:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def own_rows(batch: Batch, processes: Processes, *, share_prompts: bool) -> Int[Tensor, " b"]:
    """The rows that this process computes: a stretch of nearly equal cost in the order in which microbatches are cut.

    Rows of a prompt that is shared stay together but at the ends of a stretch; padded rows go by length. A row belongs
    to the process in whose stretch its middle lies, so that nobody carries more than a row too much.
    """
    if processes.count == 1:
        return torch.arange(len(batch))
    costs = batch.row_lengths.clone()
    order = torch.arange(len(batch))
    if share_prompts:
        again = torch.zeros(len(batch), dtype=torch.bool)
        again[1:] = batch.group_ids[1:] == batch.group_ids[:-1]
        costs = torch.where(again, batch.completion_lengths, costs)
    else:
        order = torch.argsort(costs, stable=True)
    ordered = costs[order].double()
    middle = ordered.cumsum(0) - ordered / 2
    owner = (middle * processes.count / ordered.sum().clamp(min=1)).long().clamp(max=processes.count - 1)
    return order[owner == processes.rank]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How weights are kept in parts: FSDP2, one unit per block."""

    reshard_after_forward: bool = True
    """Free the weights of a block until its backward pass (as ZeRO-3); otherwise they stay until then (as ZeRO-2)."""
    offload: bool = False
    """Keep the parts, their gradients and moments in the CPU's memory."""


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    processes: Processes,
    sharding: Sharding,
    *,
    compute_type: torch.dtype,
) -> None:
    """Leave every process a part of each weight, its gradient and its moments.

    Gradients are summed, not averaged: the denominators are those of all processes already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    half = compute_type in (torch.bfloat16, torch.float16)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(next(module.parameters()).device.type, (processes.count,)),
        "mp_policy": MixedPrecisionPolicy(compute_type, torch.float32) if half else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if sharding.offload else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=sharding.reshard_after_forward, **options)
    fully_shard(module, reshard_after_forward=False, **options)
    for part in _units(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def _units(module: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (part for part in module.modules() if isinstance(part, FSDPModule))


def reshard(module: nn.Module) -> None:
    """After a pass without gradients: every process keeps its own part of each weight only."""
    for part in _units(module):
        part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process has a part, which all must call; other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Put values into a tensor, or into this process's part of it."""
    if isinstance(target, DTensor):
        from torch.distributed.tensor import distribute_tensor

        source = values.to(device=target.device, dtype=target.dtype)
        part = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(values)
