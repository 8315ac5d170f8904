"""Is the letter of a multiple-choice answer read in the forms that models write, and no other text taken for one?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncurve.core.records import Completion, Prompt
from oncurve.data.datasets import adapt_python_rows
from oncurve.rewards.answer_locations import find_answer
from oncurve.rewards.grammar.choices import chosen_letter, reference_letter
from oncurve.rewards.mathematics import Mathematics

FORMS = [
    ("C", "C"),
    (" C", "C"),
    ("(C)", "C"),
    ("C.", "C"),
    ("c", "C"),
    ("(c)", "C"),
    ("C) Paris", "C"),
    ("C. Paris", "C"),
    ("**C**", "C"),
    (r"\boxed{C}", "C"),
    (r"\boxed{\text{(C)}}", "C"),
    ("<answer> C </answer>", "C"),
    ("<answer>The answer is (C).</answer>", "C"),
    ("The answer is (C).", "C"),
    ("The correct answer is C.", "C"),
    ("The best answer is option C because it rains.", "C"),
    ("Answer: C", "C"),
    ("**Answer: (C)**", "C"),
    ("Answer: **C**", "C"),
    ("So the answer would be J.", "J"),
    ("A is wrong, since it never rains.\nThe answer is B", "B"),
    ("(A) is wrong. (B) is right.\nThe answer is (B).", "B"),
    ("<think> A or B? The answer is A. </think> The answer is B.", "B"),
    ("#### D", "D"),
    ("So, B.", "B"),
    ("The best choice is therefore (B).", "B"),
    ("Hence option (B) is right.", "B"),
    ("B\nIt rains there.", "B"),
    ("B\nbut C is also right", None),
    ("B is not correct", None),
    ("B is incorrect.", None),
    ("The answer cannot be B", None),
    ("The answer isn't B, it's A", "A"),
    ("Neither A nor B", None),
    ("Answer: A\nThe value is \\boxed{12}", "A"),
    ("The answer is A.\n\\boxed{A or B}", None),
    ("A or B", None),
    ("(A) (B)", None),
    ("A, B", None),
    ("A and C", None),
    ("A/B", None),
    ("The answer is A or B.", None),
    ("The answer is (A) 12 or (B) 13.", None),
    ("A cat sat on the mat.", None),
    ("I think so.", None),
    ("The answer is Paris.", None),
    ("The answer is a cat.", None),
    ("Answer: neither", None),
    ("K", None),
    ("", None),
    ("12", None),
]


@pytest.mark.parametrize(("text", "letter"), FORMS)
def test_the_letter_that_a_text_commits_to(text: str, letter: str | None) -> None:
    assert find_answer(text, "choice") == letter


def test_a_megabyte_is_read_as_fast_as_a_line() -> None:
    for unit in ("A or ", "(", "The answer is ", "answer: \n", "\\text{", "A. "):
        assert find_answer(unit * (1_000_000 // len(unit)), "choice") in (None, "A")


@pytest.mark.parametrize(
    ("row", "answer", "letter"),
    [
        ({}, "B", "B"),
        ({}, "(B)", "B"),
        ({}, "B. Rome", "B"),
        ({"choices": ["Paris", "Rome"]}, "Rome", "B"),
        ({"options": ["Paris", "Rome"]}, "Paris", "A"),
        ({"choices": ["Paris", "Paris"]}, "Paris", ""),
        ({}, "Rome", ""),
    ],
)
def test_the_letter_of_a_reference(row: dict[str, Any], answer: str, letter: str) -> None:
    assert reference_letter(row, answer) == letter


def test_rows_in_the_form_of_mmlu_show_their_options_and_have_a_letter() -> None:
    rows = adapt_python_rows([{"question": "The capital of Italy?", "choices": ["Paris", "Rome"], "answer": 1}])
    assert rows[0]["question"] == "The capital of Italy?\nA. Paris\nB. Rome"
    assert rows[0]["answer"] == "B"
    others = adapt_python_rows([{"question": "2+3?", "choices": ["4", "5"], "answer": 5}])
    assert (others[0]["question"], others[0]["answer"]) == ("2+3?", "5")  # no place of a choice


@pytest.fixture
def choice() -> Iterator[Mathematics]:
    reward = Mathematics(answer_from="choice")
    yield reward
    reward.close()


def test_the_reward_pays_for_the_right_letter_alone(choice: Mathematics) -> None:
    texts = ["The answer is (B).", "A", "B or C", "no idea"]
    prompt = Prompt(index=0, text="", prompt_ids=(), row={"answer": "B"})
    completions = [Completion((), (), text, (), "stop", policy_version=0, index=0) for text in texts]
    rewards = choice([prompt] * 4, completions)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 0.0]
    assert [reward.parts["format"] for reward in rewards] == [1.0, 1.0, 0.0, 0.0]
    unreadable = choice([Prompt(index=0, text="", prompt_ids=(), row={"answer": "Rome"})], completions[:1])
    assert unreadable[0].error == "unparsable_reference"


def test_several_labels_are_none() -> None:
    assert chosen_letter("A. 12\nB. 13") == "B"  # the last line; options alone commit to it
    assert chosen_letter("A. 12 B. 13") is None
