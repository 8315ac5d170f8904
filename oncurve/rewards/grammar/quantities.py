"""Quantities: with currencies, units and signs, in sentences ("She has 18 eggs left"), in equations that state them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as combinations

from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.expressions import parse
from oncurve.rewards.grammar.lexemes import Token, Unreadable, closing, top
from oncurve.rewards.grammar.phrases import is_hedged, phrase, without_lead
from oncurve.rewards.grammar.regions import RELATIONS
from oncurve.rewards.grammar.units import DEGREES, NO_UNIT, Unit, unit_suffix
from oncurve.rewards.grammar.values import Members, Quantity, Tree, Value, negative, number

MAX_SIGNS = 4
"""Most plus-minus signs in one value."""
_CURRENCIES = ("$", "€", "£", "¥")


def read_quantity(tokens: Sequence[Token], *, with_letters: bool = True) -> Quantity:
    """A number or expression with its currency and unit. Raises Unreadable."""
    tokens = list(tokens)
    if is_hedged(tokens):
        raise Unreadable("a hedge")
    sign, currency, tokens = _currency(tokens)
    start, unit = unit_suffix(tokens, with_letters=with_letters)
    has_operator = any(token.kind == "operator" for token in tokens)
    if has_operator or (unit == DEGREES and any(token.kind == "function" for token in tokens[:start])):
        start, unit = len(tokens), NO_UNIT  # an integral's variable, the angle of a sine
    if currency:
        unit = _with_currency(currency, unit)
    inner = _with_base(tokens[:start])
    while inner and inner[-1].text in ("{}",) and inner[-1].kind == "open":
        raise Unreadable("a unit in a bracket")
    if len(inner) == 1 and inner[0].kind == "number":
        token = inner[0]
        if token.is_from_words and unit.label and not (token.value > 1 and _is_lower(tokens[start:])):
            raise Unreadable("words")
        value = -token.value if sign < 0 else token.value
        return Quantity(number(value), unit, token.base, ("-" if sign < 0 else "") + token.text)
    tree = parse(inner)
    base, digits = None, ""
    if len(inner) == 2 and inner[0].is_sign("-") and inner[1].kind == "number":
        base, digits = inner[1].base, f"-{inner[1].text}"
    return Quantity(negative(tree) if sign < 0 else tree, unit, base, digits)


def with_signs(value: Quantity) -> Value:
    """The quantity, or the list of the values that its plus-minus signs stand for."""
    if not value.tree.has("plusminus"):
        return value
    count = _count_signs(value.tree)
    if count > MAX_SIGNS:
        raise Unreadable("too many signs")
    has_both = _has_sign(value.tree, "∓")
    choices = [(1,) * count, (-1,) * count] if has_both else list(combinations((1, -1), repeat=count))
    members = tuple(Quantity(_chosen(value.tree, list(choice)), value.unit) for choice in choices)
    return Members("list", members, "±")


def _currency(tokens: list[Token]) -> tuple[int, str, list[Token]]:
    """Sign, currency and the rest of an amount of money; an empty currency for anything else."""
    if len(tokens) > 1 and tokens[0].text.upper() in ("US", "USD", "CAD", "AUD") and tokens[1].is_sign("$"):
        tokens = tokens[1:]
    sign, index = 1, 0
    if tokens and tokens[0].is_sign("-", "+"):
        sign, index = (-1 if tokens[0].is_sign("-") else 1), 1
    if index < len(tokens) and tokens[index].is_sign(*_CURRENCIES):
        currency, rest = tokens[index].text, tokens[index + 1 :]
        if sign > 0 and rest and rest[0].is_sign("-"):
            sign, rest = -1, rest[1:]
        return sign, currency, rest
    return 1, "", tokens


def _with_base(tokens: list[Token]) -> list[Token]:
    """A number and its base behind a macro, ``\\text{110}_2``, as one token."""
    texts = [token for token in tokens if token.text != "{}"]
    texts = (
        [token for token in texts if token.text not in ("(", ")", "in")]
        if any(t.text == "base" for t in texts)
        else texts
    )
    is_based = (
        len(texts) == 3
        and texts[0].kind == texts[2].kind == "number"
        and (texts[1].is_sign("_") or texts[1].text.lower() == "base")
    )
    digits, base = (texts[0].text, texts[2].value) if is_based else ("", 0)
    if not is_based or not digits.isdigit() or not 2 <= base <= 36 or any(int(digit) >= base for digit in digits):
        return tokens
    return [Token("number", digits, value=number(int(digits, int(base))).value, base=int(base))]


def _with_currency(currency: str, unit: Unit) -> Unit:
    money = ((currency, 1),)
    if unit.dimensions == money:
        return unit
    if any(power > 0 for _, power in unit.dimensions):
        raise Unreadable("an amount of money with another unit")
    return Unit(tuple(sorted((*money, *unit.dimensions))), unit.factor, unit.label)


def _is_lower(tokens: Sequence[Token]) -> bool:
    return all(token.text == token.text.lower() for token in tokens if token.kind == "word")


def _count_signs(tree: Tree) -> int:
    return (tree.kind == "plusminus") + sum(map(_count_signs, tree.parts))


def _has_sign(tree: Tree, sign: str) -> bool:
    return (tree.kind == "plusminus" and tree.name == sign) or any(_has_sign(part, sign) for part in tree.parts)


def _chosen(tree: Tree, signs: list[int]) -> Tree:
    """The expression with each plus-minus sign replaced by the next of ``signs``."""
    if tree.kind == "plusminus":
        sign = signs.pop(0) * (1 if tree.name == "±" else -1)
        part = _chosen(tree.parts[0], signs)
        return part if sign > 0 else negative(part)
    if not tree.parts:
        return tree
    return Tree(tree.kind, tuple(_chosen(part, signs) for part in tree.parts), tree.name, tree.value)


_COMPUTING = frozenset((
    "twice", "thrice", "double", "triple", "times", "minus", "negative", "plus", "half", "third", "quarter", "root",
    "square",
    "cube", "reciprocal", "opposite", "negation", "logarithm", "number",
))  # fmt: skip
_COMPUTED = frozenset(("squared", "cubed", "factorial", "below", "percent"))


def only_value(
    tokens: list[Token], read: Callable[[Sequence[Token]], Value], quantity: Callable[[Sequence[Token]], Quantity]
) -> Value | None:
    """The only value of a sentence; None where there are several, or where it does not commit to one."""
    if len(rest := without_lead(tokens)) < len(tokens):
        return read(rest)
    if is_hedged(tokens) or not any(token.kind == "word" for token in tokens):
        return None
    if any(token.is_sign(*RELATIONS) and not token.is_sign("=") for token in top(tokens)):
        return None
    chunks = [chunk for chunk in _chunks(tokens) if not (chunk[1] == chunk[0] + 1 and _is_letter(tokens[chunk[0]]))]
    if not chunks or not all(_holds_value(tokens[start:stop]) for start, stop in chunks):
        return None
    delimited = [chunk for chunk in chunks if tokens[chunk[0]].mode == "formula"]
    if len(chunks) != 1 and not (delimited and delimited[-1] == chunks[-1]):
        figures = [
            chunk
            for chunk in chunks
            if not all(t.is_from_words for t in tokens[chunk[0] : chunk[1]] if t.kind == "number")
        ]
        chunks = figures if len(figures) == 1 and len(chunks) > 1 else chunks
        if len(chunks) != 1:
            return None
    start, stop = chunks[-1]
    is_pronoun = stop == start + 1 and tokens[start].is_from_words and tokens[start].value <= 1
    if is_pronoun or _is_computed_by_words(tokens, start, stop):
        return None
    rest = tokens[start:]
    behind, _ = unit_suffix([*tokens[start:stop], *_words_behind(rest[stop - start :])])
    try:
        end = len(tokens[start:stop]) + len(_words_behind(rest[stop - start :]))
        with_unit = tokens[start : start + end]
        if behind < end:
            return with_signs(quantity(with_unit))
    except Unreadable:
        pass
    return read(tokens[start:stop])


def _chunks(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Places of the runs of mathematics between words."""
    chunks, start = list[tuple[int, int]](), None
    for index, token in enumerate([*tokens, Token("word", "end")]):
        is_word = token.kind == "word" and not (
            token.mode != "text" and len(token.text) == 2 and not token.text.isalpha()
        )
        is_article = token.kind == "name" and token.text in ("a", "A", "I") and token.mode != "formula"
        if is_word or is_article or token.is_sign(",", ".", ";", ":", "?", '"', "\\\\", "quad"):
            if start is not None:
                chunks.append((start, index))
                start = None
        elif start is None and not token.is_sign("'", "-", "!", '"'):
            start = index
    return chunks


def _is_letter(token: Token) -> bool:
    """A letter of plain text, which names something and is no value."""
    return token.kind == "name" and token.mode != "formula"


def _holds_value(chunk: Sequence[Token]) -> bool:
    """A number or a formula; a letter of plain text is none."""
    return any(
        token.kind in ("number", "command", "function", "begin") or token.mode == "formula" for token in chunk
    ) and any(token.kind != "sign" for token in chunk)


def _words_behind(tokens: Sequence[Token]) -> list[Token]:
    words = []
    for token in tokens:
        if token.kind not in ("word", "name") and not token.is_sign("%", "/", "^", "°"):
            break
        words.append(token)
    return words


def _is_computed_by_words(tokens: Sequence[Token], start: int, stop: int) -> bool:
    """Words around a number make another one of it: "twice 5", "half of 5", "5 squared"."""
    before = [token.text.lower() for token in tokens[:start] if token.text.lower() not in ("of", "the")]
    if before and (before[-1] in _COMPUTING or before[-1] in ("-", "*", "/", "^", "+")):
        return True
    after = tokens[stop].text.lower() if stop < len(tokens) else ""
    return after in _COMPUTED or (after == "and" and stop + 1 < len(tokens) and tokens[stop + 1].kind == "number")


def stated_side(sides: list[list[Token]]) -> list[Token] | None:
    """The side of a chain that states its value; None for an equation that states none."""
    trees = [tree_or_none(side) for side in sides]
    if len(sides) == 2 and trees[0] is not None and not trees[0].symbols() and name_of(sides[1]) is not None:
        return sides[0]  # 5 = x
    if len(sides) == 2 and trees[1] is not None and trees[1].kind == "symbol" and trees[1].symbols():
        return None
    is_computed = all(tree is None or not tree.symbols() for tree in trees[:-1])
    if trees[0] is not None and trees[0].has("operator"):
        return sides[-1]
    if is_computed and all(
        tree is not None or _has_label(side) for tree, side in zip(trees[:-1], sides[:-1], strict=True)
    ):
        return sides[-1]
    if len(sides) > 2 and (trees[-1] is None or not trees[-1].symbols()):
        return sides[-1]
    return None


def tree_or_none(side: list[Token]) -> Tree | None:
    """The expression of a side; None for words."""
    try:
        return parse(side)
    except Unreadable:
        return None


def _has_label(side: list[Token]) -> bool:
    return any(token.kind == "word" or token.is_sign("$", "€", "£") for token in side)


def refuse_contradiction(sides: list[list[Token]]) -> None:
    """A chain of numbers that are not equal states nothing."""
    trees = [tree for side in sides if (tree := tree_or_none(side)) is not None]
    values = {value for tree in trees if (value := rational(tree)) is not None}
    if len(values) > 1 and all(not _has_label(side) for side in sides):
        raise Unreadable("an equation that is false")


def name_of(tokens: Sequence[Token]) -> str | None:
    """The name on the left of an equation: a variable, a function's name, a segment, words; None for an expression."""
    tokens = [token for token in tokens if token.text not in ("{}",) or token.kind == "sign"]
    if tokens and tokens[0].kind == "word" and is_hedged(tokens):
        raise Unreadable("a condition")
    if not tokens or any(token.kind == "number" and index == 0 for index, token in enumerate(tokens)):
        return None
    if tokens[0].text in ("∠", "△") and len(tokens) == 2:
        return tokens[0].text + tokens[1].text
    if all(token.kind in ("word", "name") for token in tokens):
        is_product = len(tokens) > 1 and all(token.kind == "name" for token in tokens) and tokens[0].mode != "text"
        return (
            None
            if is_product and len(tokens) != 2
            else phrase(tokens)
            if any(t.kind == "word" for t in tokens)
            else "".join(t.text for t in tokens)
        )
    is_applied = (
        len(tokens) > 3 and tokens[0].kind == "name" and tokens[1].text == "(" and closing(tokens, 1) == len(tokens) - 1
    )
    if is_applied and (tokens[0].text in "PnNE" or any(token.is_sign("∪", "∩", "|", "ᶜ") for token in tokens)):
        return "".join(token.text for token in tokens)
    is_of = any(token.text == "∂" or (token.kind == "word" and token.text[0] == "d") for token in tokens[1:])
    if tokens[0].text == "frac" and is_of and all(token.text[0] == "d" for token in tokens if token.kind == "word"):
        return "".join(token.text for token in tokens)  # a derivative
    tree = tree_or_none(list(tokens))
    if tree is not None and tree.kind == "symbol" and tree.symbols():
        return tree.name
    is_function = tree is not None and tree.kind == "call" and tokens[0].kind in ("name", "word")
    return "".join(token.text for token in tokens) if is_function else None
