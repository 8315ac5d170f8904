"""Caches with which a model samples through its own modules, and the proof of each against its own forward pass."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from oncurve.algorithm.precision import (
    arithmetic_type,
    dithered_casts,
    head_type,
    in_full_precision,
    narrow,
    weight_key,
    wide_product,
)
from oncurve.core.decoder import KEYS_AND_VALUES, CacheKind, ModuleForward, cached_inputs, left_pad
from oncurve.core.errors import SamplerError, first_line
from oncurve.model.lora_linear import linear_layers
from oncurve.model.stand_in import FAILURES, allowed, find_stand_in, nudged
from oncurve.model.weights import body_of, head_key, head_matrix, is_plain_head

log = logging.getLogger(__name__)


class RoundedMatrices:
    """Under autocast, the matrices of linear layers in its type, which are rounded once and not at each token.

    Embeddings and the head stay: neither is rounded in training.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._rounded: list[tuple[nn.Parameter, Tensor]] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While it lasts, the layers hold the rounded matrices; whoever reads the weights meanwhile would see them."""
        kind = self.model.device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        rounded_matrices = self._rounded
        if rounded_matrices is None:
            head, dtype = self.model.get_output_embeddings(), torch.get_autocast_dtype(kind)
            with torch.inference_mode(False):  # what a parameter holds may not be a tensor of inference mode
                rounded_matrices = self._rounded = [
                    (part.weight, narrow(part.weight.detach(), dtype, weight_key(part)))
                    for part in linear_layers(self.model)
                    if part is not head and part.weight.dtype == torch.float32
                ]
        exact = [weight.data for weight, _ in rounded_matrices]
        for weight, rounded in rounded_matrices:
            weight.data = rounded
        try:
            yield
        finally:
            for (weight, _), whole in zip(rounded_matrices, exact, strict=True):
                weight.data = whole


class OwnHead(ModuleForward):
    """The model's own forward pass up to its head, which is multiplied as in training."""

    def __init__(self, model: PreTrainedModel, *, rounds: bool) -> None:
        """With ``rounds``, matrices are rounded once, which whoever reads the weights meanwhile would see."""
        super().__init__(model)
        self._around: Callable[[], AbstractContextManager[None]] = RoundedMatrices(model) if rounds else nullcontext
        self._head: Tensor | None = None

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        """Logits [B, V]; by the model itself where its head is more than a matrix."""
        with self._around(), dithered_casts(self.model):
            if not is_plain_head(self.model):
                return super().__call__(inputs)
            hidden = body_of(self.model)(**inputs).last_hidden_state[:, -1]
        if self._head is None:
            dtype = head_type(hidden.device, arithmetic_type(hidden.device, hidden.dtype), hidden.dtype)
            self._head = narrow(head_matrix(self.model), dtype, head_key(self.model))
        with torch.autocast(hidden.device.type, enabled=False):
            return wide_product(hidden.to(self._head.dtype), self._head.T)

    def renew(self) -> None:
        """Forget the head in the type of the arithmetic."""
        self._head = None


class OwnCache:
    """The cache as the model's own classes make it, with convolutions, states and shared layers, row by row."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.cache = DynamicCache(config=model.config)
        self._name = _cache_name(type(model))

    def inputs(self, ids: Tensor, mask: Tensor | None, filled: Tensor) -> dict[str, Any]:
        """See ``BatchCache``."""
        return cached_inputs(ids, mask, filled) | {self._name: self.cache}

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]


class WholeRows:
    """No cache: all tokens of the rows so far, which are computed again for each new one."""

    def __init__(self) -> None:
        self.ids = torch.zeros(0, dtype=torch.long)

    def inputs(self, ids: Tensor, mask: Tensor | None, filled: Tensor) -> dict[str, Any]:
        """See ``BatchCache``."""
        self.ids = torch.cat([self.ids, ids], dim=1) if self.ids.numel() else ids
        return {"input_ids": self.ids, "use_cache": False}

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self.ids = self.ids[rows]


CACHE_KINDS = (
    KEYS_AND_VALUES,
    CacheKind("a cache of its own", lambda model, size: OwnCache(model)),
    CacheKind("a cache of its own, prompt by prompt", lambda model, size: OwnCache(model), pads=False),
    CacheKind("no cache, prompt by prompt, which is slow", lambda model, size: WholeRows(), pads=False),
)
"""From the fastest to the one that is right whatever the model does with its cache."""
MOST_NATS = 1e3
"""Tokens less likely than e to the minus this are masked, which says nothing of a way."""
_KINDS_BY_MODEL: WeakKeyDictionary[PreTrainedModel, tuple[CacheKind, tuple[str, ...]]] = WeakKeyDictionary()


def cache_kind_of(model: PreTrainedModel) -> CacheKind:
    """The first way that gives the log-probabilities of the model's own forward pass, found out once for each model.

    Raises SamplerError if none does.
    """
    if model not in _KINDS_BY_MODEL:
        with torch.no_grad(), in_full_precision(model), torch.autocast(model.device.type, enabled=False):
            reasons: list[str] = []
            if not _is_finite(model):  # which tells nothing of a way, and whatever is sampled is refused
                return CACHE_KINDS[0]
            subjects = [subject for subject in (model, find_stand_in(model)) if subject is not None]
            for kind in CACHE_KINDS:
                mismatches = [mismatch for subject in subjects if (mismatch := _mismatch(subject, kind)) is not None]
                if not mismatches:
                    break
                reasons.append(f"with {kind.name} {mismatches[0]}")
            else:
                raise SamplerError(
                    f"{type(model).__name__} cannot be sampled from in this process: {'; '.join(reasons)}"
                )
        if reasons:
            log.info("the model is sampled from with %s: %s", kind.name, "; ".join(reasons))
        _KINDS_BY_MODEL[model] = kind, tuple(reasons)
    return _KINDS_BY_MODEL[model][0]


def reasons_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The reasons why a model is not sampled from in a faster way."""
    cache_kind_of(model)
    return _KINDS_BY_MODEL[model][1] if model in _KINDS_BY_MODEL else ()


def _is_finite(model: PreTrainedModel) -> bool:
    """The model's logits are numbers, as far as it gives any."""
    ids = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    try:
        return bool(_logits(model, {"input_ids": ids, "use_cache": False}).isfinite().all())
    except FAILURES:
        return True


PROMPTS, STEPS, DROPPED_AT = (21, 13), 16, 3
"""Tokens of two prompts and of completions in the proof of a way, and when the first row is dropped."""


def _mismatch(model: PreTrainedModel, kind: CacheKind) -> str | None:
    """The reason against a way; None if there is none. Rows of two prompts are decoded, one is dropped in between."""
    vocabulary = model.config.get_text_config().vocab_size
    lengths = PROMPTS if kind.pads else (PROMPTS[0], PROMPTS[0])
    prompts = [tuple((7 * index + 3) % vocabulary for index in range(length)) for length in lengths]
    rows = [[*prompts[of], *((11 * step + 5 * of + 1) % vocabulary for step in range(STEPS))] for of in (0, 1, 0)]
    try:
        decoded = _decoded(model, kind, prompts, rows)
        mismatches = (
            disagreement(model, row, torch.stack(steps), start=len(row) - STEPS)
            for row, steps in zip(rows, decoded, strict=True)
        )
        return next((mismatch for mismatch in mismatches if mismatch), None)
    except FAILURES as error:
        return f"it raises {type(error).__name__}: {first_line(error)}"


def disagreement(model: PreTrainedModel, row: list[int], logits: Tensor, *, start: int) -> str | None:
    """How far logits [T, V] before the tokens of a row from a position on are from the model's own forward pass over it
    alone; None if no further than rounding explains."""
    ids = torch.tensor([row], device=model.device)
    plain = model(input_ids=ids, use_cache=False).logits, nudged(model, ids)
    exact, near = (logprobs[0, start - 1 :][: len(logits)].log_softmax(-1) for logprobs in plain)
    seen = exact > -MOST_NATS
    error, rounding = (float((logprobs - exact)[seen].abs().max()) for logprobs in (logits.log_softmax(-1), near))
    if error <= (most := allowed(model, rounding)):
        return None
    return f"log-probabilities differ by {error:.2g} (at most {most:.2g} is rounding)"


def _decoded(
    model: PreTrainedModel, kind: CacheKind, prompts: list[tuple[int, ...]], rows: list[list[int]]
) -> list[list[Tensor]]:
    """Logits [V] behind the prompt and each token of the rows, whose first is dropped before its end."""
    ids, mask = left_pad(prompts, pad_id=0, device=model.device)
    cache = kind.make(model, ids.shape[1] + STEPS)
    logits = _logits(model, cache.inputs(ids, mask if kind.pads else None, mask))
    order = torch.tensor([0, 1, 0], device=model.device)
    cache.take(order)
    logits, mask, running = logits[order], mask[order], [0, 1, 2]
    decoded: list[list[Tensor]] = [[], [], []]
    for step in range(STEPS):
        if step == DROPPED_AT:
            keep = torch.tensor([1, 2], device=model.device)
            cache.take(keep)
            logits, mask, running = logits[keep], mask[keep], running[1:]
        for index, row in enumerate(running):
            decoded[row].append(logits[index])
        new = torch.tensor([[rows[row][step - STEPS]] for row in running], device=model.device)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = _logits(model, cache.inputs(new, mask if kind.pads else None, mask))
    return decoded


@cache
def _cache_name(kind: type[PreTrainedModel]) -> str:
    """The name of the cache in a model's forward pass."""
    return "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"


def _logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """Logits of the last position [B, V], by the model's own forward pass."""
    return model(**inputs).logits[:, -1]
