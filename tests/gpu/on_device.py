"""What runs in a process that has a pretend GPU: functions that tests call by name, and what they give back."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

GPU = torch.device("cuda", 0)


def error_of(function: Any) -> str:
    """What a function raises, as text; empty where it raises nothing."""
    try:
        function()
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mixing() -> dict[str, str]:
    """Tensors on the CPU beside tensors on the device."""
    here, there = torch.ones(3, 3), torch.ones(3, 3, device=GPU)
    return {
        "added": error_of(lambda: there + here),
        "multiplied": error_of(lambda: there @ here),
        "chosen by a mask": error_of(lambda: torch.where(here > 0, there, 0.0)),
        "gathered": error_of(lambda: there.index_select(0, torch.tensor([0]))),
        "written into": error_of(lambda: there.add_(here)),
        "into the CPU": error_of(lambda: here.add_(there)),
        "optimizer": error_of(lambda: torch._foreach_add_([there, there], [here, here])),
        "a number": error_of(lambda: there + torch.tensor(1.0)),
        "an index": error_of(lambda: there[torch.tensor([0, 2])]),
        "copied": error_of(lambda: there.copy_(here)),
    }


def carrying() -> dict[str, Any]:
    """Numbers through a module, its gradients, an optimizer, files and copies."""
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4))
    here.register_buffer("angles", torch.arange(6.0).view(2, 3).T)
    there = copy.deepcopy(here).to("cuda")
    x = torch.randn(5, 8)
    for model, given in ((here, x), (there, x.to("cuda"))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            with torch.autograd.graph.save_on_cpu(pin_memory=given.is_cuda):
                loss = model(given).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    again = torch.load(file)
    pairs = list(zip(here.parameters(), there.parameters(), copy.deepcopy(there).parameters(), strict=True))
    angles = copy.deepcopy(there).angles
    return {
        "buffer": (str(angles.device), angles.tolist(), angles.stride()),
        "same": all(torch.allclose(a, b.cpu(), atol=1e-6) and torch.equal(b, c) for a, b, c in pairs),
        "devices": {str(part.device) for part in (*there.parameters(), *again.values())},
        "loaded": all(torch.equal(again[name], value) for name, value in there.state_dict().items()),
    }


def half_width() -> dict[str, Any]:
    """Products under autocast, and one that nobody cast."""
    a, b = torch.randn(4, 8, device=GPU), torch.randn(8, 4, device=GPU)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product, total = a @ b, (a @ b).float().sum()
    return {
        "product": str(product.dtype),
        "total": str(total.dtype),
        "wide": str(torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32).dtype),
        "not cast": error_of(lambda: product @ a),
    }


def counted() -> dict[str, Any]:
    """What each of some operations is counted as."""
    from pretend.counting import counting

    x = torch.randn(6, 6, device=GPU)
    pinned = torch.empty(6, 6).pin_memory()
    found = {}
    for name, function in {
        "a view": lambda: x.T[1:].reshape(-1, 6).unsqueeze(0),
        "a product": lambda: x @ x,
        "two": lambda: (x * 2).relu_(),
        "an item": lambda: x.sum().item(),
        "a list": lambda: x.tolist(),
        "to the host": lambda: x.cpu(),
        "to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
        "from the host": lambda: torch.ones(3).to("cuda"),
        "from pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "a mask": lambda: x[x > 0],
        "as if": lambda: bool((x > 9).any()),
        "a wait": lambda: torch.cuda.synchronize(),
        "many at once": lambda: torch._foreach_mul_([x, x, x], 1.0),
    }.items():
        with counting() as counts:
            function()
        found[name] = (counts.num_launches, counts.num_synchronizations)
    return found


def memory() -> dict[str, Any]:
    """Bytes of a tensor while it lives, their peak, and a device that is full."""
    from pretend.counting import counting

    cuda, before = torch.cuda, torch.cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    with counting() as counts:
        x = torch.zeros(1000, 1000, device=GPU)
        view = x[10:].T
        del x
        held = cuda.memory_allocated() - before
        del view
        y = torch.empty(100, device=GPU)
    total = cuda.mem_get_info()[1]
    torch.ops.pretend_gpu.set_total(1_000_000)
    full = error_of(lambda: torch.empty(1_000_000, device=GPU))
    torch.ops.pretend_gpu.set_total(total)
    return {
        "held": held,
        "left": cuda.memory_allocated() - before,
        "peak": cuda.max_memory_allocated() - before,
        "counted": counts.peak_bytes - before,
        "allocations": counts.allocations,
        "full": full,
        "fits again": error_of(lambda: torch.empty(1_000_000, device=GPU)),
        "garbage": bool(y.isnan().all()),
    }


def failures() -> dict[str, list[bool]]:
    """Which of some allocations and operations fail where failures are asked for."""
    from pretend import device
    from pretend.counting import scope

    def attempts(function: Any) -> list[bool]:
        return [error_of(function).startswith("OutOfMemoryError") for _ in range(4)]

    x, found = torch.ones(4, 4, device=GPU), {}
    device.fail_at("allocation:2")
    found["second allocation"] = attempts(lambda: torch.empty(5, device=GPU))
    device.fail_at("operation:aten::mm.out:3")
    found["third product"] = attempts(lambda: x @ x)
    device.fail_at("allocation:update:1")
    found["before the scope"] = attempts(lambda: x + 1)
    with scope("update"):
        found["in the scope"] = attempts(lambda: x + 1)
    return found


class Recorded:
    """A step that a graph repeats, with the stream it was recorded on."""

    def __init__(self, step: Any) -> None:
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.out = step()


def graphs() -> dict[str, Any]:
    """What a graph reads, writes and bakes in."""
    held, factor = [torch.ones(3, device=GPU), torch.zeros(3, device=GPU)], [2.0]
    total = torch.zeros(3, device=GPU)

    def step() -> Tensor:
        weight, x = held
        total.add_(weight * x)
        return (x + weight) * factor[0]

    recorded = Recorded(step)
    found: dict[str, Any] = {
        "nothing was computed": (bool(recorded.out.isnan().all()), total.tolist()),
    }
    held[1].fill_(3.0)
    recorded.graph.replay()
    found["first"] = (recorded.out.tolist(), total.tolist())
    held[0].fill_(10.0)
    factor[0] = 7.0
    recorded.graph.replay()
    found["another weight, the same factor"] = (recorded.out.tolist(), total.tolist())
    held.clear()
    found["given back"] = error_of(recorded.graph.replay)
    return found


def refusals() -> dict[str, str]:
    """What must not happen in a recording."""
    x, pinned = torch.ones(3, device=GPU), torch.ones(3).pin_memory()
    steps = {
        "an item": lambda: x.sum().item(),
        "a pageable copy": lambda: x + torch.ones(3).to("cuda", non_blocking=True),
        "an index from the host": lambda: x[torch.tensor([0])],
        "a mask": lambda: x[x > 0],
        "empty_cache": lambda: torch.cuda.empty_cache(),
        "a pinned copy": lambda: x + pinned.to("cuda", non_blocking=True),
    }
    found = {"default stream": error_of(torch.cuda.CUDAGraph().capture_begin)}
    return found | {name: error_of(lambda step=step: Recorded(step)) for name, step in steps.items()}


def flash() -> dict[str, Any]:
    """The flash kernel where a run reads a part of its keys, against attention by hand."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(count, heads, 16, device=GPU).bfloat16() for count, heads in ((3, 4), (24, 2), (24, 2)))
    starts = [torch.tensor(cuts, dtype=torch.int32, device=GPU) for cuts in ([0, 1, 2, 3], [0, 8, 16, 24])]
    used = torch.tensor([8, 3, 5], dtype=torch.int32, device=GPU)
    forward = torch.ops.aten._flash_attention_forward
    out, logs, *_ = forward(q, k, v, *starts, 1, 8, 0.0, False, False, scale=0.25, seqused_k=used)
    errors = []
    for run, count in enumerate(used.tolist()):
        keys, values = (part[8 * run : 8 * run + count].float().repeat_interleave(2, dim=1) for part in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[run].float(), keys) * 0.25
        errors.append(float((logs[:, run] - scores.logsumexp(-1)).abs().max()))
        errors.append(float((out[run].float() - torch.einsum("hn,nhd->hd", scores.softmax(-1), values)).abs().max()))
    return {
        "error": max(errors),
        "too many keys": error_of(lambda: forward(q, k, v, *starts, 1, 8, 0.0, False, False, seqused_k=used + 2)),
        "announced": error_of(lambda: forward(q, k, v, *starts, 1, 4, 0.0, False, False)),
        "long starts": error_of(lambda: forward(q, k, v, *(s.long() for s in starts), 1, 8, 0.0, False, False)),
        "float32": error_of(lambda: forward(q.float(), k, v, *starts, 1, 8, 0.0, False, False)),
    }


def backward_of_attention() -> dict[str, float]:
    """Gradients of the kernels that torch chooses on a GPU, against those of plain products."""
    found = {}
    for name, dtype, mask in (("flash", torch.bfloat16, False), ("efficient", torch.float32, True)):
        torch.manual_seed(1)
        qkv = [torch.randn(2, 4, 32, 16).to(dtype) for _ in range(3)]
        bias = torch.randn(32, 32).to("cuda") if mask else None
        grads = []
        for wide in (False, True):
            q, k, v = (part.to("cuda", torch.float64 if wide else dtype).requires_grad_() for part in qkv)
            if wide:
                scores = q @ k.transpose(-1, -2) / 4 + (0.0 if bias is None else bias)
                out = scores.softmax(-1) @ v
            else:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            out.double().square().sum().backward()
            grads.append([out.detach().double(), *(part.grad.double() for part in (q, k, v))])  # type: ignore[union-attr]
        found[name] = max(float((a - b).norm() / b.norm()) for a, b in zip(*grads, strict=True))
    return found


def child_process() -> str:
    """What a process that this one starts finds."""
    program = "import torch; print(torch.ones(2, device='cuda').sum().item(), torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def several(names: list[str]) -> dict[str, Any]:
    """Results of several of the functions above, in one process."""
    return {name: globals()[name]() for name in names}


def loss_on_the_cpu(words: list[str]) -> int:
    """A command with a crash put back: the loss gets rows on the CPU and log-probabilities on the device."""
    from pretend.child import command

    from oncurve.core.batch import Batch

    Batch.to = lambda batch, device: batch  # type: ignore[method-assign]
    return command(*words)
