"""Random streams of the turns of an episode."""

from __future__ import annotations

import numpy as np

from oncurve.core.draw import GOLDEN, mix


def turn_key(key: int, turn: int) -> int:
    """The key of a later turn of an episode; its first turn has the completion's own.

    It is a number of the completion's stream beyond every position in a turn.
    """
    if turn == 0:
        return key
    steps = np.array([(1 << 40) + turn], dtype=np.uint64)
    return int(mix(np.array([key], dtype=np.uint64) + GOLDEN * steps)[0])
