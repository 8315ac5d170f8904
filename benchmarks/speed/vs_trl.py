"""Time of a GRPO step in oncurve and in TRL, on the same work.

Both train the same random checkpoint on the same prompts with the same group size, lengths, loss, optimizer and reward.
A step of one comes after a step of the other, so that what else the machine does falls on both. Each has a process of
its own, as it has where it is used: how oncurve sets up the C library's memory is no help to TRL, nor a burden.
With several settings of TRL, each is timed first for a few steps, and the fastest is compared.

    python benchmarks/bench.py vs_trl --model S --case ragged --trl fp32:32 fp32:8 bf16weights:32 --compute bfloat16
    python benchmarks/bench.py vs_trl --model S --case ragged --sweep
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from models import make_prompts
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
from record import Record, median_of, ratios_of
from transformers import AutoTokenizer
from trl_side import PHASES, Clock, TrlSetting, make_trainer

from oncurve.core.records import Prompt
from oncurve.observe.terminal import quiet_libraries

SETTINGS = (
    "fp32:8",
    "fp32:32",
    "fp32:64",
    "bf16weights:8",
    "bf16weights:32",
    "bf16weights:64",
    "autocast:8",
    "autocast:32",
    "autocast:64",
    "fp32:32+checkpointing",
    "bf16weights:32+checkpointing",
    "autocast:8+checkpointing",
)
"""What a sweep tries if nothing is named. The last is nearest to TRL's own defaults."""


class OursApart:
    """Our side in a process of its own, which works only while it is asked for a step."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.tokens: list[int] = []
        """Completion tokens of each step."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(arguments, folder, theirs), daemon=True)
        with patch.dict(os.environ):
            quiet_libraries()  # sets what the commands of oncurve set
            self._process.start()
        theirs.close()

    def step(self, number: int) -> dict[str, float]:
        """Sample, grade, train; the seconds of the whole and of each phase."""
        self._pipe.send(number)
        try:
            seconds, tokens = self._pipe.recv()
        except EOFError:
            raise SystemExit("oncurve's process ended; its error stands above") from None
        self.tokens.append(tokens)
        return seconds

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _work(arguments: argparse.Namespace, folder: Path, pipe: Connection) -> None:
    """Take steps as they are asked for, until nobody asks any more."""
    prepare(arguments)
    config = our_config(
        folder,
        work_of(arguments),
        compute_type=arguments.compute,
        tokens_per_microbatch=arguments.tokens_per_microbatch,
        gradient_checkpointing=arguments.checkpointing,
    )
    ours = Ours(config, work_of(arguments))
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        gc.collect()
        pipe.send((ours.step(number), ours.tokens[-1]))


def sweep(
    work: Work, settings: Sequence[TrlSetting], folder: Path, prompts: Sequence[Prompt], *, rounds: int, steps: int
) -> dict[str, Any]:
    """Seconds per step of each setting; every round starts a fresh trainer of each, whose first step does not count."""
    raw: dict[str, list[dict[str, float]]] = {str(setting): [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            clock = Clock(work.updates)
            trainer = make_trainer(work, setting, folder, prompts, steps=1 + steps, callback=clock)
            clock.watch(trainer)
            trainer.train()
            raw[str(setting)] += clock.steps[1:]
            del trainer
            gc.collect()
    seconds = {name: statistics.median(row["step"] for row in rows) for name, rows in raw.items()}
    for name, value in sorted(seconds.items(), key=lambda pair: pair[1]):
        print(f"{name:34s} {value:8.3f} s per step")
    fastest = min(seconds, key=lambda name: seconds[name])
    return {"step_seconds": seconds, "fastest": fastest, "raw": raw}


def compare(
    ours: OursApart,
    work: Work,
    setting: TrlSetting,
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    steps: int,
    warmup: int,
) -> dict[str, Any]:
    """Ours after each step of TRL's; medians, ratios step by step, and everything as it was read from the clock."""
    our_steps: list[dict[str, float]] = []

    def our_turn() -> None:
        gc.collect()
        our_steps.append(ours.step(len(our_steps)))
        gc.collect()

    clock = Clock(work.updates, between=our_turn)
    trainer = make_trainer(work, setting, folder, prompts, steps=warmup + steps, callback=clock)
    clock.watch(trainer)
    trainer.train()
    return summarize(clock, our_steps, ours.tokens, warmup=warmup)


def summarize(clock: Clock, ours: list[dict[str, float]], our_tokens: list[int], *, warmup: int) -> dict[str, Any]:
    """Medians after the warm-up. The ratio is the median of the ratios of neighbouring steps, and so are its parts."""
    theirs = clock.steps
    if len(theirs) != len(ours):
        raise RuntimeError(f"TRL took {len(theirs)} steps and oncurve {len(ours)}")

    def ratios(*keys: str) -> list[float]:
        return ratios_of(theirs, ours, keys, warmup=warmup)

    whole = ratios("step", "step")
    return {
        "trl_seconds": {key: median_of(theirs, key, warmup=warmup) for key in ("step", "train", *PHASES)},
        "oncurve_seconds": {key: median_of(ours, key, warmup=warmup) for key in ours[0]},
        "speedup": statistics.median(whole),
        "speedup_range": [min(whole), max(whole)],
        "sample_speedup": statistics.median(ratios("generate", "sample")),
        "train_speedup": statistics.median(ratios("train", "train")),
        "trl_tokens_per_step": statistics.fmean(clock.tokens),
        "oncurve_tokens_per_step": statistics.fmean(our_tokens),
        "warmup": warmup,
        "raw": {"trl": theirs, "oncurve": ours, "trl_tokens": clock.tokens, "oncurve_tokens": our_tokens},
    }


def options(parser: argparse.ArgumentParser) -> None:
    add_work_arguments(parser, case="ragged")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL term, 0.04 for instance")
    parser.add_argument("--updates", type=int, default=1, help="optimizer updates per batch of rollouts")
    parser.add_argument("--trl", nargs="+", metavar="SETTING", help="fp32:32, bf16weights:8, autocast:64+checkpointing")
    parser.add_argument("--sweep", action="store_true", help="only time TRL's settings against each other")
    parser.add_argument("--sweep-rounds", type=int, default=2)
    parser.add_argument("--sweep-steps", type=int, default=2, help="measured steps of each round")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="bfloat16", help="oncurve's arithmetic")
    parser.add_argument("--tokens-per-microbatch", type=int, default=8192)
    parser.add_argument("--checkpointing", action="store_true", help="oncurve's gradient checkpointing")
    add_common_arguments(parser, steps=9, warmup=2)


def name_of(asked: argparse.Namespace) -> str:
    work = work_of(asked)
    if asked.sweep:
        return f"vs_trl-sweep-{work.name}-{work.variant}"
    return f"vs_trl-{work.name}-{work.variant}-{asked.compute}-{kernels_of(asked)}"


def bench(asked: argparse.Namespace, record: Record) -> None:
    """Sweep if there is a choice, then compare unless only the sweep was asked for."""
    prepare(asked)
    names = asked.trl or (list(SETTINGS) if asked.sweep else ["fp32:32"])
    try:
        work, settings = work_of(asked), [TrlSetting.parse(text) for text in names]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as scratch:
        folder = work.build(Path(scratch) / "model")
        prompts = make_prompts(AutoTokenizer.from_pretrained(folder), count=work.prompts, num_tokens=work.prompt_tokens)
        chosen = str(settings[0])
        if asked.sweep or len(settings) > 1:
            swept = sweep(work, settings, folder, prompts, rounds=asked.sweep_rounds, steps=asked.sweep_steps)
            chosen, raw = swept["fastest"], swept.pop("raw")
            rows = [{"system": f"TRL {name}", **row} for name, rows in raw.items() for row in rows]
            record.facts["sweep"], record.rows = swept, rows
        if asked.sweep:
            return
        ours, trl = OursApart(asked, folder), TrlSetting.parse(chosen)
        measured = compare(ours, work, trl, folder, prompts, steps=asked.steps, warmup=asked.warmup)
        ours.close()
    raw = measured.pop("raw")
    record.rows += [
        {"system": system, "tokens": tokens, **row}
        for system in ("trl", "oncurve")
        for tokens, row in zip(raw[f"{system}_tokens"], raw[system], strict=True)
    ]
    record.facts |= {"trl_setting": chosen, "measured": measured}
    for side, seconds in (("TRL", measured["trl_seconds"]), ("oncurve", measured["oncurve_seconds"])):
        print(f"{side:8s}", "  ".join(f"{key} {value:.3f}" for key, value in seconds.items()))
    print(f"speed-up {measured['speedup']:.2f} (sample {measured['sample_speedup']:.2f}, "
          f"train {measured['train_speedup']:.2f}) against TRL at {chosen}")  # fmt: skip
