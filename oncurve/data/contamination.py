"""Benchmark problems that occur in the training data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NGRAM_WORDS = 13
"""Words in a row that two texts share only if one was taken from the other: GPT-3, arXiv:2005.14165, appendix C."""
FEW_WORDS = 6
"""Shorter questions stand in other texts by chance."""

_WORD = re.compile(r"\w+", re.UNICODE)


@dataclass(frozen=True, slots=True)
class Contamination:
    """Which problems share a run of words with the training rows."""

    indices: tuple[int, ...]
    """Places of those problems, counted from 0."""
    num_problems: int
    num_training_rows: int
    ngram_words: int
    examples: tuple[str, ...]
    """The shared words of the first few."""

    @property
    def fraction(self) -> float:
        """Share of the problems."""
        return len(self.indices) / self.num_problems if self.num_problems else 0.0

    def describe(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "num_contaminated": len(self.indices),
            "fraction": self.fraction,
            "indices": list(self.indices),
            "num_training_rows": self.num_training_rows,
            "ngram_words": self.ngram_words,
            "examples": list(self.examples),
        }


def find_contamination(
    problems: Sequence[Mapping[str, Any]], training: Iterable[Mapping[str, Any]], *, words: int = NGRAM_WORDS
) -> Contamination:
    """The problems whose question shares ``words`` words in a row with a training question or solution.

    Letters' case, punctuation and white space do not count. A question with fewer words must stand as a whole in a
    training text; one of less than six words, which stands in many texts by chance, must be the whole training
    question. The problems' n-grams are held in memory, the training rows pass by.

    Raises ValueError for runs of less than one word.
    """
    if words < 1:
        raise ValueError(f"a run of {words} words is none")
    wanted: dict[tuple[str, ...], list[int]] = {}
    for place, problem in enumerate(problems):
        for gram in set(_grams(_words(str(problem["question"])), words)):
            wanted.setdefault(gram, []).append(place)
    lengths = sorted({len(gram) for gram in wanted})
    found: dict[int, str] = {}
    count = 0
    for row in training:
        count += 1
        for text in (row.get("question"), row.get("solution")):
            tokens = _words(str(text or ""))
            for gram in _windows(tokens, lengths):
                for place in wanted.get(gram, ()):
                    found.setdefault(place, " ".join(gram))
    places = tuple(sorted(found))
    return Contamination(places, len(problems), count, words, tuple(found[place] for place in places[:3]))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _grams(tokens: list[str], words: int) -> Iterator[tuple[str, ...]]:
    """Every run of so many words; the whole text where it is shorter; nothing of an empty one."""
    if 0 < len(tokens) < words:
        yield tuple(tokens)
    for start in range(len(tokens) - words + 1):
        yield tuple(tokens[start : start + words])


def _windows(tokens: list[str], lengths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for words in lengths:
        if words < FEW_WORDS and words != len(tokens):
            continue
        for start in range(len(tokens) - words + 1):
            yield tuple(tokens[start : start + words])
