"""Where memory runs out while completions are sampled, do the same completions come out, fewer at a time?"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes import gate

from oncurve.core import decoder as decoder_module
from oncurve.core.decoder import ModuleDecoder, RowCache
from oncurve.core.errors import SamplerError
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decode_proof as proof
from oncurve.model import decode_torch, decoding, ops_torch
from oncurve.model.caches import LayerCache
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.decoding import LayerDecoder
from oncurve.model.ops_native import library
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]

PARAMS = SamplingParams(max_completion_tokens=150, seed=5)
TEXTS = tuple(f"{'word ' * (number * 3 % 7)}{number} + {number * 7} =" for number in range(5))
CALLS = ((1,), (1, 2), (3, 7))
SAID = "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 79.11 GiB"

POINTS = {
    "buffers": (LayerDecoder, "__init__"),
    "prefill": (LayerDecoder, "prefill"),
    "growth": (LayerCache, "grow"),
    "step": (LayerDecoder, "draw"),
    "draw": (decoding, "draw"),
}
MODULE_POINTS = {
    "buffers": (RowCache, "take"),
    "forward": (ModuleDecoder, "_logits"),
    "draw": (decoder_module, "draw"),
}


def fail_at(where: Any, name: str, monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[int]:
    """Let these calls of a function run out of memory; the list grows by one with each call."""
    right, seen = getattr(where, name), []

    def fails(*given: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) in calls:
            raise torch.OutOfMemoryError(f"{SAID}\nand more")
        return right(*given, **options)

    monkeypatch.setattr(where, name, fails)
    return seen


def ending(policy: TrainedPolicy) -> TrainedPolicy:
    assert policy.model.generation_config is not None
    policy.model.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, *range(100, 104)]
    return policy


def sampled(engine: InProcessEngine, policy: TrainedPolicy, prompts: list[Prompt], told: list[Group]) -> list[Group]:
    engine.load_weights(policy, version=0)
    engine.on_group = told.append
    return engine.sample(SamplingRequest(prompts, 4, step=3))


def assert_same(found: list[Group], expected: list[Group]) -> None:
    """The same completions to the last bit; products of other sizes leave log-probabilities the same up to rounding."""
    ours, theirs = ([c for group in groups for c in group.completions] for groups in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert one == replace(other, sampler_logprobs=one.sampler_logprobs)
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-4)


@pytest.fixture
def through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as a GPU does, step by step."""
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    monkeypatch.setattr(decode_torch, "TorchLayers", RecordedLayers)


@pytest.mark.usefixtures("through_torch")
@pytest.mark.parametrize(
    ("point", "calls"),
    gate(itertools.product(POINTS, CALLS), *((p, (1, 2)) for p in POINTS)),
)
def test_the_same_completions_come_out_where_memory_runs_out_on_the_way(
    point: str,
    calls: tuple[int, ...],
    make_policy: MakePolicy,
    make_prompts: MakePrompts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = PARAMS if point == "growth" else replace(PARAMS, max_completion_tokens=40)
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS)
    expected = sampled(InProcessEngine(params), policy, prompts, [])
    if calls == (3, 7):  # buffers are made once per attempt, and prompts are read several at a time
        calls = {"buffers": (1, 2, 3), "prefill": (3, 5)}.get(point, calls)
    fail_at(*POINTS[point], monkeypatch, *calls)
    told: list[Group] = []
    engine = InProcessEngine(params, max_rows=8)
    with caplog.at_level(logging.WARNING):
        assert_same(sampled(engine, policy, prompts, told), expected)
    assert sorted(group.prompt.index for group in told) == [prompt.index for prompt in prompts]
    said = [record.getMessage() for record in caplog.records if "OUT OF MEMORY" in record.getMessage()]
    assert "while 8 completions were sampled at a time" in said[0]
    assert "3.00 GiB" in said[0]
    assert said[0].endswith("set rollouts.max_rows=4 to begin so")
    assert "\n" not in said[0]
    assert len(said) == len(calls)
    assert engine.decoders.budget.limit == 8 // 2 ** len(said)


@pytest.mark.parametrize(
    ("point", "call"), gate(itertools.product(MODULE_POINTS, (1, 4)), ("buffers", 1), ("forward", 4), ("draw", 4))
)
def test_the_same_completions_come_out_of_a_model_s_own_module(
    point: str, call: int, make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "backbone_of", lambda model: None)
    policy, prompts = ending(make_policy("gpt2")), make_prompts(*TEXTS)
    params = replace(PARAMS, max_completion_tokens=40)
    expected = sampled(InProcessEngine(params, max_rows=20), policy, prompts, [])
    fail_at(*MODULE_POINTS[point], monkeypatch, call, call + 3)
    told: list[Group] = []
    found = sampled(InProcessEngine(params, max_rows=20), policy, prompts, told)
    assert_same(found, expected)
    assert sorted(group.prompt.index for group in told) == [prompt.index for prompt in prompts]


@pytest.mark.usefixtures("through_torch")
def test_groups_that_were_whole_are_not_sampled_again(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, prompts, params = ending(make_policy()), make_prompts(*TEXTS * 4), replace(PARAMS, max_completion_tokens=40)
    expected = sampled(InProcessEngine(params, max_rows=4), policy, prompts, [])
    told: list[Group] = []
    right, asked = LayerDecoder.prefill, []

    def watched(self: LayerDecoder, given: Any, slots: Any) -> Any:
        if len(asked) == 8:
            asked.append(0)
            raise torch.OutOfMemoryError(SAID)
        asked.append(len(told))
        return right(self, given, slots)

    monkeypatch.setattr(LayerDecoder, "prefill", watched)
    assert_same(sampled(InProcessEngine(params, max_rows=8), policy, prompts, told), expected)
    assert len(told) == len(prompts) == len({id(group) for group in told})
    assert asked[7] > 0, "some were whole when memory ran out"


@pytest.mark.usefixtures("through_torch")
def test_what_the_failed_attempt_held_is_free_before_the_next_one(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[LayerCache]] = []
    made, right = LayerCache.__post_init__, LayerDecoder.__init__
    alive: list[int] = []

    def remember(self: LayerCache) -> None:
        held.append(weakref.ref(self))
        made(self)

    def count(self: LayerDecoder, *given: Any, **options: Any) -> None:
        alive.append(sum(cache() is not None for cache in held))
        right(self, *given, **options)

    monkeypatch.setattr(LayerCache, "__post_init__", remember)
    monkeypatch.setattr(LayerDecoder, "__init__", count)
    fail_at(LayerDecoder, "draw", monkeypatch, 5, 12)
    sampled(InProcessEngine(PARAMS, max_rows=20), ending(make_policy()), make_prompts(*TEXTS), [])
    assert alive == [0, 0, 0]
    assert held


@pytest.mark.parametrize("way", ["backbone", "module"])
def test_when_not_even_one_completion_fits_one_message_says_what_to_set(
    way: str, make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    if way == "module":
        monkeypatch.setattr(proof, "backbone_of", lambda model: None)
    point: Any = (LayerDecoder, "hidden") if way == "backbone" else MODULE_POINTS["forward"]
    seen = fail_at(*point, monkeypatch, *range(100))
    wanted = r"one completion of up to 150 tokens behind a prompt of \d+ \(CUDA out of memory.*max_completion_tokens"
    with pytest.raises(SamplerError, match=wanted):
        sampled(InProcessEngine(PARAMS, max_rows=20), make_policy(), make_prompts(*TEXTS), [])
    assert len(seen) == 5, "20, 10, 5, 2 and 1"


@pytest.mark.parametrize("calls", [(1,), (4, 9)])
def test_kernels_give_the_same_completions(
    calls: tuple[int, ...], make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library() is None:
        pytest.skip(
            "the kernels are not built: there is no C++ compiler (sudo apt-get install g++), or ONCURVE_KERNELS is 0"
        )
    policy, prompts = ending(make_policy()), make_prompts(*TEXTS)
    expected = sampled(InProcessEngine(PARAMS), policy, prompts, [])
    fail_at(LayerDecoder, "hidden", monkeypatch, *calls)
    assert_same(sampled(InProcessEngine(PARAMS), policy, prompts, []), expected)


def test_later_calls_begin_with_what_memory_took(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    engine, policy = InProcessEngine(PARAMS, max_rows=8), ending(make_policy())
    fail_at(LayerDecoder, "hidden", monkeypatch, 1)
    slots: list[int] = []
    right = LayerDecoder.__init__

    def watched(self: LayerDecoder, *given: Any, **options: Any) -> None:
        slots.append(options["slots"])
        right(self, *given, **options)

    monkeypatch.setattr(LayerDecoder, "__init__", watched)
    for _ in range(2):
        sampled(engine, policy, make_prompts(*TEXTS), [])
    assert slots == [8, 4, 4]


def test_other_errors_of_sampling_are_not_taken_for_a_lack_of_memory(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **options: Any) -> None:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(LayerDecoder, "hidden", broken)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        sampled(InProcessEngine(PARAMS), make_policy(), make_prompts(*TEXTS), [])
