"""Talking to a process that is not trusted: every wait ends, every message is bounded."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent, Connection
from oncurve.sandbox.inside import frames
from oncurve.sandbox.inside.codec import NotData, check


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def soon() -> float:
    return time.monotonic() + 0.2


def test_messages_arrive_whole_and_in_order(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    for number in range(3):
        frames.send(other.fileno(), {"k": "x", "n": number})
    assert [connection.receive(soon(), 100)["n"] for _ in range(3)] == [0, 1, 2]
    connection.send({"k": "y"}, soon())
    assert frames.receive(other.fileno()) == {"k": "y"}


def test_silence_ends_at_the_deadline(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    other.send(b"\0\0")
    start = time.monotonic()
    with pytest.raises(ChildSilent):
        connection.receive(soon(), 100)
    assert time.monotonic() - start < 30.0


def test_a_reader_that_does_not_read_ends_at_the_deadline(ends: tuple[Connection, socket.socket]) -> None:
    connection, _ = ends
    with pytest.raises(ChildSilent):
        connection.send({"k": "x" * 10_000_000}, soon())


def test_a_closed_end_is_noticed(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    other.close()
    with pytest.raises(ChildGone):
        connection.receive(soon(), 100)
    with pytest.raises(ChildGone):
        connection.send({"k": "x"}, soon())


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\x65" + b"x" * 101,
        b"\0\0\0\4oops",
        b"\0\0\0\2[]",
        b"\0\0\0\2{}",
        b'\0\0\0\7{"k":1}',
        b'\0\0\0\x10{"k":"x","v":NaN}'[:20],
        b"\0\0\0\x5f" + b"[" * 95,
        b"\0\0\0\3\xff\xfe\xfd",
    ],
)
def test_what_is_no_message_is_refused(ends: tuple[Connection, socket.socket], content: bytes) -> None:
    connection, other = ends
    other.send(content)
    with pytest.raises((ChildMisbehaved, ChildSilent)):
        connection.receive(soon(), 100)


def test_a_number_beyond_all_floats_is_not_data(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    body = b'{"k":"return","value":1e999}'
    other.send(len(body).to_bytes(4, "big") + body)
    with pytest.raises(NotData):
        check(connection.receive(soon(), 100)["value"])


def test_deep_json_does_not_overflow(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    body = b"[" * 150_000
    other.setblocking(False)
    other.send(len(body).to_bytes(4, "big") + body)
    with pytest.raises(ChildMisbehaved):
        connection.receive(soon(), 200_000)
