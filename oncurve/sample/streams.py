"""The random number of a token: a pure function of (seed, step, prompt, completion, position).

There is no generator and so no state: a completion does not depend on who else is in the batch, on the order of work,
or on what was sampled before a restart.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: the step of the splitmix64 sequence (Steele, Lea, Flood 2014)."""


def stream_keys(seed: int, step: int, prompts: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One 64-bit key per completion, mixed from the four numbers that name it."""
    mask = (1 << 64) - 1
    key = np.full(len(prompts), np.uint64(seed & mask))
    for part in (np.full(len(prompts), np.uint64(step & mask)), prompts.astype(np.uint64), indices.astype(np.uint64)):
        key = _mix(key + GOLDEN * (part + np.uint64(1)))
    return key


def turn_key(key: int, turn: int) -> int:
    """The key of a later turn of an episode; its first turn has the completion's own.

    It is a number of the completion's stream beyond every position in a turn.
    """
    if turn == 0:
        return key
    steps = np.array([(1 << 40) + turn], dtype=np.uint64)
    return int(_mix(np.array([key], dtype=np.uint64) + GOLDEN * steps)[0])


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in (0, 1) for each key at its position in the completion, with 52 random bits.

    With a bit more, the largest number would round to 1 and draw a token that lies outside the distribution.
    """
    bits = _mix(keys + GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64; arrays wrap around modulo 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
