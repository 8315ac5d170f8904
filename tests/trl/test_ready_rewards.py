"""The rewards that TRL's command has by name give what TRL's own give."""

from __future__ import annotations

import pytest

from oncurve.trl.ready_rewards import accuracy_reward


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"The answer is \(4\).", 1.0),
        (r"Final answer: \[4\]", 1.0),
        (r"So \boxed{4}, not $5$", 1.0),
        ("The answer is $5$.", 0.0),
        ("Thus $x=3$ and $y=4$.", 0.0),
        (r"\(4\)", 0.0),
        ("4", 0.0),
    ],
)
def test_an_answer_is_boxed_or_called_one(completion: str, value: float) -> None:
    assert accuracy_reward([completion], ["4"]) == [value]
    assert accuracy_reward([completion], ["We get $2+2=4$, so $4$"]) == [value]
