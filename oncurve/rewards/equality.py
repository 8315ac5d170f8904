"""Equality of two final answers: exact rules first; what they cannot decide goes to an oracle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

from oncurve.rewards.arithmetic import evaluate
from oncurve.rewards.choices import chosen_letter
from oncurve.rewards.latex import compact, nesting, split_top, tidy
from oncurve.rewards.quantities import Quantity, read_amount, read_quantity, same_quantity, split_unit
from oncurve.rewards.shapes import (
    MAX_NESTING,
    THOUSANDS,
    as_region,
    bracketed,
    in_order_of_names,
    is_region,
    joins,
    list_members,
    marks_of,
    named_members,
    pairs_up,
    plain_braces,
    read_chain,
    read_congruence,
    read_date,
    read_matrix,
    read_range,
    read_ratio,
    read_remainder,
    read_rows,
    same_time,
    with_commas,
)
from oncurve.rewards.statements import (
    CHOICE,
    is_doubted,
    is_hedged,
    is_prose,
    number_in_prose,
    plain_words,
    same_words,
    stated,
    without_integers,
)
from oncurve.rewards.units import Unit

MAX_ANSWER_CHARACTERS = 600
"""A longer answer is wrong unless it is the reference letter by letter."""

MAX_DEGREE = 1_000
"""An answer whose brackets are raised to more than this, all exponents multiplied, is compared as text only."""

DEGREES, RADIANS = (Unit(((name, 1),)) for name in ("°", "rad"))

Oracle = Callable[[str, str], bool]
"""Decides about a tidied answer and a tidied reference, in that order, when no exact rule applies."""

_ASSIGNMENT = re.compile(
    r"(?:\\text\{[^{}]*\}|[a-zA-Z](?:_\{?\w+\}?)?(?:(?:\^\{?-1\}?)?\([a-z]\))?'?|\\[a-z]+)\s*(?:=|\\in(?![a-zA-Z]))\s*"
)
_OPERATION = re.compile(r"(?:[\w)\]}]|\\%)\s*[-+*/^&]\s*\S|[a-zA-Z]\w*\s*\(|(?<![\\a-zA-Z])\$?[A-Z]{1,3}\$?\d")
_EQUATION = re.compile(r"(?<![<>!=\\])=(?!=)")
_BINDING = re.compile(r"[-\d\s]*\\(?:i?int|iiint|oint|sum|prod|lim)(?![a-zA-Z])")
"""Operators that bind their variables, so that the expression has a value."""
_CROSS = re.compile(r"(?<=[\d)%])\s*[xX]\s*(?=\\?\$?\.?\d)")
"""An x between numbers: a sign for times where the sides of an equation are read."""
_CONSTANT = re.compile(r"\+\s*([CcKk])$")
"""A constant of integration, which has any of these names."""
_MEMBER = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?)\s*\\in(?![a-zA-Z])")
_NAME = re.compile(r"\s*(?!.*\\(?:frac|sqrt|cdot|times)(?![a-zA-Z]))[^\d\s+\-*/^<>][^+\-*/^<>]*")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_CHOICES = re.compile(r"(?:[A-J]|[IVX]+) and (?:[A-J]|[IVX]+)")
_VECTOR = re.compile(r"^\\langle((?:(?!\\[lr]angle).)*,(?:(?!\\[lr]angle).)*)\\rangle\s*$")
_ANGLE = re.compile(r"\\angle\s*\{?\s*([A-Z]{3})\s*\}?")
_ROUNDED = re.compile(r"(.+?)(?:\\approx|≈)\s*(-?\d{1,20})(\.\d{1,20})")
_LETTER_IN_FORMULA = re.compile(
    r"[A-Ja-j]\s*(?:['+*/^_=<>]|-(?!\s.*[a-zA-Z]{2})|\((?!.*[a-zA-Z]{2}))|\([A-J]\)\s*[-+*/^_(]"
)
"""A dash or a bracket with words behind it is a remark on the letter."""
_PERIODIC = re.compile(r"\(|\.\.\.|…|\\(?:overline|bar|dot|[lcd]?dots)(?![a-z])")
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_POWER_OF_BRACKETS = re.compile(r"[)\]}]\s*\^\s*(?:\{\s*(\d{1,6})\s*\}|(\d))")
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d])\d+\.?(?:\s+\.?|\s*\{\s*)\d|(?<![\w^\]}])\{\s*\d+\s*\}\s*\{?\s*\d")
"""Numbers with nothing between them; the symbolic grader would add them up."""

_EXPENSIVE = re.compile(
    r"\\(?:sum|int|prod|lim|iint|oint|limits)(?![a-zA-Z])|\\[dt]?binom\s*\{\s*\d{4,}"
    r"|\^\s*(?:\{[^{}]*(?:\^|\d{4,})|\d{4,}|[^\s{]\s*\^|\([^()]*\^)"  # towers of powers, exponents of four digits
    r"|\d{3,}\s*!|!\s*!|\)\s*!"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+(?:\.\d+)?))\s*\^\{\\circ\}")
_MIXED = re.compile(r"(?<![\d.^_}\\a-zA-Z])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")


def equal_answers(candidate: str, gold: str, oracle: Oracle) -> bool:
    r"""Whether an answer states what the reference states.

    Exact rules decide about equal texts, numbers, dates, ranges, words, choices, and lists of those, without an error
    of rounding; the oracle is asked only about what remains, such as ``\frac{\sqrt{12}}{2}`` against ``\sqrt{3}``.

    >>> equal_answers("1,000 dollars", "1000", oracle=lambda candidate, gold: False)
    True
    """
    if len(candidate) > MAX_ANSWER_CHARACTERS or len(gold) > MAX_ANSWER_CHARACTERS:
        return candidate.strip() == gold.strip() != ""
    candidate, gold = without_integers(candidate, gold)
    candidate, gold = tidy(stated(candidate, gold)), tidy(stated(gold, gold))
    if "C" in "".join(match[1] for text in (candidate, gold) if (match := _CONSTANT.search(text))):
        candidate, gold = (_CONSTANT.sub("+C", text) for text in (candidate, gold))
    return _equal(_without_rounded(candidate), gold, oracle)


def _without_rounded(answer: str) -> str:
    r"""An exact value without the decimal behind it that rounds it: ``\frac{1}{3}`` of ``\frac{1}{3} \approx 0.33``."""
    match = _ROUNDED.fullmatch(answer)
    exact = evaluate(match[1].strip()) if match else None
    if match is None or exact is None:
        return answer
    is_rounding = abs(exact - Fraction(match[2] + match[3])) * 2 <= Fraction(1, 10 ** (len(match[3]) - 1))
    return match[1].strip() if is_rounding else answer


def _equal(candidate: str, gold: str, oracle: Oracle) -> bool:
    if not candidate or not gold:
        return False
    if compact(candidate) == compact(gold):
        return True
    candidate, gold = _as_tuples(as_region(candidate), as_region(gold))
    is_same_time = same_time(candidate, gold)
    if is_same_time is not None:
        return is_same_time
    is_same_shape = _same_shape(candidate, gold, oracle)
    if is_same_shape is not None:
        return is_same_shape
    opening, inside, _ = bracketed(candidate)
    if opening == r"\{" and not gold.startswith(r"\{") and len(list_members(inside)) == 1:
        candidate = inside.strip()
    quantity = read_quantity(gold)
    if quantity is not None:
        return _equals_number(candidate, quantity, gold, oracle)
    choice = CHOICE.fullmatch(gold)
    if choice is not None:
        letter = chosen_letter(candidate.upper() if len(candidate) <= 3 else candidate)
        return letter == choice[1] and not _LETTER_IN_FORMULA.match(candidate)
    words = plain_words(gold)
    if words is not None and not _CHOICES.fullmatch(gold):
        return same_words(candidate, words)
    if is_hedged(candidate, gold):
        return False
    return _equal_structures(candidate, gold, oracle)


def _as_tuples(candidate: str, gold: str) -> tuple[str, str]:
    """Both with vectors in round brackets, if the reference is a vector; a point is none."""
    if _VECTOR.fullmatch(gold) or r"\begin" in gold:
        return _VECTOR.sub(r"(\1)", candidate), _VECTOR.sub(r"(\1)", gold)
    return candidate, gold


def _same_shape(candidate: str, gold: str, oracle: Oracle) -> bool | None:
    """Angles, dates, ranges and amounts in several units, compared member by member; None if the reference is none of
    them."""
    if (angle := _ANGLE.fullmatch(gold)) is not None:
        found = _ANGLE.fullmatch(candidate)
        return found is not None and found[1] in (angle[1], angle[1][::-1])
    if (date := read_date(gold)) is not None:
        return read_date(candidate) == date
    if (matrix := read_matrix(gold)) is not None and r"\begin" not in candidate:
        found = read_rows(candidate, matrix)
        return found is not None and all(
            _equal(one, other, oracle)
            for row, wanted in zip(found, matrix, strict=True)
            for one, other in zip(row, wanted, strict=True)
        )
    if (congruence := read_congruence(gold)) is not None:
        found = read_congruence(candidate)
        is_same_name = found is not None and ("" in (found[0], congruence[0]) or found[0] == congruence[0])
        return found is not None and is_same_name and found[1:] == congruence[1:]
    if (chain := read_chain(gold)) is not None:
        return read_chain(candidate) == chain
    if (ends := read_range(gold)) is not None:
        found = read_range(candidate)
        if found is None and (ratio := read_ratio(gold)) is not None and ":" in candidate:
            return read_ratio(candidate) == ratio
        return found is not None and all(_equal(one, other, oracle) for one, other in zip(found, ends, strict=True))
    amounts = [read_amount(text) for text in (candidate, gold)]
    if any(amounts):
        one, other = (
            read_quantity(text) if amount is None else amount
            for text, amount in zip((candidate, gold), amounts, strict=True)
        )
        if one is not None and other is not None and one.unit.dimensions and other.unit.dimensions:
            return same_quantity(one, other)
        return False if other is not None and amounts[1] is None else None
    return None


def _equals_number(candidate: str, gold: Quantity, gold_text: str, oracle: Oracle) -> bool:
    """The reference is a number, so the answer must be one number too, and nothing that is yet to be computed."""
    if candidate.startswith("="):
        candidate = candidate[1:].strip()
        if _OPERATION.search(candidate.lstrip("-+")):  # a formula of a spreadsheet
            return False
    quantity = read_quantity(candidate) or read_remainder(candidate)
    if quantity is None and is_prose(candidate):
        quantity = number_in_prose(candidate)
        return quantity is not None and same_quantity(quantity, gold)
    if quantity is not None:
        return same_quantity(quantity, gold) and not is_doubted(candidate, gold_text)
    value = _right_hand_side(candidate)
    if value != candidate:
        return _equal(value, gold_text, oracle)
    if gold.base not in (None, 10):
        return compact(candidate) == gold.digits
    if _EQUATION.search(candidate) or len(split_top(candidate)) > 1 or "--" in candidate:
        return False
    if is_hedged(candidate, gold_text) or is_region(candidate):
        return False
    if not gold.unit and _PERIODIC.search(gold_text):  # which the oracle does not read
        gold_text = rf"\frac{{{gold.value.numerator}}}{{{gold.value.denominator}}}"
    return _ask_without_units(candidate, gold_text, oracle)


def _right_hand_side(answer: str) -> str:
    """The right-hand side of ``x = 5``, ``A = bh = 15`` or ``2 + 3 = 5`` beside a reference that is no equation.

    An equation such as ``2x + 1 = 5`` states no value and stays whole.
    """
    is_named = _ASSIGNMENT.match(answer) is not None
    answer = _ASSIGNMENT.sub("", answer, count=1) if is_named else answer
    sides = [_CROSS.sub(r"\\times ", side) for side in _EQUATION.split(answer)]
    if len(sides) < 2 or len(split_top(THOUSANDS.sub("", answer))) > 1:
        return answer
    if _BINDING.match(answer):
        return sides[-1].strip()
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[1].strip()):  # 5 = x
        return sides[0].strip()
    if len(sides) > 2 and not set(_VARIABLE.findall(sides[-1])) - {"i", "e"}:  # a chain that ends in a value
        return sides[-1].strip()
    if is_named or _NAME.fullmatch(sides[0]) or not any(_VARIABLE.search(side) for side in sides[:-1]):
        return sides[-1].strip()
    return answer


def _equal_structures(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Compares lists, tuples, sets and equations piece by piece, and the rest as expressions."""
    members = [match[1] for text in (candidate, gold) if (match := _MEMBER.match(text))]
    if len(set(members)) > 1:  # statements about different variables
        return False
    if len(_marks(gold)) > 1:
        return _same_marked(candidate, gold, oracle)
    if read_ratio(gold) is not None or len(split_top(candidate, ":")) > 1:
        return _same_ratio(candidate, gold, oracle)
    opening = bracketed(gold)[0]
    if opening and (values := in_order_of_names(candidate)) is not None:  # x = 3, y = 4 for the point (3, 4)
        return opening == "(" and _same_tuple(f"({', '.join(values)})", gold, oracle)
    if is_region(candidate) or is_region(gold):
        is_value = _ASSIGNMENT.match(candidate) or (_BINDING.match(candidate) and not _EQUATION.search(gold))
        return _ask(_right_hand_side(candidate) if is_value else candidate, gold, oracle)
    candidate, gold = _without_names(candidate, gold)
    if candidate == "":
        return False
    if compact(candidate) == compact(gold):
        return True
    num_members = len(list_members(bracketed(gold)[1]))
    if num_members > 1 and len(list_members(bracketed(candidate)[1])) > 1:
        same_members = _same_tuple if gold.startswith(("(", "[")) and bracketed(gold)[0] else _same_set
        return same_members(candidate, gold, oracle)
    if (len(list_members(candidate)) > 1 and not bracketed(candidate)[0]) or len(list_members(gold)) > 1:
        return False
    return _ask_without_units(candidate, gold, oracle)


def _without_names(candidate: str, gold: str) -> tuple[str, str]:
    """Both without a name that only one gives its value; an answer that is an equation beside a value is no answer."""
    if joins(candidate):
        candidate, gold = with_commas(candidate), with_commas(gold) if joins(gold) else gold
    if not _EQUATION.search(gold) and r"\in" not in gold:
        candidate = _right_hand_side(candidate)
        if _EQUATION.search(candidate) and len(split_top(candidate)) == 1:
            return "", gold
    elif not _EQUATION.search(candidate) and _ASSIGNMENT.match(gold) and len(list_members(gold)) == 1:
        gold = _right_hand_side(gold)
    return candidate, gold


def _marks(text: str) -> set[object]:
    """The names or labels of a list that has a different one for some of its members; empty for any other list."""
    opening, inside, _ = bracketed(text)
    members = list_members(inside if opening == r"\{" else text)
    pairs = named_members(members)
    found = marks_of(pairs)
    return set(found) if (len(members) > 1 or len(pairs) > 1) and all(found) else set()


def _same_marked(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Named values and labelled amounts: each with its own name in any order, or without names in the given order."""
    wanted = named_members(list_members(gold))
    opening, inside, _ = bracketed(candidate)
    found = named_members(list_members(candidate))
    if len(found) == 1 and opening in ("(", "["):
        found = named_members(list_members(inside))
    if len(found) != len(wanted):
        return False
    marks = marks_of(found)
    if not any(marks):  # in order; a set has none
        if opening == r"\{":
            return False
        return all(_equal(one[1], other[1], oracle) for one, other in zip(found, wanted, strict=True))
    return all(marks) and pairs_up(
        found, wanted, lambda one, other: one[0] == other[0] and _equal(one[1], other[1], oracle)
    )


def _same_tuple(candidate: str, gold: str, oracle: Oracle) -> bool:
    """The same brackets, and in them equal members at equal places."""
    opening, inside, closing = bracketed(candidate)
    gold_opening, gold_inside, gold_closing = bracketed(gold)
    members, gold_members = split_top(inside), split_top(gold_inside)
    if (opening, closing) != (gold_opening, gold_closing) or len(members) != len(gold_members):
        return False
    return all(_equal(member, other, oracle) for member, other in zip(members, gold_members, strict=True))


def _same_set(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Every member has its own equal among the others, in any order."""
    opening, inside, _ = bracketed(candidate)
    members, wanted = list_members(inside), list_members(bracketed(gold)[1])
    is_set = opening not in ("(", "[") and len(members) == len(wanted)
    return is_set and pairs_up(members, wanted, lambda one, other: _equal(one, other, oracle))


def _ask_without_units(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Compares what stands before the units, which may be missing on one side and are converted otherwise."""
    expression, unit = split_unit(_radians(candidate))
    gold_expression, gold_unit = split_unit(_radians(gold))
    if unit == DEGREES and (gold_unit == RADIANS or (not gold_unit and r"\pi" in gold)):
        expression, unit = rf"\frac{{\pi}}{{180}}({expression})", gold_unit
    elif unit == RADIANS and gold_unit == DEGREES:
        gold_expression, gold_unit = rf"\frac{{\pi}}{{180}}({gold_expression})", unit
    if not unit.agrees_with(gold_unit):
        return False
    if unit.dimensions and gold_unit.dimensions and unit.factor != gold_unit.factor:
        ratio = unit.factor / gold_unit.factor
        expression = rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}({expression})"
    if compact(expression) == compact(gold_expression):
        return True
    return _ask(expression, gold_expression, oracle)


def _radians(text: str) -> str:
    r"""The text with the degrees under its sines as radians: ``\sin 30^\circ`` is ``\sin(\frac{30\pi}{180})``."""
    if not _TRIGONOMETRIC.search(text):
        return text

    def _converted(match: re.Match[str]) -> str:
        degrees = Fraction(match[3]) if match[3] else Fraction(int(match[1]), int(match[2]))
        turn = degrees / 180
        return rf"(\frac{{{turn.numerator}\pi}}{{{turn.denominator}}})"

    return _DEGREES.sub(_converted, text)


def _same_ratio(candidate: str, gold: str, oracle: Oracle) -> bool:
    """The members of two ratios are in proportion; times of day, such as 2:00, are compared as they are."""
    members, gold_members = read_ratio(candidate), read_ratio(gold)
    if members is None and gold_members is not None and len(gold_members) == 2 and not _CLOCK.fullmatch(gold):
        shares = [evaluate(member) for member in gold_members]
        value = evaluate(candidate) if re.search("/|frac", candidate) else None  # 3:2 as a fraction
        return None not in shares and shares[1] != 0 and value == shares[0] / shares[1]  # type: ignore[operator]
    if members is None or gold_members is None or len(members) != len(gold_members):
        return False
    if all(_equal(member, other, oracle) for member, other in zip(members, gold_members, strict=True)):
        return True
    values = [[evaluate(member) for member in side] for side in (members, gold_members)]
    if any(not value for side in values for value in side) or _CLOCK.fullmatch(gold):
        return False
    first, second = ([value / side[0] for value in side] for side in values)  # type: ignore[operator]
    return first == second


def _ask(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Exact arithmetic where both are that; else the oracle's word, unless the answer could keep it busy for ever."""
    if nesting(plain_braces(candidate)) > MAX_NESTING or ":" in candidate:
        return False
    if _SIDE_BY_SIDE.search(candidate) and not _SIDE_BY_SIDE.search(gold):
        return False
    values = _value(candidate), _value(gold)
    if None not in values:
        return values[0] == values[1]
    if _is_expensive(candidate) and not _is_expensive(gold):
        return False
    return oracle(_improper(candidate), _improper(gold))


def _value(text: str) -> Fraction | None:
    """The value of a bare number or of arithmetic."""
    quantity = read_quantity(text)
    if quantity is not None:
        return None if quantity.unit else quantity.value
    return evaluate(text)


def _improper(text: str) -> str:
    r"""The text with mixed numbers as fractions: ``2\frac{1}{2}\sqrt{3}`` has a factor of five halves."""

    def _fraction(match: re.Match[str]) -> str:
        whole, top, bottom = (int(group) for group in match.groups())
        return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"

    return _MIXED.sub(_fraction, text)


def _is_expensive(answer: str) -> bool:
    """Whether an expression may take for ever to evaluate: sums, towers of powers, huge factorials, long expansions."""
    degree = math.prod(int(first or second) for first, second in _POWER_OF_BRACKETS.findall(answer))
    return degree > MAX_DEGREE or _EXPENSIVE.search(answer) is not None
