"""Tokens per second of the engine and of transformers' generate, beside the most that the machine could do.

All sample the same prompts from the same random checkpoint, in one process, one after the other in every round.

    python benchmarks/bench.py sampling --model S --case full --prompt-tokens 48
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from models import END, SHAPES, Shape
from ours import (
    Ours,
    Work,
    add_common_arguments,
    add_work_arguments,
    kernels_of,
    our_config,
    prepare,
    work_of,
)
from record import Record, median_of, round_robin
from roofline import decode, gemm_flops, prefill, read_bandwidth
from transformers import AutoModelForCausalLM, GenerationConfig

from oncurve.core.records import Prompt

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REFERENCE = "generate float32"


class Generate:
    """``model.generate`` as TRL calls it: all rows at once, every prompt repeated for its group, in evaluation mode."""

    def __init__(self, folder: Path, work: Work, dtype: torch.dtype, prompts: Sequence[Prompt], device: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        rows = [list(prompt.prompt_ids) for prompt in prompts for _ in range(work.group_size)]
        self.ids = torch.tensor(rows, device=device)
        self.settings = GenerationConfig(
            max_new_tokens=work.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=END,
            pad_token_id=END + 1,
        )

    @torch.no_grad()
    def lengths(self, number: int) -> list[int]:
        """Sample once; the length of each completion, its end token included."""
        torch.manual_seed(number)
        output = self.model.generate(
            input_ids=self.ids, attention_mask=torch.ones_like(self.ids), generation_config=self.settings
        )
        sampled = output[:, self.ids.shape[1] :]
        ended = (sampled == END).int()
        first = torch.where(ended.any(dim=1), ended.argmax(dim=1) + 1, sampled.shape[1])
        return [int(length) for length in first]


def demand(shape: Shape, lengths: Sequence[int], work: Work, *, number_bytes: int) -> tuple[float, float]:
    """Least work for completions of these lengths, as a run's profile counts it: operations, and bytes to be read."""
    size = shape.size(number_bytes)
    groups = [
        (work.prompt_tokens, lengths[start : start + work.group_size])
        for start in range(0, len(lengths), work.group_size)
    ]
    least = prefill(size, [work.prompt_tokens] * work.prompts) + decode(size, groups, steps=max(lengths) - 1)
    return least.operations, least.bytes


def timed(sample: Callable[[int], list[int]], device: str) -> Callable[[int], dict[str, Any]]:
    """One round of a system: seconds, tokens and the lengths they come from."""

    def step(number: int) -> dict[str, Any]:
        started = time.perf_counter()
        lengths = sample(number)
        if device != "cpu":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - started, "tokens": sum(lengths), "lengths": lengths}

    return step


def systems(
    folder: Path, work: Work, arguments: argparse.Namespace
) -> tuple[dict[str, Callable[[int], dict[str, Any]]], dict[str, str]]:
    """What is compared, and the type in which each computes."""
    found: dict[str, Callable[[int], dict[str, Any]]] = {}
    types: dict[str, str] = {}
    prompts: Sequence[Prompt] = ()
    for compute in arguments.compute:
        ours = Ours(our_config(folder, work, compute_type=compute, device=arguments.device), work)
        prompts = ours.prompts

        def lengths(number: int, ours: Ours = ours) -> list[int]:
            return [len(completion.token_ids) for group in ours.sample(number) for completion in group.completions]

        found[f"engine {compute}"], types[f"engine {compute}"] = timed(lengths, arguments.device), compute
    for name, dtype in TYPES.items():
        generate = Generate(folder, work, dtype, prompts, arguments.device)
        found[f"generate {name}"], types[f"generate {name}"] = timed(generate.lengths, arguments.device), name
    return found, types


def summarize(
    raw: dict[str, list[dict[str, Any]]], types: dict[str, str], work: Work, limits: dict[str, Any], *, warmup: int
) -> dict[str, Any]:
    """Medians of each system, against generate in float32 and against what the machine was measured to reach."""
    shape, table = SHAPES[work.model], {}
    for name, rows in raw.items():
        for row in rows:
            row["tokens_per_second"] = row["tokens"] / row["seconds"]
            operations, read = demand(
                shape, row["lengths"], work, number_bytes=torch.tensor([], dtype=TYPES[types[name]]).element_size()
            )
            row["gemm_fraction"] = operations / row["seconds"] / limits["gemm_flops"][types[name]]
            row["bandwidth_fraction"] = read / row["seconds"] / limits["bandwidth_bytes_per_second"]
        keys = ("seconds", "tokens", "tokens_per_second", "gemm_fraction", "bandwidth_fraction")
        table[name] = {key: median_of(rows, key, warmup=warmup) for key in keys}
    for name, row in table.items():
        row["speedup"] = row["tokens_per_second"] / table[REFERENCE]["tokens_per_second"]
        print(f"{name:20s} {row['tokens_per_second']:10.0f} tokens/s  {row['speedup']:5.2f} times  "
              f"{row['gemm_fraction']:6.1%} of the GEMM rate  {row['bandwidth_fraction']:6.1%} of the bandwidth"
              )  # fmt: skip
    return table


def options(parser: argparse.ArgumentParser) -> None:
    add_work_arguments(parser, is_trained=False)
    parser.add_argument("--compute", nargs="+", choices=list(TYPES), default=list(TYPES), help="the engine's types")
    parser.add_argument("--device", default="cpu")
    add_common_arguments(parser, steps=7)


def name_of(asked: argparse.Namespace) -> str:
    return f"sampling-{work_of(asked).name}-{kernels_of(asked)}"


def bench(asked: argparse.Namespace, record: Record) -> None:
    prepare(asked)
    work = work_of(asked)
    limits = {
        "gemm_flops": {name: gemm_flops(dtype, device=asked.device) for name, dtype in TYPES.items()},
        "bandwidth_bytes_per_second": read_bandwidth(device=asked.device),
    }
    with tempfile.TemporaryDirectory() as scratch:
        found, types = systems(work.build(Path(scratch) / "model"), work, asked)
        raw = round_robin(found, steps=asked.warmup + asked.steps, record=record)
    record.facts |= {"measured": summarize(raw, types, work, limits, warmup=asked.warmup), "limits": limits}
    record.rows = [{"system": name, **row} for name, rows in raw.items() for row in rows]
