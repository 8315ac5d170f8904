"""How far do log-probabilities move when torch keeps a long prompt in the type of its products?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decoding, layer_decoders, ops_torch
from oncurve.model.decoding import LayerDecoder
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]
PARAMS = SamplingParams(max_completion_tokens=40, seed=3)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def sampled(policy: TrainedPolicy, prompts: list[Prompt]) -> list[Completion]:
    engine = InProcessEngine(PARAMS)
    engine.load_weights(policy, version=0)
    return [completion for group in engine.sample(SamplingRequest(prompts, 4)) for completion in group.completions]


def rounding(policy: TrainedPolicy, completions: list[Completion]) -> float:
    """The root mean square difference of the sampler's log-probabilities to those of a float32 pass."""
    errors = []
    for completion in completions:
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(completion.prompt_ids) - 1 : -1]
        chosen = torch.tensor(completion.token_ids)[:, None]
        exact = torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0]
        errors.append(exact - torch.tensor(completion.sampler_logprobs))
    return float(torch.cat(errors).square().mean().sqrt())


def test_torch_alone_keeps_long_prompts_in_the_type_of_the_products(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[torch.dtype, ...]] = set()

    class Watched(LayerDecoder):
        def hidden(self, tokens: Any, positions: Any, places: Any) -> Any:
            seen.update(tuple(buffer.dtype for buffer in cache.all()) for cache in self.caches)
            return super().hidden(tokens, positions, places)

    monkeypatch.setattr(layer_decoders, "LayerDecoder", Watched)
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    policy, prompts = make_policy("llama", compute_type="bfloat16"), make_prompts("word " * 40, "word " * 30, "1 + 1 =")
    assert max(len(prompt.prompt_ids) for prompt in prompts) >= decoding.LONG
    assert rounding(policy, sampled(policy, prompts)) < 0.03
    assert seen == {(FLOAT32, FLOAT32, BFLOAT16, BFLOAT16)}
    seen.clear()
    short = make_prompts("1 + 1 =")
    assert rounding(policy, sampled(policy, short)) < 0.03
    assert seen == {(FLOAT32,) * 4}
