"""A code breaker in two letters: its environment, its demonstrations, and how its turns are played.

The study is `python benchmarks/bench.py study code_breaker --seeds 0 1 2`.

The policy has three guesses at a code of two letters out of four, and is told after each how many letters are in place
and how many elsewhere: perfect play finds 13 of 16 codes. The three bases are trained from random weights on 8,000
games of people who guess a code that is still possible in half of their turns; or who never look at what they are told;
or who do look, in demonstrations whose answers lack the line break that the environment's answers have.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import yaml

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


def measured(step: Any) -> dict[str, Any]:
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


def turns(run: Path) -> dict[str, Any]:
    """Every tenth step of a run, turn by turn; the record has to hold all of it."""
    from oncurve.history.past import open_run  # lazy: every run imports the environment above

    past = open_run(run)
    last = max(past.steps)
    return {"turns": [measured(past.step(number)) for number in past.steps if number % 10 == 1 or number == last]}


COLDSTARTS = {
    name: (
        "--data", f"{name}.jsonl", "--size", "nano", "sft.epochs=4", "rollouts.max_completion_tokens=4",
        "evaluation.every_steps=0",
    )
    for name in BASES
}  # fmt: skip


def write(folder: Path) -> None:
    """8,000 games of each kind, the prompts, and the recipe."""
    for name, (looks, before) in BASES.items():
        rng = Random(7)
        shown = [{"prompt": f"Game {rng.randrange(1000)}:", "turns": game(rng, looks, before)} for _ in range(8000)]
        write_rows(folder / f"{name}.jsonl", shown)
    trained = [{"question": f"Game {n}:", "code": CODES[(n * 7) % 16], "answer": "x"} for n in range(960)]
    held = [{"question": f"Game {n}:", "code": CODES[n % 16], "answer": "x"} for n in range(1000, 1160)]
    data = {"type": "jsonl", "template": "as_is"}
    recipe = {
        "model": "embedded",
        "data": {**data, "path": str(write_rows(folder / "train.jsonl", trained))},
        "rewards": [{"type": "environment"}],
        "algorithm": {"type": "grpo", "group_size": 16},
        "rollouts": {
            "max_completion_tokens": 24,
            "episodes": {"max_turns": 4},
            "environments": {"game": f"{Path(__file__).resolve()}:CodeBreaker"},
        },
        "optimizer": {"learning_rate": 5e-4, "schedule": "constant"},
        "run": {"steps": 150, "prompts_per_step": 16, "track": []},
        "evaluation": {
            "num_prompts": 160,
            "temperature": 1.0,
            "data": {**data, "path": str(write_rows(folder / "held.jsonl", held))},
        },
    }
    (folder / "code_breaker.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
