"""Decoders of a policy: of our own layers where they know its family and may decode, of its modules elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from oncurve.core.decoder import Decoder, DecoderPlan, ModuleDecoder
from oncurve.core.draw import draw, uniforms
from oncurve.core.records import DecodeCall
from oncurve.core.requests import PAST, PROMPT_TOKENS, BufferSizes
from oncurve.core.sampler import PolicyView, padding_id
from oncurve.core.scheduler import RowBatch
from oncurve.model.decode_memory import MOST_ROWS, NEWEST
from oncurve.model.decode_proof import Proof
from oncurve.model.decoding import LayerDecoder, first_above_on_device
from oncurve.model.row_budget import LayerKeeper, RowBudget, RowMemory
from oncurve.model.trace_ranges import traced
from oncurve.model.weights import Backbone, head_key, head_matrix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oncurve.model.decode_cuda_graph import DeviceDraw

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


@dataclass(frozen=True, eq=False)
class PendingDraw:
    """A step that was started and whose tokens nobody has looked at."""

    rows: np.ndarray
    serials: np.ndarray
    """Serial numbers of these rows when it began."""
    drawn: DeviceDraw


class AheadBatch(RowBatch):
    """Rows whose next step is started at once where the decoder draws by itself."""

    _pending: PendingDraw | None = None

    def advance(self) -> None:
        """One more token for every running row, or the start of it."""
        if (ahead := self._ahead()) is not None:
            self._start_step(ahead)
        else:
            self.settle()
            super().advance()

    def close(self) -> None:
        """Give back what decoding has taken of a device's memory."""
        self._pending = None
        super().close()

    def _ahead(self) -> LayerDecoder | None:
        """The decoder, where nothing but uniform numbers decides about the tokens of the next step."""
        decoder = self.decoder
        if not isinstance(decoder, LayerDecoder) or not decoder.draws or self.params.cuts or not len(self.rows.running):
            return None
        rows, running = self.rows, self.rows.running
        is_late = rows.lengths[running] - rows.begins[running] >= self.params.min_completion_tokens
        has_read = rows.addresses[running, PAST] + 1 >= rows.lengths[running]
        return decoder if (is_late & has_read).all() else None

    def _start_step(self, ahead: LayerDecoder) -> None:
        """Start a step, and only then look at the tokens of the step before.

        Rows that turn out to have ended with these are computed once more for nothing.
        """
        rows = self.rows
        if self.decoder.mover is not None and rows.are_sparse:
            self.settle()
            self.compact()
        running = rows.running
        written = rows.addresses[running, PAST] + 1 - rows.begins[running]
        goes = written < rows.limits[running]
        started = None
        if goes.any():
            running, written = running[goes], written[goes]
            addresses = rows.addresses[running]
            past = addresses[:, PAST]
            tokens = np.where(past < rows.lengths[running], rows.tokens[running, past], NEWEST)
            rows.addresses[running, PAST] = past + 1
            last_tokens, at, where = (
                torch.from_numpy(array) for array in (tokens, addresses[:, PROMPT_TOKENS] + past, addresses)
            )
            drawn = ahead.draw(last_tokens, at, where, uniforms(rows.keys[running], written), self._choose)
            started = PendingDraw(running, rows.serials[running], drawn)
        self.settle()
        self._pending = started

    def _choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, uniform, self.params, find=first_above_on_device)

    def settle(self) -> None:
        """Write down the tokens that are under way, but those of rows that have ended since they were asked for."""
        step, self._pending = self._pending, None
        if step is not None:
            tokens, logprobs = step.drawn.get()
            runs = self.rows.are_there(step.rows, step.serials)
            self.record(step.rows[runs], tokens[runs], logprobs[runs])


class LayerDecoders:
    """Makes the fastest decoder that computes what the model does."""

    def __init__(
        self, budget: RowBudget | None = None, proof: Proof | None = None, memory: RowMemory | None = None
    ) -> None:
        """``memory`` holds keys and values of rows that wait for an answer."""
        self.budget, self.proof, self.memory = budget or RowBudget(), proof or Proof(), memory or RowMemory()

    @property
    def most_rows(self) -> int:
        """See ``Decoders``."""
        return max(MOST_ROWS, self.budget.max_rows or 0)

    @property
    def is_exact(self) -> bool:
        """The number of positions is set, so that none may be left over."""
        return self.budget.kv_tokens is not None

    def plan(
        self, policy: PolicyView, call: DecodeCall, end_ids: tuple[int, ...], *, is_shared: bool, version: str | None
    ) -> DecoderPlan:
        """See ``Decoders``."""
        backbone = self.proof.backbone(policy)
        sizes = self.budget.sizes(call, self.budget.rows(policy.model, backbone, call))

        def make() -> Decoder:
            if backbone is None:
                return self._by_modules(policy, sizes, end_ids, rounds=not is_shared and version is None)
            decoder = _by_layers(policy, backbone, sizes, apart=version is not None)
            decoder.keeper = LayerKeeper(decoder, self.memory)
            return decoder

        return DecoderPlan(sizes, make)

    def _by_modules(
        self, policy: PolicyView, sizes: BufferSizes, end_ids: tuple[int, ...], *, rounds: bool
    ) -> ModuleDecoder:
        """Through the model's modules; where nobody else reads its matrices, they are rounded once."""
        from oncurve.model.module_caches import OwnHead, cache_kind_of  # lazy

        kind, pad_id = cache_kind_of(policy.model), padding_id(policy, end_ids)
        return TracedModules(policy, sizes, pad_id=pad_id, kind=kind, forward=OwnHead(policy.model, rounds=rounds))

    def shrink(self, rows: int, reason: str, call: DecodeCall, *, key: str) -> None:
        """See ``Decoders``."""
        self.budget.shrink(rows, reason, call, key=key)

    def ending_tokens(self, stop: tuple[str, ...], policy: PolicyView) -> np.ndarray | None:
        """See ``Decoders``."""
        return ending_tokens(stop, policy.tokenizer) if stop else None

    def batch_type(self, plain: type[RowBatch]) -> type[RowBatch]:
        """One that starts steps ahead, which on a CPU is the plain one."""
        return AheadBatch

    def forget_limit(self) -> None:
        """See ``Decoders``."""
        self.budget.limit = None


class TracedModules(ModuleDecoder):
    """The decoder of a model's modules, with ranges in a trace."""

    @traced("prefill")
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """See ``Decoder``."""
        return super().prefill(prompts, slots)

    @traced("decode")
    def hidden(self, tokens: Tensor, positions: Tensor, addresses: Tensor) -> Tensor:
        """See ``Decoder``."""
        return super().hidden(tokens, positions, addresses)


@traced("load")
def _by_layers(policy: PolicyView, backbone: Backbone, sizes: BufferSizes, *, apart: bool) -> LayerDecoder:
    decoder = LayerDecoder(
        backbone,
        head_matrix(policy.model),
        backbone.compute_type(),
        head_key=head_key(policy.model),
        slots=sizes.rows,
        prompt_slots=sizes.prompts,
        prompt_tokens=sizes.prompt_tokens,
        completion_tokens=sizes.completion_tokens,
        apart=apart,
    )
    decoder.head_of = lambda: (head_matrix(policy.model), head_key(policy.model))
    return decoder
