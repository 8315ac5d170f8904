"""The processes of a run: the only door to torch.distributed.

Every process holds the same batch; only computing is divided. What crosses between them: completions and rewards (each
process samples and grades its share), sums of gradients, and statistics.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from oncurve.core.batch import Batch
from oncurve.core.errors import OncurveError, TrainingError
from oncurve.core.policy import OneProcess
from oncurve.core.records import Mean
from oncurve.policy.environment import read_rank_info
from oncurve.run_errors import Stopped

if TYPE_CHECKING:
    from oncurve.policy.heartbeat import Heartbeat

T = TypeVar("T")
BUCKET_NUMBERS = 1 << 25
"""Numbers of a gradient that are summed over the processes in one go: 128 MiB in float32."""


@dataclass(frozen=True)
class Processes(OneProcess):
    """The processes of a run, seen from one of them. Alone, every exchange is with itself."""

    rank: int = 0
    """Number of this process among all, from 0. Process 0 writes files and shows progress."""
    count: int = 1
    silent_seconds: float = 60.0
    """A process that says nothing for so long counts as lost."""
    _heartbeat: Heartbeat | None = None
    _beside: dist.ProcessGroup | None = None
    """Links of their own, for a thread beside the training."""
    _were_joined: bool = False
    """The program had joined them before the run, and goes on with them behind it."""

    @property
    def is_main(self) -> bool:
        """This process writes files and shows progress."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks. All must call it."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def gather_beside(self, value: T) -> list[T]:
        """As ``gather``, for one thread of each process, which the training does not wait for."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._beside)
        return values

    def on_main(self, call: Callable[[], T]) -> T | None:
        """Call it in process 0 alone; the others wait and get None. All must call it.

        An error of it for the user is raised in process 0, which says it; the others end with the same exit code.
        """
        result, error = None, None
        if self.is_main:
            try:
                result = call()
            except OncurveError as raised:
                error = raised
        code = self.all_gather(None if error is None else error.exit_code)[0]
        if error is not None:
            raise error
        if code is not None:
            raise Stopped("", exit_code=code)
        return result

    def broadcast_from_main(self, call: Callable[[], T]) -> T:
        """The result of a call in process 0, for all of them, which must all call it. Errors as in ``on_main``."""
        return self.all_gather(self.on_main(call))[0]  # type: ignore[return-value]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, which all must call. Zeros elsewhere leave a value as it is."""
        if self.count == 1:
            return tensor
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    def all_true(self, is_true: bool) -> bool:
        """Whether it is true in every process. All must call it."""
        return int(self.all_reduce(torch.tensor(int(is_true)))) == self.count

    def add_means(self, statistics: Mapping[str, Mean]) -> dict[str, Mean]:
        """Statistics of all processes, added as those of microbatches are. All must call it."""
        sums: dict[str, Mean] = {}
        for part in self.all_gather(dict(statistics)):
            for key, mean in part.items():
                sums[key] = sums[key] + mean if key in sums else mean
        return sums

    def own_rows(self, batch: Batch, *, share_prompts: bool) -> Int[Tensor, " b"]:
        """See ``own_rows``."""
        return own_rows(batch, self, share_prompts=share_prompts)

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

        Raises LostProcess for one that is gone, TrainingError for one that failed; other errors are told to the others
        and pass through.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            lost = None if self._heartbeat is None or isinstance(error, OncurveError) else self._heartbeat.lost()
            if lost is None:
                self.tell(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
                raise
            loss, kind = lost
            raise kind(
                f"{loss}, so process {self.rank} of {self.count} cannot go on. Start again with `oncurve resume`"
            ) from error

    def tell(self, what: str) -> None:
        """Leave a last word, for the message of the others."""
        if self._heartbeat is not None:
            self._heartbeat.notify(what)

    def ask_to_stop(self, number: int) -> None:
        """Tell the others, from any thread, that this process got a signal."""
        if self._heartbeat is not None:
            self._heartbeat.ask_to_stop(number)

    def on_stop_request(self, react: Callable[[int], None]) -> None:
        """Have something called, in a thread of its own, when another process got a signal."""
        if self._heartbeat is not None:
            self._heartbeat.react = react

    def close(self) -> None:
        """Take leave of the others."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self.count > 1 and dist.is_initialized() and not self._were_joined:
            dist.destroy_process_group()


ALONE = Processes()
"""A run in one process."""


def start(device: torch.device, *, timeout_seconds: float = 1800.0, silent_seconds: float = 60.0) -> Processes:
    """Join the processes that a launcher started; alone where there was none.

    Raises ConfigError for variables of a launcher that make no sense, TrainingError if the others do not come.
    """
    rank_info = read_rank_info()
    if rank_info.count == 1:
        return ALONE
    from oncurve.policy.heartbeat import Heartbeat  # lazy

    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank_info.publish()
    try:
        limit = timedelta(seconds=timeout_seconds)
        bound = device if device.type == "cuda" else None  # else NCCL guesses the device, and warns
        were_joined = dist.is_initialized()  # as by accelerate's PartialState
        if were_joined and device.type == "cuda":
            dist.destroy_process_group()  # of NCCL alone, which does not add up numbers of the CPU
        if not dist.is_initialized():
            dist.init_process_group(_backend(device), timeout=limit, device_id=bound)
        beside = dist.new_group(backend="gloo", timeout=limit)
        assert isinstance(beside, dist.ProcessGroup)  # this process is in it
        without_deadlines()
    except (RuntimeError, dist.DistError) as error:
        raise TrainingError(
            f"the {rank_info.count} processes did not find each other at {rank_info.address}:{rank_info.port}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None
    return Processes(
        rank_info.rank,
        rank_info.count,
        silent_seconds,
        Heartbeat(rank_info, silent_seconds, timeout_seconds),
        beside,
        were_joined,
    )


def without_deadlines() -> None:
    """Let no exchange in a group of this process end by torch's clock: heartbeats decide how long to wait."""
    for group in c10d._world.pg_map:  # pyright: ignore[reportPrivateUsage]
        c10d._set_pg_timeout(timedelta(days=365), group)  # pyright: ignore[reportPrivateUsage]


def join_alone(device: torch.device) -> None:
    """Make a group of this process alone, if it is in none: there are libraries that insist on one."""
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


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
