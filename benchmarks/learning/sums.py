"""Sums of two numbers up to 20, a task whose answers a small pretrained model already finds now and then.

A recipe takes them with `data: {type: generated, function: sums.py:sums}`. The splits are disjoint by numbers: a pair
that is asked in the test is asked in no training row, in neither order.
"""

from __future__ import annotations

from random import Random

LARGEST = 20
TEST_FRACTION = 0.25


def sums(split: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """The first ``count`` questions of a split, in an order that no seed changes."""
    draw = Random("sums of two numbers")
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1)]
    draw.shuffle(pairs)
    held_out = round(TEST_FRACTION * len(pairs))
    mine = pairs[:held_out] if split == "test" else pairs[held_out:]
    asked = [*mine, *((b, a) for a, b in mine if a != b)]
    draw.shuffle(asked)
    return [
        {"question": f"How much is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
        for a, b in asked[:count]
    ]
