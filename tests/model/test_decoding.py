"""Does a decode step by the kernels equal one in torch alone, and is a row's result its own?"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import product
from unittest.mock import patch

import pytest
import torch
from lanes import gate
from own_layer_cases import FAMILIES
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.model import decode_torch, ops_torch
from oncurve.model.decode_native import NativeLayers
from oncurve.model.decoding import LayerDecoder
from oncurve.model.ops_native import NativeOps, library
from oncurve.model.weights import Backbone

PROMPTS = [list(range(1, 42)), [5, 9, 3], [7] * 17]
"""Longer and shorter than a block of positions, and one of one block and a rest."""
PROMPT_OF = [0, 0, 0, 1, 2, 2, 0]
SHAPES = {
    "odd": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 50,
        "head_dim": 6,
    },
    "wide": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "head_dim": 80,
    },
}
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def need_kernels() -> None:
    if library() is None:
        pytest.skip("no C++ compiler, so there are no kernels: sudo apt-get install g++")


kernels = pytest.mark.usefixtures("need_kernels")


def make(family: str, shape: str) -> PreTrainedModel:
    config, kind = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config(vocab_size=64, num_hidden_layers=3, max_position_embeddings=256, **SHAPES[shape])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def decoder_of(model: PreTrainedModel, dtype: torch.dtype, *, slots: int) -> LayerDecoder:
    head = model.get_output_embeddings().weight.detach()
    room = {"slots": slots, "prompt_slots": 3, "prompt_tokens": 41, "completion_tokens": 170}
    return LayerDecoder(Backbone(model), head, dtype, **room)


def run(decoder: LayerDecoder, tokens: Tensor, chosen: Sequence[int]) -> list[Tensor]:
    """Logits [R, V] of each of the given tokens [steps, rows], for some of the rows."""
    decoder.prefill(PROMPTS, [2, 0, 1])
    lengths = torch.tensor([len(PROMPTS[PROMPT_OF[row]]) for row in chosen])
    places = torch.tensor([[place, 0, [2, 0, 1][PROMPT_OF[row]], 0] for place, row in enumerate(chosen)])
    places[:, 3] = lengths
    logits = []
    for step, ids in enumerate(tokens[:, chosen]):
        places[:, 1] = step
        logits.append(decoder.step(ids, lengths + step, places.contiguous()))
    return logits


@kernels
@types
@pytest.mark.parametrize(
    ("family", "shape"),
    gate(product(FAMILIES, SHAPES), *[(family, ("wide", "odd")[at % 2]) for at, family in enumerate(FAMILIES)]),
)
@torch.no_grad()
def test_kernels_decode_what_torch_decodes(family: str, shape: str, dtype: torch.dtype) -> None:
    model, everyone = make(family, shape), range(len(PROMPT_OF))
    tokens = torch.randint(1, 64, (140, len(PROMPT_OF)))  # the buffers grow on the way
    native = decoder_of(model, dtype, slots=len(PROMPT_OF))
    assert isinstance(native.layers, NativeLayers)
    with patch("oncurve.model.decoding.operations", return_value=ops_torch):
        plain = decoder_of(model, dtype, slots=len(PROMPT_OF))
    found, expected = (torch.stack(run(decoder, tokens, everyone)) for decoder in (native, plain))
    bound = 2e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(found, expected, atol=bound * float(expected.abs().max()), rtol=0)
    if dtype == torch.bfloat16:  # no further from the exact logits than torch in that type, the head included
        plain.head = plain.head.to(dtype)
        rounded = torch.stack(run(plain, tokens, everyone))
        with patch("oncurve.model.decoding.operations", return_value=ops_torch):
            exact = torch.stack(run(decoder_of(model, torch.float32, slots=len(PROMPT_OF)), tokens, everyone))
        assert (found - exact).square().mean() <= 1.1 * (rounded - exact).square().mean()


@kernels
@types
@torch.no_grad()
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    model, rows = make("qwen2", "odd"), len(PROMPT_OF)
    tokens = torch.randint(1, 64, (20, rows))

    def hidden(chosen: Sequence[int]) -> Tensor:
        decoder = decoder_of(model, dtype, slots=rows)
        prompts = run(decoder, tokens[:0], range(rows))
        assert not prompts
        decoder.head, decoder.vocabulary = (
            decoder.ops.head_matrix(torch.eye(36), dtype),
            36,
        )  # in float32 the product is torch's
        decoder.prefill = lambda *_: torch.empty(0)  # type: ignore[method-assign]
        return torch.stack(run(decoder, tokens, chosen))

    together = hidden(range(rows))
    for row in range(rows):
        assert torch.equal(hidden([row])[:, 0], together[:, row])


@kernels
@types
@pytest.mark.parametrize(("rows", "inputs"), [(1, 16), (17, 33), (48, 64), (16, 5)])
def test_packing_keeps_every_weight_once(rows: int, inputs: int, dtype: torch.dtype) -> None:
    built = library()
    assert built is not None
    matrix = torch.randn(rows, inputs)
    packed = NativeOps(built, dtype).pack([matrix[: rows // 2], matrix[rows // 2 :]] if rows > 1 else [matrix])
    assert len(packed) % (16 * 32) == 0
    expected = matrix.to(dtype).flatten().sort().values
    assert torch.equal(packed[packed != 0].sort().values, expected[expected != 0])


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_matrix_arranged_beforehand_gives_the_same_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((rows, 36), (50, 36), (50,)))
    found = decode_torch.matrix_product(weight, bias)(x)
    monkeypatch.setattr(decode_torch, "_can_arrange", lambda: False)
    plain = decode_torch.matrix_product(weight, bias)(x)
    exact = x.double() @ weight.double().T + bias.double()
    assert (found - exact).abs().max() <= 1.5 * (plain - exact).abs().max()


@torch.no_grad()
def test_rows_in_any_slots_at_any_positions_decode_in_torch_what_they_decode_alone() -> None:
    model = make("qwen2", "odd")
    tokens, started = torch.randint(1, 64, (24, len(PROMPT_OF))), [0, 0, 3, 0, 9, 3, 0]
    slots = [17, 2, 3, 11, 0, 9, 1]
    with patch("oncurve.model.decoding.operations", return_value=ops_torch):
        alone = [run(decoder_of(model, torch.float32, slots=20), tokens, [row]) for row in range(len(slots))]
        decoder = decoder_of(model, torch.float32, slots=20)
        decoder.prefill(PROMPTS, [2, 0, 1])
        for step in range(20):
            running = [row for row in range(len(slots)) if step >= started[row] and not (row == 3 and step > 5)]
            past = torch.tensor([step - started[row] for row in running])
            prompts = [PROMPT_OF[row] for row in running]
            lengths = torch.tensor([len(PROMPTS[prompt]) for prompt in prompts])
            at = torch.tensor([slots[row] for row in running]), past, torch.tensor([[2, 0, 1][p] for p in prompts])
            logits = decoder.step(tokens[past, running], lengths + past, torch.stack([*at, lengths], dim=1))
            for place, row in enumerate(running):
                expected = alone[row][int(past[place])][0]
                torch.testing.assert_close(logits[place], expected, atol=2e-5, rtol=1e-4)


@kernels
@torch.no_grad()
def test_kernels_let_go_of_what_only_prompts_need_before_completions_have_room() -> None:
    model, tokens = make("qwen2", "odd"), torch.randint(1, 64, (3, len(PROMPT_OF)))
    expected = run(decoder_of(model, torch.bfloat16, slots=20), tokens, [0, 3])
    decoder = decoder_of(model, torch.bfloat16, slots=20)
    matrices = [weakref.ref(layer.down) for layer in decoder.weights]
    with patch.object(
        decoder, "prefill", lambda *given: (LayerDecoder.prefill(decoder, *given), decoder.end_prompts())
    ):
        assert {cache.positions for cache in decoder.caches} == {0}
        found = run(decoder, tokens, [0, 3])
    assert [matrix() for matrix in matrices] == [None] * 3
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
