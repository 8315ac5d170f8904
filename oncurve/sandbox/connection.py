"""Connection to one graded process, with a deadline on every wait."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

from oncurve.sandbox.inside.frames import LENGTH_BYTES, Frame, pack


class ChildSilent(Exception):
    """Nothing came before the deadline."""


class ChildGone(Exception):
    """The process closed its end."""


class ChildMisbehaved(Exception):
    """Bytes came that are no message, or a longer one than is allowed."""


class Connection:
    """Messages to and from one process that is not trusted.

    Owned by the thread that grades; every wait ends at a deadline, and every buffer is bounded.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def send(self, frame: Frame, deadline: float) -> None:
        """Sends one message.

        Raises ChildSilent if it is not taken in time, ChildGone if nobody is there.
        """
        view = memoryview(pack(frame))
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise ChildGone from error

    def receive(self, deadline: float, max_bytes: int) -> Frame:
        """The next message.

        Raises ChildSilent, ChildGone or ChildMisbehaved.
        """
        length = int.from_bytes(self._take(LENGTH_BYTES, deadline), "big")
        if length > max_bytes:
            raise ChildMisbehaved(f"a message of {length} bytes, at most {max_bytes} are allowed")
        body = self._take(length, deadline)
        try:
            frame = json.loads(body, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ChildMisbehaved("a message that is not JSON") from error
        if not isinstance(frame, dict) or not isinstance(frame.get("k"), str):
            raise ChildMisbehaved("a message of no known kind")
        return frame

    def _take(self, length: int, deadline: float) -> bytes:
        while len(self._received) < length:
            try:
                part = self._socket.recv(min(length - len(self._received), 1 << 18))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise ChildGone from error
            if not part:
                raise ChildGone
            self._received += part
        data = bytes(self._received[:length])
        del self._received[:length]
        return data

    def _wait(self, events: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise ChildSilent


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
