"""When is a returned value, or a printed text, the expected one?"""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from oncurve.sandbox.inside.codec import encode
from oncurve.sandbox.program_cases import same_output, same_value

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1, 1),
        (2**80, 2**80),
        ("a", "a"),
        (None, None),
        (True, True),
        ([1, [2]], [1, [2]]),
        ((1, 2), [1, 2]),
        ([1, 2], (1, 2)),
        ({1, 2, 3}, {3, 2, 1}),
        (frozenset([1]), {1}),
        ({"b": 1, "a": [2]}, {"a": [2], "b": 1}),
        (2, 2.0),
        (2.0, 2),
        (0.1 + 0.2, 0.3),
        (1e9 + 1, 1e9),
        (NAN, NAN),
        (INF, INF),
        ([0.1 + 0.2], [0.3]),
        ({1: 0.1 + 0.2}, {1: 0.3}),
        (Fraction(1, 3), Fraction(1, 3)),
        (1 + 2j, 1 + 2j),
        (b"x", b"x"),
        (set(), set()),
        ([], ()),
    ],
)
def test_equal_values(actual: Any, expected: Any) -> None:
    assert same_value(encode(actual), encode(expected))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1, 2),
        (1, True),
        (True, 1),
        (0, False),
        (0, None),
        (2**53 + 1, 2**53),
        (float(2**53), 2**53 + 1),
        ("1", 1),
        (1, "1"),
        ([1], 1),
        (1, [1]),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ({1, 2}, [1, 2]),
        ({1: 2}, {1: 3}),
        ({1: 2}, {2: 2}),
        ({"1": 2}, {1: 2}),
        (0.31, 0.3),
        (3.0000001, 3),
        (NAN, 1.0),
        (1.0, NAN),
        (INF, -INF),
        (10**400, 1.5),
        ("b", b"b"),
        (None, []),
        ("", None),
        (range(3), [0, 1, 2]),
        (iter([1]), [1]),
    ],
)
def test_different_values(actual: Any, expected: Any) -> None:
    assert not same_value(encode(actual), encode(expected))


def test_keys_that_share_one_hash_are_compared_quickly() -> None:
    prime = 2**61 - 1
    payload = ["d", *(part for k in range(1, 40_000) for part in (["i", hex(prime * k)], 0))]
    start = time.perf_counter()
    assert same_value(payload, list(payload))
    assert time.perf_counter() - start < 10.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("6\n", "6"),
        ("6", "6\n\n"),
        ("a  b \nc\n", "a b\nc"),
        ("a\r\nb\r\n", "a\nb"),
        ("0.3000000001", "0.3"),
        ("x 1.0", "x 1.00"),
        ("", ""),
    ],
)
def test_equal_outputs(actual: str, expected: str) -> None:
    assert same_output(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("", "6"),
        ("6", "6\n7"),
        ("6\n7", "6"),
        ("\n6", "6"),
        ("67", "6 7"),
        ("6.0000001", "6"),
        ("0.31", "0.3"),
        ("nan", "0.3"),
        ("Yes", "yes"),
        ("0x6", "6"),
        ("1" * 5000, "1.5"),
    ],
)
def test_different_outputs(actual: str, expected: str) -> None:
    assert not same_output(actual, expected)
