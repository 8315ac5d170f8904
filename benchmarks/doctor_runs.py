"""Does the doctor find what was planted? Runs of the embedded task made sick on purpose, and healthy ones.

Every run goes through `oncurve train` as a user would start it: 12 steps of 8 prompts and 8 completions, measured on 64
held-out problems before, during and after. Then the doctor reads the run folder. A run whose folder is complete is not
repeated, so the script can be stopped and started again, and several can share the runs (--only).

    python benchmarks/doctor_runs.py                        # all runs, then the table
    python benchmarks/doctor_runs.py --only rate_x100 healthy_grpo_1
    python benchmarks/doctor_runs.py --diagnose             # read the finished runs again, train nothing
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from oncurve.errors import RewardError, TrainingError
from oncurve.rewards.answers import find_answer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "doctor_runs.json"
SEVERE = "severe"

BUDGET = (
    "run.steps=12",
    "run.prompts_per_step=8",
    "run.rollouts_every_steps=6",
    "evaluation.num_prompts=64",
    "evaluation.num_prompts_during=64",
    "evaluation.data.limit=64",
    "evaluation.every_steps=4",
)
"""The same for every run; what a run is made sick with comes after it."""

ENDINGS = (0, RewardError.exit_code, TrainingError.exit_code)
"""How a run may end: at its last step, or stopped because of what it was made sick with."""

MINE = "benchmarks/doctor_runs.py"


def is_right(completion: str, answer: str) -> bool:
    return find_answer(completion, "answer_tag") == answer


def constant(completion: str, answer: str) -> float:
    return 1.0


def opposite(completion: str, answer: str) -> dict[str, float]:
    paid = float(not is_right(completion, answer))
    return {"reward": paid, "correct": paid}


def crashes(completion: str, answer: str) -> dict[str, float]:
    if crc32(completion.encode()) % 8 == 0:
        raise ValueError("this grader does not read every completion")
    right = float(is_right(completion, answer))
    return {"reward": right, "correct": right}


def slow(completion: str, answer: str) -> dict[str, float]:
    time.sleep(0.15)
    right = float(is_right(completion, answer))
    return {"reward": right, "correct": right}


def by_chance(completion: str, answer: str) -> float:
    return float(crc32(completion.encode()) % 2)


def long_is_good(completion: str, answer: str) -> float:
    return min(len(completion) / 250, 1.0)


def tags_are_enough(completion: str, answer: str) -> float:
    return float("</think> <answer>" in completion and completion.rstrip().endswith("</answer>"))


@dataclass(frozen=True)
class Planned:
    """One run: its name, what differs from the recipe of the demo, and what the doctor should say first."""

    name: str
    planted: str
    """In words; empty for a healthy run."""
    overrides: tuple[str, ...]
    expected: tuple[str, ...] = ()
    """Names of the checks any of which names the planted cause."""
    model_of: str | None = None
    """Run whose trained model this one starts from."""


def _custom(name: str) -> str:
    return f"rewards=[{{type: custom, function: '{MINE}:{name}'}}]"


SICK = (
    Planned("rate_x100", "learning rate x 100", ("optimizer.learning_rate=1e-2",), ("learning_rate_high",)),
    Planned(
        "huge_step",
        "no KL and a huge step: learning rate x 30, 8 updates on each batch, ratios hardly clipped",
        (
            "optimizer.learning_rate=3e-3",
            "algorithm.kl_coef=0",
            "run.completions_per_update=8",
            "algorithm.clip_high=10",
            "algorithm.clip_low=0.99",
        ),
        ("learning_rate_high", "kl_growth"),
    ),
    Planned("rate_tiny", "learning rate 1e-9", ("optimizer.learning_rate=1e-9",), ("learning_rate_low",)),
    Planned("constant_reward", "every completion earns 1", (_custom("constant"),), ("reward_constant",)),
    Planned(
        "opposite_grader", "wrong answers earn reward, right ones do not", (_custom("opposite"),), ("grader_inverted",)
    ),
    Planned(
        "crashing_grader",
        "the grader raises for one completion in 8",
        (_custom("crashes"),),
        ("grader_errors",),
    ),
    Planned("slow_grader", "grading takes 0.15 s for each completion", (_custom("slow"),), ("grading_bound",)),
    Planned("random_reward", "the reward is a coin toss", (_custom("by_chance"),), ("reward_blind",)),
    Planned("length_bonus", "longer is better", (_custom("long_is_good"),), ("reward_blind", "reward_hacking")),
    Planned(
        "format_only", "the tags alone earn reward", (_custom("tags_are_enough"),), ("reward_blind", "format_only")
    ),
    Planned("cold", "temperature 0.05", ("rollouts.temperature=0.05",), ("sampling_narrow",)),
    Planned("top_p_small", "top_p 0.1", ("rollouts.top_p=0.1",), ("sampling_narrow",)),
    Planned("cut_off", "at most 12 tokens", ("rollouts.max_completion_tokens=12",), ("truncation",)),
    Planned(
        "never_ends",
        "at least 90 of at most 96 tokens",
        ("rollouts.min_completion_tokens=90",),
        ("minimum_length", "truncation"),
    ),
    Planned(
        "easy_pairs",
        "groups of 2 on prompts that the model can already do",
        ("algorithm.group_size=2", "run.prompts_per_step=32", "data.levels=[1]"),
        ("too_easy",),
        model_of="healthy_grpo_1",
    ),
    Planned("too_easy", "one-step problems, trained model", ("data.levels=[1]",), ("too_easy",), "healthy_grpo_1"),
    Planned("too_hard", "products and sums for a model that knows sums", ("data.levels=[4]",), ("too_hard",)),
    Planned(
        "wrong_form",
        "the prompt asks for tags, the reward reads a box",
        ("rewards=[{type: mathematics, answer_from: boxed}]",),
        ("no_format",),
    ),
    Planned(
        "tiny_clip",
        "8 updates on each batch, clipped at 0.0001",
        ("run.completions_per_update=8", "algorithm.clip_low=0.0001", "algorithm.clip_high=0.0001"),
        ("clipping",),
    ),
    Planned("entropy_bonus", "an entropy bonus of 1", ("algorithm.entropy_coef=1",), ("entropy_bonus",)),
)

HEALTHY = (
    Planned("healthy_grpo_1", "", ("run.seed=1",)),
    Planned("healthy_grpo_2", "", ("run.seed=2",)),
    Planned("healthy_grpo_3", "", ("run.seed=3", "optimizer.learning_rate=5e-5")),
    Planned("healthy_grpo_4", "", ("run.seed=4", "optimizer.learning_rate=2e-4")),
    Planned("healthy_dr_grpo", "", ("run.seed=5", "algorithm.type=dr_grpo")),
    Planned("healthy_dapo", "", ("run.seed=6", "algorithm.type=dapo")),
    Planned("healthy_rloo", "", ("run.seed=7", "algorithm.type=rloo")),
    Planned("healthy_gspo", "", ("run.seed=8", "algorithm.type=gspo")),
    Planned("healthy_cispo", "", ("run.seed=9", "algorithm.type=cispo", "algorithm.group_size=12")),
    Planned("healthy_kl", "", ("run.seed=10", "algorithm.kl_coef=0.01", "run.completions_per_update=32")),
)

PLAN = (*HEALTHY, *SICK)


def ensure(run: Planned, folder: Path) -> None:
    """Train a run unless it is complete; what an earlier attempt left behind is thrown away."""
    path = folder / run.name
    if (path / "done").is_file():
        return
    shutil.rmtree(path, ignore_errors=True)
    if run.model_of is not None:
        ensure(next(other for other in PLAN if other.name == run.model_of), folder)
    model = [] if run.model_of is None else [f"model={folder / run.model_of / 'model'}"]
    place = [f"run.folder={folder}", f"run.name={run.name}"]
    oncurve = [sys.executable, "-c", "from oncurve.cli.app import main; main()"]
    command = [*oncurve, "train", "word_problems", *BUDGET, *model, *run.overrides, *place]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in ENDINGS:
        raise SystemExit(f"{run.name} failed with exit code {done.returncode}: {done.stderr[-2000:]}")
    path.mkdir(parents=True, exist_ok=True)
    ending = {"exit_code": done.returncode, "message": done.stderr.strip()[-500:]}
    (path / "done").write_text(json.dumps({**ending, "seconds": round(time.perf_counter() - started, 1)}) + "\n")


def examine(run: Planned, folder: Path) -> dict[str, Any]:
    """What the doctor says about a finished run."""
    from oncurve.doctor.diagnose import diagnose  # the graders above are imported by every run: keep that light
    from oncurve.doctor.read import read_case

    ending = json.loads((folder / run.name / "done").read_text())
    case = read_case(folder / run.name)
    findings = diagnose(case)
    measured = [row["evaluation/correct_fraction"] for row in case.metrics if "evaluation/correct_fraction" in row]
    return {
        "run": run.name,
        "planted": run.planted,
        "overrides": list(run.overrides),
        "expected": list(run.expected),
        "findings": [{"check": found.check, "severity": found.severity, "what": found.what} for found in findings],
        "is_right": is_named(run, [(found.check, found.severity) for found in findings]),
        "correct_before_and_after": [measured[0], measured[-1]] if measured else [],
        "exit_code": ending["exit_code"],
        "seconds": ending["seconds"],
    }


def is_named(run: Planned, findings: list[tuple[str, str]]) -> bool:
    """The first finding names the planted cause; on a healthy run nothing is severe."""
    if run.expected:
        return bool(findings) and findings[0][0] in run.expected
    return all(severity != SEVERE for _, severity in findings)


def main() -> None:
    from oncurve.observe.manifest import describe_run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/doctor"), help="where the runs are kept")
    parser.add_argument("--only", nargs="+", default=[run.name for run in PLAN], choices=[run.name for run in PLAN])
    parser.add_argument("--diagnose", action="store_true", help="train nothing, read the finished runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for run in PLAN:
        if run.name in arguments.only and not arguments.diagnose:
            ensure(run, arguments.folder)
            print(run.name, "finished", flush=True)
    found = [examine(run, arguments.folder) for run in PLAN if (arguments.folder / run.name / "done").is_file()]
    for result in found:
        first = result["findings"][0] if result["findings"] else {"check": "-", "severity": "-"}
        print(f"{'ok ' if result['is_right'] else 'NO '} {result['run']:18} {first['severity']:8} {first['check']}")
    arguments.output.write_text(
        json.dumps({"budget": BUDGET, "runs": found, "run": describe_run()}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
