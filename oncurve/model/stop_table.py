"""Tokens that can end a stop string: a table by which few completions are decoded to look for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character: which tokens make it depends on those beside them."""
Table = list[bytes | None]
"""Bytes that each token id adds to a text; None where that depends on its neighbours."""
_tables: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, Table | None]] = WeakKeyDictionary()
"""With the number of tokens that the tokenizer had."""
_ending: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, tuple[str, ...]], np.ndarray]] = WeakKeyDictionary()


def ending_tokens(stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """For each token id, whether it can end one of these strings behind any text; None where that is not known.

    A token with the bytes t ends a string s if s lies in t, or if s ends with the first bytes of t.
    """
    key = (len(tokenizer), stop)
    known = _ending.setdefault(tokenizer, {})
    if key not in known:
        table = token_table(tokenizer)
        if table is None or not table or any(REPLACEMENT in text for text in stop):
            return None
        strings = [text.encode() for text in stop]
        suffixes = {string[start:] for string in strings for start in range(len(string))}
        longest = max(len(string) for string in strings)

        def can_end(token: bytes | None) -> bool:
            if token is None:
                return True
            begins = any(token[:length] in suffixes for length in range(1, min(len(token), longest) + 1))
            return begins or any(string in token for string in strings)

        known[key] = np.array([can_end(token) for token in table], dtype=bool)
    return known[key]


def token_table(tokenizer: PreTrainedTokenizerBase) -> Table | None:
    """The bytes that each token adds to a text; None for a tokenizer that is not known to join texts token by token."""
    count = len(tokenizer)
    if tokenizer not in _tables or _tables[tokenizer][0] != count:
        _tables[tokenizer] = count, _make_table(tokenizer, count)
    return _tables[tokenizer][1]


def _make_table(tokenizer: PreTrainedTokenizerBase, count: int) -> Table | None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:  # it decodes in a way of its own
        return None
    to_bytes = _reader(tokenizer.backend_tokenizer.decoder)
    if to_bytes is None:
        return None
    names = tokenizer.convert_ids_to_tokens(list(range(count)))
    return [None if name is None else to_bytes(name) for name in names]


def _reader(decoder: Any) -> Callable[[str], bytes | None] | None:
    """A function that reads token names as a decoder of the tokenizers library does; None for an unknown decoder."""
    described = {} if decoder is None else json.loads(decoder.__getstate__())
    if described.get("type") == "ByteLevel":
        return _from_byte_level
    parts = described.get("decoders", [described])
    if all(_is_plain(part) for part in parts) and any(part["type"] in ("Replace", "Metaspace") for part in parts):
        return _from_pieces
    return None


def _is_plain(part: dict[str, Any]) -> bool:
    """A step of SentencePiece's decoders: spaces for their sign, bytes by their numbers, no space at the beginning."""
    match part:
        case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
            return True
        case {"type": "Metaspace", "replacement": "▁"} | {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Strip", "content": " ", "stop": 0}:
            return True
    return False


def _from_byte_level(name: str) -> bytes:
    """Each letter stands for a byte; a name with another letter, such as that of an added token, is a text."""
    try:
        return bytes(BYTE_OF[letter] for letter in name)
    except KeyError:
        return name.encode()


def _from_pieces(name: str) -> bytes | None:
    """A text, or a byte (<0x0A>), of which the text depends on the bytes beside it."""
    is_byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
    return None if is_byte else name.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2): visible ones are themselves, the others follow
    from number 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_OF = _byte_letters()
