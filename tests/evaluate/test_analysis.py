"""Does the page of an evaluation show every category with its share and examples?"""

from __future__ import annotations

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
    page = analysis_markdown(EVALUATION)
    assert "| Right answer in the right form | 1/6 = 16.7%" in page
    assert "| Wrong answer in the right form | 4/6 = 66.7%" in page
    assert "| Could not be graded | 0/6 = 0.0%" in page


@pytest.mark.proves("F143")
def test_examples_stand_under_their_category_whole_up_to_a_length_and_a_number() -> None:
    page = analysis_markdown(EVALUATION)
    assert "## Could not be graded" not in page
    wrong = page[page.index("## Wrong answer") : page.index("## Not in the form")]
    assert [number for number in (2, 4, 5, 6) if f"question {number}" in wrong] == [2, 4, 5]
    assert "[...]" in wrong
    assert "7" * 1600 not in wrong
    assert "found: 5" in wrong


def test_a_right_answer_in_another_form_is_told_apart() -> None:
    page = analysis_markdown(EVALUATION)
    assert "the answer is right, and only its form is not" in page[page.index("## Not in the form") :]
    assert "only its form is not" not in page[: page.index("## Not in the form")]


def test_what_a_model_writes_cannot_become_a_title() -> None:
    assert "\n# not a title" not in analysis_markdown(EVALUATION)
    assert "\n    # not a title" in analysis_markdown(EVALUATION)
