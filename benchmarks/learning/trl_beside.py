"""The same script, model and rows under TRL and under `oncurve trl`, with forced completions: losses, rewards, time.

    python benchmarks/bench.py trl_beside

Every step takes all prompts, so that the order of rows does not matter, and completion g of a prompt in step s is a
function of (prompt, g, s) in both. What is compared is everything behind sampling: rewards, advantages, the loss, its
gradient, AdamW and the schedule, since each step starts from weights that the steps before it made. With --sampled
completions are drawn, and the time of a step is that of sampling and training together; losses are then not comparable:

    python benchmarks/bench.py trl_beside --sampled --repeats 3
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

from record import ROOT, Record

PROMPTS, GROUP, LENGTH = 4, 4, 24
SCRIPT = f"""
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

def correct(completions, gold, **kwargs):
    return [float(str(g) in c) for c, g in zip(completions, gold)]

def short(completions, **kwargs):
    return [-0.01 * len(c) for c in completions]

rows = [{{"prompt": f"How much is {{n}} + 1?", "gold": n + 1}} for n in range({PROMPTS})]
args = GRPOConfig(
    output_dir="out", max_steps=STEPS, num_generations={GROUP}, per_device_train_batch_size={PROMPTS * GROUP},
    max_completion_length={LENGTH}, learning_rate=2e-5, bf16=False, use_cpu=True, logging_steps=1, beta=BETA,
    loss_type=LOSS, reward_weights=[1.0, 0.5], save_strategy="no", report_to="none", gradient_checkpointing=False,
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=[correct, short], args=args, train_dataset=Dataset.from_list(rows))
trainer.train()
"""
FOUND = "FOUND "
"""What a process of one side prints before its result."""
LOSSES = (("dapo", 0.0), ("grpo", 0.04), ("dr_grpo", 0.0), ("bnpo", 0.04))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sampled", action="store_true", help="draw completions, for the time of a whole step")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, taking turns; times are medians")
    parser.add_argument("--child", choices=["trl", "oncurve"], help=argparse.SUPPRESS)
    parser.add_argument("--loss", default="dapo", help=argparse.SUPPRESS)
    parser.add_argument("--beta", type=float, default=0.0, help=argparse.SUPPRESS)


def name_of(asked: argparse.Namespace) -> str:
    return "trl_beside_speed" if asked.sampled else "trl_beside"


def bench(asked: argparse.Namespace, record: Record) -> None:
    if asked.child:
        one_side(asked)
        return
    record.facts["completions_per_step"] = PROMPTS * GROUP
    for loss, beta in LOSSES[:1] if asked.sampled else LOSSES:
        runs: dict[str, list[Any]] = {"trl": [], "oncurve": []}
        for _ in range(asked.repeats):
            for side in runs:
                runs[side].append(apart(asked, side, loss, beta))
        record.add(beside(loss, beta, runs))


def apart(asked: argparse.Namespace, side: str, loss: str, beta: float) -> list[dict[str, float]]:
    """One run of a side: a row for each step."""
    words = ["--loss", loss, "--beta", str(beta), "--steps", str(asked.steps)]
    rows: list[dict[str, float]] = in_child("trl_beside", side, words + ["--sampled"] * asked.sampled)
    return rows


def in_child(name: str, side: str, words: Sequence[str]) -> Any:
    """What a benchmark prints of one side behind ``FOUND``, in a process of its own. Raises SystemExit if it fails."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "bench.py"), name, "--child", side, *words]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=3600)
    lines = [line for line in done.stdout.splitlines() if line.startswith(FOUND)]
    if done.returncode or not lines:
        raise SystemExit(f"{side}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix(FOUND))


def beside(loss: str, beta: float, runs: dict[str, list[Any]]) -> dict[str, Any]:
    """Both sides step by step, and the largest difference of each quantity."""
    theirs, ours = runs["trl"][0], runs["oncurve"][0]
    found: dict[str, Any] = {"loss_type": loss, "beta": beta}
    for key in ("reward", "loss", "grad_norm", "learning_rate"):
        found[key] = {"trl": [row[key] for row in theirs], "oncurve": [row[key] for row in ours]}
        found[key]["largest_difference"] = max(
            abs(a - b) for a, b in zip(found[key]["trl"], found[key]["oncurve"], strict=True)
        )
    for side, each in runs.items():
        found[f"seconds_per_step_{side}"] = median(row["seconds"] for rows in each for row in rows[1:])
    return found


def one_side(asked: argparse.Namespace) -> None:
    """The script under one of the two; its rows are printed."""
    with ExitStack() as stack:
        run_side(asked, stack)


def run_side(asked: argparse.Namespace, stack: ExitStack) -> None:
    """The same, with what it changes in this process put back at the end."""
    from oncurve.observe.run_model import EMBEDDED

    if asked.child == "oncurve":
        from oncurve.trl.names import trl_resolved

        stack.enter_context(trl_resolved())
        if not asked.sampled:
            force_ours()
    elif not asked.sampled:
        force_theirs()
    names = {"STEPS": asked.steps, "BETA": asked.beta, "LOSS": asked.loss, "MODEL": str(EMBEDDED)}
    space: dict[str, Any] = {"__name__": "script", **names}
    marks = [time.perf_counter()]
    exec(compile(SCRIPT.replace("trainer.train()", ""), "script.py", "exec"), space)
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    trainer = space["trainer"]
    trainer.add_callback(Clock())
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    spent = [b - a for a, b in pairwise(marks)]
    keys = ("reward", "loss", "grad_norm", "learning_rate")
    rows = [{**{key: row[key] for key in keys}, "seconds": s} for row, s in zip(logged, spent, strict=True)]
    sys.stdout.write(f"\n{FOUND}" + json.dumps(rows) + "\n")


def forced(prompt_ids: tuple[int, ...], place: int, step: int, end: int) -> list[int]:
    """Completion ``place`` of a prompt in a step: tokens of the vocabulary, some ended, some cut off."""
    draw = random.Random(repr((tuple(prompt_ids), place, step)))
    length = draw.randint(3, LENGTH)
    ids = [draw.randrange(5, 400) for _ in range(length)]
    return ids if length == LENGTH else [*ids[:-1], end]


def force_theirs() -> None:
    """TRL's trainer takes forced completions in the place of generating."""
    from trl import GRPOTrainer

    def generate(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        seen: dict[tuple[int, ...], int] = {}
        completions = []
        for ids in prompt_ids:
            place = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
            completions.append(forced(tuple(ids), place, self.state.global_step, self.processing_class.eos_token_id))
        return completions, None

    GRPOTrainer._generate_single_turn = generate


def force_ours() -> None:
    """The engine gives forced completions in the place of sampling."""
    from oncurve.core.records import Completion, Group
    from oncurve.run import guards
    from oncurve.sample.engine import InProcessEngine

    guards.MISMATCH_LIMIT = guards.SAMPLED_LIMIT = float(
        "inf"
    )  # the model finds forced tokens unlikely, which ends a real run

    def sample(self: Any, request: Any) -> list[Group]:
        tokenizer = self._policy.tokenizer
        end = tokenizer.eos_token_id
        groups = []
        for prompt in request.prompts:
            made = [forced(prompt.prompt_ids, place, request.step, end) for place in range(request.group_size)]
            completions = tuple(
                Completion(
                    prompt.prompt_ids, tuple(ids), tokenizer.decode(ids, skip_special_tokens=True), (-1.0,) * len(ids),
                    "stop" if ids[-1] == end else "length", self._version, place,
                )
                for place, ids in enumerate(made)
            )  # fmt: skip
            groups.append(Group(prompt, completions))
            if self.on_group is not None:
                self.on_group(groups[-1])
        return groups

    InProcessEngine.sample = sample
