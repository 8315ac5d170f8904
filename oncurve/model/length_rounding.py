"""Rounding of sequence lengths, so that few different ones occur and few kernels are compiled."""

from __future__ import annotations


def whole_tokens(tokens: int) -> int:
    """Tokens, rounded up so that few different numbers occur: by at most a sixteenth, from 256 tokens on.

    For every size of a matrix product in bfloat16 torch prepares code, which takes milliseconds once and half a
    mebibyte for good.
    """
    step = max(16, 1 << max(tokens.bit_length() - 5, 0))
    return -(-tokens // step) * step
