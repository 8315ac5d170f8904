"""Do our own layers compute the hidden states and gradients of transformers' modules?"""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes import gate
from own_layer_cases import FAMILIES, gradients, largest_error, make, ragged_batch

from oncurve.core.batch import Batch
from oncurve.model import forward_backward, ops_torch
from oncurve.model.packing import make_layout, whole_tokens
from oncurve.model.weights import Backbone, backbone_of, supports
from oncurve.policy import forward
from oncurve.policy.forward import completion_logprobs

THERE = "what there is"
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def batch() -> Batch:
    return ragged_batch()


@families
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_float64_gradients_are_those_of_the_padded_model(
    family: str, tied: bool, recompute: bool, batch: Batch
) -> None:
    model = make(family, torch.float64, tie_word_embeddings=tied)
    assert supports(model)
    padded, expected = gradients(model, batch)
    packed, found = gradients(model, batch, packed=True, recompute=recompute)
    assert (padded - packed).abs().max() < 1e-10
    assert largest_error(found, expected) < 1e-10


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 3, 1, 4, 2, 5]], ids=["one group", "two in turns"])
def test_rows_of_equal_length_and_groups_in_turns_have_the_same_float64_gradients(
    order: list[int], batch: Batch
) -> None:
    full = replace(batch, completion_lengths=torch.full((6,), 7), mask=torch.ones(6, 7, dtype=torch.bool))
    full, model = full.select(torch.tensor(order)), make("qwen2", torch.float64)
    blocks = make_layout(full, torch.device("cpu")).blocks
    assert any(block.run is not None and block.rows > 1 for block in blocks) == (len(order) == 3)
    _, expected = gradients(model, full)
    _, found = gradients(model, full, packed=True)
    assert largest_error(found, expected) < 1e-10


@families
def test_float32_gradients_are_those_of_the_padded_model(family: str, batch: Batch) -> None:
    model = make(family)
    _, expected = gradients(model, batch)
    _, found = gradients(model, batch, packed=True)
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "way"),
    gate(
        itertools.product(FAMILIES, ("what there is", "torch alone")),
        ("qwen3", "what there is"),
        ("llama", "torch alone"),
    ),
)
def test_bfloat16_gradients_are_as_near_to_float64_as_those_of_the_padded_model(
    family: str, way: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of all gradients together, over several models: the error of one is as much chance as arithmetic.

    The padded model is transformers' own up to its logits. With our head, whose gradient is not rounded, it comes
    nearer.
    """
    if way == "torch alone":
        monkeypatch.setattr(forward_backward, "operations", lambda *_: ops_torch)
        monkeypatch.setattr(forward, "operations", lambda *_: ops_torch)
    errors: dict[str, list[float]] = {"packed": [], "padded": [], "padded, our head": []}
    for seed in range(20):
        _, exact = gradients(make(family, torch.float64, seed=seed), batch)
        for what, found_in in errors.items():
            with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as change:
                if what == "padded":
                    change.setattr("oncurve.policy.forward.is_plain_head", lambda _: False)
                _, found = gradients(make(family, seed=seed), batch, packed=what == "packed")
            square = sum(float((found[n].double() - exact[n]).square().sum()) for n in exact)
            found_in.append((square / sum(float(exact[n].square().sum()) for n in exact)) ** 0.5)
    assert sum(errors["packed"]) <= 0.97 * sum(errors["padded"])
    assert sum(errors["packed"]) <= 1.02 * sum(errors["padded, our head"])


def test_models_with_something_unknown_are_left_to_transformers() -> None:
    assert not supports(make("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0))
    assert not supports(make("llama", mlp_bias=True))
    assert not supports(make("llama", hidden_act="gelu"))
    assert not supports(make("llama").to(torch.bfloat16))
    assert not supports(make("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
    model = make("qwen2")
    assert backbone_of(model) is backbone_of(model)
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert backbone_of(model) is None


def test_rounded_matrices_follow_the_weights() -> None:
    model = make("qwen2")
    backbone = Backbone(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again = backbone.weights(torch.bfloat16)
    assert torch.equal(again[0].output, model.model.layers[0].self_attn.o_proj.weight.bfloat16())
    assert backbone.weights(torch.float32)[0].output is model.model.layers[0].self_attn.o_proj.weight


def test_sequences_come_in_few_lengths_and_are_filled_up_by_little() -> None:
    filled = {tokens: whole_tokens(tokens) for tokens in range(1, 5000)}
    assert all(tokens <= whole < tokens + max(16, tokens / 15) for tokens, whole in filled.items())
    assert len(set(filled.values())) < 100


def test_a_row_that_fills_up_the_sequence_is_read_by_nobody(batch: Batch) -> None:
    layout = make_layout(batch, torch.device("cpu"))
    real = 4 + 2 + int((batch.completion_lengths - 1).sum())
    assert layout.ids.shape[1] == whole_tokens(real) > real
    assert int(layout.predicts.max()) < real
    assert all(prompt.stop <= real for prompt, _ in layout.readers)


def layer_functions(output: torch.Tensor) -> list[Any]:
    """The nodes of our layers in the graph of a tensor."""
    found, waiting, seen = [], [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            found += [node] if node.name() == "_LayerBackward" else []
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_a_later_microbatch_adds_its_gradients_layer_by_layer(recompute: bool, batch: Batch) -> None:
    """With the gradients of a first one there, another backward pass needs less than a second gradient of all."""
    model = make("qwen2", num_hidden_layers=8, intermediate_size=4096)
    gradients(model, batch, packed=True, recompute=recompute)
    total = sum(4 * parameter.numel() for parameter in model.parameters())
    with torch.profiler.profile(profile_memory=True) as profiler:
        logprobs, _ = completion_logprobs(model, batch, temperature=1.0, packed=True, recompute=recompute)
        with torch.profiler.record_function("backward begins"):
            logprobs.sum().backward()
    events = profiler.profiler.kineto_results.events()
    begins = next(event.start_ns() for event in events if event.name() == "backward begins")
    alive = most = 0
    for time, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        alive = alive + change if time >= begins else 0
        most = max(most, alive)
    assert 0 < most < total / 2


def test_a_loss_that_nobody_runs_backward_lets_go_of_what_layers_kept(batch: Batch) -> None:
    model = make("qwen2")
    logprobs = completion_logprobs(model, batch, temperature=1.0, packed=True)[0]
    kept = [weakref.ref(function.saved) for function in layer_functions(logprobs)]
    assert len(kept) == 3
    del logprobs
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
