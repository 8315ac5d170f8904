"""Parser of answers: from tokens to typed values."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import pairwise

from oncurve.rewards.grammar import forms, regions
from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.expressions import parse
from oncurve.rewards.grammar.forms import read_truths
from oncurve.rewards.grammar.lexemes import Token, Unreadable, closing, split, top
from oncurve.rewards.grammar.phrases import (
    NO_SOLUTION,
    REALS,
    Clause,
    phrase,
    split_bound,
    split_clause,
    without_remark,
    words_value,
)
from oncurve.rewards.grammar.preparation import trimmed
from oncurve.rewards.grammar.quantities import (
    name_of,
    only_value,
    read_quantity,
    refuse_contradiction,
    stated_side,
    with_signs,
)
from oncurve.rewards.grammar.values import (
    Conditional,
    Congruence,
    IntegerFamily,
    Members,
    Named,
    Quantity,
    Range,
    Ratio,
    RealSet,
    Relation,
    Value,
    Words,
    negative,
    number,
)

MAX_DEPTH = 12
MAX_FILLED = 200
"""Members that dots may stand for."""
_JOINS = (",", ";", "\\\\")


class Reader:
    """A reader of one answer; each method reads one form, and ``value`` any of them."""

    def __init__(self, *, with_letters: bool) -> None:
        self.with_letters = with_letters
        self.depth = 0

    def value(self, tokens: Sequence[Token]) -> Value:
        """The value that the tokens write, whatever it is. Raises Unreadable."""
        tokens = trimmed(without_remark(list(tokens)))
        if not tokens:
            raise Unreadable("nothing")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        try:
            return self._any(tokens)
        finally:
            self.depth -= 1

    def _any(self, tokens: list[Token]) -> Value:
        if (value := _figure(tokens) or forms.read_spoken_time(tokens) or words_value(tokens)) is not None:
            return value
        if any(token.kind == "begin" for token in tokens) and (value := self._table(tokens)) is not None:
            return value
        for read_form in (forms.read_date, self._time, forms.read_amounts):
            if (value := read_form(tokens)) is not None:
                return value
        if (value := self._with_clause(tokens)) is not None:
            return value
        if any(token.is_sign("mod") for token in tokens) and (value := self._congruence(tokens)) is not None:
            return value
        if any(token.is_sign("∧", "∨", "¬", "→", "⇒", "⇔", "∪", "∩", "∖", "ᶜ") for token in tokens) and (
            value := _truths(tokens)
        ):
            return value
        return self._plain(tokens)

    def _time(self, tokens: Sequence[Token]) -> Value | None:
        value = forms.read_time(tokens)
        return value if value is not None and value.half is not None else None

    def _congruence(self, tokens: Sequence[Token]) -> Congruence | None:
        return forms.read_congruence(tokens, self.pieces)

    def _plain(self, tokens: list[Token]) -> Value:
        """A region, a list, a relation, a ratio, a range, or one quantity."""
        if (region := self._region(tokens)) is not None:
            return region
        if (several := self._several(tokens)) is not None:
            return several
        if (named := self._named(tokens)) is not None:
            return named
        if any(token.is_sign(*regions.RELATIONS) for token in top(tokens)):
            return self._relation(tokens)
        if (value := self._range_or_ratio(tokens)) is not None:
            return value
        if (value := self._bracketed(tokens)) is not None:
            return value
        try:
            return with_signs(self.quantity(tokens))
        except Unreadable:
            if tokens[-1].is_from_words and tokens[-1].value == 0 and tokens[-2:-1] and tokens[-2].text == "below":
                below = self.quantity(tokens[:-2])
                return Quantity(negative(below.tree), below.unit)
            if (sentence := only_value(tokens, self.value, self.quantity)) is not None:
                return sentence
            raise

    def _table(self, tokens: list[Token]) -> Value | None:
        if (matrix := forms.read_matrix(tokens)) is not None:
            return matrix
        start = next(index for index, token in enumerate(tokens) if token.kind == "begin")
        stop = closing(tokens, start)
        before, after = tokens[:start], tokens[stop + 1 :]
        is_system = tokens[start].text in (
            "cases",
            "aligned",
            "align",
            "array",
            "gathered",
            "split",
            "dcases",
            "alignedat",
        )
        if not is_system or any(token.text != "{" for token in before) or after:
            return None
        return self._system(tokens[start].text, split(tokens[start + 1 : stop], "\\\\"))

    def _system(self, name: str, rows: list[list[Token]]) -> Value:
        """The rows of ``cases`` or ``aligned``: pieces of a function, a chain over several lines, or a list."""
        rows = [row for row in rows if row]
        if name in ("cases", "dcases", "array") and all(_is_piece(row) for row in rows):
            return Members("set", tuple(self._piece(row) for row in rows))
        lines: list[list[Token]] = []
        for row in rows:
            line = [token for token in row if not token.is_sign("&")]
            if lines and line and line[0].is_sign("="):
                lines[-1] += line
            elif line:
                lines.append(line)
        return self.value(lines[0]) if len(lines) == 1 else self._members([self.value(line) for line in lines])

    def _piece(self, row: list[Token]) -> Conditional:
        value, condition = split(row, "&")
        if condition and condition[0].text.lower() in ("if", "for", "when"):
            condition = condition[1:]
        return Conditional(self.value(value), self.value(condition))

    def _with_clause(self, tokens: list[Token]) -> Value | None:
        """A value with ``for all x``, ``where k is an integer`` or a condition behind it; None without one."""
        clause = split_clause(tokens)
        if clause is None:
            return None
        if clause.kind == "always":
            return self.value(clause.before)
        if clause.kind == "integers":
            return self._family(clause)
        raise Unreadable("a condition")

    def _family(self, clause: Clause) -> Value:
        if all(token.text != clause.letter for token in clause.before):
            raise Unreadable("integers that do not occur")
        renamed = [
            Token(t.kind, "#" if t.text == clause.letter else t.text, t.value, t.has_space, t.mode)
            for t in clause.before
        ]
        value = self.value(renamed)
        inner = value.value if isinstance(value, Named) else value
        return IntegerFamily(inner, clause.domain, self.value(clause.before))

    def _region(self, tokens: list[Token]) -> Value | None:
        """A set of real numbers; None for what is none or for relations that only algebra can solve."""
        text = phrase(tokens)
        if text in REALS or text in NO_SOLUTION:
            return regions.REALS if text in REALS else regions.EMPTY
        if (excepted := self._all_but(tokens)) is not None:
            return excepted
        if (bound := split_bound(tokens)) is not None:
            return regions.bounded(bound[0], parse(bound[1]))
        if not _may_be_region(tokens):
            return None
        pieces, joins = self.pieces_and_joins(tokens)
        try:
            if len(pieces) > 1 and all(any(t.is_sign(*regions.ORDERS, "!=") for t in top(piece)) for piece in pieces):
                return _joined([regions.read_region(piece) for piece in pieces], joins)
            return regions.read_region(tokens)
        except Unreadable:
            return None

    def _all_but(self, tokens: list[Token]) -> RealSet | None:
        texts = [token.text.lower() for token in tokens]
        gap = next((index for index, text in enumerate(texts) if text in ("except", "but", "excluding")), None)
        if gap is None or gap > 7 or not any(texts[0] == word for word in ("all", "any", "every", "ℝ")):
            return None
        rest = [token for token in tokens[gap + 1 :] if token.text.lower() not in ("for", "at")]
        sides = split(rest, "=", "!=")
        points = [parse(piece) for piece in self.pieces(sides[-1])]
        result = regions.REALS
        for point in points:
            gap_region = RealSet((regions.interval(point, point, is_low_open=False, is_high_open=False),))
            result = regions.intersection(result, regions.complement(gap_region))
        return result

    def pieces(self, tokens: Sequence[Token]) -> list[list[Token]]:
        """The texts between commas, semicolons, "and" and "or"; those that dots stand for too."""
        return _filled(self.pieces_and_joins(tokens)[0])

    def pieces_and_joins(self, tokens: Sequence[Token]) -> tuple[list[list[Token]], list[str]]:
        """The pieces of a list, and the word or sign between each and the next."""
        pieces, joins, depth = [list[Token]()], list[str](), 0
        for token in tokens:
            depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
            join = _join(token) if depth == 0 else ""
            if not join:
                pieces[-1].append(token)
            elif pieces[-1]:
                pieces.append([])
                joins.append(join)
            elif joins:
                joins[-1] = join if join in ("and", "or") else joins[-1]
            else:
                raise Unreadable("a list that begins with its separator")
        if not pieces[-1]:
            if joins and joins[-1] in ("and", "or"):
                raise Unreadable("a list that does not end")
            pieces.pop()
        return pieces, joins

    def _several(self, tokens: list[Token]) -> Value | None:
        """A list; None for one value."""
        if tokens[0].text.lower() == "both":
            tokens = tokens[1:]
        pieces = self.pieces(tokens)
        if len(pieces) == 1:
            pieces = _wide(tokens)
        if len(pieces) == 1:
            return None
        if (sentence := self._sentence_with_comma(tokens, pieces)) is not None:
            return sentence
        values = [self.value(piece) for piece in pieces]
        if isinstance(values[0], Named) and all(isinstance(value, Quantity) for value in values[1:]):
            values = [values[0], *(Named(values[0].name, value) for value in values[1:])]  # x = 2, 3
        return self._members(values)

    def _sentence_with_comma(self, tokens: list[Token], pieces: list[list[Token]]) -> Value | None:
        """The value of a sentence of which one clause alone has a number; None for a list."""
        has_value = [any(token.kind not in ("word", "sign") for token in piece) for piece in pieces]
        if sum(has_value) != 1 or all(len(piece) < 2 for piece, has in zip(pieces, has_value, strict=True) if not has):
            return None
        return only_value(tokens, self.value, self.quantity)

    def _members(self, values: Sequence[Value]) -> Value:
        flat: list[Value] = []
        for value in values:
            is_expanded = isinstance(value, Members) and value.brackets == "±"
            flat += value.members if isinstance(value, Members) and is_expanded else [value]
        return Members("list", tuple(flat))

    def _named(self, tokens: list[Token]) -> Value | None:
        """``x = 5``, ``f(x) = 2x``, ``Total: 84`` and ``(x, y) = (1, 2)``; None for an equation without a name."""
        sides = split(tokens, "=")
        if (
            len(sides) >= 2
            and all(sides)
            and not any(t.is_sign(*regions.RELATIONS) and not t.is_sign("=") for t in top(tokens))
        ):
            if len(sides) == 2 and (pairs := self._named_tuple(*sides)) is not None:
                return pairs
            name = name_of(sides[0])
            if name is not None:
                if len(sides) == 2:
                    return self._name_all(name, self.value(sides[1]))
                return Named(name, self._last_of(sides[1:]))
            return None
        colon = next((index for index, token in enumerate(tokens) if token.is_sign(":")), 0)
        label = tokens[:colon]
        is_label = all(token.kind in ("word", "name") for token in label)
        has_word = any(token.kind == "word" for token in label) or (
            colon + 1 < len(tokens) and tokens[colon + 1].has_space
        )
        if colon and is_label and has_word:
            return self._name_all(phrase(label), self.value(tokens[colon + 1 :]))
        return None

    def _name_all(self, name: str, value: Value) -> Value:
        if isinstance(value, Members) and value.brackets == "±":
            return Members("list", tuple(Named(name, member) for member in value.members), "±")
        return value if isinstance(value, Named) else Named(name, value)

    def _named_tuple(self, left: list[Token], right: list[Token]) -> Value | None:
        if not (
            left[0].text == right[0].text == "("
            and closing(left, 0) == len(left) - 1
            and closing(right, 0) == len(right) - 1
        ):
            return None
        names, values = split(left[1:-1], ","), split(right[1:-1], ",")
        if len(names) != len(values) or len(names) < 2 or any(name_of(name) is None for name in names):
            return None
        return Members(
            "list", tuple(Named(name_of(n) or "", self.value(v)) for n, v in zip(names, values, strict=True))
        )

    def _last_of(self, sides: list[list[Token]]) -> Value:
        """The value of the last side of a chain, whose other sides must not contradict it."""
        last = self.value(sides[-1])
        refuse_contradiction([*sides])
        return last

    def _relation(self, tokens: list[Token]) -> Value:
        """An equation or chain: its last side where the others only lead to it, else the relation itself."""
        signs = tuple(token.text for token in top(tokens) if token.is_sign(*regions.RELATIONS))
        sides = split(tokens, *regions.RELATIONS)
        if not all(sides):
            raise Unreadable("a relation without one of its sides")
        if set(signs) == {"="}:
            stated = stated_side(sides)
            if stated is not None:
                refuse_contradiction(sides)
                return self.value(stated)
        if signs[-1:] == ("≈",) and len(signs) == 1:
            return self._rounded(*sides)
        return Relation(tuple(parse(side) for side in sides), signs)

    def _rounded(self, exact: list[Token], rounded: list[Token]) -> Value:
        """An exact value with the decimal behind it that rounds it."""
        value, near = self.quantity(exact), rounded[0] if rounded else None
        whole = rational(value.tree)
        sign = -1 if near is not None and near.is_sign("-") else 1
        near = rounded[1] if sign < 0 and len(rounded) == 2 else near
        if whole is None or near is None or near.kind != "number" or "." not in near.text:
            raise Unreadable("an approximation")
        num_decimals = len(near.text.partition(".")[2])
        if abs(whole - sign * near.value) * 2 > number(10).value ** -num_decimals:
            raise Unreadable("an approximation of something else")
        return value

    def quantity(self, tokens: Sequence[Token]) -> Quantity:
        """A number or expression with its unit. Raises Unreadable."""
        return read_quantity(tokens, with_letters=self.with_letters)

    def _range_or_ratio(self, tokens: list[Token]) -> Range | Ratio | None:
        value = forms.read_range(tokens, self.value)
        if value is not None:
            return value
        return forms.read_ratio(tokens, self.quantity)

    def _bracketed(self, tokens: list[Token]) -> Value | None:
        """A tuple, set or list of lists in one pair of brackets; None for anything else."""
        if (nested := forms.read_nested_list(tokens)) is not None:
            return nested
        if len(tokens) > 5 and forms.is_transposed(tokens[(stop := closing_or_none(tokens) or 0) + 1 :]) and stop:
            pieces = self.pieces(tokens[1:stop])
            return Members("tuple", tuple(self.value(piece) for piece in pieces), "⟨⟩") if len(pieces) > 1 else None
        opening, close = tokens[0].text, tokens[-1].text
        if tokens[0].kind != "open" or opening == "{}" or closing(tokens, 0) != len(tokens) - 1:
            return None
        pieces = self.pieces(tokens[1:-1]) if len(tokens) > 2 else []
        if opening == "{" and close == "}":
            return Members("set", self._expanded(pieces))
        if opening in "([⟨" and close in ")]⟩" and len(pieces) > 1:
            return Members("tuple", tuple(self.value(piece) for piece in pieces), opening + close)
        return None

    def _expanded(self, pieces: list[list[Token]]) -> tuple[Value, ...]:
        members = self._members([self.value(piece) for piece in pieces])
        assert isinstance(members, Members)
        return members.members


def _filled(pieces: list[list[Token]]) -> list[list[Token]]:
    """``1, 2, ..., 6`` with the members between, where all are integers at equal distances; else what was given."""
    if len(pieces) < 3 or [token.text for token in pieces[-2]] != ["..."]:
        return pieces
    integers = [_integer(piece) for piece in (*pieces[:-2], pieces[-1])]
    if None in integers:
        return pieces
    *first, last = (value for value in integers if value is not None)
    steps = {after - before for before, after in pairwise(first)} or {1}
    step = steps.pop()
    if steps or not step or (last - first[-1]) % step or not 0 < (last - first[-1]) // step <= MAX_FILLED:
        return pieces
    return [*pieces[:-2], *(_figures(value) for value in range(first[-1] + step, last, step)), pieces[-1]]


def _integer(tokens: Sequence[Token]) -> int | None:
    digits = tokens[1:] if tokens[0].is_sign("-") else tokens
    if len(digits) != 1 or digits[0].kind != "number" or digits[0].value.denominator > 1:
        return None
    return int(digits[0].value) * (-1 if len(tokens) > 1 else 1)


def _figures(value: int) -> list[Token]:
    return [Token("sign", "-")] * (value < 0) + [Token("number", str(abs(value)), value=Fraction(abs(value)))]


def _join(token: Token) -> str:
    if token.is_sign(*_JOINS):
        return ","
    text = token.text.lower()
    if text in ("and", "or"):
        return text
    return {"∨": "or", "∧": "and", "&": ","}.get(token.text, "") if token.kind == "sign" else ""


def _wide(tokens: list[Token]) -> list[list[Token]]:
    """The statements between wide spaces; the whole where a piece is none."""
    pieces = [piece for piece in split(tokens, "quad") if piece]
    is_list = len(pieces) > 1 and all(any(token.is_sign("=") for token in piece) for piece in pieces)
    return pieces if is_list else [[token for token in tokens if not token.is_sign("quad")]]


def _figure(tokens: list[Token]) -> Value | None:
    """An angle or triangle by its corners; an angle may be read from both sides."""
    kind = {"angle": "∠", "triangle": "△", "∠": "∠", "△": "△"}.get(tokens[0].text.lower(), "")
    corners = "".join(token.text for token in tokens[1:] if token.text != "{}")
    if not kind or not (corners.isalpha() and corners.isupper() and len(corners) <= 4):
        return None
    return Words(kind + (min(corners, corners[::-1]) if kind == "∠" else corners))


def _truths(tokens: list[Token]) -> Value | None:
    try:
        return read_truths(tokens)
    except Unreadable:
        return None


def _may_be_region(tokens: Sequence[Token]) -> bool:
    if any(token.is_sign(*regions.SIGNS) or token.text in ("ℝ", "∅") for token in tokens):
        return True
    is_pair = tokens[0].text in "([" and tokens[-1].text in ")]" and closing_or_none(tokens) == len(tokens) - 1
    is_mixed = tokens[0].text + tokens[-1].text in ("(]", "[)")
    return (
        is_pair and (is_mixed or any(token.text == "∞" for token in tokens)) and len(split(tokens[1:-1], ",", ";")) == 2
    )


def closing_or_none(tokens: Sequence[Token]) -> int | None:
    """The index of the bracket that closes the first one; None if it does not close or is none."""
    if tokens[0].kind != "open":
        return None
    try:
        return closing(tokens, 0)
    except Unreadable:
        return None


def _joined(parts: list[RealSet], joins: list[str]) -> RealSet:
    """Inequalities with "and", "or" or commas between them as one set."""
    if "or" in joins and "and" not in joins:
        return reduce(regions.union, parts)
    if "or" not in joins and "and" in joins:
        return reduce(regions.intersection, parts)
    both = reduce(regions.intersection, parts)
    return both if both.intervals or len(parts) != 2 else reduce(regions.union, parts)


def _is_piece(row: list[Token]) -> bool:
    """A row of a function in pieces: a value, and its condition in another column."""
    columns = split(row, "&")
    if len(columns) != 2 or not all(columns):
        return False
    begins = columns[1][0].text.lower() in ("if", "for", "when", "otherwise", "else")
    return begins or (not columns[1][0].is_sign("=") and any(token.is_sign(*regions.SIGNS) for token in columns[1]))
