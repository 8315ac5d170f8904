"""Stage C of a first hour on a GPU: choices between two ways, timed on the device and checked against each other."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
from gpu_first_agreement import policy_of, sample
from gpu_first_probe import Answer, Setting, judged
from gpu_first_sizes import half, throughput
from gpu_first_timing import checkpoint, is_gpu, seconds_each, seconds_of
from models import make_prompts
from torch import Tensor

from oncurve.core.draw import draw
from oncurve.core.records import SamplingParams

HEADS, KV_HEADS, SIZE = 12, 2, 128
"""Attention of 1.5B."""


def attention(setting: Setting) -> Answer:
    """One decode step's attention over rows of ragged lengths, by what torch has, each against float32."""
    if not is_gpu(setting.device) or torch.version.cuda is None:
        return Answer("absent", "these kernels need a real CUDA device")
    table, wrong = {}, []
    for rows, longest in itertools.product((32, 128, 256, 512), (256, 1024, 3000)):
        generator = torch.Generator("cuda").manual_seed(0)
        lengths = torch.randint(longest // 4, longest + 1, (rows,), generator=generator, device="cuda")
        shape = (rows, KV_HEADS, longest, SIZE)
        q = torch.randn(rows, KV_HEADS, HEADS // KV_HEADS, SIZE, generator=generator, device="cuda").bfloat16()
        k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ideal = exact(q, k, v, lengths)
        for name, way in attention_ways(q, k, v, lengths, longest).items():
            key = f"{rows} rows, up to {longest} tokens, {name}"
            try:
                far = float((way() - ideal).norm() / ideal.norm())
                table[key] = {"seconds": seconds_each(way, setting.device, times=20), "relative": far}
                wrong += [f"{key} is off by {far:.2g}"] if far > 0.02 else []
            except (RuntimeError, TypeError) as error:  # this torch, or this device, does not have it
                table[key] = {"seconds": None, "error": str(error).splitlines()[0][:200]}
    shown = {key: row["seconds"] for key, row in table.items() if key.startswith("256 rows, up to 1024")}
    said = "; ".join(wrong) or "; ".join(f"{key}: {(each or 0) * 1e6:.0f} us" for key, each in shown.items())
    return judged(not wrong, said, ways=table)


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """In float32, row by row."""
    out = torch.empty(q.shape, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        scores = q[row].float() @ k[row, :, :length].float().transpose(1, 2) * SIZE**-0.5
        out[row] = scores.softmax(-1) @ v[row, :, :length].float()
    return out


def attention_ways(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int) -> dict[str, Callable[[], Tensor]]:
    """The kernel with a mask, and the flash kernel over the real lengths with as many queries as share a key."""
    rows, shared, aten = len(q), HEADS // KV_HEADS, torch.ops.aten
    padded = -(-longest // 32) * 32
    shut = torch.arange(padded, device="cuda")[None] >= lengths[:, None]
    bias = torch.zeros(shut.shape, dtype=q.dtype, device="cuda").masked_fill_(shut, -torch.inf)[:, :longest]
    bias = bias[:, None, None].expand(*q.shape[:3], longest)
    keys, values = (part.transpose(1, 2).contiguous().flatten(0, 1) for part in (k, v))
    starts, used = torch.arange(rows + 1, dtype=torch.int32, device="cuda"), lengths.int()
    together = q.transpose(1, 2).contiguous().flatten(0, 1)  # the queries of a key head as tokens of their row

    def efficient() -> Tensor:
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False)[0]

    def flash(queries: Tensor, each: int) -> Tensor:
        told = (starts * each, starts * longest, each, longest, 0.0, False, False)
        return aten._flash_attention_forward(queries, keys, values, *told, seqused_k=used)[0]

    return {
        "efficient with a mask": efficient,
        "flash, a query head each": lambda: flash(q.flatten(1, 2), 1).view(q.shape),
        "flash, queries of a key together": lambda: (
            flash(together, shared).view(rows, shared, KV_HEADS, SIZE).transpose(1, 2)
        ),
    }


def drawing(setting: Setting) -> Answer:
    """Ways to draw a token, and more rows at one time."""
    vocabulary, table = (1024, {}) if setting.tiny else (151_936, {})
    for rows in (2,) if setting.tiny else (128, 512):
        generator = torch.Generator().manual_seed(0)
        logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(setting.device)
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator).to(setting.device)
        expected = draw(logits, uniform, SamplingParams(), forbidden=[])[0]
        ways: dict[str, Callable[[], Tensor]] = {
            "now": lambda logits=logits, uniform=uniform: draw(logits, uniform, SamplingParams(), forbidden=[])[0],
            "two levels": lambda logits=logits, uniform=uniform: two_levels(logits, uniform),
            "softmax alone": lambda logits=logits: torch.softmax(logits, dim=-1),
        }
        for name, way in ways.items():
            same = float((way() == expected).float().mean()) if name != "softmax alone" else None
            each = seconds_each(way, setting.device, times=20)
            table[f"{rows} rows, {name}"] = {"seconds": each, "same_tokens": same}
    at_once = {} if setting.tiny else rows_at_once(setting)
    said = ", ".join(f"{name}: {row['seconds'] * 1e6:.0f} us" for name, row in table.items())
    said += "".join(f"; {name}: {row['tokens_per_second']:,.0f} tokens/s" for name, row in at_once.items())
    agree = min(row["same_tokens"] for row in table.values() if row["same_tokens"] is not None)
    return judged(agree > 0.99, f"{said}; {agree:.1%} of tokens agree", draw=table, rows_at_once=at_once)


def two_levels(logits: Tensor, uniform: Tensor, *, width: int = 1024) -> Tensor:
    """The first token above a number, by sums of ``width`` tokens in float32 added up in float64, then inside one."""
    p = torch.softmax(logits.float(), dim=-1)
    blocks = torch.nn.functional.pad(p, (0, -p.shape[1] % width)).unflatten(1, (-1, width))
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, threshold, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, width))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(inside, threshold - before, right=True).clamp_(max=width - 1)
    return (block * width + place)[:, 0].clamp_(max=p.shape[1] - 1)


def rows_at_once(setting: Setting) -> dict[str, dict[str, float]]:
    """Tokens per second of 1,024 completions, by the rows that run together."""
    told = Setting(setting.work, setting.folder, setting.device, setting.tiny, {"model": "1.5B"})
    policy = policy_of(setting.device, half(setting), str(checkpoint(setting.work, "1.5B")))
    prompts = make_prompts(policy.tokenizer, count=128, num_tokens=64)
    found = {}
    for rows in (256, 512, 1024):
        groups = sample(policy, prompts, 8, SamplingParams(max_completion_tokens=16), max_rows=rows)
        params = SamplingParams(max_completion_tokens=192)

        def once(groups: list[Any] = groups, rows: int = rows, params: SamplingParams = params) -> None:
            groups[:] = sample(policy, prompts, 8, params, max_rows=rows)

        seconds = seconds_of(once, setting.device, repeats=1, warmup=0)
        found[f"max_rows {rows}"] = throughput(told, groups, seconds, batches=1024 // rows)
    return found


def fusing(setting: Setting) -> Answer:
    """Add and norm in one Triton kernel, and by torch.compile, inside a recording as a decode step is."""
    if importlib.util.find_spec("triton") is None or torch.version.cuda is None:
        return Answer("absent", "Triton and a real CUDA device are needed")
    import gpu_first_fused

    return gpu_first_fused.compare(setting)


def layers(setting: Setting) -> Answer:
    """Small kernels of training, fused or compiled."""
    if setting.tiny or torch.version.cuda is None:
        return Answer("absent", "a real CUDA device is needed: a CPU trains through layers of its own")
    import gpu_first_layers

    return gpu_first_layers.compare(setting)


def parts(setting: Setting) -> Answer:
    """FSDP2 of one process, and a checkpoint copied, written, flushed and hashed, by part."""
    import gpu_first_parts

    return gpu_first_parts.compare(setting)
