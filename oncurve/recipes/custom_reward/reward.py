"""Two reward functions of one's own: oncurve calls them for each completion with the row's answer.

Return a number, None if a row does not apply, or a dictionary with "reward" and named parts, which are logged apart.
The part "correct" is what accuracy is counted by, "format" tells a badly written answer from a wrong one. A function
with the parameters (prompts, completions, **columns), as written for TRL, works here unchanged.
"""

import re

ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>\s*$")


def right(completion: str, answer: str) -> dict[str, float]:
    """1 if the completion ends with the right whole number in the answer tag, else 0."""
    match = ANSWER.search(completion)
    correct = float(match is not None and int(match.group(1)) == int(answer))
    return {"reward": correct, "correct": correct, "format": float(match is not None)}


def brief(completion: str, answer: str) -> float:
    """1 for a completion of at most 60 characters, less for each beyond, 0 from 160 on."""
    return min(max((160 - len(completion)) / 100, 0.0), 1.0)
