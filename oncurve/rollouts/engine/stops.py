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
        recent = [ids[-self.window :] for ids in completions]
        return [
            any(text in tail for text in self.stop) and self._is_new(tail, ids)
            for tail, ids in zip(self._decode(recent), recent, strict=True)
        ]

    def _is_new(self, tail: str, ids: list[int]) -> bool:
        """The last token finished a stop string; one that was there before it has been let pass."""
        [before] = self._decode([ids[:-1]])
        return any(tail.rfind(text) > before.rfind(text) for text in self.stop)

    def _decode(self, sequences: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)
