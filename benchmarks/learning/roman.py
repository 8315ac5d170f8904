"""GRPO on a small model from random weights: Roman numerals, by learning rate and prompts per step.

A model of 0.1 million weights learns 1,500 numerals in two passes, which answers about half of the others. Then GRPO
with the answer alone as its reward. A run that is in the folder already is not made again.

    python benchmarks/learning/roman.py           # about twenty minutes on two cores; the table of docs/sft.md
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from oncurve.observe.manifest import describe_run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "roman.json"
SIGNS = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V"}
RUNS = (
    (16, "1e-6", 12), (16, "1e-5", 60), (16, "3e-5", 60), (16, "1e-4", 60), (16, "3e-4", 12),
    (128, "1e-4", 40), (128, "5e-4", 40), (128, "1e-3", 20), (128, "2e-4", 100), (128, "5e-4", 100),
)  # fmt: skip
"""Prompts per step, learning rate, steps."""
REWARD = "def exact(completion, answer):\n    return float(completion.strip() == answer)\n"
RECIPE = """model: runs/quarter
data: {path: problems.jsonl, template: plain}
rewards: [{type: custom, function: "reward.py:exact"}]
rollouts: {max_completion_tokens: 8}
"""


def roman(number: int) -> str:
    text = ""
    for value, sign in {**SIGNS, 4: "IV", 1: "I"}.items():
        count, number = divmod(number, value)
        text += sign * count
    return text


def write_task(folder: Path) -> None:
    """The demonstrations, the problems, the reward and the recipe."""
    numbers = list(range(1, 4000))
    random.Random(0).shuffle(numbers)
    shown = [{"prompt": f"{roman(n)} is", "completion": f" {n}"} for n in numbers[:1500]]
    asked = [{"question": f"{roman(n)} is", "answer": str(n)} for n in numbers[1500:]]
    for name, rows in (("demonstrations", shown), ("problems", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")


def command(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "oncurve", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def train(folder: Path, prompts: int, rate: str, steps: int) -> dict[str, Any]:
    """One run, and how many of the 500 test problems it answers."""
    name = f"p{prompts}-{rate}-{steps}"
    if not (folder / "runs" / name / "comparison.json").is_file():
        settings = (f"run.prompts_per_step={prompts}", f"optimizer.learning_rate={rate}", f"run.steps={steps}")
        command(folder, "train", "recipe.yaml", f"run.name={name}", "run.save_every_steps=0", *settings)
    compared = json.loads((folder / "runs" / name / "comparison.json").read_text(encoding="utf-8"))
    [correct] = [row for row in compared["rows"] if row["name"] == "correct"]
    shares = {side: correct[side]["successes"] / correct[side]["total"] for side in ("before", "after")}
    row = {"prompts_per_step": prompts, "learning_rate": float(rate), "steps": steps, **shares}
    return {**row, "change": [correct["low"], correct["high"]], "p_value": correct["p_value"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "roman", help="where the runs are kept")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_task(asked.folder)
    if not (asked.folder / "runs" / "quarter").exists():
        begin = ("--data", "demonstrations.jsonl", "--size", "nano", "--output", "runs/quarter")
        command(asked.folder, "coldstart", *begin, "sft.epochs=2", "rollouts.max_completion_tokens=8")
    runs = []
    for each in RUNS:
        runs.append(train(asked.folder, *each))
        sys.stdout.write(f"{runs[-1]}\n")
    asked.output.write_text(json.dumps({"runs": runs, "run": describe_run()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
