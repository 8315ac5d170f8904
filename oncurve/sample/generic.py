"""Sampling through the model's own module, for models whose layers are not known here.

The prompt of a group is read once and its keys and values are handed to the whole group; finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.algorithm.precision import arithmetic_type, head_type, wide_product
from oncurve.model.lora_linear import linear_layers
from oncurve.model.weights import body_of, head_matrix, is_plain_head
from oncurve.records import FinishReason
from oncurve.sample.base import PolicyView, SamplingParams, padding_id
from oncurve.sample.cache import RowCache, left_pad
from oncurve.sample.draw import draw
from oncurve.sample.stops import StopStrings
from oncurve.sample.streams import uniforms

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
                        part.weight.data = part.weight.detach().to(torch.get_autocast_dtype(kind))
        yield


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
        self.pad_id = padding_id(policy.tokenizer, end_ids)
        self.rows = [SampledRow() for _ in keys]
        self.running = np.arange(len(keys))
        self._is_padded = True
        """Some row of the batch is; known without asking the device."""
        self._head_matrix: Tensor | None = None

    def run(self, prompt_ids: list[tuple[int, ...]], group_size: int) -> list[SampledRow]:
        """Prefill each prompt once, expand it to its group, decode."""
        with rounded_matrices(self.model) if self.rounds else nullcontext():
            return self._run(prompt_ids, group_size)

    def _run(self, prompt_ids: list[tuple[int, ...]], group_size: int) -> list[SampledRow]:
        device = self.model.device
        ids, mask = left_pad(prompt_ids, pad_id=self.pad_id, device=device)
        is_short = np.repeat([len(prompt) < ids.shape[1] for prompt in prompt_ids], group_size)
        self._is_padded = bool(is_short.any())
        config = self.model.config.get_text_config()
        cache = RowCache(config.num_hidden_layers, ids.shape[1] + self.params.max_completion_tokens)
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

    def _forward(self, ids: Tensor, mask: Tensor, cache: RowCache) -> Tensor:
        """Logits of the next token [B, V], for new tokens at the right end of a mask of everything so far."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask if self._is_padded else None,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
        }
        if not is_plain_head(self.model):
            return self.model(**inputs, logits_to_keep=1).logits[:, -1]
        return self._head(body_of(self.model)(**inputs).last_hidden_state[:, -1])

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states [B, H], by the products of training."""
        device = hidden.device
        if self._head_matrix is None:
            dtype = head_type(device, arithmetic_type(device, hidden.dtype), hidden.dtype)
            self._head_matrix = head_matrix(self.model).to(dtype)
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
