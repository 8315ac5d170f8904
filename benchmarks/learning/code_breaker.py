"""A code breaker in two letters: why one base learns it and another does not.

    python benchmarks/learning/code_breaker.py --seeds 0 1 2 --output benchmarks/results/code_breaker.json

The policy has three guesses at a code of two letters out of four, and is told after each how many letters are in place
and how many elsewhere: perfect play finds 13 of 16 codes. The three bases are trained from random weights on 8,000
games of people who guess a code that is still possible in half of their turns; or who never look at what they are told;
or who do look, in demonstrations whose answers lack the line break that the environment's answers have.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import oncurve
from oncurve.cli.coldstart import prepare_own
from oncurve.recipe.load import load_config, read_text
from oncurve.run.result import finish
from oncurve.run.step_log import Step
from oncurve.run.training import recipe_steps

LETTERS = "abcd"
CODES = [a + b for a in LETTERS for b in LETTERS]
GUESSES = 3
BASES = {"looks": (0.5, "\n"), "does not look": (0.0, "\n"), "looks, another layout": (0.5, "")}
"""How often people's guesses are still possible, and what stands before what they are told."""


def told(guess: str, code: str) -> str:
    """Letters in place, and letters elsewhere."""
    exact = sum(a == b for a, b in zip(guess, code, strict=True))
    common = sum(min(guess.count(letter), code.count(letter)) for letter in set(guess))
    return f"{exact}{common - exact}"


def is_guess(text: str) -> bool:
    """Two of the letters."""
    return len(text) == len(CODES[0]) and set(text) <= set(LETTERS)


class CodeBreaker:
    """The environment of a game: finding the code pays 1."""

    deterministic = True

    def reset(self, code: str, **row: object) -> None:
        self.code, self.asked = code, 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.asked += 1
        guess = action.strip()
        right = guess == self.code
        said = told(guess, self.code) if is_guess(guess) else "no"
        return said, float(right), right, self.asked == GUESSES, {}


def possible(history: list[tuple[str, str]]) -> list[str]:
    """Codes that agree with everything that was told."""
    return [code for code in CODES if all(told(guess, code) == said for guess, said in history)]


def game(rng: Random, looks: float, before: str) -> list[str]:
    """The turns of a game by somebody who takes a code that is still possible with this probability."""
    code, history, turns = rng.choice(CODES), [], []
    for _ in range(GUESSES):
        left = possible(history)
        guess = rng.choice(left if rng.random() < looks else CODES)
        turns += [before + history[-1][1]] if history else []
        turns.append(guess)
        if guess == code:
            break
        history.append((guess, told(guess, code)))
    return turns


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_base(folder: Path, looks: float, before: str) -> Path:
    """A nano model that was shown 8,000 games, four times."""
    rng = Random(7)
    shown = [{"prompt": f"Game {rng.randrange(1000)}:", "turns": game(rng, looks, before)} for _ in range(8000)]
    data = write_rows(folder.with_suffix(".jsonl"), shown)
    words = ["sft.epochs=4", "rollouts.max_completion_tokens=4", "evaluation.every_steps=0"]
    recipe, given = prepare_own(folder, data, size="nano", like=None, layers=None, seed=0, overrides=words)
    finish(recipe_steps(load_config(recipe, [*given, *words]), read_text(Path(recipe))))
    return folder


def measured(step: Step) -> dict[str, Any]:
    """Of every turn: the mean advantage of its completions, how often it is a guess, and how often a possible one."""
    advantages, guesses, possibles = defaultdict(list), defaultdict(list), defaultdict(list)
    for group, graded in zip(step.groups, step.rewards, strict=True):
        values = [reward.value or 0.0 for reward in graded]
        mean = fmean(values)
        spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        for completion, value in zip(group.completions, values, strict=True):
            said = [part.text for part in completion.segments if part.is_policy] or [completion.text]
            answers = [part.text.strip() for part in completion.segments if not part.is_policy]
            history: list[tuple[str, str]] = []
            for turn, text in enumerate(said):
                guess = text.strip()
                advantages[turn].append((value - mean) / (spread + 1e-6))
                guesses[turn].append(is_guess(guess))
                possibles[turn].append(guess in possible(history))
                if turn < len(answers) and is_guess(guess):
                    history.append((guess, answers[turn]))
    named = {"advantage": advantages, "is_guess": guesses, "is_possible": possibles}
    turns = {name: [round(fmean(found[turn]), 3) for turn in sorted(found)] for name, found in named.items()}
    return {"step": step.number, "reward": round(step.metrics["reward/mean"], 4), **turns}


def train(base: Path, seed: int, steps: int, scratch: Path) -> list[dict[str, Any]]:
    """GRPO from a base; what is measured of every tenth step."""
    trained = [{"question": f"Game {n}:", "code": CODES[(n * 7) % 16], "answer": "x"} for n in range(960)]
    held = [{"question": f"Game {n}:", "code": CODES[n % 16], "answer": "x"} for n in range(1000, 1160)]
    data = {"type": "jsonl", "template": "as_is"}
    recipe = {
        "model": str(base),
        "data": {**data, "path": str(write_rows(scratch / "train.jsonl", trained))},
        "rewards": [{"type": "environment"}],
        "algorithm": {"type": "grpo", "group_size": 16},
        "rollouts": {
            "max_completion_tokens": 24,
            "episodes": {"max_turns": 4},
            "environments": {"game": f"{Path(__file__).resolve()}:CodeBreaker"},
        },
        "optimizer": {"learning_rate": 5e-4, "schedule": "constant"},
        "run": {"steps": steps, "prompts_per_step": 16, "seed": seed, "folder": str(scratch / "runs"), "track": []},
        "evaluation": {
            "num_prompts": 160,
            "temperature": 1.0,
            "data": {**data, "path": str(write_rows(scratch / "held.jsonl", held))},
        },
    }
    path = scratch / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    every = [measured(step) for step in oncurve.Trainer.from_recipe(str(path)).steps()]
    return [row for row in every if row["step"] % 10 == 1 or row["step"] == steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=list(BASES))
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {"best_possible": 13 / 16, "steps": asked.steps, "runs": []}
    with TemporaryDirectory() as place:
        for number, name in enumerate(asked.bases):
            base = make_base(Path(place) / f"base{number}", *BASES[name])
            for seed in asked.seeds:
                curve = train(base, seed, asked.steps, Path(place))
                found["runs"].append({"base": name, "seed": seed, "curve": curve})
                asked.output.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
