"""What is a completion worth? Rewards for problems.jsonl."""

import re

STEP = re.compile(r"(\d+)([+-])(\d+):")


def exact(completion: str, answer: str) -> dict[str, float]:
    """1 for the right number in exactly one pair of answer tags."""
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    is_marked = len(found) == 1
    is_right = is_marked and found[0].strip() == answer
    return {"reward": float(is_right), "correct": float(is_right), "format": float(is_marked)}


def contains(completion: str, answer: str) -> float:
    """1 if the answer is anywhere in the text. A bad idea: see below."""
    return float(answer in completion)


def works(completion: str, steps: int) -> float:
    """The fraction of the expected steps that are written down; reads the column "steps"."""
    return min(len(set(STEP.findall(completion))) / steps, 1.0)
