"""Exact rules decide what they can, and ask an oracle only about the rest."""

from __future__ import annotations

from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_records import STEADY

from oncurve.rewards.equality import MAX_ANSWER_CHARACTERS, equal_answers


def forbidden(candidate: str, gold: str) -> NoReturn:
    raise AssertionError(f"the oracle was asked about {candidate!r} and {gold!r}")


@pytest.mark.parametrize(
    ("candidate", "gold", "is_equal"),
    [
        ("1,000 dollars", "1000", True),
        (r"\frac{2}{4}", "0.5", True),
        ("(1, 2)", "(1,2)", True),
        ("(2, 1)", "(1,2)", False),
        ("2, 1", "1, 2", True),
        ("C", r"\text{(C)}", True),
        ("east", r"\text{east}", True),
        ("18 or 19", "18", False),
        ("x^2+1", "x^2 + 1", True),
        ("The answer is 18", "18", True),
        ("1:2", "2:1", False),
        ("", "5", False),
        ("5", "", False),
    ],
)
def test_common_answers_need_no_oracle(candidate: str, gold: str, is_equal: bool) -> None:
    assert equal_answers(candidate, gold, forbidden) == is_equal


def test_the_oracle_decides_about_expressions() -> None:
    asked: list[tuple[str, str]] = []

    def oracle(candidate: str, gold: str) -> bool:
        asked.append((candidate, gold))
        return True

    assert equal_answers(r"\frac{\sqrt{12}}{2}", r"\sqrt3", oracle)
    assert equal_answers(r"(1, 2\cdot x)", "(1, x+x)", oracle)
    assert asked == [(r"\frac{\sqrt{12}}{2}", r"\sqrt{3}"), (r"2\cdot x", "x+x")]


@pytest.mark.parametrize(
    "candidate",
    [
        "9^{9^{9}}",
        "9**9**9",
        "9^9^9",
        "10^{9999}",
        "10^9999",
        "100!!",
        "1000!",
        r"\sum_{k} k",
        r"\int x",
        "(x+1)^{999}(x+2)^{999}",
        "((9^{99})^{99})^{99}",
        r"\binom{99999999}{5555555}",
        "(" * 13 + "1" + ")" * 13,
    ],
)
def test_the_oracle_is_never_asked_what_could_keep_it_busy(candidate: str) -> None:
    assert not equal_answers(candidate, r"\sqrt{3}", forbidden)


def test_the_oracle_may_be_asked_if_the_reference_has_it_too() -> None:
    assert equal_answers(r"\sum_{k=1}^n k + 0", r"\sum_{k=1}^n k", lambda candidate, gold: True)


def test_a_text_that_is_too_long_is_compared_letter_by_letter() -> None:
    text = "5 " * MAX_ANSWER_CHARACTERS
    assert equal_answers(text, text, forbidden)
    assert not equal_answers(text, "5", forbidden)
    assert not equal_answers(" " * (MAX_ANSWER_CHARACTERS + 1), " " * (MAX_ANSWER_CHARACTERS + 1), forbidden)


@STEADY
@given(st.text(max_size=80), st.sampled_from(["5", r"\sqrt{3}", "(1,2)", r"\text{(C)}", "east", "x>3", "1:2"]))
def test_no_text_makes_it_fail(candidate: str, gold: str) -> None:
    equal_answers(candidate, gold, lambda candidate, gold: False)


@STEADY
@given(st.text(alphabet=r"\{}()[]^_ =,;:.+-0123xyi$%!<>frac", min_size=1, max_size=40))
def test_an_answer_equals_itself_unless_it_is_nothing(text: str) -> None:
    assert equal_answers(text, text, lambda candidate, gold: False) or not text.strip(' .;:,\\$*()[]{}`"')
