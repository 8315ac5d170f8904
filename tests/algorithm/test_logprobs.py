from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from oncurve.algorithm.chunked_head import from_hidden
from oncurve.algorithm.precision import head_type
from oncurve.core.logprobs import from_logits

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu


def head(tokens: int = 7, width: int = 4, vocabulary: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=draw)


@pytest.mark.proves("F28")
def test_from_logits_by_hand():
    logprobs, entropy = from_logits(torch.tensor([[0.0, math.log(3)]]), torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(3 / 4), abs=1e-6)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-6)


def test_the_temperature_divides_the_logits():
    logits = torch.tensor([[1.0, 3.0, -2.0]], dtype=torch.float64)
    hot = from_logits(logits, torch.tensor([0]), temperature=2.0)
    halved = from_logits(logits / 2, torch.tensor([0]))
    assert hot[0].item() == halved[0].item()
    assert hot[1].item() == halved[1].item()


@pytest.mark.proves("F27")
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize(("temperature", "is_large"), [(1.0, False), (0.7, False), (1.0, True)])
def test_from_hidden_gives_value_and_gradient_of_the_whole_matrix(
    chunk_tokens: int, temperature: float, is_large: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also where chunks make their products in the same memory, as large ones do on a CPU."""
    if is_large:
        monkeypatch.setattr("oncurve.algorithm.chunked_head.RELEASED_BYTES", 0)
    hidden, weight, targets = head()
    outputs = from_hidden(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    whole = from_logits(hidden @ weight.T, targets, temperature=temperature)
    mix = torch.linspace(-1, 2, 7, dtype=torch.float64)
    for fast, plain in zip(outputs, whole, strict=True):
        assert torch.allclose(fast, plain, atol=1e-14, rtol=0)
    fast = torch.autograd.grad((mix * (outputs[0] - 0.3 * outputs[1])).sum(), (hidden, weight))
    plain = torch.autograd.grad((mix * (whole[0] - 0.3 * whole[1])).sum(), (hidden, weight))
    for one, other in zip(fast, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-13, rtol=0)


def test_the_gradients_of_logprob_and_entropy_are_those_of_finite_differences():
    hidden, weight, targets = head(tokens=4, width=3, vocabulary=5)
    assert torch.autograd.gradcheck(
        lambda h, w: from_hidden(h, w, targets, temperature=0.8, chunk_tokens=3), (hidden, weight)
    )


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, targets = head()
    weight = weight.detach()
    from_hidden(hidden, weight, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_token_gives_empty_results():
    hidden, weight, _ = head()
    logprobs, entropy = from_hidden(hidden[:0], weight, torch.empty(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()


@pytest.mark.proves("D13")
def test_half_precision_states_give_float32_logprobs():
    hidden, weight, targets = head()
    logprobs, entropy = from_hidden(hidden.detach().bfloat16(), weight.detach().float(), targets)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_the_head_multiplies_in_the_type_of_its_states_whatever_autocast_says():
    torch.manual_seed(0)
    weight, targets = torch.randn(40, 16), torch.randint(0, 40, (9,))

    def run(enabled: bool) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logprobs, entropy = from_hidden(hidden, weight, targets, chunk_tokens=4)
            (logprobs - entropy).sum().backward()
        assert hidden.grad is not None
        return logprobs.detach(), hidden.grad

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)
    hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    logprobs, entropy = from_logits(hidden @ weight.double().T, targets)
    (logprobs - entropy).sum().backward()
    assert torch.allclose(run(False)[1].double(), hidden.grad, atol=1e-5), "in float32, backward too"


@torch.no_grad()
def on_a_gpu() -> dict[str, object]:
    """The head in chunks of two tokens on a GPU: types, products, and how far from float64 it is."""
    from pretend.counting import counting

    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16, device="cuda").bfloat16(), torch.randn(40, 16, device="cuda")
    targets = torch.randint(0, 40, (5,)).to("cuda")
    with counting() as counts:
        found = from_hidden(hidden, weight, targets, chunk_tokens=2)
    exact = from_logits(hidden.double() @ weight.bfloat16().double().T, targets)
    return {
        "types": [str(part.dtype) for part in found],
        "devices": [part.device.type for part in found],
        "products": {name: count for name, count in counts.launches.items() if "mm" in name},
        "error": max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)),
    }


def test_a_gpu_keeps_the_float32_sums_of_bfloat16_products(pretend_gpu: PretendGpu):
    found = pretend_gpu(on_a_gpu)
    assert (found["types"], found["devices"]) == (["torch.float32"] * 2, ["cuda"] * 2)
    assert found["products"] == {"aten::mm.dtype": 3}
    assert found["error"] < 1e-5


@pytest.mark.parametrize(
    ("device", "compute_type", "expected"),
    [
        ("cuda", torch.bfloat16, torch.bfloat16),
        ("cuda", torch.float16, torch.float32),
        ("cuda", torch.float32, torch.float32),
        ("cpu", torch.bfloat16, torch.float32),
    ],
)
def test_the_head_is_in_bfloat16_on_a_gpu_alone(device: str, compute_type: torch.dtype, expected: torch.dtype):
    assert head_type(torch.device(device), compute_type, torch.float32) == expected
