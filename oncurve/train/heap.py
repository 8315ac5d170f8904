"""Where does the memory of a step's tensors come from, and does it stay with the process for the next step?"""

from __future__ import annotations

import ctypes
import logging
import os

log = logging.getLogger(__name__)

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The names of two options in malloc.h."""
NEVER = 2**31 - 1
LARGEST = 32 * 2**20
"""Larger blocks than this always come from the system and go back to it; glibc accepts no more."""


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors on a CPU leave behind; whether it does.

    Otherwise the heap shrinks whenever its end is free, several times in a step, and the system clears each page again
    before the next tensor may use it: 5 to 8 % of the time of training. The peak stays what it is; between peaks the
    process does not shrink. Settings of one's own (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_) go first, and C
    libraries other than glibc know no such option.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    kept = bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, NEVER))
    if not kept:
        log.info("the C library does not keep freed memory: each training step asks the system for it again")
    return kept
