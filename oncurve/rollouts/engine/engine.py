"""How are many completions sampled at once, inside the training process?

The prompt of a group is read once and its keys and values handed to the whole group; finished rows leave the batch; the
policy's own module computes every token, so there is nothing to synchronize.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oncurve.errors import SamplerError
from oncurve.records import FinishReason, Group, Prompt
from oncurve.rollouts.base import PolicyView, SamplingParams, end_token_ids, make_group, padding_id
from oncurve.rollouts.engine.cache import RowCache, left_pad
from oncurve.rollouts.engine.draw import draw
from oncurve.rollouts.engine.stops import StopStrings
from oncurve.rollouts.engine.streams import stream_keys, uniforms

COMPACT_BELOW = 0.75
"""Finished rows are cut from the batch when no more than this share still runs: a cut copies the running rows."""


@dataclass
class Row:
    """One completion while it is being sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Engine:
    """Samples in process from the policy's own weights."""

    def __init__(self, params: SamplingParams, *, max_rows: int = 256) -> None:
        self.params = params
        self.max_rows = max_rows
        self._policy: PolicyView | None = None
        self._version = 0

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the policy: its module holds the current weights already."""
        self._policy, self._version = policy, version

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = None

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, *, step: int = 0, params: SamplingParams | None = None
    ) -> list[Group]:
        """One group per prompt. A prompt that occurs twice gets different completions each time."""
        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        params = params or self.params
        policy, model = self._policy, self._policy.model
        indices = occurrence_indices(prompts, group_size)
        prompts_at_once = max(1, self.max_rows // group_size)
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode(), policy.compute():
                return [
                    group
                    for start in range(0, len(prompts), prompts_at_once)
                    for group in self._sample_together(
                        policy, prompts[start : start + prompts_at_once], group_size, step, params, indices[start:]
                    )
                ]
        finally:
            model.train(was_training)

    def _sample_together(
        self,
        policy: PolicyView,
        prompts: Sequence[Prompt],
        group_size: int,
        step: int,
        params: SamplingParams,
        indices: list[list[int]],
    ) -> list[Group]:
        numbers = np.repeat(np.array([prompt.index for prompt in prompts], dtype=np.int64), group_size)
        keys = stream_keys(params.seed, step, numbers, np.array(indices[: len(prompts)]).reshape(-1))
        end_ids = end_token_ids(policy.model, policy.tokenizer)
        decoder = _Decoder(policy, params, keys, end_ids)
        rows = decoder.run([prompt.prompt_ids for prompt in prompts], group_size)
        return [
            make_group(
                prompt,
                [
                    (row.token_ids, row.logprobs, row.finish_reason or "abort")
                    for row in rows[place * group_size : (place + 1) * group_size]
                ],
                tokenizer=policy.tokenizer,
                end_ids=end_ids,
                version=self._version,
            )
            for place, prompt in enumerate(prompts)
        ]


class _Decoder:
    """Token by token for one batch of groups, until every row has finished."""

    def __init__(self, policy: PolicyView, params: SamplingParams, keys: np.ndarray, end_ids: tuple[int, ...]) -> None:
        self.model, self.params, self.keys, self.end_ids = policy.model, params, keys, end_ids
        self.stops = StopStrings(params.stop, policy.tokenizer)
        self.pad_id = padding_id(policy.tokenizer, end_ids)
        self.rows = [Row() for _ in keys]
        self.running = np.arange(len(keys))

    def run(self, prompt_ids: list[tuple[int, ...]], group_size: int) -> list[Row]:
        """Prefill each prompt once, expand it to its group, decode."""
        device = self.model.device
        ids, mask = left_pad(prompt_ids, pad_id=self.pad_id, device=device)
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
            width += 1
            logits = self._forward(tokens[:, None], mask[:, :width], cache)
        return self.rows

    def _forward(self, ids: Tensor, mask: Tensor, cache: RowCache) -> Tensor:
        """Logits of the next token [B, V], for new tokens at the right end of a mask of everything so far."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=mask if not bool(mask.all()) else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

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


def occurrence_indices(prompts: Sequence[Prompt], group_size: int) -> list[list[int]]:
    """The numbers of each prompt's completions in its random streams; a repeated prompt continues the count."""
    seen: Counter[int] = Counter()
    indices: list[list[int]] = []
    for prompt in prompts:
        first = seen[prompt.index] * group_size
        indices.append(list(range(first, first + group_size)))
        seen[prompt.index] += 1
    return indices
