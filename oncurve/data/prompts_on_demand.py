"""Prompts of large data sets, written when a step asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from oncurve.data.sources import Row
from oncurve.data.stored_rows import StoredRows
from oncurve.errors import DataError
from oncurve.records import Prompt

MAX_TRIES = 1_000
"""Rows in a row that may be too long."""


class PromptsOnDemand:
    """The prompts of stored rows; in the place of a row that is too long comes the next one that is not."""

    def __init__(self, rows: StoredRows, write: Callable[[Sequence[Row]], list[Prompt]], *, limit: int | None) -> None:
        self._rows, self._write, self._limit = rows, write, limit
        self.check: Callable[[Prompt], None] = lambda prompt: None
        """Called with every prompt that is written; what it raises ends the run."""
        self.see: Callable[[list[Prompt]], object] = lambda prompts: None
        """Called with the prompts of a step."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the rows' file and of the number of rows used."""
        return f"{self._rows.fingerprint} {len(self)}"

    def at(self, places: Sequence[int]) -> list[Prompt]:
        """The prompts of different places: a function of those alone."""
        taken, found = set(places), self._at(places)
        for number, prompt in enumerate(found):
            place, tries = places[number], 0
            while self._limit is not None and len(prompt.prompt_ids) > self._limit:
                tries += 1
                if tries > MAX_TRIES:
                    raise DataError(
                        f"{MAX_TRIES:,} rows behind row {places[number]:,} are longer than {self._limit} tokens. Raise "
                        f"data.max_prompt_tokens, or use a shorter template"
                    )
                place = (place + 1) % len(self)
                if place not in taken:
                    [prompt] = self._at([place])
            taken.add(place)
            found[number] = prompt
        for prompt in found:
            self.check(prompt)
        self.see(found)
        return found

    def _at(self, places: Sequence[int]) -> list[Prompt]:
        written = self._write([self._rows[place] for place in places])
        return [replace(prompt, index=place) for prompt, place in zip(written, places, strict=True)]
