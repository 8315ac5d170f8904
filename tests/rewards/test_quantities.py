"""Exact numbers and their units."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_records import STEADY

from oncurve.rewards.latex import tidy
from oncurve.rewards.quantities import exact_number, read_quantity, same_quantity, split_unit
from oncurve.rewards.units import Unit, read_unit


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", 1000),
        ("$18.00", 18),
        ("-5", -5),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        ("1 4/5", Fraction(9, 5)),
        ("50%", Fraction(1, 2)),
        ("1.2e-3", Fraction(12, 10_000)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("3 million", 3_000_000),
        ("five", 5),
        ("18 eggs", 18),
    ],
)
def test_a_number_is_read_exactly(text: str, number: Fraction | int) -> None:
    assert exact_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", "1 2", "18 or 19", "2x", "5!", "1_000", "1,00", "(1,2)", "--5", "1e999", "1" * 400]
)
def test_what_is_no_single_number_is_refused(text: str) -> None:
    assert exact_number(text) is None


@STEADY
@given(st.fractions())
def test_every_fraction_is_read_back(number: Fraction) -> None:
    sign, top = ("-" if number < 0 else ""), abs(number.numerator)
    assert exact_number(f"{number.numerator}/{number.denominator}") == number
    assert exact_number(rf"{sign}\frac{{{top}}}{{{number.denominator}}}") == number


@STEADY
@given(st.integers(), st.integers(0, 6))
def test_every_decimal_is_read_back_with_and_without_separators(digits: int, places: int) -> None:
    number = Fraction(digits, 10**places)
    plain = f"{abs(digits) / 10**places:.{places}f}"
    if Fraction(plain) != abs(number):  # beyond the precision of floats
        return
    sign = "-" if digits < 0 else ""
    assert exact_number(sign + plain) == number
    whole, _, rest = plain.partition(".")
    assert exact_number(f"{sign}${int(whole):,}" + (f".{rest}" if rest else "")) == number


@STEADY
@given(st.text(max_size=200))
def test_no_text_makes_it_fail(text: str) -> None:
    exact_number(text)
    split_unit(tidy(text))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("5 cm", "5 centimeters", True),
        ("5 cm", "5", True),
        ("5 cm", "5 m", False),
        (r"5\text{ cm}^2", "5 square cm", True),
        (r"5\text{ cm}^2", "5 cm", False),
        ("18 eggs", "18 apples", False),
        ("18 eggs", "18 brown eggs", True),
        ("5 km/h", "5 m/s", False),
        ("36 km/h", "10 m/s", True),
        ("5 kPa", "5 Pa", False),
        ("3 dozen", "36", True),
        ("$5", "5 cents", False),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.5%", "0.5", False),
        ("50%", "50%", True),
        ("101_2", "101_3", False),
    ],
)
def test_units_may_be_missing_but_must_not_differ(one: str, other: str, is_same: bool) -> None:
    first, second = read_quantity(tidy(one)), read_quantity(tidy(other))
    assert first is not None
    assert second is not None
    assert same_quantity(first, second) == is_same


def test_a_unit_is_split_from_an_expression() -> None:
    assert split_unit(r"3\sqrt{2}\text{ cm}") == (r"3\sqrt{2}", read_unit(" cm"))
    assert split_unit(r"2\pi^{\circ}") == (r"2\pi", read_unit(" degrees"))
    assert split_unit(r"3\sqrt{2}") == (r"3\sqrt{2}", Unit())
    assert split_unit(r"5\text{ or }") == (r"5\text{ or }", Unit())
