"""Has a completion just produced a stop string?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Looks for stop strings at the end of running completions by decoding only their last tokens."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stop = tuple(text for text in stop if text)
        self.tokenizer = tokenizer
        # A token is at least one byte, except tokens that decode to nothing: eight spare tokens allow for those.
        self.window = max((len(text.encode()) for text in self.stop), default=0) + 8

    def ended(self, completions: Sequence[list[int]]) -> list[bool]:
        """Which completions hold a stop string that their last token finished."""
        if not self.stop:
            return [False] * len(completions)
        tails = self.tokenizer.batch_decode(
            [ids[-self.window :] for ids in completions],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return [any(text in tail for text in self.stop) for tail in tails]
