"""Dialects: how the policy writes calls, and what stands between two of its turns, as tokens.

Tokens are made once. What the policy wrote stays as it was sampled. What it is told is tokenized by itself, between the
marks of the dialect, in such a way that no text of a tool can become a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from oncurve.core.sampler import exact_text
from oncurve.episodes.call_formats import read_tagged
from oncurve.episodes.tools import CallRequest, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT_MARK = " [cut]"
"""Stands at the end of an answer that was longer than the limit."""
_CHARACTERS_PER_TOKEN = 32
"""Characters of an answer that are tokenized, for each token that it may have."""
EncodedText = tuple[list[int], str]
"""Tokens and their text."""


class Dialect(Protocol):
    """The format in which one kind of model is spoken with."""

    stop: tuple[str, ...]
    """Strings that end a turn, besides the end token."""
    end_ids: Sequence[int]
    """Tokens that end a turn; whoever samples says which."""

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
        """The calls in a turn."""
        ...

    def encode_answers(self, answers: Sequence[tuple[str, str]], *, ended: bool, limit: int) -> EncodedText:
        """The tokens between a turn and the next one: the answers of tools by name, each cut to ``limit`` tokens.

        ``ended``: the turn has its end token already.
        """
        ...

    def encode_observation(self, text: str, *, ended: bool, limit: int) -> EncodedText:
        """The same for the words of an environment that has no tools."""
        ...


class ForeignText:
    """Text that nobody here wrote, as tokens none of which is a mark of the tokenizer or the template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def marks(self) -> frozenset[int]:
        """Tokens that were added to the vocabulary: ends, roles, tags."""
        added = {int(number) for number in self.tokenizer.added_tokens_decoder}
        return frozenset(added | set(self.tokenizer.all_special_ids))

    @cached_property
    def _names(self) -> re.Pattern[str]:
        names = sorted({str(token) for token in self.tokenizer.added_tokens_decoder.values()}, key=len, reverse=True)
        return re.compile("|".join(re.escape(name) for name in names if len(name) > 1) or "(?!)")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; names of marks in it are taken apart, so that they spell the same and mean nothing."""
        pieces = self._apart(text)
        ids: list[int] = []
        for piece in pieces:
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return [token for token in ids if token not in self.marks]

    def framed(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Marks and foreign words (True), tokenized as one text in which the words are no marks.

        Nor do they become one together with what stands beside them.
        """
        text, foreign = "", [False]
        for part, is_foreign in parts:
            text += part
            foreign += [is_foreign] * len(part)
        cuts, at = [0], 0
        while match := self._names.search(text, at):
            is_mark = not any(foreign[match.start() + 1 : match.end() + 1])
            at = match.end() if is_mark else match.start() + 1
            cuts += [] if is_mark else [at]
        ids: list[int] = []
        for start, end in pairwise([*cuts, len(text)]):
            ids += self.tokenizer.encode(text[start:end], add_special_tokens=False)
        alone = [self.tokenizer.encode(part, add_special_tokens=False) for part, is_foreign in parts if not is_foreign]
        expected = [mark for content in alone for mark in self._marks_in(content)]
        return ids if self._marks_in(ids) == expected else self._framed_apart(parts)

    def holds_mark(self, text: str) -> bool:
        """The name of a mark stands in the text."""
        return self._names.search(text) is not None

    def _marks_in(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.marks]

    def _framed_apart(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Each part by itself, for a tokenizer that finds marks in other ways than by their names."""
        ids: list[int] = []
        for text, is_foreign in parts:
            ids += self.encode(text) if is_foreign else self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def cut(self, text: str, limit: int) -> list[int]:
        """The same with at most ``limit`` tokens; what was longer ends with a mark for that."""
        ids = self.encode(text[: limit * _CHARACTERS_PER_TOKEN])
        if len(ids) <= limit and len(text) <= limit * _CHARACTERS_PER_TOKEN:
            return ids
        mark = self.encode(CUT_MARK)
        return ids[: max(0, limit - len(mark))] + mark[:limit]

    def _apart(self, text: str) -> list[str]:
        """The text in pieces none of which holds the name of a mark."""
        cuts = [0]
        while match := self._names.search(text, cuts[-1]):
            cuts.append(match.start() + 1)
        return [piece for start, end in pairwise([*cuts, len(text)]) if (piece := text[start:end])]


@dataclass(frozen=True)
class _Frame:
    """The marks around the words of others, as tokens."""

    before: list[int]
    between: list[int]
    after: list[int]


class TagDialect:
    """``<tool>2+3</tool>`` is answered by ``<result>5</result>``: for models without a chat template.

    Words of an environment without tools stand where the next question of the prompt's template would.
    """

    stop: tuple[str, ...] = ("</tool>",)
    end_ids: Sequence[int] = ()

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, turn: str = "\nUser: {user}\nAssistant:") -> None:
        """``turn`` is what stands between two turns, with {user} where the words of the environment go."""
        self.tokenizer, self.foreign = tokenizer, ForeignText(tokenizer)
        before, _, after = turn.partition("{user}")
        self._result = _Frame(self._ids("<result>"), [], self._ids("</result>"))
        self._turn = _Frame(self._ids(before), [], self._ids(after))

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
        """The call with which the turn ended."""
        return read_tagged(text, tools)[-1:]

    def encode_answers(self, answers: Sequence[tuple[str, str]], *, ended: bool, limit: int) -> EncodedText:
        """Each answer between its tags."""
        ids: list[int] = []
        for _, answer in answers:
            ids += [*self._result.before, *self.foreign.cut(answer, limit), *self._result.after]
        return ids, exact_text(self.tokenizer, ids)

    def encode_observation(self, text: str, *, ended: bool, limit: int) -> EncodedText:
        """The words as the next question."""
        ids = [*self._turn.before, *self.foreign.cut(text, limit), *self._turn.after]
        return ids, exact_text(self.tokenizer, ids)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


MakeDialect = Callable[["PreTrainedTokenizerBase"], Dialect]
