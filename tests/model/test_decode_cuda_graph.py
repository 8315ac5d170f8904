"""Does a decode step in few shapes equal one in exactly fitting shapes, and would a GPU take it?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lanes import gate
from own_layer_cases import FAMILIES
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.core.draw import draw
from oncurve.core.records import SamplingParams
from oncurve.model import decode_torch, decoding, ops_torch
from oncurve.model.decode_cuda_graph import RecordedLayers, Shape, few_positions, write_numbers
from oncurve.model.decode_flash import FlashLayers
from oncurve.model.decode_torch import PrefixGroups
from oncurve.model.decoding import LayerDecoder
from oncurve.model.weights import Backbone, supports

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu

PROMPTS = [list(range(1, 42)), [5, 9, 3], [7] * 17]
TYPES = (torch.float32, torch.float64, torch.bfloat16)
ROOM = {"slots": 40, "prompt_slots": 4, "prompt_tokens": 41, "completion_tokens": 170}


def make(family: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config, kind = FAMILIES[family]
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = kind(config(vocab_size=64, num_hidden_layers=2, intermediate_size=96, **sizes)).eval()
    return model.to(device, dtype)  # pyright: ignore[reportArgumentType]


def decoder_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32, **options: Any) -> LayerDecoder:
    return LayerDecoder(Backbone(model), model.get_output_embeddings().weight.detach(), dtype, **ROOM, **options)


def places_of(slots: Sequence[int], past: Sequence[int], prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What ``LayerDecoder.step`` is told of rows, and their positions."""
    lengths = [len(PROMPTS[prompt]) for prompt in prompts]
    places = torch.tensor([slots, past, prompts, lengths]).T.contiguous()
    return places, places[:, 1] + places[:, 3]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "dtype"), gate(product(FAMILIES, TYPES), *zip(FAMILIES, TYPES, strict=True)), ids=str
)
def test_few_shapes_decode_what_fitting_shapes_decode(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    fitting = decoder_of(model, dtype)
    monkeypatch.setattr(decode_torch, "TorchLayers", RecordedLayers)
    few = decoder_of(model, dtype)
    assert type(few.layers) is RecordedLayers
    assert type(fitting.layers) is not RecordedLayers
    for one in (fitting, few):
        one.prefill(PROMPTS, [0, 1, 2])
    draw_tokens = torch.Generator().manual_seed(0)
    slots, prompts, ahead = [17, 2, 3, 11, 0, 9, 1], [0, 0, 2, 1, 2, 0, 0], [0, 0, 3, 0, 1, 0, 2]
    for step in range(150):  # the buffers grow on the way
        if step == 60:  # some rows end, the others go on where they are
            slots, prompts, ahead = slots[1:4], prompts[1:4], ahead[1:4]
        if step == 100:
            for one in (fitting, few):
                one.move(torch.tensor(slots), torch.arange(3), step + max(ahead))
            slots = [0, 1, 2]
        tokens = torch.randint(1, 64, (len(slots),), generator=draw_tokens)
        places, positions = places_of(slots, [step + more for more in ahead], prompts)
        expected, found = (one.step(tokens, positions, places) for one in (fitting, few))
        bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}[dtype]
        torch.testing.assert_close(found, expected, atol=bound * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["one", "several"])
def test_numbers_say_who_reads_what(kind: str) -> None:
    slots, prompts, lengths = ([3], [1], [9]) if kind == "one" else ([5, 0, 3, 1], [2, 0, 2, 0], [7, 4, 7, 4])
    rows = np.array([[slot, 10 + slot, *one] for slot, *one in zip(slots, prompts, lengths, strict=True)])
    shape = Shape(span=8, seen=32, readers=3, prompts=4)
    tokens, positions = np.arange(len(rows)) + 50, rows[:, 1] + rows[:, 3]
    numbers = write_numbers(shape, tokens, positions, rows, width=32)
    by_slot, table, read = np.split(numbers, [4 * 8, 4 * 8 + 4 * 3])
    by_slot, table = by_slot.reshape(4, 8), table.reshape(4, 3)
    assert (by_slot[:3, slots] == [tokens, positions, rows[:, 1]]).all()
    assert not by_slot[:, [slot for slot in range(8) if slot not in slots]].any(), "slots without a row are at rest"
    for slot, prompt, length in zip(slots, prompts, lengths, strict=True):
        assert table.ravel()[by_slot[3, slot]] == slot
        assert by_slot[3, slot] // 3 == prompt
        assert read[prompt] == length
    assert all(read[prompt] == 32 for prompt in range(4) if prompt not in prompts)


def test_groups_come_back_to_their_slots() -> None:
    """The table of ``write_numbers`` puts a slot's query among those of its prompt and brings its result back."""
    rows = np.array([[5, 1, 2, 7], [0, 1, 0, 4], [3, 1, 2, 7], [1, 1, 0, 4]])
    shape = Shape(span=6, seen=32, readers=2, prompts=3)
    numbers = torch.from_numpy(write_numbers(shape, np.zeros(4), np.zeros(4), rows, width=32))
    groups = PrefixGroups(numbers[24:30], numbers[18:24], 3, 32, None)
    q = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 2, 4)
    together = groups.together(q)
    assert together.shape == (3, 3, 4, 4)
    assert set(together[2].unique().tolist()) == {3.0, 5.0}
    back = groups.apart(together[..., 0], 2)
    assert back[[0, 1, 3, 5], 0, 0].tolist() == [0.0, 1.0, 3.0, 5.0]


def test_positions_come_in_two_sizes_between_powers_of_two() -> None:
    sizes = {few_positions(count) for count in range(1, 4097)}
    assert sizes == {32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096}
    assert all(count <= few_positions(count) <= max(32, 1.5 * count + 32) for count in range(1, 4097))


@torch.no_grad()
def sampling(family: str, weights: torch.dtype) -> dict[str, Any]:
    """Sampling on a GPU in bfloat16: what its parts give beside the CPU in float32, and what they launch."""
    from pretend.counting import counting

    model = make(family, device="cuda", dtype=weights)
    assert supports(model)
    decoder, exact = decoder_of(model, torch.bfloat16, records=False), decoder_of(make(family, dtype=weights).float())
    assert type(decoder.layers) is FlashLayers
    assert {buffer.dtype for cache in decoder.caches for buffer in cache.all()} == {torch.bfloat16}
    reads = [one.prefill(PROMPTS, [2, 0, 1]) for one in (decoder, exact)]
    for past in range(4):
        places, positions = places_of([3, 0, 6], [past] * 3, [2, 0, 1])
        with counting() as counts:
            steps = [one.step(torch.tensor([5, 6, 7]), positions, places) for one in (decoder, exact)]
    uniform = torch.rand(3, dtype=torch.float64).to("cuda")
    drawn = [
        draw(steps[0], uniform, SamplingParams(max_completion_tokens=4, **params), forbidden=[2])[0].tolist()
        for params in ({}, {"top_k": 3, "top_p": 0.9})
    ]
    decoder.move(torch.tensor([6, 3]), torch.arange(2), 100)
    return {
        "like": [(tuple(found[0].shape), str(found[0].dtype), found[0].device.type) for found in (reads, steps)],
        "error": max(float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in (reads, steps)),
        "drawn": drawn,
        "launched": set(counts.launches),
        "waits": set(counts.synchronizations),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_takes_every_operation_of_sampling(family: str, weights: torch.dtype, pretend_gpu: PretendGpu) -> None:
    found = pretend_gpu(sampling, family, weights)
    assert found["like"] == [((3, 64), "torch.float32", "cuda")] * 2
    assert found["error"] < 0.05
    assert all(len(tokens) == 3 and 2 not in tokens for tokens in found["drawn"])
    assert found["waits"] <= {"a copy to the device"}, "a step that waits for the device cannot be recorded"
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in found["launched"]
    assert "aten::_flash_attention_forward" in found["launched"]


@torch.no_grad()
def recorded_and_plain(family: str) -> list[float]:
    """How far recorded steps are from the same steps one by one, where buffers grow on the way."""
    model, found = make(family, device="cuda"), []
    recorded, plain = (decoder_of(model, torch.bfloat16, records=records) for records in (True, False))
    for one in (recorded, plain):
        one.prefill(PROMPTS, [0, 1, 2])
    for past in range(150):
        places, positions = places_of([17, 2, 3, 11], [past] * 4, [0, 0, 2, 1])
        tokens = torch.randint(1, 64, (4,))
        expected, logits = (one.step(tokens, positions, places) for one in (plain, recorded))
        found.append(float((logits - expected).abs().max()))
    return found


@pytest.mark.parametrize("family", gate(FAMILIES, "qwen3"))
def test_recorded_steps_are_the_steps_that_were_recorded(family: str, pretend_gpu: PretendGpu) -> None:
    assert pretend_gpu(recorded_and_plain, family) == [0.0] * 150


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_are_those_steps_on_a_real_gpu(family: str) -> None:
    model = make(family).cuda()
    recorded, plain = (decoder_of(model, torch.bfloat16, records=records) for records in (True, False))
    for one in (recorded, plain):
        one.prefill(PROMPTS, [0, 1, 2])
    for past in range(150):
        places, positions = places_of([17, 2, 3, 11], [past] * 4, [0, 0, 2, 1])
        tokens = torch.randint(1, 64, (4,))
        expected, found = (one.step(tokens, positions, places) for one in (plain, recorded))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
