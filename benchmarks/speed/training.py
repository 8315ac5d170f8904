"""Time of forward, backward and optimizer on the same batch: padded as TRL does it, padded by us, and packed.

The batch is synthetic: random tokens, advantages that are never zero, lengths full or ragged. Every system has its own
copy of the model; all take turns in one process.

    python benchmarks/bench.py training --model S --case ragged
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import FIRST_WORD, SHAPES, draw_lengths
from ours import (
    LEARNING_RATE,
    LORA_RANK,
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
from roofline import backward, forward, gemm_flops, product_seconds
from torch.nn import functional
from transformers import AutoModelForCausalLM
from trl_side import TrlSetting, lora_config

from oncurve.core.batch import Batch, collate
from oncurve.core.records import Completion, Group, Prompt

WAYS = ("padded", "packed", "shared")
"""Of ours: padded rows; packed rows; packed rows that share the prompt of their group."""


def synthetic_batch(work: Work, prompts: Sequence[Prompt], vocabulary: int) -> Batch:
    """A batch as rollouts of this work would give it, with advantages of plus or minus one half or more."""
    generator = torch.Generator().manual_seed(1)
    lengths = iter(draw_lengths(work.case, count=work.completions, limit=work.new_tokens))
    groups = []
    for prompt in prompts:
        completions = []
        for index in range(work.group_size):
            ids = torch.randint(FIRST_WORD, vocabulary, (next(lengths),), generator=generator).tolist()
            completions.append(Completion(prompt.prompt_ids, tuple(ids), "", (0.0,) * len(ids), "stop", 0, index))
        groups.append(Group(prompt, tuple(completions)))
    signs = torch.randint(0, 2, (work.prompts, work.group_size), generator=generator) - 0.5
    return collate(groups, signs * (1 + torch.rand(signs.shape, generator=generator)))


class Reference:
    """A training step as TRL's: rows padded to the longest of the batch, micro-batches of whole rows, the model's own
    forward over all of them, cross-entropy over the completion tokens.
    """

    def __init__(self, folder: Path, work: Work, setting: TrlSetting, batch: Batch, device: str) -> None:
        dtype = torch.bfloat16 if setting.arithmetic == "bf16weights" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        if work.training == "lora":
            from peft import get_peft_model

            model = get_peft_model(model, lora_config())
        if setting.checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model, self.setting, self.batch = model.train(), setting, batch.to(device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.trained, self.device = trained, device

    def step(self) -> None:
        """All micro-batches, clipping, one update."""
        batch, size = self.batch, min(self.setting.micro_batch, len(self.batch))
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)  # prompts are equally long
        kept = batch.completion_ids.shape[1]
        attention = torch.cat([torch.ones_like(batch.prompt_ids), batch.mask.long()], dim=1)
        cast = torch.autocast(self.device, torch.bfloat16) if self.setting.arithmetic == "autocast" else nullcontext()
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            with cast:
                logits = self.model(
                    input_ids=ids[rows], attention_mask=attention[rows], logits_to_keep=kept + 1, use_cache=False
                ).logits[:, :-1]
            logprobs = -functional.cross_entropy(
                logits.float().flatten(0, 1), batch.completion_ids[rows].flatten(), reduction="none"
            ).view(-1, kept)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -(ratio * batch.advantages[rows, None] * batch.mask[rows]).sum() / batch.size.num_tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def our_step(folder: Path, work: Work, batch: Batch, way: str, compute: str, arguments: argparse.Namespace) -> Any:
    """A step of ours in one of its ways."""
    config = our_config(
        folder,
        work,
        compute_type=compute,
        packing=way != "padded",
        gradient_checkpointing=arguments.checkpointing,
        tokens_per_microbatch=arguments.tokens_per_microbatch,
        device=arguments.device,
    )
    ours = Ours(config, work)
    if way == "packed":  # to share nothing, every completion says that its prompt is its own
        batch = replace(batch, group_ids=torch.arange(len(batch))).measured()
    return lambda: ours.train(batch)


def timed(step: Callable[[], None], device: str) -> Callable[[int], dict[str, float]]:
    """The seconds of a step."""

    def run(number: int) -> dict[str, float]:
        started = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - started}

    return run


def systems(folder: Path, work: Work, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is compared, by name, and facts about the batch."""
    probe = Ours(our_config(folder, work), work)
    batch = synthetic_batch(work, probe.prompts, SHAPES[work.model].vocabulary)
    found: dict[str, Any] = {}
    for text in arguments.trl:
        setting = TrlSetting.parse(text)
        step = Reference(folder, work, setting, batch, arguments.device).step
        found[f"TRL-like {setting}"] = timed(step, arguments.device)
    for way in arguments.ways:
        for compute in arguments.compute:
            step = our_step(folder, work, batch, way, compute, arguments)
            found[f"oncurve {way} {compute}"] = timed(step, arguments.device)
    padded = len(batch) * (batch.prompt_ids.shape[1] + batch.completion_ids.shape[1])
    real = int(batch.row_lengths.sum())
    shared = real - sum(int(batch.prompt_lengths[0]) for _ in range(len(batch) - work.prompts))
    rows = list(
        zip(batch.group_ids.tolist(), batch.prompt_lengths.tolist(), batch.completion_lengths.tolist(), strict=True)
    )
    size = SHAPES[work.model].size(2, lora_rank=LORA_RANK if work.training == "lora" else None)
    once = forward(size, rows, predicted=int(batch.mask.sum()))
    operations = once.operations + backward(size, once, predicted=int(batch.mask.sum())).operations
    return found, {
        "operations": operations,
        "padded_tokens": padded,
        "tokens": real,
        "tokens_with_shared_prompts": shared,
    }


def options(parser: argparse.ArgumentParser) -> None:
    add_work_arguments(parser)
    parser.add_argument("--trl", nargs="+", default=["fp32:8", "fp32:32", "bf16weights:32", "autocast:32"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--compute", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on our side")
    parser.add_argument("--tokens-per-microbatch", type=int, default=8192)
    parser.add_argument("--device", default="cpu")
    add_common_arguments(parser, steps=7)


def name_of(asked: argparse.Namespace) -> str:
    checkpointing = "-checkpointing" if asked.checkpointing else ""
    return f"training-{work_of(asked).name}-{asked.training}{checkpointing}-{kernels_of(asked)}"


def bench(asked: argparse.Namespace, record: Record) -> None:
    prepare(asked)
    work = work_of(asked)
    limits = {name: gemm_flops(getattr(torch, name), device=asked.device) for name in ("float32", "bfloat16")}
    with tempfile.TemporaryDirectory() as scratch:
        found, facts = systems(work.build(Path(scratch) / "model"), work, asked)
        raw = round_robin(found, steps=asked.warmup + asked.steps, record=record)
    seconds = {name: median_of(rows, "seconds", warmup=asked.warmup) for name, rows in raw.items()}
    fastest = min(value for name, value in seconds.items() if name.startswith("TRL-like"))
    measured = {}
    for name, value in seconds.items():
        kind = "bfloat16" if any(word in name for word in ("bf", "autocast")) else "float32"
        fraction = facts["operations"] / value / limits[kind]
        measured[name] = {"seconds": value, "speedup": fastest / value, "gemm_fraction": fraction}
        print(f"{name:40s} {value:8.3f} s  {fastest / value:5.2f} times the fastest TRL-like step  "
              f"{fraction:6.1%} of the GEMM rate")  # fmt: skip
    products = SHAPES[work.model].products(facts["tokens_with_shared_prompts"], work.completions * work.new_tokens)
    alone = product_seconds(products, device=asked.device)
    print(f"the matrix products alone, every weight trained, in float32: {alone:.3f} s")
    record.facts |= {"measured": measured, "limits": {"gemm_flops": limits, "product_seconds": alone}, "batch": facts}
    record.rows = [{"system": name, **row} for name, rows in raw.items() for row in rows]
