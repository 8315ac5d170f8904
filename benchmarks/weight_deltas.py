"""How many bytes is what changed of the weights in a step, at which learning rate, and how long does coding it take?

    python benchmarks/weight_deltas.py --models embedded --rates 1e-6 1e-5 1e-4 --output benchmarks/results/deltas.json

Real runs: the embedded model learns word problems; M, a random model, follows a coin. After every step the weights are
coded as ``rollouts.deltas`` would publish them, and at some steps in other ways as well. Bytes do not depend on the
machine. A case that is in the output already is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import RESULTS, describe_machine  # before transformers
from models import SHAPES, build, coin

import oncurve
from oncurve.rollouts.servers import delta
from oncurve.rollouts.servers.delta_store import _assemble
from oncurve.rollouts.servers.shards import cut_into_files
from oncurve.rollouts.servers.transfer.weight_stream import Shipment, named_weights

try:
    import zstandard
except ImportError:
    zstandard = None
BESIDE_EVERY = 25
"""Steps between those at which other encodings are tried."""


def trainer_of(model: str, training: str, rate: float, steps: int, folder: Path) -> oncurve.Trainer:
    """A run of so many steps."""
    lora = {"lora": {"rank": 16}} if training == "lora" else {}
    run = {"steps": steps, "prompts_per_step": 8, "save_every_steps": 0, "folder": str(folder), "name": "run"}
    place = "embedded"
    rewards: Any = "r1_zero"
    tokens = 96
    if model != "embedded":
        place = str(build(folder / "model", SHAPES[model], mean_tokens=None, max_length=512))
        tokens = 16

        def rewards(completion: str) -> float:
            return coin(completion)

    return oncurve.Trainer(
        place,
        data="word_problems",
        rewards=rewards,
        algorithm={"type": "grpo", "group_size": 8},
        rollouts={"type": "engine", "max_completion_tokens": tokens},
        optimizer={"learning_rate": rate},
        policy=lora,
        evaluation={"every_steps": 0, "num_prompts": 4},
        run=run,
    )


def view(policy: Any) -> tuple[np.ndarray, list[delta.Region]]:
    """All weights as servers get them, as one file."""
    shipment = Shipment("", 0, named_weights(policy), torch.bfloat16)
    names = [name for part in cut_into_files(shipment).values() for name in part]
    return _assemble(shipment, names)


def others(base: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Bytes in other encodings, as shares of all weights."""
    old, young = (data[: data.size // 2 * 2].view(np.uint16) for data in (base, new))
    places = np.flatnonzero(old != young)
    values = young[places].tobytes()
    gaps = delta._vary(np.diff(places, prepend=-1) - 1).tobytes()
    xor = (old ^ young).tobytes()
    found = {
        "positions of 4 bytes and values": places.size * 6,
        "gaps and new values, zlib 6": len(zlib.compress(gaps)) + len(zlib.compress(values)),
        "exclusive-or, zlib 6": len(zlib.compress(xor)),
        "new weights, zlib 6": len(zlib.compress(new)),
    }
    if zstandard is not None:
        for level in (3, 19):
            found[f"exclusive-or, zstd {level}"] = len(zstandard.ZstdCompressor(level=level).compress(xor))
    return {name: size / new.size for name, size in found.items()}


def measure(model: str, training: str, rate: float, steps: int) -> dict[str, Any]:
    """One run."""
    shares, changed, coding, patching, seconds, beside = [], [], [], [], [], []
    used: dict[str, list[float]] = {"step": [], "copying": [], "summing": [], "coding": []}
    with tempfile.TemporaryDirectory() as place:
        trainer = trainer_of(model, training, rate, steps, Path(place))
        base: np.ndarray | None = None
        size = thin = 0
        mark = time.process_time()

        def lap(what: str) -> None:
            nonlocal mark
            used[what].append(time.process_time() - mark)
            mark = time.process_time()

        for number, step in enumerate(trainer.steps()):
            lap("step")
            new, regions = view(trainer.policy)
            lap("copying")
            hashlib.sha256(new.data).hexdigest()
            lap("summing")
            weights = trainer.policy.thin_weights()
            size, thin = new.size, 0 if weights is None else weights.num_bytes
            if base is not None:
                begin = time.perf_counter()
                coded = delta.encode(base, new, regions)
                coded_at = time.perf_counter()
                lap("coding")
                assert np.array_equal(delta.apply(coded.data, base), new)
                patching.append(time.perf_counter() - coded_at)
                coding.append(coded_at - begin)
                shares.append(len(coded.data) / new.size)
                changed.append(coded.changed / coded.total)
                seconds.append(step.metrics["time/step_seconds"])
                if number % BESIDE_EVERY == 0 or number == 1:
                    beside.append({"step": number, "ours": shares[-1], **others(base, new)})
            base = new
            mark = time.process_time()
    median: Callable[[list[float]], float] = statistics.median
    return {
        "model": model, "training": training, "learning_rate": rate, "steps": len(shares), "whole_bytes": size,
        "adapter_bytes": thin, "mean_share": statistics.fmean(shares), "first_share": shares[0],
        "last_share": shares[-1], "mean_changed_fraction": statistics.fmean(changed),
        "changed_fraction": [round(value, 5) for value in changed], "share": [round(value, 5) for value in shares],
        "coding_seconds": median(coding), "patching_seconds": median(patching), "step_seconds": median(seconds),
        "cpu_seconds": {name: median(values) for name, values in used.items()}, "beside": beside,
    }  # fmt: skip


def main() -> None:
    """Measure what is missing, print, write after every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["embedded", "M"])
    parser.add_argument("--trainings", nargs="+", default=["full", "lora"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_deltas.json")
    asked = parser.parse_args()
    if zstandard is None:
        print("zstd is not compared: the package zstandard is not installed")
    logging.disable(logging.WARNING)
    found = json.loads(asked.output.read_text()) if asked.output.exists() else {"cases": []}
    for model in asked.models:
        for training in asked.trainings:
            for rate in asked.rates:
                key = (model, training, rate)
                if key in [(one["model"], one["training"], one["learning_rate"]) for one in found["cases"]]:
                    continue
                case = measure(model, training, rate, asked.steps + 1)
                found["machine"] = describe_machine()
                found["cases"].append(case)
                asked.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(
                    f"{model:10}{training:6}{rate:8.0e}: {case['mean_changed_fraction']:7.2%} changed, "
                    f"{case['mean_share']:7.2%} of the bytes; {case['coding_seconds']:.3f} s of "
                    f"{case['step_seconds']:.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
