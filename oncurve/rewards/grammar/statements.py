"""Parser of answers: from tokens to typed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import product as combinations

from oncurve.rewards.grammar import forms, regions
from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.expressions import closing, parse, split
from oncurve.rewards.grammar.lexer import Token, Unreadable, as_members, tokens
from oncurve.rewards.grammar.numerals import with_figures
from oncurve.rewards.grammar.phrases import (
    NO_SOLUTION,
    REALS,
    Clause,
    is_hedged,
    is_plain_words,
    phrase,
    split_clause,
    without_lead,
    without_remark,
    words_value,
)
from oncurve.rewards.grammar.units import DEGREES, NO_UNIT, Unit, unit_suffix
from oncurve.rewards.grammar.values import (
    Conditional,
    Congruence,
    Family,
    Named,
    Quantity,
    Range,
    Ratio,
    Region,
    Relation,
    Tree,
    Value,
    Words,
    negative,
    number,
    symbol,
)
from oncurve.rewards.grammar.values import Sequence as Members

MAX_CHARACTERS = 600
"""A longer text is no answer."""
MAX_DEPTH = 12
MAX_SIGNS = 4
"""Most plus-minus signs in one value."""
_JOINS = (",", ";", "\\\\")
_CURRENCIES = ("$", "€", "£", "¥")
_RELATIONS = ("=", "≈", "≡", "⇒", "⇔", "→", "≅", "∝", "⊂", "⊆", "⊥", "∥", *regions.SIGNS)


@lru_cache(maxsize=4096)
def read(text: str, *, with_thousands: bool = True, with_letters: bool = True) -> Value:
    r"""The typed value of an answer. Raises Unreadable.

    ``with_thousands`` False takes the commas of ``1,000`` for separators of members; ``with_letters`` False takes a single
    letter behind a number, as in ``5 m``, for a variable and not a unit.

    >>> read("x = 5").name, read(r"3 \text{ cm}").unit.dimensions
    ('x', (('m', 1),))
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable("a text that is too long")
    found = _separated(prepared(text), everywhere=not with_thousands)
    reader = Reader(with_letters=with_letters)
    try:
        return reader.value(found)
    except (RecursionError, regions.OrderError) as error:
        raise Unreadable(str(error) or "nested too deeply") from None


def prepared(text: str) -> list[Token]:
    """The tokens of an answer with numbers in figures, without ordinal endings."""
    return forms.bare(forms.without_ordinals(with_figures(_inward(_angled(tokens(text))))))


def _angled(found: list[Token]) -> list[Token]:
    """``<1, 2>`` as a vector."""
    is_vector = len(found) > 4 and found[0].is_sign("<") and found[-1].is_sign(">")
    if is_vector and any(token.is_sign(",") for token in found):
        return [Token("open", "⟨"), *found[1:-1], Token("close", "⟩")]
    return found


def _separated(found: list[Token], *, everywhere: bool) -> list[Token]:
    """The tokens with the commas of a number as separators where they may be: between the members of a bracket of a text
    that puts no space behind a comma."""
    has_spaced_commas = any(token.is_sign(",") and after.has_space for token, after in zip(found, found[1:], strict=False))
    has_commas = any(token.is_sign(",") for token in found)
    result: list[Token] = []
    depth = 0
    for place, token in enumerate(found):
        if token.text != "{}":
            depth += (token.kind == "open") - (token.kind == "close")
        is_alone = 0 < place < len(found) - 1 and found[place - 1].kind == "open" and found[place + 1].kind == "close"
        is_split = everywhere or (depth > 0 and not has_spaced_commas and not (is_alone and not has_commas))
        if token.kind != "number" or "," not in token.text or not is_split:
            result.append(token)
            continue
        for position, member in enumerate(as_members(token)):
            result += [Token("sign", ",")] * bool(position) + [member]
    return result


def _inward(found: list[Token]) -> list[Token]:
    """``]1,4[`` with the brackets of an open interval."""
    depth, turned = 0, list(found)
    for place, token in enumerate(found):
        if token.text == "]" and depth == 0:
            turned[place], depth = replace(token, kind="open", text="("), 1
        elif token.text == "[" and depth == 1 and (place + 1 == len(found) or found[place + 1].kind in ("sign", "word")):
            turned[place], depth = replace(token, kind="close", text=")"), 0
        elif token.text != "{}":
            depth += (token.kind == "open") - (token.kind == "close")
    return turned if depth == 0 else found


class Reader:
    """A reader of one answer; each method reads one form, and ``value`` any of them."""

    def __init__(self, *, with_letters: bool) -> None:
        self.with_letters = with_letters
        self.depth = 0

    def value(self, found: Sequence[Token]) -> Value:
        """The value that the tokens write, whatever it is. Raises Unreadable."""
        found = trimmed(without_remark(list(found)))
        if not found:
            raise Unreadable("nothing")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        try:
            return self._any(found)
        finally:
            self.depth -= 1

    def _any(self, found: list[Token]) -> Value:
        if (value := _figure(found) or words_value(found)) is not None:
            return value
        if any(token.kind == "begin" for token in found) and (value := self._table(found)) is not None:
            return value
        for read_form in (forms.read_date, self._time, forms.read_amounts):
            if (value := read_form(found)) is not None:
                return value
        if (value := self._with_clause(found)) is not None:
            return value
        if any(token.is_sign("mod") for token in found) and (value := self._congruence(found)) is not None:
            return value
        if any(token.is_sign("∧", "∨", "¬", "→", "⇒", "⇔", "∪", "∩", "∖", "ᶜ") for token in found) and (value := _truths(found)):
            return value
        return self._plain(found)

    def _time(self, found: Sequence[Token]) -> Value | None:
        value = forms.read_time(found)
        return value if value is not None and value.half is not None else None

    def _congruence(self, found: Sequence[Token]) -> Congruence | None:
        return forms.read_congruence(found, self.pieces)

    def _plain(self, found: list[Token]) -> Value:
        """A region, a list, a relation, a ratio, a range, or one quantity."""
        if (region := self._region(found)) is not None:
            return region
        if (several := self._several(found)) is not None:
            return several
        if (named := self._named(found)) is not None:
            return named
        if any(token.is_sign(*_RELATIONS) for token in _top(found)):
            return self._relation(found)
        if (value := self._range_or_ratio(found)) is not None:
            return value
        if (value := self._bracketed(found)) is not None:
            return value
        try:
            return self._signs(self.quantity(found))
        except Unreadable:
            if found[-1].is_from_words and found[-1].value == 0 and found[-2:-1] and found[-2].text == "below":
                below = self.quantity(found[:-2])
                return Quantity(negative(below.tree), below.unit)
            if (sentence := self.sentence(found)) is not None:
                return sentence
            raise

    def _table(self, found: list[Token]) -> Value | None:
        if (matrix := forms.read_matrix(found)) is not None:
            return matrix
        start = next(place for place, token in enumerate(found) if token.kind == "begin")
        stop = closing(found, start)
        before, after = found[:start], found[stop + 1 :]
        is_system = found[start].text in ("cases", "aligned", "align", "array", "gathered", "split", "dcases", "alignedat")
        if not is_system or any(token.text != "{" for token in before) or after:
            return None
        return self._system(found[start].text, split(found[start + 1 : stop], "\\\\"))

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

    def _with_clause(self, found: list[Token]) -> Value | None:
        """A value with ``for all x``, ``where k is an integer`` or a condition behind it; None without one."""
        clause: Clause | None = split_clause(found)
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
        renamed = [Token(t.kind, "#" if t.text == clause.letter else t.text, t.value, t.has_space, t.mode) for t in clause.before]
        value = self.value(renamed)
        inner = value.value if isinstance(value, Named) else value
        return Family(inner, clause.domain, self.value(clause.before))

    def _region(self, found: list[Token]) -> Value | None:
        """A set of real numbers; None for what is none or for relations that only algebra can solve."""
        text = phrase(found)
        if text in REALS or text in NO_SOLUTION:
            return regions.REALS if text in REALS else regions.EMPTY
        if (excepted := self._all_but(found)) is not None:
            return excepted
        if not _may_be_region(found):
            return None
        pieces, joins = self.pieces_and_joins(found)
        try:
            if len(pieces) > 1 and all(any(t.is_sign(*regions.ORDERS, "!=") for t in _top(piece)) for piece in pieces):
                return _joined([regions.read_region(piece) for piece in pieces], joins)
            return regions.read_region(found)
        except Unreadable:
            return None

    def _all_but(self, found: list[Token]) -> Region | None:
        texts = [token.text.lower() for token in found]
        gap = next((place for place, text in enumerate(texts) if text in ("except", "but", "excluding")), None)
        if gap is None or gap > 7 or not any(texts[0] == word for word in ("all", "any", "every", "ℝ")):
            return None
        rest = [token for token in found[gap + 1 :] if token.text.lower() not in ("for", "at")]
        sides = split(rest, "=", "!=")
        points = [parse(piece) for piece in self.pieces(sides[-1])]
        result = regions.REALS
        for point in points:
            gap_region = Region((regions.interval(point, point, is_low_open=False, is_high_open=False),))
            result = regions.intersection(result, regions.complement(gap_region))
        return result

    def pieces(self, found: Sequence[Token]) -> list[list[Token]]:
        """The texts between commas, semicolons, "and" and "or"."""
        return self.pieces_and_joins(found)[0]

    def pieces_and_joins(self, found: Sequence[Token]) -> tuple[list[list[Token]], list[str]]:
        """The pieces of a list, and the word or sign between each and the next."""
        pieces, joins, depth = [list[Token]()], list[str](), 0
        for token in found:
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

    def _several(self, found: list[Token]) -> Value | None:
        """A list; None for one value."""
        if found[0].text.lower() == "both":
            found = found[1:]
        pieces = self.pieces(found)
        if len(pieces) == 1:
            pieces = _wide(found)
        if len(pieces) == 1:
            return None
        if (sentence := self._sentence_with_comma(found, pieces)) is not None:
            return sentence
        values = [self.value(piece) for piece in pieces]
        if isinstance(values[0], Named) and all(isinstance(value, Quantity) for value in values[1:]):
            values = [values[0], *(Named(values[0].name, value) for value in values[1:])]  # x = 2, 3
        return self._members(values)

    def _sentence_with_comma(self, found: list[Token], pieces: list[list[Token]]) -> Value | None:
        """The value of a sentence of which one clause alone has a number; None for a list."""
        has_value = [any(token.kind not in ("word", "sign") for token in piece) for piece in pieces]
        if sum(has_value) != 1 or all(len(piece) < 2 for piece, has in zip(pieces, has_value, strict=True) if not has):
            return None
        return self.sentence(found)

    def _members(self, values: Sequence[Value]) -> Value:
        flat: list[Value] = []
        for value in values:
            is_expanded = isinstance(value, Members) and value.brackets == "±"
            flat += value.members if isinstance(value, Members) and is_expanded else [value]
        return Members("list", tuple(flat))

    def _named(self, found: list[Token]) -> Value | None:
        """``x = 5``, ``f(x) = 2x``, ``Total: 84`` and ``(x, y) = (1, 2)``; None for an equation without a name."""
        sides = split(found, "=")
        if len(sides) >= 2 and all(sides) and not any(t.is_sign(*_RELATIONS) and not t.is_sign("=") for t in _top(found)):
            if len(sides) == 2 and (pairs := self._named_tuple(*sides)) is not None:
                return pairs
            name = _name_of(sides[0])
            if name is not None:
                if len(sides) == 2:
                    return self._name_all(name, self.value(sides[1]))
                return Named(name, self._last_of(sides[1:]))
            return None
        colon = next((place for place, token in enumerate(found) if token.is_sign(":")), 0)
        label = found[:colon]
        is_label = all(token.kind in ("word", "name") for token in label)
        has_word = any(token.kind == "word" for token in label) or (colon + 1 < len(found) and found[colon + 1].has_space)
        if colon and is_label and has_word:
            return self._name_all(phrase(label), self.value(found[colon + 1 :]))
        return None

    def _name_all(self, name: str, value: Value) -> Value:
        if isinstance(value, Members) and value.brackets == "±":
            return Members("list", tuple(Named(name, member) for member in value.members), "±")
        return value if isinstance(value, Named) else Named(name, value)

    def _named_tuple(self, left: list[Token], right: list[Token]) -> Value | None:
        if not (left[0].text == right[0].text == "(" and closing(left, 0) == len(left) - 1 and closing(right, 0) == len(right) - 1):
            return None
        names, values = split(left[1:-1], ","), split(right[1:-1], ",")
        if len(names) != len(values) or len(names) < 2 or any(_name_of(name) is None for name in names):
            return None
        return Members("list", tuple(Named(_name_of(n) or "", self.value(v)) for n, v in zip(names, values, strict=True)))

    def _last_of(self, sides: list[list[Token]]) -> Value:
        """The value of the last side of a chain, whose other sides must not contradict it."""
        last = self.value(sides[-1])
        _refuse_contradiction([*sides])
        return last

    def _relation(self, found: list[Token]) -> Value:
        """An equation or chain: its last side where the others only lead to it, else the relation itself."""
        signs = tuple(token.text for token in _top(found) if token.is_sign(*_RELATIONS))
        sides = split(found, *_RELATIONS)
        if not all(sides):
            raise Unreadable("a relation without one of its sides")
        if set(signs) == {"="}:
            stated = self._stated_side(sides)
            if stated is not None:
                _refuse_contradiction(sides)
                return self.value(stated)
        if signs[-1:] == ("≈",) and len(signs) == 1:
            return self._rounded(*sides)
        return Relation(tuple(parse(side) for side in sides), signs)

    def _stated_side(self, sides: list[list[Token]]) -> list[Token] | None:
        trees = [_tree_or_none(side) for side in sides]
        if len(sides) == 2 and trees[1] is not None and trees[1].kind == "symbol" and trees[1].symbols() and trees[0] is not None:
            return None if trees[0].symbols() else sides[0]  # 5 = x
        is_computed = all(tree is None or not tree.symbols() for tree in trees[:-1])
        if trees[0] is not None and trees[0].has("operator"):
            return sides[-1]
        if is_computed and all(tree is not None or _has_label(side) for tree, side in zip(trees[:-1], sides[:-1], strict=True)):
            return sides[-1]
        if len(sides) > 2 and (trees[-1] is None or not trees[-1].symbols()):
            return sides[-1]
        return sides[-1] if _is_named_sum(trees[0]) else None

    def _rounded(self, exact: list[Token], rounded: list[Token]) -> Value:
        """An exact value with the decimal behind it that rounds it."""
        value, near = self.quantity(exact), rounded[0] if rounded else None
        whole = rational(value.tree)
        sign = -1 if near is not None and near.is_sign("-") else 1
        near = rounded[1] if sign < 0 and len(rounded) == 2 else near
        if whole is None or near is None or near.kind != "number" or "." not in near.text:
            raise Unreadable("an approximation")
        places = len(near.text.partition(".")[2])
        if abs(whole - sign * near.value) * 2 > number(10).value ** -places:
            raise Unreadable("an approximation of something else")
        return value

    def _range_or_ratio(self, found: list[Token]) -> Range | Ratio | None:
        value = forms.read_range(found, self.value)
        if value is not None:
            return value
        return forms.read_ratio(found, self.quantity)

    def _bracketed(self, found: list[Token]) -> Value | None:
        """A tuple, set or list of lists in one pair of brackets; None for anything else."""
        if (nested := forms.read_nested_list(found)) is not None:
            return nested
        opening, close = found[0].text, found[-1].text
        if found[0].kind != "open" or opening == "{}" or closing(found, 0) != len(found) - 1:
            return None
        pieces = self.pieces(found[1:-1]) if len(found) > 2 else []
        if opening == "{" and close == "}":
            return Members("set", self._expanded(pieces))
        if opening in "([⟨" and close in ")]⟩" and len(pieces) > 1:
            return Members("tuple", tuple(self.value(piece) for piece in pieces), opening + close)
        return None

    def _expanded(self, pieces: list[list[Token]]) -> tuple[Value, ...]:
        members = self._members([self.value(piece) for piece in pieces])
        assert isinstance(members, Members)
        return members.members

    def quantity(self, found: Sequence[Token]) -> Quantity:
        """A number or expression with its currency and unit. Raises Unreadable."""
        found = list(found)
        if is_hedged(found):
            raise Unreadable("a hedge")
        sign, currency, found = _currency(found)
        start, unit = unit_suffix(found, with_letters=self.with_letters)
        has_operator = any(token.kind == "operator" for token in found)
        if has_operator or (unit == DEGREES and any(token.kind == "function" for token in found[:start])):
            start, unit = len(found), NO_UNIT  # an integral's variable, the angle of a sine
        if currency:
            unit = _with_currency(currency, unit)
        inner = _with_base(found[:start])
        while inner and inner[-1].text in ("{}",) and inner[-1].kind == "open":
            raise Unreadable("a unit in a bracket")
        if len(inner) == 1 and inner[0].kind == "number":
            token = inner[0]
            if token.is_from_words and unit.label and not (token.value > 1 and _is_lower(found[start:])):
                raise Unreadable("words")
            value = -token.value if sign < 0 else token.value
            return Quantity(number(value), unit, token.base, ("-" if sign < 0 else "") + token.text)
        tree = parse(inner)
        base, digits = None, ""
        if len(inner) == 2 and inner[0].is_sign("-") and inner[1].kind == "number":
            base, digits = inner[1].base, f"-{inner[1].text}"
        return Quantity(negative(tree) if sign < 0 else tree, unit, base, digits)

    def _signs(self, value: Quantity) -> Value:
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

    def sentence(self, found: list[Token]) -> Value | None:
        """The only value of a sentence; None where there are several, or where it does not commit to one."""
        if len(rest := without_lead(found)) < len(found):
            return self.value(rest)
        if is_hedged(found) or not any(token.kind == "word" for token in found):
            return None
        if any(token.is_sign(*_RELATIONS) and not token.is_sign("=") for token in _top(found)):
            return None
        chunks = [chunk for chunk in _chunks(found) if not (chunk[1] == chunk[0] + 1 and _is_letter(found[chunk[0]]))]
        if not chunks or not all(_holds_value(found[start:stop]) for start, stop in chunks):
            return None
        delimited = [chunk for chunk in chunks if found[chunk[0]].mode == "formula"]
        if len(chunks) != 1 and not (delimited and delimited[-1] == chunks[-1]):
            figures = [chunk for chunk in chunks if not all(t.is_from_words for t in found[chunk[0] : chunk[1]] if t.kind == "number")]
            chunks = figures if len(figures) == 1 and len(chunks) > 1 else chunks
            if len(chunks) != 1:
                return None
        start, stop = chunks[-1]
        is_one_of = stop == start + 1 and found[start].is_from_words and found[start].value <= 1
        if is_one_of or _is_computed_by_words(found, start, stop):
            return None
        rest = found[start:]
        behind, _ = unit_suffix([*found[start:stop], *_words_behind(rest[stop - start :])])
        try:
            end = len(found[start:stop]) + len(_words_behind(rest[stop - start :]))
            with_unit = found[start : start + end]
            if behind < end:
                return self._signs(self.quantity(with_unit))
        except Unreadable:
            pass
        return self.value(found[start:stop])


def trimmed(found: list[Token]) -> list[Token]:
    """The tokens without closing punctuation, an opening equals sign or a group around all of them."""
    before = -1
    while found and before != len(found):
        before = len(found)
        while found and (found[-1].is_sign(".", ",", ";", ":", "\\\\", "quad", "&", "!") and not _counts(found)):
            found = found[:-1]
        while found and found[0].is_sign("quad", "&", ":", "."):
            found = found[1:]
        if len(found) > 1 and found[0].is_sign("=") and not _is_formula(found[1:]):
            found = found[1:]
        if len(found) > 1 and found[0].text == "{}" and found[0].kind == "open" and closing(found, 0) == len(found) - 1:
            found = found[1:-1]
    return found


def _counts(found: list[Token]) -> bool:
    """A closing exclamation mark is a factorial behind a number or a bracket."""
    return found[-1].is_sign("!") and len(found) > 1 and found[-2].kind != "word"


def _is_formula(found: Sequence[Token]) -> bool:
    """What follows an equals sign at the beginning is a formula of a spreadsheet, which nobody has computed."""
    rest = found[1:] if found[0].is_sign("-") else found
    has_operation = any(token.is_sign("+", "-", "*", "/", "^", "&") for token in rest[1:])
    cell = rest[0].kind == "name" and rest[0].text.isupper() and len(rest) > 1 and rest[1].kind == "number"
    return has_operation or cell or any(token.kind == "word" and token.text.isupper() for token in rest)


def _top(found: Sequence[Token]) -> list[Token]:
    kept, depth = [], 0
    for token in found:
        depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
        if depth == 0:
            kept.append(token)
    return kept


def _join(token: Token) -> str:
    if token.is_sign(*_JOINS):
        return ","
    text = token.text.lower()
    if text in ("and", "or"):
        return text
    return {"∨": "or", "∧": "and", "&": ","}.get(token.text, "") if token.kind == "sign" else ""


def _wide(found: list[Token]) -> list[list[Token]]:
    """The statements between wide spaces; the whole where a piece is none."""
    pieces = [piece for piece in split(found, "quad") if piece]
    is_list = len(pieces) > 1 and all(any(token.is_sign("=") for token in piece) for piece in pieces)
    return pieces if is_list else [[token for token in found if not token.is_sign("quad")]]


def _figure(found: list[Token]) -> Value | None:
    """An angle or triangle by its corners; an angle may be read from both sides."""
    kind = {"angle": "∠", "triangle": "△", "∠": "∠", "△": "△"}.get(found[0].text.lower(), "")
    corners = "".join(token.text for token in found[1:] if token.text != "{}")
    if not kind or not (corners.isalpha() and corners.isupper() and len(corners) <= 4):
        return None
    return Words(kind + (min(corners, corners[::-1]) if kind == "∠" else corners))


def _truths(found: list[Token]) -> Value | None:
    try:
        return regions.read_truths(found)
    except Unreadable:
        return None


def _may_be_region(found: Sequence[Token]) -> bool:
    if any(token.is_sign(*regions.SIGNS) or token.text in ("ℝ", "∅") for token in found):
        return True
    is_pair = found[0].text in "([" and found[-1].text in ")]" and closing_or_none(found) == len(found) - 1
    is_mixed = found[0].text + found[-1].text in ("(]", "[)")
    return is_pair and (is_mixed or any(token.text == "∞" for token in found)) and len(split(found[1:-1], ",", ";")) == 2


def closing_or_none(found: Sequence[Token]) -> int | None:
    """The place of the bracket that closes the first one; None if it does not close or is none."""
    if found[0].kind != "open":
        return None
    try:
        return closing(found, 0)
    except Unreadable:
        return None


def _joined(parts: list[Region], joins: list[str]) -> Region:
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


def _tree_or_none(side: list[Token]) -> Tree | None:
    try:
        return parse(side)
    except Unreadable:
        return None


def _has_label(side: list[Token]) -> bool:
    return any(token.kind == "word" or token.is_sign("$", "€", "£") for token in side)


def _is_named_sum(tree: Tree | None) -> bool:
    """An expression of several variables and no numbers: it is what was asked for."""
    if tree is None or len(tree.symbols()) < 2:
        return False
    return not any(part.kind == "number" and part.value not in (1, -1) for part in _leaves(tree))


def _leaves(tree: Tree) -> list[Tree]:
    return [leaf for part in tree.parts for leaf in _leaves(part)] if tree.parts else [tree]


def _refuse_contradiction(sides: list[list[Token]]) -> None:
    """A chain of numbers that are not equal states nothing."""
    trees = [tree for side in sides if (tree := _tree_or_none(side)) is not None]
    values = {value for tree in trees if (value := rational(tree)) is not None}
    if len(values) > 1 and all(not _has_label(side) for side in sides):
        raise Unreadable("an equation that is false")


def _name_of(found: Sequence[Token]) -> str | None:
    """The name on the left of an equation: a variable, a function's name, a segment, words; None for an expression."""
    found = [token for token in found if token.text not in ("{}",) or token.kind == "sign"]
    if not found or any(token.kind == "number" and place == 0 for place, token in enumerate(found)):
        return None
    if found[0].text in ("∠", "△") and len(found) == 2:
        return found[0].text + found[1].text
    if all(token.kind in ("word", "name") for token in found):
        is_product = len(found) > 1 and all(token.kind == "name" for token in found) and found[0].mode != "text"
        return None if is_product and len(found) != 2 else phrase(found) if any(t.kind == "word" for t in found) else "".join(t.text for t in found)
    tree = _tree_or_none(list(found))
    if tree is not None and tree.kind == "symbol" and tree.symbols():
        return tree.name
    is_function = tree is not None and tree.kind == "call" and found[0].kind in ("name", "word")
    return "".join(token.text for token in found) if is_function else None


def _currency(found: list[Token]) -> tuple[int, str, list[Token]]:
    """Sign, currency and the rest of an amount of money; an empty currency for anything else."""
    if len(found) > 1 and found[0].text.upper() in ("US", "USD", "CAD", "AUD") and found[1].is_sign("$"):
        found = found[1:]
    sign, place = 1, 0
    if found and found[0].is_sign("-", "+"):
        sign, place = (-1 if found[0].is_sign("-") else 1), 1
    if place < len(found) and found[place].is_sign(*_CURRENCIES):
        currency, rest = found[place].text, found[place + 1 :]
        if sign > 0 and rest and rest[0].is_sign("-"):
            sign, rest = -1, rest[1:]
        return sign, currency, rest
    return 1, "", found


def _with_base(found: list[Token]) -> list[Token]:
    """A number and its base behind a macro, ``\\text{110}_2``, as one token."""
    texts = [token for token in found if token.text != "{}"]
    is_based = len(texts) == 3 and texts[0].kind == texts[2].kind == "number" and texts[1].is_sign("_")
    digits, base = (texts[0].text, texts[2].value) if is_based else ("", 0)
    if not is_based or not digits.isdigit() or not 2 <= base <= 36 or any(int(digit) >= base for digit in digits):
        return found
    return [Token("number", digits, value=number(int(digits, int(base))).value, base=int(base))]


def _with_currency(currency: str, unit: Unit) -> Unit:
    money = ((currency, 1),)
    if unit.dimensions == money:
        return unit
    if any(power > 0 for _, power in unit.dimensions):
        raise Unreadable("an amount of money with another unit")
    return Unit(tuple(sorted((*money, *unit.dimensions))), unit.factor, unit.label)


def _is_lower(found: Sequence[Token]) -> bool:
    return all(token.text == token.text.lower() for token in found if token.kind == "word")


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


def _chunks(found: Sequence[Token]) -> list[tuple[int, int]]:
    """Places of the runs of mathematics between words."""
    chunks, start = list[tuple[int, int]](), None
    for place, token in enumerate([*found, Token("word", "end")]):
        is_word = token.kind == "word" and not (token.mode != "text" and len(token.text) == 2 and not token.text.isalpha())
        is_article = token.kind == "name" and token.text in ("a", "A", "I") and token.mode != "formula"
        if is_word or is_article or token.is_sign(",", ".", ";", ":", "?", '"', "\\\\", "quad"):
            if start is not None:
                chunks.append((start, place))
                start = None
        elif start is None and not token.is_sign("'", "-", "!", '"'):
            start = place
    return chunks


def _is_letter(token: Token) -> bool:
    """A letter of plain text, which names something and is no value."""
    return token.kind == "name" and token.mode != "formula"


def _holds_value(chunk: Sequence[Token]) -> bool:
    """A number or a formula; a letter of plain text is none."""
    return any(token.kind in ("number", "command", "function", "begin") or token.mode == "formula" for token in chunk) and any(
        token.kind != "sign" for token in chunk
    )


def _words_behind(found: Sequence[Token]) -> list[Token]:
    kept = []
    for token in found:
        if token.kind not in ("word", "name") and not token.is_sign("%", "/", "^", "°"):
            break
        kept.append(token)
    return kept


_COMPUTING = frozenset((
    "twice", "thrice", "double", "triple", "times", "minus", "negative", "plus", "half", "third", "quarter", "root", "square",
    "cube", "reciprocal", "opposite", "negation", "logarithm", "number",
))  # fmt: skip
_COMPUTED = frozenset(("squared", "cubed", "factorial", "below", "percent"))


def _is_computed_by_words(found: Sequence[Token], start: int, stop: int) -> bool:
    """Words around a number make another one of it: "twice 5", "half of 5", "5 squared"."""
    before = [token.text.lower() for token in found[:start] if token.text.lower() not in ("of", "the")]
    if before and (before[-1] in _COMPUTING or before[-1] in ("-", "*", "/", "^", "+")):
        return True
    after = found[stop].text.lower() if stop < len(found) else ""
    return after in _COMPUTED or (after == "and" and stop + 1 < len(found) and found[stop + 1].kind == "number")



def exact_number(text: str) -> Fraction | None:
    """The number that a text states, its unit and currency left aside; None if it states something else.

    >>> exact_number("$1,000")
    Fraction(1000, 1)
    """
    try:
        value = read(text.strip())
    except Unreadable:
        return None
    value = value.value if isinstance(value, Named) else value
    if not isinstance(value, Quantity) or value.tree.has("factorial"):
        return None
    number_of = rational(value.tree)
    return None if number_of is None else number_of / (100 if value.unit.is_percent else 1)
