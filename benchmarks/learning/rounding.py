"""What rounding the copies of the weights does to learning: float32, bfloat16 with a dither, bfloat16 to the nearest.

    python benchmarks/learning/rounding.py arrive                  what float32 taught, and the share that copies show
    python benchmarks/learning/rounding.py learn --seeds 0 1 2     three runs each on the embedded model
    python benchmarks/learning/rounding.py learn --sums FOLDER     the same on sums, with SmolLM2-135M (fetch_models.py)
    python benchmarks/learning/rounding.py final                   models saved in bfloat16, read by plain transformers
    python benchmarks/learning/rounding.py speed [--sums FOLDER]   seconds of a step, the three in turn on one work
    python benchmarks/learning/rounding.py picture                 the figure of docs/precision.md

A finished run is kept in the folder of --runs and not made again. ``learn`` trains every mode with one seed before the
next seed, each run in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import oncurve
from oncurve.algorithm.precision import key_of, narrow
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Group, Prompt
from oncurve.data.from_settings import shared_columns
from oncurve.evaluate.evaluate import grade_groups
from oncurve.evaluate.evaluation import read_evaluation
from oncurve.model.context import context_of
from oncurve.model.lora_linear import linear_layers
from oncurve.policy.final_model import write_model
from oncurve.policy.forward import row_logprobs
from oncurve.rewards.terms import make_reward_function
from oncurve.run.rendered import make_prompts, split_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODES = ("float32", "dither", "nearest")
STEPS = (1, 2, 4, 8, 16)
"""Steps after which what has arrived is measured."""


def has_bfloat16() -> bool:
    """This machine multiplies bfloat16 in hardware."""
    known = torch.cpu.get_capabilities()
    return torch.cuda.is_available() or bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def embedded_on_grid(place: Path) -> Path:
    """The model in the package with its weights on bfloat16's grid, as those of a published model are."""
    if not place.is_dir():
        partial = place.with_name(f".{place.name}-{os.getpid()}")
        shutil.copytree(ROOT / "oncurve" / "assets" / "base_model", partial)
        file = partial / "model.safetensors"
        weights = {name: weight.bfloat16().float().contiguous() for name, weight in load_file(file).items()}
        save_file(weights, partial / "new", metadata={"format": "pt"})
        (partial / "new").replace(file)
        partial.rename(place)
    return place


def make_trainer(
    mode: str, seed: int, runs: Path, sums: Path | None, *, rate: float | None = None, **run: Any
) -> oncurve.Trainer:
    """A run of 16 steps; the embedded model at a rate of 2e-5, or sums at 1e-5. Unmeasured at another rate."""
    policy = {"compute_type": "float32"} if mode == "float32" else {"compute_type": "bfloat16", "rounding": mode}
    name = f"{'embedded' if sums is None else 'sums'}_{mode}_{seed}"
    shared = {"steps": STEPS[-1], "prompts_per_step": 16, "seed": seed, "save_every_steps": 0, "folder": str(runs)}
    if sums is None:
        return oncurve.Trainer(
            str(embedded_on_grid(runs / "grid")),
            {"type": "word_problems", "limit": 4096},
            "r1_zero",
            algorithm={"group_size": 8, "clip_high": 0.28},
            rollouts={"type": "engine", "max_completion_tokens": 96},
            optimizer={"learning_rate": rate or 2e-5, "warmup_updates": 2},
            policy=policy,
            run={**shared, "name": name, **run},
            evaluation={"num_prompts": 1} if rate else {
                "data": {"type": "word_problems", "split": "test", "limit": 400},
                "num_prompts": 300, "every_steps": 4, "num_prompts_during": 300,
            },
        )  # fmt: skip
    rows = {
        "type": "generated", "function": f"{ROOT}/benchmarks/learning/sums.py:sums", "template": "question_only",
        "chat": True,
    }  # fmt: skip
    return oncurve.Trainer(
        str(sums),
        rows,
        {"type": "mathematics", "answer_from": "prose"},
        algorithm={"type": "grpo", "group_size": 8},
        rollouts={"type": "engine", "max_completion_tokens": 16},
        optimizer={"learning_rate": rate or 1e-5, "warmup_updates": 4},
        policy=policy,
        run={**shared, "name": name, **run},
        evaluation={"num_prompts": 1} if rate else {
            "data": {**rows, "split": "test"}, "num_prompts": 99, "every_steps": 4, "num_prompts_during": 60,
        },
    )  # fmt: skip


def run_one(mode: str, seed: int, runs: Path, sums: Path | None) -> None:
    """Train one run in this process and write what it learned beside it."""
    trainer = make_trainer(mode, seed, runs, sums)
    begin = time.perf_counter()
    for _ in trainer.steps():
        pass
    seconds = time.perf_counter() - begin
    if trainer.result is None or trainer.result.is_interrupted:
        raise SystemExit(f"{trainer.folder}: stopped before its end. Remove it, and call this again")
    (runs / f"{Path(trainer.folder).name}.json").write_text(json.dumps({"seconds": round(seconds, 1)}))


def read_run(path: Path) -> dict[str, Any]:
    """What a finished run measured of itself, step by step."""
    rows = [json.loads(line) for line in (path.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
    name, mode, seed = path.stem.split("_")
    keys = {
        "rewards": "reward/mean",
        "correct": "evaluation/correct_fraction",
        "arrived": "policy/arrived",
        "moved": "policy/moved_fraction",
        "sampled_tokens_per_second": "speed/sampled_tokens_per_second",
        "trained_tokens_per_second": "speed/trained_tokens_per_second",
    }
    columns = {said: {row["step"]: round(row[key], 4) for row in rows if key in row} for said, key in keys.items()}
    return {"task": name, "mode": mode, "seed": int(seed), **json.loads(path.read_text()), **columns}


def learn(seeds: list[int], runs: Path, sums: Path | None) -> None:
    """Every mode with every seed, each in a process of its own, in turn; the results side by side."""
    name = "embedded" if sums is None else "sums"
    for seed in seeds:
        for mode in MODES:
            if not (runs / f"{name}_{mode}_{seed}.json").is_file():
                extra = [] if sums is None else ["--sums", str(sums)]
                command = [sys.executable, __file__, "one", "--mode", mode, "--seeds", str(seed), "--runs", str(runs)]
                subprocess.run([*command, *extra], check=True)
    found = [read_run(path) for path in sorted(runs.glob(f"{name}_*_[0-9].json"))]
    write(f"rounding_{name}.json", {"runs": found})


def arrive(seeds: list[int], runs: Path, sums: Path | None) -> None:
    """Train in float32; after some steps compare the change of log-probabilities with the one that copies show.

    With d the change of the log-probabilities of the first step's completions, and c that of a model whose matrices are
    copies: the share c d / d d that arrives, with its standard error over completions, and what else the copies change,
    |c - share d| / |d|.
    """
    name, rows = "embedded" if sums is None else "sums", []
    for seed in seeds:
        trainer = make_trainer("float32", seed, runs, sums, name=f"{name}_arrive_{seed}_{time.time_ns()}")
        base = make_trainer("float32", seed, runs, sums).policy.model
        texts: list[Tensor] = []
        for step in trainer.steps():
            if not texts:
                texts = [
                    torch.tensor([*group.prompt.prompt_ids, *one.token_ids])
                    for group in step.groups
                    for one in group.completions[:4]
                ]
                before = logprobs(base, texts)
            if step.number in STEPS:
                rows += arrived(trainer.policy.model, texts, before, seed, step.number)
                print(*rows[-2:], sep="\n", flush=True)
        write(f"rounding_arrived_{name}.json", {"rows": rows})


def logprobs(model: Any, texts: list[Tensor]) -> list[Tensor]:
    """Of all tokens of the rows but their first."""
    with torch.no_grad():
        return [row_logprobs(model, ids).double() for ids in texts]


def arrived(model: Any, texts: list[Tensor], before: list[Tensor], seed: int, step: int) -> list[dict[str, Any]]:
    """The share of the change since the start that copies of the matrices show, by each way to round."""

    def changes() -> list[Tensor]:
        return [after - was for after, was in zip(logprobs(model, texts), before, strict=True)]

    taught = changes()
    size = sum(float(d @ d) for d in taught)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = []
    for mode in MODES[1:]:
        kept = [(part.weight, part.weight.data) for part in linear_layers(model)]
        for weight, data in kept:
            key = key_of(seed, names[id(weight)])
            weight.data = narrow(data, torch.bfloat16, key if mode == "dither" else None).float()
        shown = changes()
        for weight, data in kept:
            weight.data = data
        share = sum(float(c @ d) for c, d in zip(shown, taught, strict=True)) / size
        others = [c - share * d for c, d in zip(shown, taught, strict=True)]
        error = sum(float(o @ d) ** 2 for o, d in zip(others, taught, strict=True)) ** 0.5 / size
        noise = (sum(float(o @ o) for o in others) / size) ** 0.5
        numbers = {"share": share, "error": error, "noise": noise}
        found.append({"mode": mode, "seed": seed, "step": step} | {key: round(x, 4) for key, x in numbers.items()})
    return found


def held_out(trainer: oncurve.Trainer) -> tuple[list[Prompt], RewardFunction]:
    """The prompts that a run was measured on at its end, and its reward."""
    rows = split_rows(trainer.config)
    model, tokenizer = trainer.policy.model, trainer.policy.tokenizer
    prompts = make_prompts(trainer.config, tokenizer, context_tokens=context_of(model.config), rows=rows).test
    return list(prompts), make_reward_function(trainer.config.rewards, columns=shared_columns(rows))


@torch.no_grad()
def greedy(folder: Path, prompts: list[Prompt], most: int) -> list[Group]:
    """What plain transformers writes in float32, greedy, up to the end of the answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    groups = []
    for start in range(0, len(prompts), 50):
        part = prompts[start : start + 50]
        rows = tokenizer.pad({"input_ids": [list(prompt.prompt_ids) for prompt in part]}, return_tensors="pt")
        out = model.generate(
            **rows, max_new_tokens=most, do_sample=False, stop_strings="</answer>", tokenizer=tokenizer
        )
        for prompt, ids in zip(part, out[:, rows["input_ids"].shape[1] :], strict=True):
            text, mark, _ = tokenizer.decode(ids, skip_special_tokens=True).partition("</answer>")
            reason: Any = "stop" if mark else "length"
            tokens = tuple(ids.tolist())
            written = Completion(prompt.prompt_ids, tokens, text + mark, (0.0,) * len(tokens), reason, 0, 0)
            groups.append(Group(prompt, (written,)))
    return groups


def final(seeds: list[int], runs: Path, steps: int = 8) -> None:
    """Models saved in bfloat16 after few steps, by the dither and to the nearest, beside the policy that was measured.

    Plain transformers reads them and writes 300 held-out completions, greedy and in float32, so that it differs from
    the run in its weights and the rounding of its activations alone.
    """
    rows = []
    for seed in seeds:
        trainer = make_trainer("dither", seed, runs, None, name=f"final_{seed}_{time.time_ns()}", steps=steps)
        for _ in trainer.steps():
            pass
        folder = Path(trainer.folder)
        prompts, reward_function = held_out(trainer)
        measured = read_evaluation(folder / "evaluations", "trained").examples
        write_model(trainer.policy, folder / "dither", torch.bfloat16)
        for weight in trainer.policy.model.parameters():
            weight.data = weight.data.bfloat16().float()
        write_model(trainer.policy, folder / "nearest", torch.bfloat16)
        row: dict[str, Any] = {"seed": seed, "steps": steps, "evaluated": sum(one.is_correct for one in measured)}
        for mode in MODES[1:]:
            groups = greedy(folder / mode, prompts, most=96)
            same = sum(g.completions[0].text == one.completion for g, one in zip(groups, measured, strict=True))
            row[mode] = {
                "same_texts": same,
                "correct": sum(one.is_correct for one in grade_groups(groups, reward_function)),
            }
        rows.append(row)
        print(row, flush=True)
    write("rounding_final.json", {"problems": len(measured), "rows": rows})


def speed(seeds: list[int], runs: Path, sums: Path | None) -> None:
    """Tokens per second of the three ways, which take their steps in turn in one process.

    The rate is so low that no float32 weight moves: the copies of a model on the grid are the same by either rounding,
    so both ways sample and train the same tokens and differ in what the rounding costs.
    """
    name = "embedded" if sums is None else "sums"
    loops = {}
    for mode in MODES:
        run_name, num_steps = f"{name}_speed_{mode}_{time.time_ns()}", 64 if sums is None else 10
        loops[mode] = make_trainer(mode, seeds[0], runs, sums, rate=1e-30, name=run_name, steps=num_steps)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    steps = {mode: trainer.steps() for mode, trainer in loops.items()}
    for turn in range(num_steps):
        for mode in sorted(MODES, key=lambda mode: (MODES.index(mode) + turn) % len(MODES)):
            step = next(steps[mode])
            found[mode].append({key: step.metrics[f"speed/{key}_tokens_per_second"] for key in ("sampled", "trained")})
    medians = {
        mode: {key: median(row[key] for row in rows[2:]) for key in ("sampled", "trained")}
        for mode, rows in found.items()
    }
    ratios = {
        key: median(a[key] / b[key] for a, b in zip(found["dither"][2:], found["nearest"][2:], strict=True))
        for key in ("sampled", "trained")
    }
    print(medians, ratios)
    write(f"rounding_speed_{name}.json", {"medians": medians, "dither_by_nearest": ratios, "steps": found})


def picture() -> None:
    """Held-out accuracy and what arrives, step by step, of every run of ``rounding_embedded.json``."""
    import matplotlib.pyplot as plt

    found = json.loads((RESULTS / "rounding_embedded.json").read_text())["runs"]
    colors = dict(zip(MODES, ("#4c78a8", "#54a24b", "#e45756"), strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for run in found:
        first = run["seed"] == found[0]["seed"]
        for axis, key in ((left, "correct"), (right, "arrived")):
            steps = sorted(map(int, run[key]))
            label = run["mode"] if first and key == "correct" else None
            axis.plot(steps, [run[key][str(step)] for step in steps], color=colors[run["mode"]], label=label)
    left.set(xlabel="step", ylabel="correct, 300 held-out problems")
    right.set(xlabel="step", ylabel="policy/arrived", ylim=(0, 1.1))
    left.legend(frameon=False)
    figure.savefig(ROOT / "docs" / "pictures" / "precision.png", dpi=110)


def write(name: str, found: dict[str, Any]) -> None:
    """A result with the machine that it is of."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = next((line.split(":")[1].strip() for line in info.splitlines() if "model name" in line), "")
    machine = {"processor": processor or platform.processor(), "torch": torch.__version__, "bfloat16": has_bfloat16()}
    found = {"machine": machine, "commit": commit.stdout.strip(), **found}
    (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Choose one of the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("arrive", "learn", "final", "speed", "picture", "one"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--mode", choices=MODES, help="of one run")
    parser.add_argument("--sums", type=Path, help="folder of SmolLM2-135M: train on sums")
    parser.add_argument("--runs", type=Path, default=Path("rounding_runs"), help="folder of the runs")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    if given.study == "one":
        run_one(given.mode, given.seeds[0], given.runs, given.sums)
    elif given.study == "learn":
        learn(given.seeds, given.runs, given.sums)
    elif given.study == "arrive":
        arrive(given.seeds, given.runs, given.sums)
    elif given.study == "final":
        final(given.seeds, given.runs)
    elif given.study == "speed":
        speed(given.seeds, given.runs, given.sums)
    elif given.study == "picture":
        picture()


if __name__ == "__main__":
    main()
