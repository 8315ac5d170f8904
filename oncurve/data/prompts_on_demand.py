"""Prompts and demonstrations of large data sets, written when a step asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from oncurve.core.errors import DataError
from oncurve.core.records import Prompt
from oncurve.data.demonstrations import Demonstration
from oncurve.data.sources import Row, StoredRows

MAX_TRIES = 1_000
"""Rows in a row that may be too long."""
NUM_CACHED = 4_096
"""Demonstrations that stay written: those of a step, unless it is larger. Others are written again."""


class PromptsOnDemand:
    """The prompts of stored rows; in the place of a row that is too long comes the next one that is not."""

    remedy = "Raise data.max_prompt_tokens, or use a shorter template"

    def __init__(self, rows: StoredRows, write: Callable[[Sequence[Row]], list[Prompt]], *, limit: int | None) -> None:
        self._rows, self._write, self._limit = rows, write, limit
        self.check: Callable[[Sequence[int]], None] = lambda token_ids: None
        """Called with the tokens of every row that is written; what it raises ends the run."""
        self.see: Callable[[list[Prompt]], object] = lambda prompts: None
        """Called with the prompts of a step."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the rows' file and of the number of rows used."""
        return f"{self._rows.fingerprint} {len(self)}"

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of different indices: a function of those alone."""
        used, prompts = set(indices), self._at(indices)
        for number, prompt in enumerate(prompts):
            index, tries = indices[number], 0
            while self._limit is not None and len(self._tokens(prompt)) > self._limit:
                tries += 1
                if tries > MAX_TRIES:
                    raise DataError(
                        f"{MAX_TRIES:,} rows behind row {indices[number]:,} are longer than {self._limit} tokens. "
                        f"{self.remedy}"
                    )
                index = (index + 1) % len(self)
                if index not in used:
                    [prompt] = self._at([index])
            used.add(index)
            prompts[number] = prompt
        for prompt in prompts:
            self.check(self._tokens(prompt))
        self.see(prompts)
        return prompts

    def _at(self, indices: Sequence[int]) -> list[Prompt]:
        written = self._write([self._rows[index] for index in indices])
        return [replace(prompt, index=index) for prompt, index in zip(written, indices, strict=True)]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens of the prompt's row that are learned from."""
        return prompt.prompt_ids


class DemonstrationsOnDemand(PromptsOnDemand):
    """The prompts of demonstrations, which are found by the prompts' indices."""

    remedy = "Raise sft.max_tokens, or take a model with a longer context"

    def __init__(self, rows: StoredRows, show: Callable[[Row, int], Demonstration], *, limit: int | None) -> None:
        super().__init__(rows, lambda rows: [], limit=limit)
        self._demonstration = lru_cache(NUM_CACHED)(lambda index: show(rows[index], index))

    def __getitem__(self, index: int) -> Demonstration:
        return self._demonstration(index)

    def _at(self, indices: Sequence[int]) -> list[Prompt]:
        return [self[index].prompt for index in indices]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt.prompt_ids + self[prompt.index].token_ids
