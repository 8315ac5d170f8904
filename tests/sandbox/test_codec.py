"""Values cross as data of exact builtin types, and nothing else crosses."""

from __future__ import annotations

import datetime
import json
import math
import time
import uuid
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.sandbox.inside.codec import MAX_DEPTH, NotData, check, decode, encode

HASHABLE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.fractions()
)
VALUES = st.recursive(
    st.one_of(HASHABLE, st.complex_numbers(allow_nan=False), st.decimals(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.sets(HASHABLE), st.dictionaries(HASHABLE, inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(VALUES)
def test_data_comes_back_as_it_was(value: Any) -> None:
    payload = json.loads(json.dumps(encode(value), allow_nan=False))
    check(payload)
    back = decode(payload)
    assert back == value
    assert type(back) is type(value)


def test_numbers_that_json_does_not_know_come_back() -> None:
    assert decode(encode(2**5000)) == 2**5000
    assert decode(encode(-(2**70))) == -(2**70)
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "value",
    [
        datetime.date(2020, 1, 2),
        datetime.datetime(2020, 1, 2, 3, 4, tzinfo=datetime.UTC),
        datetime.time(3, 4),
        datetime.timedelta(days=-1, seconds=5),
        uuid.UUID(int=7),
        PurePosixPath("a/b"),
        deque([1, (2,)]),
    ],
)
def test_dates_paths_and_deques_are_data(value: Any) -> None:
    payload = json.loads(json.dumps(encode([value])))
    check(payload)
    assert decode(payload) == [value]
    assert type(decode(payload)[0]) is type(value)


@pytest.mark.parametrize(
    "payload", [["date", "x"], ["delta", 1], ["uuid", 3], ["path", ["l"]], ["delta", 10**30, 0, 0]]
)
def test_malformed_dates_are_refused(payload: Any) -> None:
    with pytest.raises(NotData):
        check(payload)


def test_a_lone_surrogate_comes_back() -> None:
    assert decode(json.loads(json.dumps(encode("a\ud800b")))) == "a\ud800b"


class Colour(IntEnum):
    RED = 3


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 3),
        (Liar(7), 7),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (deque([1, 2], maxlen=5), deque([1, 2])),
        (bytearray(b"x"), bytearray(b"x")),
        (int, int),
    ],
)
def test_what_extends_a_builtin_type_is_sent_as_that_type(value: Any, plain: Any) -> None:
    back = decode(encode(value))
    assert back == plain
    assert type(back) is type(plain)


def test_iterators_are_sent_as_what_they_give() -> None:
    assert list(decode(encode(x * x for x in range(3)))) == [0, 1, 4]
    assert list(decode(encode({"a": 1}.items()))) == [("a", 1)]
    assert list(decode(encode(map(str, [1])))) == ["1"]


class Same:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter([1])


@pytest.mark.parametrize("value", [Same(), object(), lambda: 1, math, ..., NotImplemented, Same, [Same()], {1: Same()}])
def test_objects_with_behaviour_are_refused(value: Any) -> None:
    with pytest.raises(NotData):
        encode(value)


def test_values_that_hold_themselves_or_go_too_deep_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 0
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    for value in (loop, deep):
        with pytest.raises(NotData):
            encode(value)


@pytest.mark.parametrize(
    "payload",
    [
        [],
        {},
        {"l": 1},
        ["l", {}],
        ["nonsense"],
        [1, 2],
        [["l"]],
        ["d", 1],
        ["i", "xyz"],
        ["i", 5],
        ["f", "abc"],
        ["D", "one"],
        ["F", 1, 0],
        ["F", 1.5, 2],
        ["r", 1, 2, 0],
        ["T", "Exception"],
        ["b", "\u1234"],
        ["mine", 1, "object"],
        ["c", "a", 1],
    ],
)
def test_malformed_data_is_refused_by_both_readers(payload: Any) -> None:
    with pytest.raises(NotData):
        check(payload)
    with pytest.raises(NotData):
        decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        ["mine", True, "object"], ["mine", 1, "file"], ["yours", "name", "object"], ["mine"],
        ["mine", 1, "object", "a" * 101], ["mine", 1, "exception", "a", "b", "c"], ["mine", 1, "object", 2],
    ],
)  # fmt: skip
def test_malformed_references_are_refused(payload: Any) -> None:
    with pytest.raises(NotData):
        check(payload, allow_references=True)
    for names in ([], ["a" * 100], ["a", "b"]):
        check(["mine", 1, "exception", *names], allow_references=True)


def test_looking_at_keys_that_share_one_hash_is_fast() -> None:
    prime = 2**61 - 1
    payload = encode(list(range(0)))
    payload = ["d", *(part for k in range(1, 40_000) for part in (["i", hex(prime * k)], 0))]
    start = time.perf_counter()
    check(payload)
    assert time.perf_counter() - start < 5.0


def test_fractions_and_decimals_keep_their_kind() -> None:
    assert decode(encode([Fraction(1, 3), Decimal("0.10")])) == [Fraction(1, 3), Decimal("0.10")]
