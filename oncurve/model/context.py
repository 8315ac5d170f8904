"""Lengths of sequences: the positions that a model was made for, and lengths rounded to few different ones."""

from __future__ import annotations

from typing import Any

CHANGING_ROPES = ("longrope", "dynamic")
"""Rotary embeddings whose angles depend on the longest row of a call."""


def context_of(config: Any) -> int | None:
    """Positions in which a row may be; None if the model's configuration does not say.

    Asked as transformers does: a configuration may keep the number under a name of its own, as that of GPT-2 does.
    Rotary embeddings of the types longrope and dynamic change for all rows of a call when the longest passes a length,
    so that a row would depend on its neighbours; such a model is used up to that length.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [
        rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict) and rope.get("rope_type") in CHANGING_ROPES
    ]
    limits = [getattr(text, "max_position_embeddings", None)]
    limits += [rope.get("original_max_position_embeddings") for rope in kinds]
    return min((limit for limit in limits if limit and limit > 0), default=None)


def whole_tokens(tokens: int) -> int:
    """Tokens, rounded up so that few different numbers occur: by at most a sixteenth, from 256 tokens on.

    For every size of a matrix product in bfloat16 torch prepares code, which takes milliseconds once and half a
    mebibyte for good.
    """
    step = max(16, 1 << max(tokens.bit_length() - 5, 0))
    return -(-tokens // step) * step
