"""How does ``transformers`` sample? The slow reference that every other sampler is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from oncurve.errors import SamplerError
from oncurve.records import FinishReason, Group, Prompt
from oncurve.rollouts.base import PolicyView, SamplingParams, end_token_ids, make_group, padding_id
from oncurve.rollouts.engine.cache import left_pad


class HfSampler:
    """``model.generate`` over all rows at once: finished rows stay in the batch, prompts are read once per completion.

    The model's own generation settings (top-p, repetition penalty, ...) are left aside, since they would sample from
    another distribution than the policy's. Its random numbers depend on the batch, unlike those of the engine.
    """

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
        """One group per prompt."""
        if self._policy is None:
            raise SamplerError("the sampler has no weights yet; call load_weights before sample")
        params = params or self.params
        model = self._policy.model
        at_once = max(1, self.max_rows // group_size)
        was_training = model.training
        model.eval()
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.inference_mode(), self._policy.compute():
                torch.manual_seed(params.seed * 1_000_003 + step)
                return [
                    group
                    for start in range(0, len(prompts), at_once)
                    for group in self._generate(self._policy, prompts[start : start + at_once], group_size, params)
                ]
        finally:
            model.train(was_training)

    def _generate(
        self, policy: PolicyView, prompts: Sequence[Prompt], group_size: int, params: SamplingParams
    ) -> list[Group]:
        model, tokenizer = policy.model, policy.tokenizer
        end_ids = end_token_ids(model, tokenizer)
        pad_id = padding_id(tokenizer, end_ids)
        ids, mask = left_pad([prompt.prompt_ids for prompt in prompts], pad_id=pad_id, device=model.device)
        settings = generation_settings(params, end_ids=end_ids, pad_id=pad_id, group_size=group_size)
        stop: dict[str, Any] = {"stop_strings": list(params.stop), "tokenizer": tokenizer} if params.stop else {}
        generate: Any = model.generate
        output = generate(input_ids=ids, attention_mask=mask, generation_config=settings, **stop)
        tokens = output.sequences[:, ids.shape[1] :]
        logprobs = _sampled_logprobs(output.logits, tokens, params.temperature)
        sampled = [
            _cut(row_ids, row_logprobs, tokenizer, params, end_ids)
            for row_ids, row_logprobs in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]
        return [
            make_group(
                prompt,
                sampled[place * group_size : (place + 1) * group_size],
                tokenizer=tokenizer,
                end_ids=end_ids,
                version=self._version,
            )
            for place, prompt in enumerate(prompts)
        ]


def generation_settings(
    params: SamplingParams, *, end_ids: tuple[int, ...], pad_id: int, group_size: int
) -> GenerationConfig:
    """Settings for ``generate`` that leave nothing to the model's defaults."""
    settings: dict[str, Any] = {
        "max_new_tokens": params.max_completion_tokens,
        "num_return_sequences": group_size,
        "do_sample": params.temperature > 0,
        "eos_token_id": list(end_ids),
        "pad_token_id": pad_id,
        "return_dict_in_generate": True,
        "output_logits": True,
        "use_cache": True,
        "repetition_penalty": 1.0,
    }
    if params.min_completion_tokens:
        settings["min_new_tokens"] = params.min_completion_tokens
    if params.temperature > 0:
        settings |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        if params.min_p > 0:
            settings["min_p"] = params.min_p
    elif group_size > 1:
        settings |= {"do_sample": True, "temperature": 1.0, "top_k": 1}
    return GenerationConfig(**settings)


def _sampled_logprobs(logits: Sequence[Tensor], tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the sampled tokens [B, T], at the temperature (at 1 for greedy)."""
    scale = temperature if temperature > 0 else 1.0
    columns = [
        torch.log_softmax(step.float() / scale, dim=-1).gather(1, tokens[:, t : t + 1]) for t, step in enumerate(logits)
    ]
    return torch.cat(columns, dim=1)


def _cut(
    ids: list[int], logprobs: list[float], tokenizer: Any, params: SamplingParams, end_ids: tuple[int, ...]
) -> tuple[list[int], list[float], FinishReason]:
    """Remove the padding after the end of a completion and say why it ended."""
    for place, token in enumerate(ids):
        if token in end_ids:
            return ids[: place + 1], logprobs[: place + 1], "stop"
        if params.stop and place + 1 >= params.min_completion_tokens:
            text = tokenizer.decode(ids[: place + 1], skip_special_tokens=False)
            if any(stop in text for stop in params.stop):
                return ids[: place + 1], logprobs[: place + 1], "stop"
    return ids, logprobs, "length"
