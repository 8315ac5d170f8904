"""Streams, events and graphs of the pretend GPU, as ``torch.cuda`` names them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

OPS = torch.ops.pretend_gpu


class Event:
    """A point in a stream. Nothing runs beside the host, so it is always reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        OPS.synchronize("event")

    def elapsed_time(self, end: Event) -> float:
        if not (self._recorded and end._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1.0


class Stream:
    """A queue of work; which one is current decides what a graph records."""

    device_index, device_type = 0, 1

    def __init__(self, device: Any = None, priority: int = 0, **known: Any) -> None:
        self.stream_id = known["stream_id"] if "stream_id" in known else OPS.new_stream()
        self.priority, self.device, self.cuda_stream = priority, torch.device("cuda", 0), self.stream_id
        self._before: list[int] = []

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        OPS.synchronize("stream")

    def __enter__(self) -> Stream:
        self._before.append(OPS.current_stream())
        OPS.set_stream(self.stream_id)
        return self

    def __exit__(self, *_: object) -> None:
        OPS.set_stream(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class StreamContext:
    """``torch.cuda.stream(one)``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


class CUDAGraph:
    """Operations that were recorded and are run again on what their memory holds then."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._number: int | None = None
        self._is_open = False
        self._pool: int | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self._pool = OPS.new_pool() if pool is None else pool[1]
        self._number = OPS.begin_recording(self._pool)
        self._is_open = True

    def capture_end(self) -> None:
        self._is_open = False
        OPS.end_recording()

    def replay(self) -> None:
        if self._number is None or self._is_open:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        OPS.replay(self._number)

    def reset(self) -> None:
        if self._number is not None:
            OPS.forget(self._number)
        self._number = None

    def pool(self) -> tuple[int, int]:
        assert self._pool is not None
        return (0, self._pool)

    def __del__(self) -> None:
        if OPS is not None:  # not while the interpreter ends
            self.reset()


def graph_pool_handle() -> tuple[int, int]:
    """Memory that several graphs share."""
    return (0, OPS.new_pool())


def current_stream(device: Any = None) -> Stream:
    """The one that work goes to."""
    return Stream(stream_id=OPS.current_stream())


def default_stream(device: Any = None) -> Stream:
    """The one that work goes to where nobody chose another."""
    return Stream(stream_id=0)


def set_stream(stream: Stream | None) -> None:
    """``torch.cuda.set_stream``."""
    if stream is not None:
        OPS.set_stream(stream.stream_id)
