"""Sampling through the model's own module, for models whose layers are not known here.

The prompt of a group is read once and its keys and values are handed to the whole group; finished rows leave the batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.algorithm.precision import arithmetic_type, head_type, in_full_precision, wide_product
from oncurve.algorithm.rounding import dithered_casts, narrow, weight_key
from oncurve.errors import SamplerError
from oncurve.model.lora_linear import linear_layers
from oncurve.model.out_of_memory import first_line
from oncurve.model.stand_in import FAILURES, allowed, find_stand_in, nudged
from oncurve.model.weights import body_of, head_key, head_matrix, is_plain_head
from oncurve.records import FinishReason
from oncurve.sample.base import PolicyView, SamplingParams, padding_id
from oncurve.sample.cache import OwnCache, RowCache, Rows, WholeRows, left_pad
from oncurve.sample.draw import draw
from oncurve.sample.stops import StopStrings
from oncurve.sample.streams import uniforms

log = logging.getLogger(__name__)

COMPACT_BELOW = 0.75
"""Finished rows are cut from the batch when no more than this share still runs: a cut copies the running rows."""


@contextmanager
def rounded_matrices(model: PreTrainedModel) -> Iterator[None]:
    """Under autocast, linear layers hold their matrices in its type while this lasts, not rounded again at each token.

    Embeddings and the head stay: neither is rounded in training.
    """
    kind, head = model.device.type, model.get_output_embeddings()
    with ExitStack() as stack:
        if torch.is_autocast_enabled(kind):
            for part in linear_layers(model):
                if part is not head and part.weight.dtype == torch.float32:
                    stack.callback(partial(setattr, part.weight, "data"), part.weight.data)
                    with torch.inference_mode(False):  # what a parameter holds may not be a tensor of inference mode
                        part.weight.data = narrow(
                            part.weight.detach(), torch.get_autocast_dtype(kind), weight_key(part)
                        )
        yield


@dataclass(frozen=True)
class Way:
    """A way to sample from a model through its own modules."""

    name: str
    make_cache: Callable[[PreTrainedModel, int], Rows]
    """From the model and the most positions of a row."""
    pads: bool = True
    """Prompts of different length are read together."""


WAYS = (
    Way(
        "a cache of keys and values",
        lambda model, size: RowCache(model.config.get_text_config().num_hidden_layers, size),
    ),
    Way("a cache of its own", lambda model, size: OwnCache(model.config)),
    Way("a cache of its own, prompt by prompt", lambda model, size: OwnCache(model.config), pads=False),
    Way("no cache, prompt by prompt, which is slow", lambda model, size: WholeRows(), pads=False),
)
"""From the fastest to the one that is right whatever the model does with its cache."""
MOST_NATS = 1e3
"""Tokens less likely than e to the minus this are masked, which says nothing of a way."""
_WAYS: WeakKeyDictionary[PreTrainedModel, tuple[Way, tuple[str, ...]]] = WeakKeyDictionary()


def way_of(model: PreTrainedModel) -> Way:
    """The first way that gives the log-probabilities of the model's own forward pass, found out once for each model.

    Raises SamplerError if none does.
    """
    if model not in _WAYS:
        with torch.no_grad(), in_full_precision(model), torch.autocast(model.device.type, enabled=False):
            reasons: list[str] = []
            if not _is_finite(model):  # which tells nothing of a way, and whatever is sampled is refused
                return WAYS[0]
            subjects = [one for one in (model, find_stand_in(model)) if one is not None]
            for way in WAYS:
                objections = [found for one in subjects if (found := _objection(one, way)) is not None]
                if not objections:
                    break
                reasons.append(f"with {way.name} {objections[0]}")
            else:
                raise SamplerError(
                    f"{type(model).__name__} cannot be sampled from in this process: {'; '.join(reasons)}"
                )
        if reasons:
            log.info("the model is sampled from with %s: %s", way.name, "; ".join(reasons))
        _WAYS[model] = way, tuple(reasons)
    return _WAYS[model][0]


def reasons_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The reasons why a model is not sampled from in a faster way."""
    way_of(model)
    return _WAYS[model][1] if model in _WAYS else ()


def _is_finite(model: PreTrainedModel) -> bool:
    """The model's logits are numbers, as far as it gives any."""
    ids = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    try:
        return bool(_logits(model, {"input_ids": ids, "use_cache": False}).isfinite().all())
    except FAILURES:
        return True


PROMPTS, STEPS, DROPPED_AT = (21, 13), 16, 3
"""Tokens of two prompts and of completions in the proof of a way, and when the first row is dropped."""


def _objection(model: PreTrainedModel, way: Way) -> str | None:
    """The reason against a way; None if there is none. Rows of two prompts are decoded, one is dropped in between."""
    vocabulary = model.config.get_text_config().vocab_size
    lengths = PROMPTS if way.pads else (PROMPTS[0], PROMPTS[0])
    prompts = [tuple((7 * place + 3) % vocabulary for place in range(length)) for length in lengths]
    rows = [[*prompts[of], *((11 * step + 5 * of + 1) % vocabulary for step in range(STEPS))] for of in (0, 1, 0)]
    try:
        found = _decoded(model, way, prompts, rows)
        objections = (
            disagreement(model, row, torch.stack(steps), start=len(row) - STEPS)
            for row, steps in zip(rows, found, strict=True)
        )
        return next((objection for objection in objections if objection), None)
    except FAILURES as error:
        return f"it raises {type(error).__name__}: {first_line(error)}"


def disagreement(model: PreTrainedModel, row: list[int], logits: Tensor, *, start: int) -> str | None:
    """How far logits [T, V] before the tokens of a row from a place on are from the model's own forward pass over it
    alone; None if no further than rounding explains."""
    ids = torch.tensor([row], device=model.device)
    plain = model(input_ids=ids, use_cache=False).logits, nudged(model, ids)
    exact, near = (one[0, start - 1 :][: len(logits)].log_softmax(-1) for one in plain)
    seen = exact > -MOST_NATS
    error, rounding = (float((one - exact)[seen].abs().max()) for one in (logits.log_softmax(-1), near))
    if error <= (most := allowed(model, rounding)):
        return None
    return f"log-probabilities differ by {error:.2g} (at most {most:.2g} is rounding)"


def _decoded(
    model: PreTrainedModel, way: Way, prompts: list[tuple[int, ...]], rows: list[list[int]]
) -> list[list[Tensor]]:
    """Logits [V] behind the prompt and each token of the rows, whose first is dropped before its end."""
    ids, mask = left_pad(prompts, pad_id=0, device=model.device)
    held = way.make_cache(model, ids.shape[1] + STEPS)
    logits = _logits(model, inputs_of(model, ids, mask if way.pads else None, mask, held))
    order = torch.tensor([0, 1, 0], device=model.device)
    held.take(order)
    logits, mask, running = logits[order], mask[order], [0, 1, 2]
    found: list[list[Tensor]] = [[], [], []]
    for step in range(STEPS):
        if step == DROPPED_AT:
            keep = torch.tensor([1, 2], device=model.device)
            held.take(keep)
            logits, mask, running = logits[keep], mask[keep], running[1:]
        for place, row in enumerate(running):
            found[row].append(logits[place])
        new = torch.tensor([[rows[row][step - STEPS]] for row in running], device=model.device)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = _logits(model, inputs_of(model, new, mask if way.pads else None, mask, held))
    return found


def inputs_of(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, filled: Tensor, rows: Rows) -> dict[str, Any]:
    """The arguments of a forward pass over new tokens; ``filled`` [B, L] marks the rows' tokens, new ones included."""
    if isinstance(rows, WholeRows):
        return {"input_ids": rows.append(ids), "use_cache": False}
    positions = (filled.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        _cache_name(type(model)): rows.cache if isinstance(rows, OwnCache) else rows,
        "use_cache": True,
    }


@cache
def _cache_name(kind: type[PreTrainedModel]) -> str:
    """The name of the cache in a model's forward pass."""
    return "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"


def _logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """Logits of the last place [B, V], by the model's own forward pass."""
    return model(**inputs).logits[:, -1]


@dataclass
class SampledRow:
    """One completion while it is being sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class ModuleSampling:
    """Token by token for one batch of groups, until every row has finished."""

    def __init__(
        self,
        policy: PolicyView,
        params: SamplingParams,
        keys: np.ndarray,
        end_ids: tuple[int, ...],
        *,
        rounds: bool = True,
    ) -> None:
        """With ``rounds``, matrices are rounded once, which whoever reads the weights meanwhile would see."""
        self.rounds = rounds
        self.model, self.params, self.keys, self.end_ids = policy.model, params, keys, end_ids
        self.stops = StopStrings(params.stop, policy.tokenizer)
        self.pad_id = padding_id(policy, end_ids)
        self.rows = [SampledRow() for _ in keys]
        self.running = np.arange(len(keys))
        self._is_padded = True
        """Some row of the batch is; known without asking the device."""
        self._head_matrix: Tensor | None = None

    def run(self, prompt_ids: list[tuple[int, ...]], group_size: int) -> list[SampledRow]:
        """Prefill each prompt once, expand it to its group, decode."""
        way_of(self.model)  # before matrices are rounded
        with rounded_matrices(self.model) if self.rounds else nullcontext(), dithered_casts(self.model):
            return self._run(prompt_ids, group_size)

    def _run(self, prompt_ids: list[tuple[int, ...]], group_size: int) -> list[SampledRow]:
        device, way = self.model.device, way_of(self.model)
        if not way.pads and len(prompt_ids) > 1:
            return self._one_by_one(prompt_ids, group_size)
        ids, mask = left_pad(prompt_ids, pad_id=self.pad_id, device=device)
        is_short = np.repeat([len(prompt) < ids.shape[1] for prompt in prompt_ids], group_size)
        self._is_padded = bool(is_short.any())
        cache = way.make_cache(self.model, ids.shape[1] + self.params.max_completion_tokens)
        logits = self._forward(ids, mask, cache)
        expand = torch.arange(len(prompt_ids), device=device).repeat_interleave(group_size)
        cache.take(expand)
        mask = mask[expand]
        capacity = torch.ones(len(mask), self.params.max_completion_tokens, dtype=mask.dtype, device=device)
        mask, width, logits = torch.cat([mask, capacity], dim=1), ids.shape[1], logits[expand]
        for position in range(self.params.max_completion_tokens):
            tokens = self._step(logits, position)
            if all(self.rows[row].finish_reason for row in self.running):
                break
            keep = self._compaction()
            if keep is not None:
                cache.take(keep)
                mask, tokens = mask[keep], tokens[keep]
                self._is_padded = bool(is_short[self.running].any())
            width += 1
            logits = self._forward(tokens[:, None], mask[:, :width], cache)
        return self.rows

    def _one_by_one(self, prompt_ids: list[tuple[int, ...]], group_size: int) -> list[SampledRow]:
        """The group of each prompt by itself, where rows of different length cannot be together."""
        for place, prompt in enumerate(prompt_ids):
            own = slice(place * group_size, (place + 1) * group_size)
            part = copy(self)
            part.keys, part.rows, part.running = self.keys[own], self.rows[own], np.arange(group_size)
            part._run([prompt], group_size)
        return self.rows

    def _forward(self, ids: Tensor, mask: Tensor, cache: Rows) -> Tensor:
        """Logits of the next token [B, V], for new tokens at the right end of a mask of everything so far."""
        inputs = inputs_of(self.model, ids, mask if self._is_padded else None, mask, cache)
        if not is_plain_head(self.model):
            return self.model(**inputs, logits_to_keep=1).logits[:, -1]
        return self._head(body_of(self.model)(**inputs).last_hidden_state[:, -1])

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states [B, H], by the products of training."""
        device = hidden.device
        if self._head_matrix is None:
            dtype = head_type(device, arithmetic_type(device, hidden.dtype), hidden.dtype)
            self._head_matrix = narrow(head_matrix(self.model), dtype, head_key(self.model))
        with torch.autocast(device.type, enabled=False):
            return wide_product(hidden.to(self._head_matrix.dtype), self._head_matrix.T)

    def _step(self, logits: Tensor, position: int) -> Tensor:
        """Draw a token for every row of the batch and record it where the row still runs."""
        uniform = torch.from_numpy(uniforms(self.keys[self.running], np.full(len(self.running), position)))
        forbidden = list(self.end_ids) if position < self.params.min_completion_tokens else []
        tokens, logprobs = draw(logits, uniform.to(logits.device), self.params, forbidden=forbidden)
        live = [int(row) for row in self.running if self.rows[row].finish_reason is None]
        for row, token, logprob in zip(self.running, tokens.tolist(), logprobs.tolist(), strict=True):
            if self.rows[row].finish_reason is None:
                self.rows[row].token_ids.append(token)
                self.rows[row].logprobs.append(logprob)
        self._finish(live, last=position + 1 == self.params.max_completion_tokens)
        return tokens

    def _finish(self, live: list[int], *, last: bool) -> None:
        """Mark the rows whose newest token ended them."""
        ended = self.stops.ended([self.rows[row].token_ids for row in live])
        for row, stopped in zip(live, ended, strict=True):
            state = self.rows[row]
            long_enough = len(state.token_ids) >= self.params.min_completion_tokens
            if state.token_ids[-1] in self.end_ids or (stopped and long_enough):
                state.finish_reason = "stop"
            elif last:
                state.finish_reason = "length"

    def _compaction(self) -> Tensor | None:
        """Places of the rows to keep when enough have finished; None while the batch stays as it is."""
        keep = np.array([self.rows[row].finish_reason is None for row in self.running])
        if keep.mean() > COMPACT_BELOW:
            return None
        places = torch.from_numpy(np.flatnonzero(keep)).to(self.model.device)
        self.running = self.running[keep]
        return places
