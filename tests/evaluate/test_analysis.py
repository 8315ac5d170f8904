"""Does the page of an evaluation show every category with its share and examples?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncurve.evaluate.analysis import TITLES, analysis_markdown
from oncurve.evaluate.evaluation import CATEGORIES, Evaluation, Example
from oncurve.rewards.weighted_sum import Category


def example(index: int, category: Category, text: str, *, anyway: bool | None = None) -> Example:
    return Example(
        index=index, question=f"question {index}", answer="5", completion=text, num_tokens=10 * index,
        finish_reason="stop", category=category, reward=None, correct_any_format=anyway, detail="found: 5",
    )  # fmt: skip


EVALUATION = Evaluation(
    name="trained",
    examples=(
        example(1, "correct", "it is 5", anyway=True),
        example(2, "wrong", "it is 6", anyway=False),
        example(3, "bad_format", "five\n# not a title", anyway=True),
        example(4, "wrong", "it is " + "7" * 3000, anyway=False),
        *(example(number, "wrong", f"guess {number}", anyway=False) for number in (5, 6)),
    ),
    params={},
    step=7,
)


def test_every_category_has_a_title_and_a_line_with_its_share() -> None:
    assert tuple(TITLES) == CATEGORIES
    binary = replace(EVALUATION, examples=tuple(replace(row, reward=0.0) for row in EVALUATION.examples))
    assert analysis_markdown(binary).startswith(
        "# trained, after 7 steps\n\n| category | completions [95 %] | mean tokens | cut off |\n|---|---:|---:|---:|\n"
        "| Right answer in the right form | 1/6 = 16.7% [3.0%, 56.4%] | 10 | 0 |\n"
        "| Wrong answer in the right form | 4/6 = 66.7% [30.0%, 90.3%] | 42 | 0 |\n"
        "| Not in the form that was asked for | 1/6 = 16.7% [3.0%, 56.4%] | 30 | 0 |\n"
        "| Graded without a verdict, by falling reward | 0/6 = 0.0% [0.0%, 39.0%] | - | 0 |\n"
        "| Could not be graded | 0/6 = 0.0% [0.0%, 39.0%] | - | 0 |\n\n"
        "## Right answer in the right form: 1\n\n"
        "Row 1, 10 tokens, ended by stop\nThe grader noted: found: 5\n\n"
        "question:\n\n    question 1\n\nreference:\n\n    5\n\ncompletion:\n\n    it is 5\n\n"
    )


def test_completions_without_a_verdict_stand_by_falling_reward() -> None:
    examples = [
        replace(row, reward=reward, category="graded", judged=(), correct_any_format=None)
        for row, reward in zip(EVALUATION.examples, (0.5, 0.25, 1.0), strict=False)
    ]
    page = analysis_markdown(replace(EVALUATION, examples=tuple(examples)))
    assert page.splitlines()[2:6] == [
        "Mean reward: 0.583 [0.250, 1.000]", "", "| category | completions [95 %] | mean tokens | cut off |",
        "|---|---:|---:|---:|",
    ]  # fmt: skip
    assert [line for line in page.splitlines() if line.startswith(("Row", "| Grad"))] == [
        "| Graded without a verdict, by falling reward | 3/3 = 100.0% [43.9%, 100.0%] | 20 | 0 |",
        "Row 3, reward 1, 30 tokens, ended by stop",
        "Row 1, reward 0.5, 10 tokens, ended by stop",
        "Row 2, reward 0.25, 20 tokens, ended by stop",
    ]
    assert "Could not" not in page


@pytest.mark.proves("F143")
def test_examples_stand_under_their_category_whole_up_to_a_length_and_a_number() -> None:
    page = analysis_markdown(EVALUATION)
    assert "## Could not be graded" not in page
    wrong = page[page.index("## Wrong answer") : page.index("## Not in the form")]
    assert [number for number in (2, 4, 5, 6) if f"question {number}" in wrong] == [2, 4, 5]
    assert "[...]" in wrong
    assert "7" * 1494 + " [...]" in wrong
    assert "7" * 1495 not in wrong
    assert "it is [...]" in analysis_markdown(EVALUATION, max_characters=5)
    assert "it is 5\n" in analysis_markdown(EVALUATION, max_characters=7)
    assert "found: 5" in wrong


def test_a_right_answer_in_another_form_is_told_apart() -> None:
    page = analysis_markdown(EVALUATION)
    assert "the answer is right, and only its form is not" in page[page.index("## Not in the form") :]
    assert "only its form is not" not in page[: page.index("## Not in the form")]


def test_what_a_model_writes_cannot_become_a_title() -> None:
    assert "\n# not a title" not in analysis_markdown(EVALUATION)
    assert "\n    # not a title" in analysis_markdown(EVALUATION)
