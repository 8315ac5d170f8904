"""Stages beside GRPO on the embedded word problems: distillation, rejection sampling, a warm start.

    python benchmarks/learning/stages.py distil FOLDER  a run of GRPO teaches the base that it came from, three seeds
    python benchmarks/learning/stages.py spread FOLDER  entropy and pass@8 after supervised training, and after GRPO
    python benchmarks/learning/stages.py base FOLDER  a base from random weights beside TRL's SFTTrainer, in turns

Every run is one of the command line, made in FOLDER/runs and not made again where it is there. Accuracies and numbers
of steps do not depend on what else the machine does; seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from oncurve.coldstart.untrained import write_untrained
from oncurve.data.demonstrations import taught_rows
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import read_json, read_metrics

RECIPE, STUDENT = "word_problems", "distil_word_problems"
GOAL = 0.9
DURING = ("evaluation.every_steps=1", "evaluation.num_prompts_during=200")
QUIET = ("evaluation.every_steps=0",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    seeds = [str(seed) for seed in asked.seeds]
    made_by = ["python", "benchmarks/learning/stages.py", asked.part, "FOLDER", "--seeds", *seeds]
    found = {**PARTS[asked.part](asked.folder.resolve(), asked.seeds), "made_by": describe_run(made_by)}
    text = json.dumps(found, indent=1)
    if asked.output:
        asked.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


def command(folder: Path, *words: str) -> None:
    """A command of oncurve, whose last words are shown if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "oncurve", *words], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stdout[-1500:]}{done.stderr[-1500:]}")


def run(folder: Path, verb: str, recipe: str, name: str, *settings: str) -> Path:
    """The folder of a run, made if it is not there."""
    place = folder / "runs" / name
    if not (place / "evaluations" / "trained.json").exists():
        command(folder, verb, recipe, f"run.name={name}", *settings)
    return place


def grpo(folder: Path, seed: int, *settings: str, name: str = "grpo") -> Path:
    return run(folder, "train", RECIPE, f"{name}-{seed}", f"run.seed={seed}", *DURING, *settings)


def share(place: Path, name: str = "trained") -> dict[str, Any]:
    """Correct of the 500 test problems, greedy, with the interval."""
    found = read_json(place / "evaluations" / f"{name}.json")["correct"]
    return {key: round(found[key], 4) for key in ("fraction", "low", "high")}


def course(place: Path) -> dict[str, Any]:
    """Steps, completions, sampled tokens and seconds until the goal is reached on held-out problems."""
    rows = [row for row in read_metrics(place) if row["step"]]
    curve = [round(row["evaluation/correct_fraction"], 4) for row in rows]
    reached = next((number for number, value in enumerate(curve, start=1) if value >= GOAL), None)
    sums = {
        key: list(accumulate(row[name] for row in rows))
        for key, name in (("tokens", "tokens/sampled"), ("seconds", "time/step_seconds"))
    }
    at = {key: round(values[reached - 1], 1) if reached else None for key, values in sums.items()}
    return {"steps": reached, **at, "curve": curve, "after": share(place)}


def distil(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """Steps to the goal by distillation and by GRPO from the same base."""
    seen = []
    for seed in seeds:
        teacher = grpo(folder, seed)
        student = run(
            folder, "train", STUDENT, f"student-{seed}", f"run.seed={seed}", f"algorithm.teacher={teacher}", *DURING,
            "run.steps=4", "evaluation.num_prompts=200",
        )  # fmt: skip
        seen.append({"seed": seed, "grpo": course(teacher), "distil": course(student)})
    return {"goal": GOAL, "seeds": seen}


def spread(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """What supervised training of growing length leaves for GRPO to find."""
    seen = []
    for seed in seeds:
        for steps in (0, 10, 40, 160):
            model = "embedded"
            if steps:
                model = str(run(
                    folder, "sft", RECIPE, f"warm-{steps}-{seed}", f"run.steps={steps}", f"run.seed={seed}",
                    "run.prompts_per_step=16", "optimizer.learning_rate=3e-4", "optimizer.schedule=linear", *QUIET,
                ))  # fmt: skip
            after = grpo(
                folder, seed, *((f"model={model}",) if steps else ()), name=f"from-{steps}" if steps else "grpo"
            )
            first = next(row for row in read_metrics(after) if row["step"] == 1)
            one = {"seed": seed, "sft_steps": steps, "entropy": round(first["policy/entropy"], 4)}
            for when, weights in (("before", model), ("after_grpo", str(after))):
                one[when] = sampled_eight(folder, weights, f"{when}-{steps}-{seed}")
            seen.append(one | {"grpo": course(after)})
    return {"models": seen}


def sampled_eight(folder: Path, model: str, name: str) -> dict[str, float]:
    """pass@1 and pass@8 of a model on 200 test problems at temperature 1."""
    output = folder / "eight" / name
    if not (output / "evaluations").exists():
        command(
            folder, "evaluate", RECIPE, "--model", model, "--output", str(output), "evaluation.samples=8",
            "evaluation.temperature=1.0", "evaluation.num_prompts=200", *QUIET,
        )  # fmt: skip
    found = read_json(output / "evaluations" / "evaluation.json")["pass_at_k"]
    return {f"pass@{k}": round(found[k], 4) for k in ("1", "8")}


def base(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """Seconds of the same updates on the same rows by oncurve and by TRL, taking turns, and the accuracy of both."""
    seconds: dict[str, list[float]] = {"oncurve": [], "trl": []}
    after = {}
    for seed in seeds:
        start = write_untrained(folder / f"random-{seed}", RECIPE, seed=seed)
        for side, build in (("oncurve", by_oncurve), ("trl", by_trl)):
            model, spent = build(folder, f"{side}-{seed}", str(start), seed)
            seconds[side].append(round(spent, 1))
            output = folder / "measured" / f"{side}-{seed}"
            if not output.exists():
                command(folder, "evaluate", RECIPE, "--model", model, "--output", str(output), *QUIET)
            after[f"{side}-{seed}"] = share(output, "evaluation")
    return {"updates": UPDATES, "rows_per_update": ROWS_PER_UPDATE, "seconds": seconds, "after": after}


def by_oncurve(folder: Path, name: str, model: str, seed: int) -> tuple[str, float]:
    place = run(
        folder, "sft", f"{RECIPE}/base", name, f"model={model}", f"run.seed={seed}", "run.save_every_steps=0",
        f"data.limit={UPDATES * ROWS_PER_UPDATE}", "evaluation.num_prompts=8",
    )  # fmt: skip
    return str(place), sum(row["time/step_seconds"] for row in read_metrics(place) if row["step"])


def by_trl(folder: Path, name: str, model: str, seed: int) -> tuple[str, float]:
    """In a process of its own, as ours, with the same optimizers, order of rows and schedule."""
    place, file = folder / name, folder / f"rows-{seed}.jsonl"
    if not (place / "seconds").exists():
        rows = taught_rows(RECIPE, count=UPDATES * ROWS_PER_UPDATE, lesson_fraction=0.56, seed=seed)
        file.write_text("".join(
            json.dumps({"prompt": row["prompt"], "completion": row["parts"][0]["text"]}) + "\n" for row in rows
        ))  # fmt: skip
        program = TRL_PROGRAM.format(
            model=model, rows=str(file), place=str(place), updates=UPDATES, size=ROWS_PER_UPDATE, seed=seed
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
    return str(place), float((place / "seconds").read_text())


UPDATES = 800
"""Of a base from random weights."""
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
PARTS: dict[str, Callable[[Path, list[int]], dict[str, Any]]] = {
    "distil": distil, "spread": spread, "base": base,
}  # fmt: skip

if __name__ == "__main__":
    main()
