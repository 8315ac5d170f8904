"""Tokens of a completion as pieces of its text, with their probabilities, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oncurve.core.errors import Failure, attempt
from oncurve.core.records import Completion

_DECIMALS = 3


class TokenRecord:
    """Lengths in characters and log-probabilities of the tokens of a step's first groups."""

    def __init__(self, tokenizer: Any, *, num_groups: int) -> None:
        """``tokenizer`` is one of the tokenizers library, which transformers keeps as ``backend_tokenizer``.

        None: one that cannot say where its tokens are; log-probabilities are kept alone then.
        """
        self._tokenizer, self._num_groups = tokenizer, num_groups

    def entries(self, index: int, completion: Completion) -> dict[str, Any]:
        """The record of a completion's tokens besides its text; empty for the groups after the first few."""
        if index >= self._num_groups:
            return {}
        entries: dict[str, Any] = {"logprobs": [round(value, _DECIMALS) for value in completion.sampler_logprobs]}
        if self._tokenizer is not None:
            lengths = token_lengths(self._tokenizer, completion.token_ids, completion.text)
            if lengths is not None:
                entries["token_lengths"] = lengths
        return entries


def token_lengths(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[int] | None:
    """Characters of the text that each token stands for; their sum is the length of the text.

    A token that ends inside a character has 0 and the token that completes it has the whole; an end token, which the
    text leaves out, has 0. None if the tokens do not spell the text, so that nobody is shown the wrong boundaries.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    pieces = attempt(lambda: [stream.step(tokenizer, token) or "" for token in token_ids])
    if isinstance(pieces, Failure) or not "".join(pieces).startswith(text):  # bytes that are no text end the stream
        return None
    left = len(text)
    lengths: list[int] = []
    for piece in pieces:
        lengths.append(min(len(piece), left))
        left -= lengths[-1]
    return lengths
