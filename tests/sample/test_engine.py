"""Does the engine sample what a plain loop over one completion at a time would sample?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import decode_ways
import numpy as np
import pytest
import torch
from lanes import gate
from transformers import PreTrainedModel

from oncurve.core import decoder as decoder_module
from oncurve.core import requests as rows
from oncurve.core.decoder import RowCache, left_pad
from oncurve.core.draw import draw, stream_keys, uniforms
from oncurve.core.errors import SamplerError
from oncurve.core.records import DecodeCall, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decoding, layer_decoders
from oncurve.model import module_caches as generic_module
from oncurve.model.row_budget import RowBudget
from oncurve.model.weights import body_of
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]

PARAMS = SamplingParams(max_completion_tokens=24, seed=5)
TEXTS = tuple(f"{'word ' * (number * 3 % 7)}{number} + {number * 7} =" for number in range(8))


MODELS_IN_EACH_WAY = list(itertools.product(("qwen2", "llama", "gpt2", "gemma2"), decode_ways.WAYS))
IN_THE_GATE = [pair for pair in MODELS_IN_EACH_WAY if pair[0] == "qwen2" or pair[1] in ("torch", "module")][:-1]
Ways = Callable[[str], None]
ways = pytest.mark.parametrize("way", decode_ways.WAYS)


@pytest.fixture
def take_way(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Make the engine compute in a way."""
    return lambda way: decode_ways.take_way(way, monkeypatch)


def ending(policy: TrainedPolicy) -> TrainedPolicy:
    """The policy with so many tokens that end a completion that the batch shrinks as it goes."""
    assert policy.model.generation_config is not None
    policy.model.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, *range(100, 125)]
    return policy


def sampled(
    policy: TrainedPolicy, prompts: list[Prompt], group_size: int, *, max_rows: int = 256, step: int = 3
) -> list[Group]:
    engine = InProcessEngine(PARAMS, max_rows=max_rows)
    engine.load_weights(policy, version=0)
    return engine.sample(SamplingRequest(prompts, group_size, step=step))


def what(groups: list[Group]) -> list[list[tuple[tuple[int, ...], str, str]]]:
    """Tokens, text and ending of every completion."""
    return [[(c.token_ids, c.text, c.finish_reason) for c in group.completions] for group in groups]


def one_by_one(policy: TrainedPolicy, prompt: Prompt, index: int, *, step: int = 3) -> list[int]:
    """The slow reference: the whole sequence through the model for every token, no cache, no batch, no padding."""
    ids = list(prompt.prompt_ids)
    key = stream_keys(PARAMS.seed, step, np.array([prompt.index]), np.array([index]))
    assert policy.model.generation_config is not None
    for position in range(PARAMS.max_completion_tokens):
        with torch.no_grad():
            logits = policy.model(torch.tensor([ids]), use_cache=False).logits[:, -1]
        number = torch.from_numpy(uniforms(key, np.array([position])))
        token, _ = draw(logits, number, PARAMS, forbidden=[])
        ids.append(int(token))
        if ids[-1] in policy.model.generation_config.eos_token_id:
            break
    return ids[len(prompt.prompt_ids) :]


@pytest.mark.proves("D51")
@pytest.mark.parametrize(("architecture", "way"), gate(MODELS_IN_EACH_WAY, *IN_THE_GATE))
def test_batch_cache_and_padding_change_no_token(
    architecture: str, way: str, take_way: Ways, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    take_way(way)
    policy, prompts = ending(make_policy(architecture)), make_prompts(*TEXTS, first_index=11)
    groups = sampled(policy, prompts, 2)
    for group in groups:
        for completion in group.completions:
            assert list(completion.token_ids) == one_by_one(policy, group.prompt, completion.index)


@ways
def test_a_completion_is_the_same_alone_and_among_63_others(
    way: str, take_way: Ways, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    take_way(way)
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS)
    together = what(sampled(policy, prompts, 8))
    assert sum(len(group) for group in together) == 64
    assert {reason for group in together for _, _, reason in group} == {"stop", "length"}
    for place, prompt in enumerate(prompts):
        assert what(sampled(policy, [prompt], 1)) == [together[place][:1]]
        assert what(sampled(policy, [prompt], 8)) == [together[place]]


@ways
def test_neither_order_nor_the_size_of_the_batch_matters(
    way: str, take_way: Ways, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    take_way(way)
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS)
    together = what(sampled(policy, prompts, 4))
    assert what(sampled(policy, prompts[::-1], 4)) == together[::-1]
    for max_rows in (1, 5, 16, 31):
        assert what(sampled(policy, prompts, 4, max_rows=max_rows)) == together


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("way", ["torch", "module"])
def test_when_finished_rows_leave_the_batch_does_not_matter(
    share: float,
    way: str,
    take_way: Ways,
    make_policy: MakePolicy,
    make_prompts: MakePrompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_way(way)
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS)
    usual = what(sampled(policy, prompts, 8))
    monkeypatch.setattr(decoder_module, "COMPACT_BELOW", share)
    monkeypatch.setattr(rows, "COMPACT_BELOW", share)
    assert what(sampled(policy, prompts, 8)) == usual


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_under_autocast_samples_the_same_from_matrices_that_were_rounded_once(
    tied: bool,
    take_way: Ways,
    make_policy: MakePolicy,
    make_prompts: MakePrompts,
    tiny_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_way("module")
    model = tiny_model("llama")
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    policy = make_policy(model, compute_type="bfloat16")
    before = {name: (p.data_ptr(), p.dtype) for name, p in policy.model.named_parameters()}
    kinds: list[torch.dtype] = []
    body_of(policy.model).register_forward_pre_hook(
        lambda module, args: kinds.extend({p.dtype for p in module.parameters()})  # type: ignore[func-returns-value]
    )
    found = sampled(policy, make_prompts(*TEXTS[:3]), 2)
    assert set(kinds) == {torch.float32, torch.bfloat16}
    assert {name: (p.data_ptr(), p.dtype) for name, p in policy.model.named_parameters()} == before
    monkeypatch.setattr(generic_module, "RoundedMatrices", lambda model: nullcontext)
    expected = sampled(policy, make_prompts(*TEXTS[:3]), 2)
    assert what(found) == what(expected)
    logprobs = [[c.sampler_logprobs for c in group.completions] for groups in (found, expected) for group in groups]
    assert logprobs[:3] == logprobs[3:]


def test_matrices_come_back_when_sampling_fails(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("llama")

    def fail() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), generic_module.RoundedMatrices(model)():
            assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_finished_rows_leave_the_batch_of_a_module(
    take_way: Ways, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    take_way("module")
    policy, sizes = ending(make_policy()), []
    generic_module.cache_kind_of(policy.model)  # whose proof reads rows of its own
    body_of(policy.model).register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    groups = sampled(policy, make_prompts(*TEXTS), 8)
    assert sizes[0][0] == 8, "each prompt is read once, not once per completion"
    rows = [shape[0] for shape in sizes[1:]]
    assert {shape[1] for shape in sizes[1:]} == {1}
    assert rows == sorted(rows, reverse=True)
    running = [
        sum(len(c.token_ids) > position for group in groups for c in group.completions)
        for position in range(1, len(rows) + 1)
    ]
    assert all(alive <= computed < alive / 0.75 + 1 for alive, computed in zip(running, rows, strict=True))


class Watched(decoding.LayerDecoder):
    """A decoder that notes what it computes."""

    read: list[int]
    steps: list[int]
    held: list[int]

    def prefill(self, prompts, slots):
        self.read.extend(len(prompt) for prompt in prompts)
        return super().prefill(prompts, slots)

    def hidden(self, tokens, positions, places):
        self._watch(tokens)
        return super().hidden(tokens, positions, places)

    def draw(self, tokens, positions, places, uniform, choose):
        self._watch(tokens)
        return super().draw(tokens, positions, places, uniform, choose)

    def _watch(self, tokens):
        self.steps.append(len(tokens))
        cache = self.caches[0]
        self.held.append(cache.own_values[:, 0, :, 0].numel() + cache.prompt_keys[:, 0, 0].numel())


def test_rounding_of_logits_in_the_hundreds_is_no_objection_to_a_cache(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model, draw = tiny_model("qwen2"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight[5] = 1e3 * torch.randn(model.lm_head.weight.shape[1], generator=draw)
    assert generic_module.cache_kind_of(model) is generic_module.CACHE_KINDS[0]
    assert generic_module.reasons_of(model) == ()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    """The engine's decoders from now on."""
    Watched.read, Watched.steps, Watched.held = [], [], []
    monkeypatch.setattr(layer_decoders, "LayerDecoder", Watched)
    return Watched


def test_finished_rows_leave_at_once_and_prompts_are_read_once(
    watched: type[Watched], make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS)
    groups = sampled(policy, prompts, 8)
    assert sorted(watched.read) == sorted(len(prompt.prompt_ids) for prompt in prompts)
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    assert watched.steps == [sum(length > position for length in lengths) for position in range(1, max(lengths))]


def test_a_group_is_told_while_others_are_still_decoded(
    watched: type[Watched], make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy, told = ending(make_policy()), []
    engine = InProcessEngine(PARAMS)
    engine.load_weights(policy, version=0)
    engine.on_group = lambda group: told.append((group.prompt.index, len(watched.steps)))
    groups = engine.sample(SamplingRequest(make_prompts(*TEXTS), 2, step=3))
    longest = {group.prompt.index: max(len(c.token_ids) for c in group.completions) for group in groups}
    assert dict(told) == {index: length - 1 for index, length in longest.items()}, "at once, at its last token"
    assert min(dict(told).values()) < len(watched.steps)


@pytest.mark.parametrize("way", gate(decode_ways.WAYS, *(way for way in decode_ways.WAYS if way != "module")))
def test_a_thousand_ragged_rows_pass_through_a_tenth_of_the_room_they_need(
    way: str, take_way: Ways, watched: type[Watched], make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    take_way(way)
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS * 25)
    everything = sum(len(prompt.prompt_ids) + 5 * PARAMS.max_completion_tokens for prompt in prompts)
    engine = InProcessEngine(PARAMS, max_rows=1000, kv_tokens=everything // 10)
    engine.load_weights(policy, version=0)
    groups = engine.sample(SamplingRequest(prompts, 5, step=3))
    assert sum(len(group.completions) for group in groups) == 1000
    if way != "module":
        assert max(watched.held) <= everything // 10
    for group in groups[::40]:
        for completion in group.completions[::4]:
            assert list(completion.token_ids) == one_by_one(policy, group.prompt, completion.index)


def test_room_that_does_not_hold_one_row_is_refused() -> None:
    call = DecodeCall(num_prompts=3, group_size=4, prompt_tokens=10, completion_tokens=14)
    with pytest.raises(SamplerError, match=r"rollouts\.kv_tokens is 60, but .* needs 128\. Raise it"):
        RowBudget(kv_tokens=60).sizes(call, 8)


@ways
def test_a_group_larger_than_the_limit_on_rows_comes_in_parts(
    way: str, take_way: Ways, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    take_way(way)
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS[:2])
    assert what(sampled(policy, prompts, 8, max_rows=3)) == what(sampled(policy, prompts, 8))


def test_the_occurrences_of_a_prompt_continue_the_count(make_prompts: MakePrompts) -> None:
    first, second = make_prompts("a", "b")
    assert SamplingRequest([first, second, first, first], 2).completion_indices() == [[0, 1], [0, 1], [2, 3], [4, 5]]


def test_a_repeated_prompt_in_another_batch_of_rows_still_continues_the_count(
    make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    [prompt] = make_prompts("Hi")
    policy = ending(make_policy())
    assert what(sampled(policy, [prompt] * 3, 2, max_rows=2)) == what(sampled(policy, [prompt] * 3, 2))


@pytest.mark.proves("F26")
def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_pad([(1, 2, 3), (4,)], pad_id=9, device=torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_rows_of_the_cache_can_be_repeated_dropped_and_continued() -> None:
    cache = RowCache(2, capacity=5)
    states = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 1, 3, 4)
    for layer in range(2):
        keys, values = cache.update(states + layer, -states - layer, layer)
        assert torch.equal(keys, states + layer)
        assert torch.equal(values, -states - layer)
    cache.take(torch.tensor([1, 0, 1]))
    assert cache.get_seq_length() == 3
    new = torch.full((3, 1, 1, 4), 7.0)
    keys, _ = cache.update(new, new, 1)
    assert torch.equal(keys, torch.cat([states[[1, 0, 1]] + 1, new], dim=2))
    assert cache.get_seq_length(1) == 4
