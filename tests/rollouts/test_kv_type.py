"""How far do log-probabilities move when keys and values are kept in another type than that of the arithmetic?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oncurve.config.load import parse_config
from oncurve.errors import ConfigError, SamplerError
from oncurve.model import decoding, ops_torch
from oncurve.model.build import library
from oncurve.model.decoding import Decoder, TorchLayers
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Completion, Prompt
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.engine import fused as fused_module
from oncurve.rollouts.engine.engine import InProcessEngine
from oncurve.wiring import make_sampler

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]
PARAMS = SamplingParams(max_completion_tokens=40, seed=3)
TEXTS = tuple(f"{'word ' * (number * 3 % 7)}{number} + {number * 7} =" for number in range(8))
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def sampled(
    policy: TrainedPolicy, prompts: list[Prompt], kv_type: torch.dtype | None, **settings: Any
) -> list[Completion]:
    engine = InProcessEngine(PARAMS, kv_type=kv_type, **settings)
    engine.load_weights(policy, version=0)
    return [completion for group in engine.sample(prompts, 4) for completion in group.completions]


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


def test_bfloat16_keys_and_values_move_float32_log_probabilities_by_their_rounding(
    make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy, prompts = make_policy("llama"), make_prompts(*TEXTS)
    assert rounding(policy, sampled(policy, prompts, None)) < 1e-5
    assert 1e-5 < rounding(policy, sampled(policy, prompts, BFLOAT16)) < 0.03


def test_float32_keys_and_values_bring_bfloat16_no_further_from_float32(
    make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy, prompts = make_policy("llama", compute_type="bfloat16"), make_prompts(*TEXTS)
    narrow = rounding(policy, sampled(policy, prompts, BFLOAT16))
    wide = rounding(policy, sampled(policy, prompts, FLOAT32))
    assert wide < 1.1 * narrow
    fastest = (
        wide if library() is None else narrow
    )  # the kernels attend in the type of the arithmetic, torch in float32
    assert rounding(policy, sampled(policy, prompts, None)) == fastest


@pytest.mark.parametrize("max_rows", [5, 32])
def test_keys_and_values_lie_in_their_type_and_a_completion_is_its_own(
    max_rows: int, make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[torch.dtype] = set()

    class Watched(Decoder):
        def step(self, tokens: Any, positions: Any, places: Any) -> Any:
            seen.update(buffer.dtype for cache in self.caches for buffer in cache.all())
            assert isinstance(self.layers, TorchLayers)
            return super().step(tokens, positions, places)

    monkeypatch.setattr(fused_module, "Decoder", Watched)
    policy, prompts = make_policy(), make_prompts(*TEXTS)
    together = sampled(policy, prompts, BFLOAT16, max_rows=max_rows)
    assert seen == {BFLOAT16}
    alone = sampled(policy, prompts[:1], BFLOAT16)
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[:4]]


def test_torch_alone_keeps_long_prompts_in_the_type_of_the_products(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[torch.dtype, ...]] = set()

    class Watched(Decoder):
        def step(self, tokens: Any, positions: Any, places: Any) -> Any:
            seen.update(tuple(buffer.dtype for buffer in cache.all()) for cache in self.caches)
            return super().step(tokens, positions, places)

    monkeypatch.setattr(fused_module, "Decoder", Watched)
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    policy, prompts = make_policy("llama", compute_type="bfloat16"), make_prompts("word " * 40, "word " * 30, "1 + 1 =")
    assert max(len(prompt.prompt_ids) for prompt in prompts) >= decoding.LONG
    chosen = rounding(policy, sampled(policy, prompts, None))
    assert seen == {(FLOAT32, FLOAT32, BFLOAT16, BFLOAT16)}
    assert chosen < 1.1 * rounding(policy, sampled(policy, prompts, BFLOAT16))


def test_where_another_type_cannot_be_kept_it_is_said(make_policy: MakePolicy, make_prompts: MakePrompts) -> None:
    policy, prompts = make_policy("gpt2"), make_prompts("a")
    assert sampled(policy, prompts, FLOAT32)
    with pytest.raises(SamplerError, match=r"kv_dtype is bfloat16, but GPT2LMHeadModel on cpu .*\(float32\)\. Set it"):
        sampled(policy, prompts, BFLOAT16)
    recipe = "model: embedded\ndata: {type: word_problems}\nrollouts: {type: transformers, kv_dtype: bfloat16}"
    with pytest.raises(ConfigError, match=r"kv_dtype is bfloat16, which the engine alone"):
        parse_config(recipe, source="recipe")
    engine = make_sampler(parse_config(recipe.replace("transformers", "engine"), source="recipe"))
    assert isinstance(engine, InProcessEngine)
    assert engine.budget.kv_type is BFLOAT16
