"""Decoders: the protocol by which logits of next tokens are asked for, and the decoder of any model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from oncurve.core.draw import draw
from oncurve.core.errors import SamplerError
from oncurve.core.records import USUAL_ROWS, DecodeCall, SamplingParams
from oncurve.core.requests import COMPACT_BELOW, PAST, PROMPT_SLOT, SLOT, BufferSizes, PromptState, RowState
from oncurve.core.sampler import PolicyView, padding_id

Chosen = tuple[np.ndarray, np.ndarray]
"""Tokens and their log-probabilities, on the CPU."""


class RowKeeper(Protocol):
    """Takes keys and values out of a decoder, and puts them back."""

    def keep(self, row: RowState, prompt: PromptState, addresses: tuple[int, int, int]) -> None:
        """Remember what a row has computed; ``addresses`` are its slot, its decoded tokens and its prompt's slot."""

    def put_row(self, slot: int, row: RowState) -> bool:
        """Let a row go on in a slot; False where what it had computed made room for others."""
        ...

    def put_prompt(self, slot: int, prompt: PromptState) -> bool:
        """Put a prompt into a prompt slot; False where it must be read again."""
        ...


class RowMover(Protocol):
    """Moves the rows of a decoder, in which each slot up to the last row's costs as much as a row."""

    def move(self, slots: Tensor, to: Tensor, tokens: int) -> None:
        """Let the rows in these slots, of up to so many tokens, lie in others."""


class Decoder(Protocol):
    """Computes the logits of the next token of many rows, each in a slot of its own.

    ``addresses`` holds for each row its slot, its decoded tokens, its prompt's slot and the prompt's tokens [R, 4].
    Tokens, positions and places lie on the CPU.
    """

    @property
    def keeper(self) -> RowKeeper | None:
        """Keys and values of rows can be taken out and put back; None where a row that returns is read again."""

    @property
    def mover(self) -> RowMover | None:
        """Rows should lie close together; None where they cost the same wherever they lie."""

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Read prompts into prompt slots; the logits of the first token behind each [P, V]."""
        ...

    def hidden(self, tokens: Tensor, positions: Tensor, addresses: Tensor) -> Tensor:
        """Read one more token of each row [R]; the input of ``logits``, [R, any width]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] by the products of training."""
        ...

    def choose(self, logits: Tensor, uniform: Tensor, params: SamplingParams) -> Chosen:
        """The next token of each row by its uniform number, as ``draw`` defines it, none forbidden."""
        ...

    def renew(self) -> None:
        """Go on with the weights as they are now; keys and values stay what they are."""

    def end_prompts(self) -> None:
        """No prompt is read from now on."""

    def close(self) -> None:
        """Give back the memory; nothing is decoded after that."""


@dataclass(frozen=True)
class DecoderPlan:
    """A decoder that was not made yet, and its size."""

    sizes: BufferSizes
    make: Callable[[], Decoder]


class Decoders(Protocol):
    """Makes decoders, as large as memory allows."""

    @property
    def most_rows(self) -> int:
        """Rows at a time at most, however much memory there is."""
        ...

    @property
    def is_exact(self) -> bool:
        """Buffers hold what was asked for and no more."""
        ...

    def plan(
        self, policy: PolicyView, call: DecodeCall, end_ids: tuple[int, ...], *, is_shared: bool, version: str | None
    ) -> DecoderPlan:
        """A decoder for a call, planned in the arithmetic of sampling.

        ``is_shared``: other threads read the weights meanwhile. A ``version`` names weights that may change under the
        rows; then rows have the same bits whoever is beside them. Raises SamplerError where not even one row fits.
        """
        ...

    def shrink(self, rows: int, reason: str, call: DecodeCall, *, key: str) -> None:
        """From now on at most half of so many rows, for which memory did not suffice; ``key`` is what a user sets.

        Raises SamplerError if that was one.
        """

    def ending_tokens(self, stop: tuple[str, ...], policy: PolicyView) -> np.ndarray | None:
        """For each token id, whether it can end one of these strings behind any text; None where that is not known."""

    def batch_type(self, plain: type[Any]) -> type[Any]:
        """The class of batches that suits these decoders: the plain one, or one that is derived from it."""
        ...

    def forget_limit(self) -> None:
        """Try as many rows again as before memory ran out."""


def fetched(tokens: Tensor, logprobs: Tensor) -> Chosen:
    """Both on the CPU, by one copy from a GPU."""
    if not tokens.is_cuda:
        return tokens.numpy(), logprobs.numpy()
    both = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.float32)


class BufferLayer(DynamicLayer):
    """Keys and values of one attention layer in a buffer of fixed capacity, so that a new token copies nothing else."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new positions and return all of them, as views of the buffers."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            rows, heads, _, width = key_states.shape
            self._keys = key_states.new_empty(rows, heads, self.capacity, width)
            self._values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
            self.is_initialized = True
        end = self.length + key_states.shape[2]
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        return self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Positions written so far."""
        return self.length

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self._keys, self._values = self._keys[rows], self._values[rows]
        self._view()


class BatchCache(Protocol):
    """The memory that a model has of the tokens of a batch of rows."""

    def inputs(self, ids: Tensor, mask: Tensor | None, filled: Tensor) -> dict[str, Any]:
        """Arguments of a forward pass over new tokens [B, S]; ``filled`` [B, L] marks the tokens of the rows, new ones
        included, and ``mask`` is the same, or None where all rows are full."""
        ...

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""


class RowCache(Cache):
    """Keys and values of all layers for a batch of rows of equal length, in the way of transformers."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.buffers = [BufferLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.buffers))

    def inputs(self, ids: Tensor, mask: Tensor | None, filled: Tensor) -> dict[str, Any]:
        """See ``BatchCache``."""
        return cached_inputs(ids, mask, filled) | {"past_key_values": self}

    def take(self, rows: Tensor) -> None:
        """Keep these rows in every layer: expand a prompt to its group, or drop rows that finished."""
        for layer in self.buffers:
            layer.take(rows)


def cached_inputs(ids: Tensor, mask: Tensor | None, filled: Tensor) -> dict[str, Any]:
    """The arguments of a forward pass over new tokens behind those of a cache, without the cache."""
    positions = (filled.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": True}


def left_pad(sequences: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids padded on the left to equal length, and the mask of real tokens: [P, S] each."""
    width = max(len(ids) for ids in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


@dataclass(frozen=True)
class CacheKind:
    """A kind of cache, and which rows may share one."""

    name: str
    make: Callable[[PreTrainedModel, int], BatchCache]
    """From the model and the most positions of a row."""
    pads: bool = True
    """Prompts of different length are read together."""


KEYS_AND_VALUES = CacheKind(
    "a cache of keys and values",
    lambda model, capacity: RowCache(model.config.get_text_config().num_hidden_layers, capacity),
)


@dataclass(eq=False)
class _Lane:
    """Rows that are computed in one forward pass, behind prompts that were read in one."""

    cache: BatchCache
    filled: Tensor
    """Real tokens of each row and room for those to come [B, L]."""
    width: int
    """Positions so far."""
    is_short: np.ndarray
    """The rows whose prompt is shorter than others that were read with it."""
    slots: np.ndarray
    """The slot of each row, -1 of one that has left; the prompt slots before any row has started."""

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        index = torch.from_numpy(rows).to(self.filled.device)
        self.cache.take(index)
        self.filled, self.is_short, self.slots = self.filled[index], self.is_short[rows], self.slots[rows]


class ModuleForward:
    """The model's own forward pass, of which the logits behind the last of the new tokens are wanted."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        """Logits [B, V] for the arguments of a forward pass."""
        return self.model(**inputs, logits_to_keep=1).logits[:, -1]

    def renew(self) -> None:
        """The weights have changed; nothing is kept of them here."""


class ModuleDecoder:
    """Decodes with the model's own forward pass.

    Prompts that are read together, and the rows that go on from them, make a lane: a batch of one length. Rows that
    finish are computed on until a quarter of their lane has finished, since a cut copies the others.
    """

    keeper = mover = None

    def __init__(
        self,
        policy: PolicyView,
        sizes: BufferSizes,
        *,
        pad_id: int = 0,
        kind: CacheKind = KEYS_AND_VALUES,
        forward: ModuleForward | None = None,
    ) -> None:
        self._policy, self._model, self._sizes = policy, policy.model, sizes
        self._pad_id, self._kind, self._forward = pad_id, kind, forward or ModuleForward(policy.model)
        self._prompts: dict[int, tuple[int, ...]] = {}
        """The tokens in each prompt slot."""
        self._read: list[_Lane] = []
        """Prompts behind which no row has started."""
        self._lanes: list[_Lane] = []

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """See ``Decoder``."""
        self._prompts.update((slot, tuple(prompt)) for slot, prompt in zip(slots, prompts, strict=True))
        self._read = [lane for lane in self._read if not set(lane.slots.tolist()) & set(slots)]
        together = len(slots) if self._kind.pads else 1
        return torch.cat([self._read_lane(slots[at : at + together]) for at in range(0, len(slots), together)])

    def _read_lane(self, slots: Sequence[int]) -> Tensor:
        """Read the prompts of some slots in one pass; the logits behind them."""
        prompts = [self._prompts[slot] for slot in slots]
        ids, mask = left_pad(prompts, pad_id=self._pad_id, device=self._model.device)
        capacity = ids.shape[1] + self._sizes.completion_tokens
        room = torch.ones(len(mask), self._sizes.completion_tokens, dtype=mask.dtype, device=mask.device)
        cache, is_short = self._kind.make(self._model, capacity), np.array([len(ids[0]) > len(p) for p in prompts])
        lane = _Lane(cache, torch.cat([mask, room], dim=1), ids.shape[1], is_short, np.array(slots))
        self._read.append(lane)
        return self._logits(lane, ids)

    def hidden(self, tokens: Tensor, positions: Tensor, addresses: Tensor) -> Tensor:
        """The logits themselves: those of the model's own forward pass, or of its head's matrix."""
        where = addresses.numpy()
        self._start(where[where[:, PAST] == 0])
        row_of, parts = {slot: row for row, slot in enumerate(where[:, SLOT].tolist())}, []
        for lane in self._lanes:
            runs = np.isin(lane.slots, where[:, SLOT])
            if runs.any() and runs.mean() <= COMPACT_BELOW:
                lane.take(np.flatnonzero(runs))
                runs = runs[runs]
            lane.slots[~runs] = -1
        self._lanes = [lane for lane in self._lanes if (lane.slots >= 0).any()]
        for lane in self._lanes:
            at = np.flatnonzero(lane.slots >= 0)
            rows = torch.tensor([row_of[slot] for slot in lane.slots[at].tolist()])
            ids = torch.full((len(lane.slots),), self._pad_id, dtype=torch.long)
            ids[torch.from_numpy(at)] = tokens[rows]
            lane.width += 1
            logits = self._logits(lane, ids[:, None].to(self._model.device))
            parts.append((rows, logits[torch.from_numpy(at).to(logits.device)]))
        [(_, first), *_] = parts
        out = first.new_empty(len(where), first.shape[1])
        for rows, logits in parts:
            out[rows.to(out.device)] = logits
        return out

    def _start(self, starting: np.ndarray) -> None:
        """Make lanes of rows behind whose prompts nothing was decoded yet."""
        if not len(starting):
            return
        for lane in self._lanes:
            lane.slots[np.isin(lane.slots, starting[:, SLOT])] = -1  # of rows that were there before
        known = {slot for lane in self._read for slot in lane.slots.tolist()}
        again = [slot for slot in dict.fromkeys(starting[:, PROMPT_SLOT].tolist()) if slot not in known]
        for slot in again:  # of a group whose other rows have started already
            self._read_lane([slot])
        for lane in self._read:
            own = starting[np.isin(starting[:, PROMPT_SLOT], lane.slots)]
            if len(own):
                index = {slot: row for row, slot in enumerate(lane.slots.tolist())}
                lane.take(np.array([index[slot] for slot in own[:, PROMPT_SLOT].tolist()]))
                lane.slots = own[:, SLOT].copy()
                self._lanes.append(lane)
        self._read = [lane for lane in self._read if lane not in self._lanes]

    def _logits(self, lane: _Lane, ids: Tensor) -> Tensor:
        """Logits of the next token [B, V], for new tokens at the right end of a lane."""
        filled = lane.filled[:, : lane.width]
        inputs = lane.cache.inputs(ids, filled if lane.is_short.any() else None, filled)
        with self._policy.compute():
            return self._forward(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that ``hidden`` gave."""
        return hidden

    def choose(self, logits: Tensor, uniform: Tensor, params: SamplingParams) -> Chosen:
        """See ``Decoder``."""
        return fetched(*draw(logits, uniform.to(logits.device), params, forbidden=[]))

    def renew(self) -> None:
        """Weights are read from the model at each step."""
        self._forward.renew()

    def end_prompts(self) -> None:
        """Nothing is held for prompts alone."""

    def close(self) -> None:
        """Drop all keys and values."""
        self._read, self._lanes = [], []


class ModuleDecoders:
    """Makes decoders of the model's own forward pass, a fixed number of rows at a time."""

    is_exact = False

    def __init__(self, max_rows: int = USUAL_ROWS) -> None:
        self.most_rows = self._rows = max_rows

    def plan(
        self, policy: PolicyView, call: DecodeCall, end_ids: tuple[int, ...], *, is_shared: bool, version: str | None
    ) -> DecoderPlan:
        """See ``Decoders``."""
        rows = min(self._rows, call.rows)
        sizes = BufferSizes(rows, call.prompts(rows), call.prompt_tokens, call.completion_tokens)
        return DecoderPlan(sizes, lambda: ModuleDecoder(policy, sizes, pad_id=padding_id(policy, end_ids)))

    def shrink(self, rows: int, reason: str, call: DecodeCall, *, key: str) -> None:
        """See ``Decoders``."""
        if rows <= 1:
            raise SamplerError(
                f"there is not enough memory to sample one completion of up to {call.completion_tokens} tokens behind "
                f"a prompt of {call.prompt_tokens} ({reason}). Lower the limits on both, or take a smaller model"
            )
        self._rows = rows // 2

    def ending_tokens(self, stop: tuple[str, ...], policy: PolicyView) -> None:
        """Not known."""

    def batch_type(self, plain: type[Any]) -> type[Any]:
        """The plain one."""
        return plain

    def forget_limit(self) -> None:
        """See ``Decoders``."""
        self._rows = self.most_rows
