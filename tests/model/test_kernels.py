"""Do the compiled kernels compute what the operations in torch compute?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from oncurve.algorithm.chunked_head import TorchHeadOps
from oncurve.core.draw import draw
from oncurve.core.records import SamplingParams
from oncurve.model import ops_native, ops_torch
from oncurve.model.forward_backward import Angles
from oncurve.model.ops_native import NativeOps, library
from oncurve.model.packing import Block, Layout
from oncurve.model.weights import AttentionSizes

pytestmark = pytest.mark.skipif(
    library() is None, reason="no C++ compiler (sudo apt-get install g++), or ONCURVE_KERNELS is 0"
)
types = pytest.mark.parametrize("compute_type", [torch.float32, torch.bfloat16], ids=str)

SIZES = AttentionSizes(heads=4, kv_heads=2, head_size=20, epsilon=1e-6)


@dataclass
class Case:
    """A kernel, what it must agree with, and numbers to try."""

    native: NativeOps
    compute_type: torch.dtype

    def __post_init__(self) -> None:
        self._draw = torch.Generator().manual_seed(0)

    def numbers(self, *shape: int, wide: bool = False) -> Tensor:
        return torch.randn(*shape, generator=self._draw).to(torch.float32 if wide else self.compute_type)

    def close(self, one: Tensor, other: Tensor) -> None:
        loose = {"atol": 2e-2, "rtol": 2e-2} if self.compute_type == torch.bfloat16 else {"atol": 2e-6, "rtol": 2e-6}
        torch.testing.assert_close(one.float(), other.float(), **loose)


@pytest.fixture
def case(compute_type: torch.dtype) -> Case:
    built = library()
    assert built is not None
    return Case(NativeOps(built, compute_type), compute_type)


@types
@pytest.mark.parametrize("with_added", [False, True])
@pytest.mark.parametrize("out", ["narrow", "wide"])
def test_norm_and_residual(case: Case, with_added: bool, out: str) -> None:
    x, weight = case.numbers(7, 33, wide=True), case.numbers(33, wide=True)
    y = case.numbers(7, 33) if with_added else None
    out_type = torch.float32 if out == "wide" else case.compute_type
    before = x.clone()
    for one, other in zip(
        case.native.add_norm(x, y, weight, 1e-6, out_type),
        ops_torch.add_norm(x, y, weight, 1e-6, out_type),
        strict=True,
    ):
        case.close(one, other)
    assert torch.equal(x, before)


@types
def test_gradient_of_the_norm_adds_to_what_is_there(case: Case) -> None:
    g, x, weight = case.numbers(40, 33), case.numbers(40, 33, wide=True), case.numbers(33, wide=True)
    scale = torch.rsqrt(x.square().mean(dim=-1) + 1e-6)
    found, expected = (torch.ones(40, 33), torch.ones(33)), (torch.ones(40, 33), torch.ones(33))
    case.native.norm_backward(g, x, weight, scale, *found)
    ops_torch.norm_backward(g, x, weight, scale, *expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@types
def test_swiglu_and_its_gradient(case: Case) -> None:
    gate_up, g = case.numbers(9, 2 * 37), case.numbers(9, 37)
    gate_up[0, 0], gate_up[0, 1] = 200.0, -200.0
    case.close(case.native.swiglu(gate_up), ops_torch.swiglu(gate_up))
    mine, theirs = gate_up.clone(), gate_up.clone()
    case.close(case.native.swiglu_backward(g, mine), ops_torch.swiglu_backward(g, theirs))
    case.close(mine, theirs)


def angles(tokens: int, head_size: int) -> Angles:
    places = torch.arange(tokens)[:, None] * torch.linspace(0.1, 1, head_size // 2)
    return Angles(places.cos(), places.sin())


def packed(*lengths: tuple[int, ...]) -> Layout:
    """Groups laid end to end: the tokens of each prompt, then those of its completions."""
    prompts, rows, end = [], [], 0
    for prompt, *completions in lengths:
        start = end
        prompts.append([start, prompt, 0, 0])
        end += prompt
        for length in completions:
            rows.append([end, length, start, prompt])
            end += length
    blocks = tuple(Block(torch.tensor(part)) for part in (prompts, rows[::-1]))
    nothing = torch.zeros(1, end, dtype=torch.long)
    return Layout(nothing, nothing, blocks, nothing[0])


@types
@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([(3, 5, 1), (2, 4, 6)], SIZES),
        ([(40, 33, 1, 70), (1, 2), (65, 16)], AttentionSizes(heads=6, kv_heads=2, head_size=32, epsilon=1e-6)),
        ([(150, 90)], AttentionSizes(heads=2, kv_heads=1, head_size=64, epsilon=1e-6)),
        (
            [(7, 9, 3)],
            AttentionSizes(heads=70, kv_heads=1, head_size=6, epsilon=1e-6),
        ),  # more heads than a tile has lines
    ],
    ids=["small", "several tiles", "long", "many heads"],
)
def test_attention_of_packed_rows_and_its_gradient(
    case: Case, lengths: list[tuple[int, ...]], sizes: AttentionSizes
) -> None:
    layout = packed(*lengths)
    tokens = layout.ids.shape[1]
    qkv = case.numbers(tokens, sizes.query_width + 2 * sizes.kv_width)
    rotary = angles(tokens, sizes.head_size)
    mixed, kept = case.native.attention(qkv, rotary, layout, sizes)
    turned = qkv.clone()
    expected, probabilities = ops_torch.attention(turned, rotary, layout, sizes)
    case.close(mixed, expected)
    g = case.numbers(tokens, sizes.query_width)
    found = case.native.attention_backward(g, qkv, kept, rotary, layout, sizes)
    exact = ops_torch.attention_backward(g, turned, probabilities, rotary, layout, sizes)
    scale = float(exact.abs().max())
    case.close(found / scale, exact / scale)
    again = case.native.attention_backward(g, qkv, kept, rotary, layout, sizes)
    assert torch.equal(found, again), "the sums have one order, whatever the threads do"


@pytest.mark.parametrize("compute_type", [torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_drawing_takes_the_token_that_torch_takes(case: Case, temperature: float) -> None:
    logits = case.numbers(500, 97) * 3
    logits[0, 5] = -math.inf
    uniform = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = case.native.draw(logits, uniform, temperature)
    expected, theirs = draw(logits, uniform.float(), SamplingParams(temperature=temperature), forbidden=[])
    assert (tokens != expected).sum() <= 1, "only where the number meets an edge within rounding"
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], theirs[same], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("compute_type", [torch.float32], ids=str)
def test_drawing_never_takes_an_impossible_token(case: Case) -> None:
    logits = torch.full((3, 50), -math.inf)
    logits[:, 7], logits[:, 20] = 0.0, 1.0
    tokens, _ = case.native.draw(logits, torch.tensor([1e-17, 0.5, 1 - 1e-16], dtype=torch.float64), 1.0)
    assert set(tokens.tolist()) <= {7, 20}


@pytest.mark.parametrize("compute_type", [torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_and_its_gradient(case: Case, temperature: float) -> None:
    logits, targets = case.numbers(11, 53) * 4, torch.arange(11)
    reference = TorchHeadOps()
    found = case.native.head(logits, targets, temperature)
    expected = reference.head(logits, targets, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    grads = (torch.randn(11), torch.randn(11))
    saved = (expected[2], expected[1])
    torch.testing.assert_close(
        case.native.head_backward(logits.clone(), targets, temperature, saved, grads),
        reference.head_backward(logits.clone(), targets, temperature, saved, grads),
        atol=2e-5,
        rtol=1e-4,
    )


@types
@pytest.mark.parametrize(
    ("rows", "words", "width"), [(1, 16, 32), (5, 53, 36), (23, 40, 36), (42, 40, 36), (64, 100, 7), (131, 48, 80)]
)
def test_logits_are_the_sums_of_products_and_those_of_a_row_are_its_own(
    case: Case, rows: int, words: int, width: int
) -> None:
    native, dtype = case.native, case.native.compute_type
    hidden, weight = torch.randn(rows, width), torch.randn(words, width)
    matrix = native.pack([weight])
    found = native.logits(hidden, matrix, words)
    expected = hidden.to(dtype).double() @ weight.to(dtype).double().T
    assert (found - expected).abs().max() < 1e-5 * width
    in_training = native.logits(hidden, native.head_matrix(weight, dtype), words)
    assert (in_training - expected).abs().max() < 1e-5 * width
    room = torch.full((rows, words), math.nan)
    assert native.logits(hidden, matrix, words, room) is room
    assert torch.equal(room, found)
    alone = torch.cat([native.logits(row[None], matrix, words) for row in hidden])
    assert torch.equal(found, alone)


@pytest.mark.parametrize("compute_type", [torch.float32], ids=str)
def test_a_strided_tensor_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        case.native.swiglu(torch.zeros(8, 4).T)


def test_numbers_that_are_not_finite_stay_so() -> None:
    built = library()
    assert built is not None
    logits = torch.zeros(2, 40)
    logits[0, 3] = math.nan
    _, logprobs = NativeOps(built, torch.float32).draw(logits, torch.full((2,), 0.5, dtype=torch.float64), 1.0)
    assert not math.isfinite(logprobs[0])
    assert math.isfinite(logprobs[1])


def test_without_a_compiler_everything_still_works(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    assert ops_native.library.__wrapped__() is None
    monkeypatch.setenv(ops_native.SWITCH, "0")
    assert ops_native.library.__wrapped__() is None
