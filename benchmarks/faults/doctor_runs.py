"""The doctor's findings on short runs of the embedded model, healthy ones and ones with a planted fault.

Each run trains 24 steps of 8 prompts as `oncurve train` would. A finding above a note is right if the fault of the run
explains it, a consequence if the doctor itself says that it follows from another finding, and else a false alarm. A run
whose folder is complete is not repeated.

    python benchmarks/bench.py doctor_runs --detach              # all runs, then the table; about an hour on two cores
    python benchmarks/bench.py doctor_runs --only rate_x100      # some of them
    python benchmarks/bench.py doctor_runs --diagnose            # read the finished runs again, train nothing
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from oncurve.rewards.answer_locations import find_answer

if TYPE_CHECKING:  # every run imports the rewards below: that stays light
    from record import Record

ROOT = Path(__file__).resolve().parents[2]
MINE = "benchmarks/faults/doctor_runs.py"
BUDGET = (
    "run.steps=24",
    "run.prompts_per_step=8",
    "run.rollouts_every_steps=6",
    "evaluation.num_prompts=64",
    "evaluation.num_prompts_during=64",
    "evaluation.data.limit=64",
    "evaluation.every_steps=8",
)
"""The same for every run; what differs comes after it."""


def is_right(completion: str, answer: str) -> bool:
    return find_answer(completion, "answer_tag") == answer


def zero(completion: str, answer: str) -> float:
    return 0.0


def one(completion: str, answer: str) -> float:
    return 1.0


def opposite(completion: str, answer: str) -> dict[str, float]:
    value = float(not is_right(completion, answer))
    return {"reward": value, "correct": value}


def crashes(completion: str, answer: str) -> float:
    if crc32(completion.encode()) % 8 == 0:
        raise ValueError("this grader does not read every completion")
    return float(is_right(completion, answer))


def no_number(completion: str, answer: str) -> float:
    return math.nan if crc32(completion.encode()) % 8 == 0 else float(is_right(completion, answer))


def slow(completion: str, answer: str) -> float:
    time.sleep(0.15)
    return float(is_right(completion, answer))


def by_chance(completion: str, answer: str) -> float:
    return float(crc32(completion.encode()) % 2)


def long_is_good(completion: str, answer: str) -> float:
    return min(len(completion) / 250, 1.0)


def short_is_good(completion: str, answer: str) -> float:
    return max(1 - len(completion) / 100, 0.0)


def tags_are_enough(completion: str, answer: str) -> float:
    return float("</think> <answer>" in completion and completion.rstrip().endswith("</answer>"))


def similarity(completion: str, answer: str) -> float:
    """A graded reward: at most 0.9, so that nothing is ever called correct."""
    return 0.9 * SequenceMatcher(None, find_answer(completion, "answer_tag") or "", answer).ratio()


def up_to_ten(completion: str, answer: str) -> float:
    return 10.0 * is_right(completion, answer) + float("<answer>" in completion)


def penalty(completion: str, answer: str) -> float:
    return 0.0 if is_right(completion, answer) else -1.0


def half(completion: str, answer: str) -> float:
    return 0.5


def format_first(completion: str, answer: str) -> float:
    return tags_are_enough(completion, answer) + 0.05 * is_right(completion, answer)


def longer_and_right(completion: str, answer: str) -> float:
    return 0.2 * is_right(completion, answer) + min(len(completion) / 400, 1.0)


def one_habit(completion: str, answer: str) -> float:
    """A reward for few different characters, which one text for every prompt earns best."""
    return max(1 - len(set(completion)) / 30, 0.0)


def fails_often(completion: str, answer: str) -> float:
    if crc32(completion.encode()) % 3 == 0:
        raise KeyError("label")
    return float(is_right(completion, answer))


class Steps:
    """An environment with steps and no tools: the answer is given in one go."""

    def reset(self, answer: str, **row: Any) -> None:
        self.answer = answer

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(is_right(action, self.answer)), True, False, {}


class Crashing(Steps):
    """The same, and one episode of five crashes."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if crc32(action.encode()) % 5 == 0:
            raise RuntimeError("this environment does not read every action")
        return super().step(action)


class OftenCrashing(Steps):
    """The same, and every second episode crashes."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if crc32(action.encode()) % 2 == 0:
            raise ConnectionError("the simulator does not answer")
        return super().step(action)


@dataclass(frozen=True)
class Planned:
    """One run: its name, what was planted, what differs from the recipe, and the checks that the fault explains."""

    name: str
    planted: str
    """In words; empty for a healthy run."""
    overrides: tuple[str, ...]
    expected: tuple[str, ...] = ()
    """Checks any of which names the planted cause; it is found if the first finding is one of them."""
    explained: tuple[str, ...] = ()
    """Checks that may speak beside them, because what they say is true of such a run."""
    model_of: str | None = None
    """Run whose trained model this one starts from."""
    recipe: str = "word_problems"


def _custom(name: str) -> str:
    return f"rewards=[{{type: custom, function: '{MINE}:{name}'}}]"


def _environment(name: str) -> tuple[str, ...]:
    return (f"rollouts.environments={{it: '{MINE}:{name}'}}", "rewards=[{type: environment}]")


DEAD = ("dead_groups", "skipped_updates")
GONE = ("entropy_explosion", "entropy_collapse", "length_explosion", "length_collapse", "kl_growth", "mismatch")
HEALTHY = (
    Planned("seed_1", "", ("run.seed=1",)),
    Planned("seed_2", "", ("run.seed=2",)),
    Planned("rate_half", "", ("run.seed=3", "optimizer.learning_rate=5e-5")),
    Planned("rate_double", "", ("run.seed=4", "optimizer.learning_rate=2e-4")),
    Planned("dr_grpo", "", ("run.seed=5", "algorithm.type=dr_grpo")),
    Planned("dapo", "", ("run.seed=6", "algorithm.type=dapo")),
    Planned("rloo", "", ("run.seed=7", "algorithm.type=rloo")),
    Planned("gspo", "", ("run.seed=8", "algorithm.type=gspo")),
    Planned("cispo", "", ("run.seed=9", "algorithm.type=cispo", "algorithm.group_size=12")),
    Planned("kl", "", ("run.seed=10", "algorithm.kl_coef=0.01", "run.completions_per_update=32")),
    Planned("lora", "", ("run.seed=11", "policy.lora={rank: 8}", "optimizer.learning_rate=1e-3")),
    Planned("temperature", "", ("run.seed=12", "rollouts.temperature=0.8")),
    Planned("groups_of_4", "", ("run.seed=13", "algorithm.group_size=4", "run.prompts_per_step=16")),
    Planned("refill", "", ("run.seed=14", "run.refill_rounds=2")),
    Planned("similarity", "", ("run.seed=15", _custom("similarity"))),
    Planned("up_to_ten", "", ("run.seed=16", _custom("up_to_ten"))),
    Planned("penalty", "", ("run.seed=17", _custom("penalty"))),
    Planned("environment_with_steps", "", ("run.seed=18", *_environment("Steps"))),
    Planned("sampled_evaluation", "", ("run.seed=19", "evaluation.temperature=1.0")),
    Planned("sft", "", ("run.seed=20", "model=embedded", "data.limit=400"), recipe="word_problems/base"),
)
SICK = (
    Planned("always_0", "the reward is always 0", (_custom("zero"),), ("reward_constant",), DEAD),
    Planned("always_1", "the reward is always 1", (_custom("one"),), ("reward_constant",), DEAD),
    Planned("opposite", "wrong answers earn the reward", (_custom("opposite"),), ("grader_inverted",), DEAD),
    Planned(
        "crashes",
        "the reward raises for one completion in 8",
        (_custom("crashes"), "run.max_error_fraction=0.5"),
        ("grader_errors",),
    ),
    Planned(
        "no_number",
        "the reward is NaN for one completion in 8",
        (_custom("no_number"), "run.max_error_fraction=0.5"),
        ("grader_errors",),
    ),
    Planned("slow", "grading takes 0.15 s for each completion", (_custom("slow"),), ("grading_bound",)),
    Planned("by_chance", "the reward is a coin toss", (_custom("by_chance"),), ("reward_blind",), ("not_learning",)),
    Planned("long_is_good", "longer is better", (_custom("long_is_good"),), ("reward_blind", "reward_hacking"), GONE),
    Planned(
        "short_is_good",
        "shorter is better",
        (_custom("short_is_good"), "optimizer.learning_rate=5e-4"),
        ("reward_blind", "reward_hacking", "grader_inverted", "length_collapse", "no_format"),
        (*GONE, *DEAD, "learning_rate_high"),
    ),
    Planned(
        "tags", "the tags alone earn the reward", (_custom("tags_are_enough"),), ("reward_blind", "format_only"), DEAD
    ),
    Planned("rate_x100", "learning rate x 100", ("optimizer.learning_rate=1e-2",), ("learning_rate_high",), GONE),
    Planned(
        "huge_steps",
        "learning rate x 30, 8 updates on each batch, hardly clipped",
        (
            "optimizer.learning_rate=3e-3",
            "run.completions_per_update=8",
            "algorithm.clip_high=10",
            "algorithm.clip_low=0.99",
        ),
        ("learning_rate_high", "kl_growth"),
        GONE,
    ),
    Planned(
        "kl_explosion",
        "learning rate x 20 with a weak KL term",
        ("optimizer.learning_rate=2e-3", "algorithm.kl_coef=0.001"),
        ("learning_rate_high", "kl_growth"),
        GONE,
    ),
    Planned(
        "rate_tiny", "learning rate 1e-9", ("optimizer.learning_rate=1e-9",), ("learning_rate_low",), ("not_learning",)
    ),
    Planned(
        "kl_strong",
        "a KL coefficient of 20",
        ("algorithm.kl_coef=20", "run.completions_per_update=16"),
        ("kl_too_strong", "learning_rate_low"),
        ("not_learning",),
    ),
    Planned("cold", "temperature 0.05", ("rollouts.temperature=0.05",), ("sampling_narrow",), DEAD),
    Planned("top_p_small", "top_p 0.1", ("rollouts.top_p=0.1",), ("sampling_narrow",), DEAD),
    Planned("cut_off", "at most 12 tokens", ("rollouts.max_completion_tokens=12",), ("truncation",), DEAD),
    Planned(
        "cut_half",
        "at most 34 tokens, which most completions need",
        ("rollouts.max_completion_tokens=34",),
        ("truncation",),
    ),
    Planned(
        "never_ends",
        "at least 90 of at most 96 tokens",
        ("rollouts.min_completion_tokens=90",),
        ("minimum_length", "truncation"),
    ),
    Planned(
        "wrong_stop", "a stop text that is before the answer", ("rollouts.stop=['</think>']",), ("no_format",), DEAD
    ),
    Planned(
        "wrong_form",
        "the prompt asks for tags, the reward reads a box",
        ("rewards=[{type: mathematics, answer_from: boxed}]",),
        ("no_format",),
        DEAD,
    ),
    Planned(
        "pairs",
        "groups of 2 on prompts that the model can do already",
        ("algorithm.group_size=2", "run.prompts_per_step=32", "data.levels=[1]"),
        ("too_easy",),
        DEAD,
        model_of="rate_double",
    ),
    Planned("too_hard", "products and sums for a model that knows sums", ("data.levels=[4]",), ("too_hard",), DEAD),
    Planned(
        "tiny_clip",
        "8 updates on each batch, clipped at 0.0001",
        ("run.completions_per_update=8", "algorithm.clip_low=0.0001", "algorithm.clip_high=0.0001"),
        ("clipping",),
    ),
    Planned("entropy_bonus", "an entropy bonus of 1", ("algorithm.entropy_coef=1",), ("entropy_bonus",), GONE),
    Planned(
        "few_prompts",
        "13 prompts, each seen 15 times",
        ("data.limit=16", "optimizer.learning_rate=5e-4"),
        ("overfitting", "too_easy"),
        (*GONE, *DEAD),
    ),
    Planned("unused_tool", "a tool that the model does not know", ("rollouts.tools=[calculator]",), ("tools_unused",)),
    Planned(
        "crashing",
        "the environment crashes for one episode in 5",
        (*_environment("Crashing"), "run.max_error_fraction=0.5"),
        ("environments_fail",),
        ("grader_errors",),
    ),
    Planned(
        "sft_rate",
        "a supervised stage at 1,000 times its learning rate",
        ("model=embedded", "data.limit=400", "optimizer.learning_rate=3"),
        ("learning_rate_high", "not_finite", "oscillation", "gradient_spikes"),
        recipe="word_problems/base",
    ),
)
MORE = (
    Planned(
        "saturated",
        "a model that solves its prompts from the start",
        ("run.seed=31", "data.levels=[1]"),
        ("too_easy",),
        DEAD,
        model_of="rate_double",
    ),
    Planned(
        "lora_rate_x100",
        "LoRA at 100 times its learning rate",
        ("run.seed=32", "policy.lora={rank: 8}", "optimizer.learning_rate=1e-1"),
        ("learning_rate_high", "not_finite"),
        GONE,
    ),
    Planned(
        "kl_runs_away",
        "16 updates on each batch at 10 times the rate, with a KL term that hardly holds",
        (
            "run.seed=33",
            "optimizer.learning_rate=1e-3",
            "run.completions_per_update=4",
            "algorithm.kl_coef=0.00001",
        ),
        ("learning_rate_high", "kl_growth"),
        (*GONE, "clipping"),
    ),
    Planned(
        "all_cut",
        "at most 20 tokens, and truncated completions are left out of the loss",
        ("run.seed=34", "rollouts.max_completion_tokens=20", "algorithm.mask_truncated=true"),
        ("truncation",),
        DEAD,
    ),
    Planned("always_half", "the reward is always 0.5", ("run.seed=35", _custom("half")), ("reward_constant",), DEAD),
    Planned(
        "format_hacked",
        "the format earns 1, the right answer 0.05",
        ("run.seed=36", _custom("format_first"), "optimizer.learning_rate=3e-4"),
        ("reward_blind", "format_only", "reward_hacking"),
        DEAD,
    ),
    Planned(
        "lengths_grow",
        "length earns five times what the right answer does",
        (
            "run.seed=37",
            _custom("longer_and_right"),
            "optimizer.learning_rate=3e-4",
            "rollouts.max_completion_tokens=192",
        ),
        ("reward_blind", "reward_hacking", "reward_exploited", "length_explosion"),
        (*GONE, "truncation"),
    ),
    Planned(
        "entropy_falls",
        "one text for every prompt earns most",
        ("run.seed=38", _custom("one_habit"), "optimizer.learning_rate=5e-4"),
        ("reward_blind", "reward_hacking", "reward_exploited", "grader_inverted", "entropy_collapse"),
        (*GONE, *DEAD, "learning_rate_high", "no_format"),
    ),
    Planned(
        "half_crash",
        "the environment crashes in every second episode",
        ("run.seed=39", *_environment("OftenCrashing"), "run.max_error_fraction=0.9"),
        ("environments_fail",),
        ("grader_errors",),
    ),
    Planned(
        "fails_often",
        "the reward raises for every third completion",
        ("run.seed=40", _custom("fails_often"), "run.max_error_fraction=0.9"),
        ("grader_errors",),
    ),
)
"""Written after the checks had been tuned on the runs above: the first finding named the fault in nine of them. For the
tenth, entropy_falls, the order of two findings was mended."""
PLAN = (*HEALTHY, *SICK, *MORE)


def train(run: Planned, folder: Path) -> None:
    """Train a run unless it is complete; what an earlier attempt left behind is thrown away."""
    path = folder / run.name
    if (path / "done").is_file():
        return
    shutil.rmtree(path, ignore_errors=True)
    if run.model_of is not None:
        train(next(other for other in PLAN if other.name == run.model_of), folder)
    model = [] if run.model_of is None else [f"model={folder / run.model_of / 'model'}"]
    command, budget = ("sft", BUDGET[3:4]) if run.recipe.endswith("base") else ("train", BUDGET)
    words = [command, run.recipe, *budget, *model, *run.overrides, f"run.folder={folder}", f"run.name={run.name}"]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | os.environ
    done = subprocess.run(
        [sys.executable, "-m", "oncurve", *words], cwd=ROOT, env=quiet, capture_output=True, text=True
    )
    path.mkdir(parents=True, exist_ok=True)
    (path / "done").write_text(json.dumps({"exit_code": done.returncode, "message": done.stderr.strip()[-500:]}) + "\n")


def examine(run: Planned, folder: Path) -> dict[str, Any]:
    """What the doctor says about a finished run, and which of it is right."""
    from oncurve.doctor.case import read_case
    from oncurve.doctor.diagnose import diagnose  # the rewards above are imported by every run: keep that light

    findings = diagnose(read_case(folder / run.name))
    alarms = [finding for finding in findings if finding.severity != "note"]
    known = {*run.expected, *run.explained, "slowing"}  # which is true where other work shares the machine
    return {
        "run": run.name,
        "planted": run.planted,
        "expected": list(run.expected),
        "found": [f"{finding.severity} {finding.check}" for finding in findings],
        "is_found": bool(alarms) and alarms[0].check in run.expected,
        "false_alarms": [one.check for one in alarms if one.check not in known and one.follows is None],
        **json.loads((folder / run.name / "done").read_text(encoding="utf-8")),
    }


def by_check(runs: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """For every check: in how many runs its fault was planted, in how many of those it spoke, and its false alarms."""
    table: dict[str, dict[str, int]] = {}
    for run in runs:
        spoke = {words.split()[1] for words in run["found"]}
        for check in {*run["expected"], *run["false_alarms"]}:
            row = table.setdefault(check, {"planted": 0, "found": 0, "false_alarms": 0})
            row["planted"] += check in run["expected"]
            row["found"] += check in run["expected"] and check in spoke
            row["false_alarms"] += check in run["false_alarms"]
    return dict(sorted(table.items()))


def options(parser: argparse.ArgumentParser) -> None:
    names = [run.name for run in PLAN]
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "doctor", help="where the runs are kept")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="RUN", help=", ".join(names))
    parser.add_argument("--diagnose", action="store_true", help="train nothing, read the finished runs")


def bench(asked: argparse.Namespace, record: Record) -> None:
    folder = asked.folder.absolute()
    chosen = () if asked.diagnose else tuple(run for run in PLAN if run.name in asked.only)
    for number, run in enumerate(chosen, start=1):
        train(run, folder)
        print(f"{run.name} finished", flush=True)
        record.progress(number, len(chosen))
    record.rows = [examine(run, folder) for run in PLAN if (folder / run.name / "done").is_file()]
    for run in record.rows:
        mark = "FALSE" if run["false_alarms"] else "ok" if run["is_found"] or not run["expected"] else "MISSED"
        print(f"{mark:7}{run['run']:24}{run['exit_code']} {', '.join(run['found'])}")
    record.facts |= {"budget": list(BUDGET), "checks": by_check(record.rows)}
