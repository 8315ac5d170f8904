"""Hand-labelled answers: each line of the files in tests/golden says what is paid, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_records import completion_of, prompt_of

from oncurve.rewards.mathematics import AnswerChecker, Mathematics

NAMES = ("mathematics", "kinds", "reported", "spellings", "independent")
"""``independent`` was labelled by the rules of docs/rewards.md alone, by somebody who did not know the grammar."""
PATHS = [Path(__file__).parents[1] / "golden" / f"{name}.jsonl" for name in NAMES]
LINES = [json.loads(line) for path in PATHS for line in path.read_text(encoding="utf-8").splitlines()]
CATEGORIES = list(dict.fromkeys(line["category"] for line in LINES))


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    made = AnswerChecker(timeout_seconds=2.0)
    yield made
    made.close()


def test_the_file_is_large_and_balanced() -> None:
    assert len(LINES) >= 400
    assert 0.3 < sum(line["expected"] is True for line in LINES) / len(LINES) < 0.7
    assert all(line["why"] for line in LINES)
    pairs = {(line["completion"], line["place"], line["reference"]) for line in LINES}
    assert len(pairs) > 0.99 * len(LINES)


@pytest.mark.proves("F95")
@pytest.mark.parametrize("category", CATEGORIES)
def test_every_label_is_met(category: str, checker: AnswerChecker) -> None:
    lines = [line for line in LINES if line["category"] == category]
    wrong: list[str] = []
    for line in lines:
        reward = Mathematics(answer_from=line["place"], checker=checker)
        graded = reward([prompt_of(line["reference"])], [completion_of(line["completion"])])[0]
        expected = line["expected"] if isinstance(line["expected"], str) else float(line["expected"])
        if (graded.error or graded.value) != expected:
            wrong.append(ascii(line) + f" got {graded.value} {graded.error}")
    assert not wrong, "\n".join(wrong)
