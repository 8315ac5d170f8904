"""One spelling for the same mathematics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_records import STEADY

from oncurve.rewards.latex import MAX_TIDIED_CHARACTERS, UNBALANCED, compact, nesting, split_top, tidy


@pytest.mark.parametrize(
    ("answer", "tidied"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac 34", r"\frac{3}{4}"),
        (r"\frac9{19}", r"\frac{9}{19}"),
        (r"\frac{270}7", r"\frac{270}{7}"),
        (r"\frac\pi2", r"\frac{\pi}{2}"),
        (r"\frac{\frac12}3", r"\frac{\frac{1}{2}}{3}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\sqrt[3]2", r"\sqrt[3]{2}"),
        ("√10", r"\sqrt{10}"),
        ("sqrt(2)", r"\sqrt{2}"),
        (r"\left(1,\,2\right)", "(1, 2)"),
        (r"10,\!080", "10,080"),
        (r"1{,}000", "1,000"),
        (r"$5$.", "5"),
        (r"\(5\)", "5"),
        (r"**5**", "5"),
        (r"\mathrm{cm}", r"\text{cm}"),
        ("90°", r"90^{\circ}"),
        ("−5", "-5"),
        ("½", r"\frac{1}{2}"),
        ("x**2", "x^2"),
        (r"1 \\ 2", r"1 \\ 2"),
    ],
)
def test_an_answer_is_written_one_way(answer: str, tidied: str) -> None:
    assert tidy(answer) == tidied


@STEADY
@given(st.text(alphabet=r"\{}()[]$^_ ,.0123abfrcsqtπ√½", max_size=60))
def test_no_text_makes_it_fail_or_grow_without_bound(text: str) -> None:
    assert len(tidy(text)) <= 40 * (len(text) + 1)


def test_more_text_than_an_answer_can_have_is_left_alone() -> None:
    text = r"\frac" * MAX_TIDIED_CHARACTERS
    assert tidy(text) == text


def test_spaces_do_not_count_except_between_digits_and_after_macros() -> None:
    assert compact("x + 1") == compact("x+1")
    assert compact("7 3/4") != compact("73/4")
    assert compact(r"\cos x") == r"\cos x"


def test_pieces_are_split_outside_of_brackets() -> None:
    assert split_top("(1,2), [3,4), 5") == ["(1,2)", "[3,4)", "5"]
    assert split_top("") == [""]


def test_nesting_counts_open_brackets() -> None:
    assert nesting("((1,2],3)") == 2
    assert nesting("(1") == UNBALANCED
    assert nesting(")(") == UNBALANCED
