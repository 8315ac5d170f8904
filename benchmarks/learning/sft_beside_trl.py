"""A base from random weights: seconds of the same updates by oncurve and by TRL's SFTTrainer, and the accuracy of both.

    python benchmarks/bench.py sft_beside_trl --seeds 0 1 2
    python benchmarks/bench.py sft_beside_trl --seeds 0 --updates 4

The two take turns, each in a process of its own, on the same rows in the same order with the same optimizers and
schedule. A run whose folder is complete is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from record import ROOT, Record
from study import oncurve, shares, steps_of

RECIPE = "word_problems"
ROWS_PER_UPDATE = 16
TRL_PROGRAM = """
import json
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


class Both(torch.optim.Optimizer):
    def __init__(self, model):
        embedding = model.get_input_embeddings().weight
        kinds = [[], []]
        for weight in model.parameters():
            kinds[weight.ndim != 2 or weight is embedding].append(weight)
        self.inner = [
            torch.optim.Muon(kinds[0], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(kinds[1], betas=(0.9, 0.95), weight_decay=0.0),
        ]
        super().__init__([{{"params": kind}} for kind in kinds], {{"lr": 3e-3}})

    def step(self, closure=None):
        for group, one in zip(self.param_groups, self.inner, strict=True):
            one.param_groups[0]["lr"] = group["lr"]
            one.step()


rows = [json.loads(line) for line in open({rows!r})]
args = SFTConfig(
    output_dir={place!r}, max_steps={updates}, per_device_train_batch_size={size}, learning_rate=3e-3,
    lr_scheduler_type="linear", warmup_steps={updates} // 20, seed={seed}, bf16=False, use_cpu=True, max_length=None,
    gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
    train_sampling_strategy="sequential", max_grad_norm=1.0,
)
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
trainer = SFTTrainer(
    model=model, args=args, train_dataset=Dataset.from_list(rows), optimizers=(Both(model), None),
    processing_class=AutoTokenizer.from_pretrained({model!r}),
)
done = trainer.train()
trainer.save_model({place!r})
open({place!r} + "/seconds", "w").write(str(done.metrics["train_runtime"]))
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "studies" / "sft_beside_trl")


def by_oncurve(folder: Path, model: Path, seed: int, updates: int) -> tuple[Path, float]:
    """A supervised run of the command line."""
    place = folder / f"oncurve-{seed}-{updates}"
    if not (place / "evaluations" / "trained.json").is_file():
        oncurve(
            folder, 1, "sft", f"{RECIPE}/base", "--resume", f"model={model}", f"run.folder={folder}",
            f"run.name={place.name}", f"run.seed={seed}", "run.save_every_steps=0", "evaluation.num_prompts=8",
            f"data.limit={updates * ROWS_PER_UPDATE}",
        )  # fmt: skip
    return place, sum(row["time/step_seconds"] for row in steps_of(place))


def by_trl(folder: Path, model: Path, seed: int, updates: int) -> tuple[Path, float]:
    """TRL's trainer on the same rows."""
    from oncurve.data.demonstrations import taught_rows  # lazy

    place, file = folder / f"trl-{seed}-{updates}", folder / f"rows-{seed}-{updates}.jsonl"
    if not (place / "seconds").exists():
        rows = taught_rows(RECIPE, count=updates * ROWS_PER_UPDATE, lesson_fraction=0.56, seed=seed)
        pairs = [{"prompt": row["prompt"], "completion": row["parts"][0]["text"]} for row in rows]
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        program = TRL_PROGRAM.format(
            model=str(model), rows=str(file), place=str(place), updates=updates, size=ROWS_PER_UPDATE, seed=seed
        )
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
    return place, float((place / "seconds").read_text())


def bench(asked: argparse.Namespace, record: Record) -> None:
    from oncurve.coldstart.untrained import write_untrained  # lazy

    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    record.total = 2 * len(asked.seeds)
    seconds: dict[str, list[float]] = {"oncurve": [], "trl": []}
    for seed in asked.seeds:
        start = folder / f"random-{seed}"
        if not start.is_dir():
            write_untrained(start, RECIPE, seed=seed)
        for side, build in (("oncurve", by_oncurve), ("trl", by_trl)):
            model, spent = build(folder, start, seed, asked.updates)
            output = folder / "measured" / model.name
            if not output.exists():
                oncurve(
                    folder, 1, "evaluate", RECIPE, "--model", str(model), "--output", str(output),
                    "evaluation.every_steps=0",
                )  # fmt: skip
            seconds[side].append(spent)
            row: dict[str, Any] = {"side": side, "seed": seed, "seconds": round(spent, 1)}
            record.add({**row, "after": shares(output, "evaluation")})
    record.facts["median_seconds"] = {side: median(values) for side, values in seconds.items()}
