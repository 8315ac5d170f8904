"""Memory allocator settings for a step's tensors on a CPU, and for many threads."""

from __future__ import annotations

import ctypes
import logging
import os

log = logging.getLogger(__name__)

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8
"""The names of options in malloc.h."""
ARENAS = 2
"""Arenas that threads share. Each keeps what was freed in it, and glibc makes up to eight per core."""
NEVER = -1
"""No trimming at all (mallopt(3)): a threshold of 2 GiB would be passed at every step of a large model."""
LARGEST = 32 * 2**20
"""The largest threshold that glibc accepts. Larger blocks come from the system and go back to it, unless none may."""
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Variables by which a user sets the same."""
_keeps = _trims = False


def keep_freed_memory(*, always: bool) -> bool:
    """Let the C library keep what tensors on a CPU leave behind; whether it does.

    Otherwise the heap shrinks whenever its end is free, several times in a step, and the system clears each page again
    before the next tensor may use it: 5 to 15 % of the time of training. Between peaks the process does not shrink.

    ``always``, tensors of any size; or those below 32 MiB until ``give_back``: then what sampling and training leave
    between tensors that live on does not add up. That all blocks from 1 MiB on go back when they are freed would take a
    third of the memory for half of the time.
    """
    global _keeps, _trims  # as wide as what they say something about: the heap of this process
    is_set = _set(MMAP_THRESHOLD, LARGEST) and _set(TRIM_THRESHOLD, NEVER) and (not always or _set(MMAP_MAX, 0))
    _keeps, _trims = is_set, is_set and not always
    return is_set


def give_back(*, always: bool = False) -> None:
    """Hand what is free back to the system, also between tensors that live on; where it is kept, only if ``always``."""
    if _trims or (_keeps and always):
        ctypes.CDLL(None).malloc_trim(0)


def share_arenas() -> None:
    """Let the threads that start from now on share few arenas."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        _set(ARENA_MAX, ARENAS)


def _set(option: int, value: int) -> bool:
    """Set an option of the C library's allocator; whether it is set.

    Settings of one's own (``OWN_SETTINGS``) go first, and C libraries other than glibc know no such option.
    """
    if any(name in os.environ for name in OWN_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    is_set = bool(mallopt(option, value))
    if not is_set:
        log.info("the C library does not let its allocator be set: steps take more time, or more memory")
    return is_set
