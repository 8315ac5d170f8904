"""Is the flash kernel called where it can be, and as it wants to be? On a GPU that is not there but carries numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from runs_reference import KINDS, Reference, heads_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oncurve.algorithm.precision import arithmetic_type
from oncurve.core.batch import Batch
from oncurve.model.packing import Layout, make_layout
from oncurve.policy import packed_attention
from oncurve.policy.packed_attention import Flash, _Attention, fits, kernel_for

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu
    from transformers import PreTrainedModel

    from oncurve.policy.trained_policy import TrainedPolicy

MakePolicy = Callable[..., "TrainedPolicy"]
MakeModel = Callable[..., "PreTrainedModel"]
MakeBatch = Callable[[str], Batch]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
every_batch = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_kernel_is_for_half_width_types_on_a_gpu(half: torch.dtype) -> None:
    assert isinstance(kernel_for(GPU, half), Flash)
    assert kernel_for(CPU, half) is None
    assert kernel_for(GPU, torch.float32) is kernel_for(GPU, torch.float64) is None


@pytest.mark.parametrize(
    ("size", "value_size", "fitting"),
    [
        (64, 64, True),
        (8, 8, True),
        (256, 256, True),
        (80, 80, True),
        (4, 4, False),
        (264, 264, False),
        (64, 128, False),
    ],
)
def test_heads_of_other_sizes_stay_in_blocks(size: int, value_size: int, fitting: bool) -> None:
    assert fits(torch.zeros(1, 2, 3, size), torch.zeros(1, 2, 3, value_size)) is fitting


def test_autocast_says_in_which_type_attention_multiplies() -> None:
    assert arithmetic_type(CPU, torch.float16) == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert arithmetic_type(CPU, torch.float32) == arithmetic_type(CPU, torch.float16) == torch.bfloat16


class Checked(TorchDispatchMode):
    """What torch's flash kernel asks of its arguments and does not check, or only on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        """Name, starts of queries and of keys, the longest of both, whether it is causal, and the scale."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::_flash_attention_")
        if name in ("forward", "backward"):
            q, k, v, *rest = args[name == "backward" :]
            self.check_heads(q, k, v)
            if name == "backward":
                (out, logs, *rest), grad = rest, args[0]
                assert out.shape == grad.shape == q.shape
                assert out.dtype == grad.dtype == q.dtype
                assert logs.shape == (q.shape[1], q.shape[0])
                assert logs.dtype == torch.float32
                assert all(part.is_contiguous() for part in (grad, out, logs))
            starts, longest, (dropout, causal, *_) = rest[:2], rest[2:4], rest[4:]
            assert all(one.dtype == torch.int32 and one.is_contiguous() and one.is_cuda for one in starts)
            assert starts[0].shape == starts[1].shape
            assert all(type(one) is int and one > 0 for one in longest)
            assert (dropout, type(causal)) == (0.0, bool)
            assert list(kwargs) == ["scale"]
            self.calls.append((name, *starts, *longest, causal, kwargs["scale"]))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.bfloat16, torch.float16)
        assert all(part.is_cuda and part.dim() == 3 and part.stride(-1) == 1 for part in (q, k, v))
        assert k.shape == v.shape
        assert q.shape[1] % k.shape[1] == 0


def expected_calls(name: str, layout: Layout, scale: float) -> list[tuple[Any, ...]]:
    """Causal among own tokens, then not causal behind prompts, with the tables of the layout."""
    both = ((True, layout.own_runs), (False, layout.prompt_runs))
    return [
        (name, runs.query_starts, runs.key_starts, runs.longest_queries, runs.longest_keys, causal, scale)
        for causal, runs in both
        if runs is not None
    ]


def assert_called(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(a is b if isinstance(b, Tensor) else a == b for a, b in zip(one, other, strict=True))


def both_passes(batch: Batch, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Kernel and definition side by side on a GPU, over queries that lie across memory and keys cut from a projection.

    Gives the error and the size of output and gradients; calls, shapes, types and devices are checked there.
    """
    layout = make_layout(batch, GPU)
    tokens, runs = layout.ids.shape[1], (layout.own_runs, layout.prompt_runs)
    torch.manual_seed(3)
    q = torch.randn(4, tokens, 64, device="cuda").to(dtype).transpose(0, 1).requires_grad_()
    both = torch.randn(tokens, 4, 64, device="cuda").to(dtype).requires_grad_()
    grad = torch.randn(4, tokens, 64, device="cuda").to(dtype).transpose(0, 1)
    with Checked() as checked:
        out = _Attention.apply(q, *both.split(2, dim=1), *runs, Flash(), 0.1)
        checked_grads = torch.autograd.grad(out, (q, both), grad)
    assert_called(checked.calls, expected_calls("forward", layout, 0.1) + expected_calls("backward", layout, 0.1))
    exact_q, exact_both = (part.detach().float().requires_grad_() for part in (q, both))
    exact = _Attention.apply(exact_q, *exact_both.split(2, dim=1), *runs, Reference(), 0.1)
    exact_grads = torch.autograd.grad(exact, (exact_q, exact_both), grad.float())
    found = [*zip((out, *checked_grads), (exact, *exact_grads), (q, q, both), strict=True)]
    for one, _, like in found:
        assert (one.shape, one.dtype, one.device) == (like.shape, dtype, like.device)
    return [(float((one.float() - other).norm()), float(other.norm())) for one, other, _ in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_batch
def test_both_passes_call_the_real_kernel_as_it_wants_to_be(
    kind: str, dtype: torch.dtype, make_batch: MakeBatch, pretend_gpu: PretendGpu
) -> None:
    for error, size in pretend_gpu(both_passes, make_batch(kind), dtype):
        assert error < 0.02 * size + 1e-3


@torch.no_grad()
def attention_of(batch: Batch, kind: torch.dtype, autocast: torch.dtype | None) -> None:
    """Attention as a model asks for it on a GPU: whatever its queries are, the kernel gets halves."""
    layout = make_layout(batch, GPU)
    tokens, half = layout.ids.shape[1], autocast or kind
    q, k = (torch.randn(1, heads, tokens, 64, device="cuda").to(kind) for heads in (4, 2))
    v = torch.randn(1, 2, tokens, 64, device="cuda").to(half)  # autocast made it; turning widens q and k
    with torch.autocast("cuda", dtype=half, enabled=autocast is not None), Checked() as checked:
        mixed, _ = packed_attention.packed_attention(torch.nn.Module(), q, k, v, None, layout=layout, scaling=0.1)
    assert (mixed.shape, mixed.dtype, mixed.device.type) == ((1, tokens, 4, 64), half, "cuda")
    assert bool(mixed.isfinite().all())
    assert_called(checked.calls, expected_calls("forward", layout, 0.1))


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_half_width_arithmetic_on_a_gpu_takes_the_real_kernel(
    kind: torch.dtype, autocast: torch.dtype | None, make_batch: MakeBatch, pretend_gpu: PretendGpu
) -> None:
    pretend_gpu(attention_of, make_batch("ragged"), kind, autocast)


@torch.no_grad()
def stays_in_blocks(batch: Batch, device: str, dtype: torch.dtype, size: int, has_layout: bool) -> None:
    """Attention that the kernel does not know goes on as it came."""
    layout = make_layout(batch, torch.device(device)) if has_layout else None
    packed_attention.block_attention = lambda *parts, **options: (parts[1], options["layout"])  # type: ignore[assignment]
    q = torch.randn(1, 2, 16, size, device=device).to(dtype)
    with Checked() as checked:
        assert packed_attention.packed_attention(torch.nn.Module(), q, q, q, None, layout=layout) == (q, layout)
    assert not checked.calls


@pytest.mark.parametrize(
    ("device", "dtype", "size", "has_layout"),
    [
        ("cuda", torch.float32, 64, True),
        ("cuda", torch.bfloat16, 4, True),
        ("cuda", torch.bfloat16, 64, False),
        ("cpu", torch.bfloat16, 64, True),
    ],
)
def test_all_else_stays_in_blocks(
    device: str, dtype: torch.dtype, size: int, has_layout: bool, make_batch: MakeBatch, pretend_gpu: PretendGpu
) -> None:
    pretend_gpu(stays_in_blocks, make_batch("ragged"), device, dtype, size, has_layout)


@pytest.mark.parametrize("asked", [{"sliding_window": 4}, {"softcap": 2.0}, {"s_aux": torch.zeros(2)}], ids=str)
def test_windows_and_caps_are_refused(asked: dict[str, Any], make_batch: MakeBatch, reference: Reference) -> None:
    layout = make_layout(make_batch("ragged"), CPU)
    q = torch.zeros(1, 2, layout.ids.shape[1], 8)
    for attention in (packed_attention.packed_attention, packed_attention.block_attention):
        with pytest.raises(NotImplementedError, match="caps nothing"):
            attention(torch.nn.Module(), q, q, q, None, layout=layout, **asked)


def test_padded_logarithms_are_refused(make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch gave them as [runs, heads, longest run]."""
    runs, q = make_layout(make_batch("ragged"), CPU).own_runs, torch.zeros(16, 2, 8)
    given = (q, torch.zeros(3, 2, 8), q, q, q)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *parts, **options: given)
    with pytest.raises(NotImplementedError, match="pads the logarithms"):
        Flash().forward(q, q, q, runs, causal=True, scale=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_batch
def test_the_real_kernel_agrees_with_blocks(
    kind: str, dtype: torch.dtype, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are measured against blocks in float32; merging rounds once more."""
    layout = make_layout(make_batch(kind), torch.device("cuda"))
    parts = heads_of(make_layout(make_batch(kind), CPU), heads=4, kv_heads=2, size=64, dtype=torch.float32)
    weights = torch.randn(layout.ids.shape[1], 4, 64, generator=torch.Generator().manual_seed(5)).cuda()

    def outcome(attention: Callable[..., Any], kind: torch.dtype) -> list[Tensor]:
        q, k, v = (part.detach().to(dtype).to("cuda", kind).requires_grad_() for part in parts)
        heads = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        mixed, _ = attention(torch.nn.Module(), *heads, None, layout=layout, scaling=0.2)
        return [mixed[0].detach(), *torch.autograd.grad((mixed[0] * weights).sum(), (q, k, v))]

    exact = outcome(packed_attention.block_attention, torch.float32)
    rounded = outcome(packed_attention.block_attention, dtype)
    found = outcome(packed_attention.packed_attention, dtype)
    for one, other, ideal in zip(found, rounded, exact, strict=True):
        assert float((one - ideal).norm()) < 3 * float((other - ideal).norm()) + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_the_real_kernel_is_proven_at_load(
    architecture: str, make_policy: MakePolicy, tiny_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_policy(tiny_model(architecture).cuda(), compute_type="bfloat16")
    assert policy.is_packed
    assert not [record for record in caplog.records if record.name.startswith("oncurve")]
