"""Does the rule for memory count the bytes that the engine's buffers take, and choose rows by it on a GPU alone?"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lanes import gate

from oncurve.core.records import USUAL_ROWS, DecodeCall, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decode_torch, decoding, ops_torch
from oncurve.model import row_budget as budget_module
from oncurve.model.caches import LayerCache
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.decode_memory import MOST_ROWS, USED_SHARE, Widths, cache_bytes, decoding_bytes, most_rows
from oncurve.model.decoding import LayerDecoder
from oncurve.model.module_caches import RoundedMatrices
from oncurve.model.row_budget import RowBudget, copied_bytes, free_bytes, widths_of
from oncurve.model.weights import backbone_of
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePolicy = Callable[..., TrainedPolicy]
QWEN = Widths(
    layers=28, hidden=1536, mlp=8960, qkv=2048, kv=512, vocabulary=151_936, kv_bytes=2, compute_bytes=2, heads_per_kv=6
)
"""Of 1.5 billion weights, in bfloat16."""
STEP = DecodeCall(num_prompts=128, group_size=8, prompt_tokens=256, completion_tokens=3072)


@pytest.mark.parametrize(
    ("limit", "texts"), gate([(300, ("1 + 1 =", "word " * 20)), (33, ("a",)), (600, ("b" * 32,) * 3)], (33, ("a",)))
)
def test_the_rule_counts_what_the_buffers_take_when_they_take_most(
    limit: int,
    texts: tuple[str, ...],
    tiny_model: Callable[..., Any],
    make_policy: MakePolicy,
    make_prompts: Callable[..., list[Prompt]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    monkeypatch.setattr(decode_torch, "TorchLayers", RecordedLayers)
    held: list[int] = []
    decoders: list[LayerDecoder] = []
    made, grow = LayerDecoder.__init__, LayerCache.grow

    def remember(self: LayerDecoder, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        decoders.append(self)

    def count(self: LayerCache, positions: int) -> None:
        before = self.own.nbytes
        grow(self, positions)
        parts = [part for cache in decoders[-1].caches for part in cache.all()]
        held.append(before + sum(part.nbytes for part in parts))  # the old buffer is there until the new one is filled

    monkeypatch.setattr(LayerDecoder, "__init__", remember)
    monkeypatch.setattr(LayerCache, "grow", count)
    policy = make_policy(tiny_model("qwen2", max_position_embeddings=1024))
    params = SamplingParams(max_completion_tokens=limit, min_completion_tokens=limit, seed=1)
    engine = InProcessEngine(params, max_rows=5)
    engine.load_weights(policy, version=0)
    prompts = make_prompts(*texts)
    engine.sample(SamplingRequest(prompts, 3))
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    call = DecodeCall(
        num_prompts=len(prompts),
        group_size=3,
        prompt_tokens=longest,
        completion_tokens=params.max_completion_tokens,
        cuts=params.top_p < 1,
    )
    widths = widths_of(policy.model, torch.float32)
    rows = min(5, call.rows)
    assert max(held) == cache_bytes(
        widths,
        rows=rows,
        prompts=call.prompts(rows),
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
    )
    assert decoding_bytes(widths, call, rows) > max(held)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "gemma2"])
def test_widths_are_those_of_the_model(family: str, make_policy: MakePolicy) -> None:
    model = make_policy(family).model
    ids = torch.zeros(1, 7, dtype=torch.long)
    cache: Any = model(input_ids=ids, use_cache=True).past_key_values
    widths = widths_of(model, torch.float32)
    assert widths.layers == len(cache.layers)
    assert widths.position_bytes == (cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes) // 7
    assert widths.vocabulary == model(input_ids=ids).logits.shape[-1]


def test_matrices_in_the_type_of_the_arithmetic_are_counted(make_policy: MakePolicy) -> None:
    model = make_policy("llama").model
    linear = [part for name, part in model.named_modules() if type(part) is torch.nn.Linear and name != "lm_head"]
    with torch.autocast("cpu", dtype=torch.bfloat16), RoundedMatrices(model)():
        rounded = sum(part.weight.nbytes for part in linear)
    assert copied_bytes(model, None, torch.bfloat16) == rounded
    assert copied_bytes(model, None, torch.float32) == 0
    backbone = backbone_of(model)
    assert backbone is not None
    assert copied_bytes(model, backbone, torch.bfloat16) > rounded


def test_rows_fill_the_memory_and_no_more() -> None:
    for free in (2 * 2**30, 8 * 2**30, 40 * 2**30):
        rows = most_rows(QWEN, STEP, free)
        assert decoding_bytes(QWEN, STEP, rows) <= USED_SHARE * free < decoding_bytes(QWEN, STEP, rows + 1)
    assert most_rows(QWEN, STEP, 2**40) == MOST_ROWS
    assert most_rows(QWEN, STEP, 2**40, most=48) == 48
    assert most_rows(QWEN, STEP, 0) == 1, "one is tried whatever the rule says"
    assert most_rows(QWEN, STEP, 20 * 2**30, by_module=True) < most_rows(QWEN, STEP, 20 * 2**30)


def on_a_gpu(free: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model of a policy as the budget would find it on a GPU with so much memory."""
    monkeypatch.setattr(budget_module, "free_bytes", lambda device: free)
    monkeypatch.setattr(budget_module, "copied_bytes", lambda *_: 0)
    monkeypatch.setattr(budget_module, "widths_of", lambda *_: QWEN)
    weight = torch.zeros(1)
    return SimpleNamespace(device=torch.device("cuda"), parameters=lambda: iter([weight]))


def test_on_a_gpu_free_memory_decides_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone: Any = object()
    model = on_a_gpu(8 * 2**30, monkeypatch)
    expected = most_rows(QWEN, STEP, 8 * 2**30)
    assert 1 < expected < USUAL_ROWS
    assert RowBudget().rows(model, backbone, STEP) == expected
    assert RowBudget(max_rows=4).rows(model, backbone, STEP) == 4
    assert RowBudget(max_rows=10_000).rows(model, backbone, STEP) == expected, "a number is a limit, not a promise"
    assert RowBudget(kv_tokens=10**9).rows(model, backbone, STEP) == MOST_ROWS
    assert RowBudget(limit=3).rows(model, backbone, STEP) == 3
    assert RowBudget().rows(on_a_gpu(2**40, monkeypatch), backbone, STEP) == MOST_ROWS


def test_on_a_cpu_rows_are_what_they_were(make_policy: MakePolicy) -> None:
    model = make_policy().model
    assert RowBudget().rows(model, None, STEP) == USUAL_ROWS == 256
    assert RowBudget(max_rows=1000).rows(model, None, STEP) == 1000


def test_memory_that_this_process_holds_without_using_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert free_bytes(torch.device("cuda")) == 120
