"""How environments are played, as evaluations record it; and a calculator whose every answer is "error"."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from oncurve.evaluate.evaluation import Evaluation, read_evaluation

HIGHEST, MOST_GUESSES = 31, 5
BEST_MEAN_GUESSES = sum(2 ** (turn - 1) * turn for turn in range(1, 6)) / (HIGHEST + 1) + 6 / (HIGHEST + 1)
"""Of a search by halves among 32 numbers: one at the first guess, two at the second, ..., the last at the sixth."""
_GUESS = re.compile(r"<tool>(\d+)</tool>(?:<result>(\w+))?")
"""A guess that finds the number ends the game, and nothing is told."""


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression.

    Args:
        expression: Numbers and signs.

    Returns:
        "error": this one is the control.
    """
    return "error"


calculator.deterministic = True  # type: ignore[attr-defined]


def game_figures(evaluation: Evaluation) -> dict[str, Any]:
    """How the guesses of a game search: found in time, how many, how far from the middle of what is left."""
    counts, distances, firsts, inside, found = [], [], [], [], 0
    for example in evaluation.examples:
        low, high = 0, HIGHEST
        guesses = [(int(number), told) for number, told in _GUESS.findall(example.completion)]
        is_found = bool(guesses) and guesses[-1][0] == int(example.answer)
        if guesses:
            firsts.append(guesses[0][0])
        if is_found:
            counts.append(len(guesses))
            found += len(guesses) <= MOST_GUESSES
        for number, told in guesses:
            inside.append(low <= number <= high)
            if low < high:
                nearest = min(max(number, 0), HIGHEST)  # 13,000,000 is as wrong as the end of the range
                distances.append(abs(nearest - (low + high) / 2) / (high - low + 1))
            if told == "higher":
                low = max(low, number + 1)
            elif told == "lower":
                high = min(high, number - 1)
    total = len(evaluation.examples)
    return {
        "found_in_five": round(found / total, 4),
        "best_possible_found_in_five": round(HIGHEST / (HIGHEST + 1), 4),
        "found_at_all": round(len(counts) / total, 4),
        "mean_guesses_of_found": round(fmean(counts), 3) if counts else None,
        "best_possible_mean_guesses": round(BEST_MEAN_GUESSES, 3),
        "distance_from_middle": round(fmean(distances), 4) if distances else None,
        "guesses_still_possible": round(fmean(inside), 4) if inside else None,
        "first_guess": [round(fmean(firsts), 2), round(pstdev(firsts), 2)] if firsts else None,
    }


def maze_figures(evaluation: Evaluation) -> dict[str, Any]:
    """How mazes are left: in time, at all, in how many moves, and how often a move runs into a wall."""
    told = [[call["answer"] for call in (example.episode or {"calls": []})["calls"]] for example in evaluation.examples]
    out = [len(answers) for answers in told if "out" in answers]
    moves = sum(map(len, told))
    return {
        "out_in_time": round(evaluation.counts.get("correct", 0) / len(told), 4),
        "out_at_all": round(len(out) / len(told), 4),
        "mean_moves_of_out": round(fmean(out), 3) if out else None,
        "moves_into_walls": round(sum(answers.count("wall") for answers in told) / moves, 4) if moves else None,
    }


PLAYS: dict[str, Callable[[Evaluation], dict[str, Any]]] = {"guess_number": game_figures, "maze": maze_figures}
"""What an evaluation says of how an environment is played."""


def figures(run: Path) -> dict[str, Any]:
    """How base and trained model play the environment of a run, and the calls of its last step."""
    from study import steps_of

    last = {"calls_at_the_end": round(steps_of(run)[-1].get("episode/calls", 0.0), 3)}
    part = run.name.rpartition("-")[0]
    if part not in PLAYS:
        return last
    played = {name: PLAYS[part](read_evaluation(run / "evaluations", name)) for name in ("base", "trained")}
    return {**last, "play": played}
