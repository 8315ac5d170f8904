"""Categories of graded completions, and the refusal to go on where grading fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from oncurve.core.errors import RewardError
from oncurve.core.records import Reward

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = Path(__file__).resolve().parents[1]

Category = Literal["correct", "wrong", "bad_format", "graded", "error"]
"""Category of a completion in an evaluation; "graded" where no reward says what is correct."""


def categorize(reward: Reward) -> Category:
    """The category of a completion in an evaluation: form first, since an answer in the wrong form was not given.

    >>> categorize(Reward(value=0.0, parts={"correct": 0.0, "format": 1.0}))
    'wrong'
    """
    if reward.error is not None:
        return "error"
    if reward.parts.get("format", 1.0) < 1.0:
        return "bad_format"
    if "correct" not in reward.parts:
        return "graded"
    return "correct" if reward.parts["correct"] >= 1.0 else "wrong"


def check_errors(rewards: Sequence[Reward], *, max_error_fraction: float = 0.2, step: int | None = None) -> None:
    """Refuses a batch in which too many completions could not be graded; ``step`` is named where there is one.

    "not_applicable" is no failure of a grader and does not count.

    Raises RewardError with the most frequent kind and an example.
    """
    failed = [reward for reward in rewards if reward.is_failure]
    if len(failed) <= max_error_fraction * len(rewards):
        return
    where = "" if step is None else f"step {step}: "
    raise RewardError(
        f"{where}grading failed for {len(failed)} of {len(rewards)} completions (at most {max_error_fraction:.0%} may "
        f"fail), {describe_failures(failed)}. Correct the reward function or the data, or allow more failures with "
        f"run.max_error_fraction={_next_tenth(len(failed) / len(rewards)):g}"
    )


def check_any_graded(rewards: Sequence[Reward], *, where: str) -> None:
    """Refuses a batch in which nothing was graded at all; ``where`` begins the message.

    Raises RewardError with what each reward gave.
    """
    if not rewards or any(reward.value is not None for reward in rewards):
        return
    raise RewardError(f"{where}: none of the {len(rewards)} completions was graded, {describe_failures(rewards)}")


def describe_failures(failed: Sequence[Reward]) -> str:
    """The most frequent kind of failure with an example and where in the user's code it happened."""
    kinds = [str(reward.error) for reward in failed]
    kind = max(sorted(set(kinds)), key=kinds.count)
    example = next(reward for reward in failed if reward.error == kind)
    frames = [frame for frame in _FRAME.findall(example.trace) if not Path(frame[0]).is_relative_to(_OURS)]
    location = f" ({Path(frames[-1][0]).name}, line {frames[-1][1]})" if frames else ""
    return f"most often as {kind!r}: {example.detail or 'no detail'}{location}"


def _next_tenth(fraction: float) -> float:
    return min(1.0, (int(10 * fraction) + 1) / 10)
