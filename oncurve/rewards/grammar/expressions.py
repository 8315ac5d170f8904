"""Parser of expressions: recursive descent from tokens to trees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from oncurve.rewards.grammar.arithmetic import ArithmeticParser, chosen
from oncurve.rewards.grammar.lexemes import ACCENTS, FUNCTIONS, Token, Unreadable, closing, split
from oncurve.rewards.grammar.values import Tree, negative, number, product, quotient, symbol

MAX_LETTERS = 6
"""Letters of a word that may be a product of variables."""

_NAMES_OF_FUNCTIONS = frozenset("fghFGHPΓζ")
"""Letters that apply to a bracket that touches them; with others it is a product."""
_ROUNDED = {"⌊": "floor", "⌈": "ceil"}
_SEVERAL = frozenset(("max", "min", "gcd", "lcm"))


def parse(tokens: Sequence[Token]) -> Tree:
    """The expression that all of the tokens write. Raises Unreadable.

    >>> from oncurve.rewards.grammar.lexer import tokenize
    >>> parse(tokenize(r"\\\\frac12")).parts[0].value
    Fraction(1, 1)
    """
    _refuse_prose(tokens)
    return Parser(tokens).whole()


def _refuse_prose(tokens: Sequence[Token]) -> None:
    """Words of plain text beside each other, or before a number, are no products of letters."""
    for token, after in itertools.pairwise(tokens):
        is_plain = token.kind == "word" and token.mode == "bare" and not token.text.startswith("d")
        if is_plain and after.has_space and (after.kind == "number" or (after.kind == "word" and after.mode == "bare")):
            raise Unreadable("words")


class Parser(ArithmeticParser):
    """A reader of one expression."""

    def atom(self) -> Tree:
        """A number, name, function, command or bracket."""
        token = self.next
        match token.kind:
            case "number":
                return self._number()
            case "name":
                return self._name()
            case "word":
                return self._word()
            case "function":
                self.index += 1
                return self.function(token.text)
            case "command":
                self.index += 1
                return self.command(token.text)
            case "operator":
                self.index += 1
                return self.operator(token.text)
            case "open":
                return self._bracket()
        if token.kind == "begin" or token.is_sign("|"):
            return self._environment() if token.kind == "begin" else self._absolute()
        if token.is_sign("_", "^") and (tree := self.combination(None)) is not None:
            return tree
        raise Unreadable(f"the sign {token.text!r}")

    def _bracket(self) -> Tree:
        opening = self.next.text
        if opening == "{}" and self.after().text == "{}" and self.after().kind == "close":
            self.index += 2  # {}_{8}C_{3}
            return self.primary()
        inside = self.inside()
        if opening in _ROUNDED:
            return Tree("call", (inside.whole(),), _ROUNDED[opening])
        if opening in ("⟨", "{"):
            raise Unreadable("a bracket around several values")
        return inside.whole()

    def _absolute(self) -> Tree:
        end = next((k for k in range(self.index + 1, len(self.tokens)) if self.tokens[k].is_sign("|")), 0)
        if not end:
            raise Unreadable("a bar that does not close")
        inside = self.deeper(self.tokens[self.index + 1 : end])
        self.index = end + 1
        return Tree("call", (inside.whole(),), "abs")

    def _name(self) -> Tree:
        token = self.next
        self.index += 1
        name = token.text
        if name in ("∂", "∇") and self.next.kind in ("name", "word"):
            name += self.next.text
            self.index += 1
        if name in ("∠", "△") or (name == "∇" and self.next.is_sign("*")):
            raise Unreadable("a figure, or a divergence")
        name = self._decorated(name)
        if (tree := self._applied(name)) is not None:
            return tree
        return symbol(name)

    def _decorated(self, name: str) -> str:
        """The name with its index and primes, which make it another name."""
        while True:
            if self.take("_"):
                end = closing(self.tokens, self.index) if self.next.text == "{}" else self.index
                inside = self.tokens[self.index : end + 1]
                if not inside:
                    raise Unreadable("an index that is missing")
                name += "_" + "".join(token.text for token in inside if token.text != "{}")
                self.index = end + 1
            elif self.next.kind == "sign" and self.next.text and set(self.next.text) <= {"'", "ᶜ", '"'}:
                name += self.next.text.replace('"', "''")
                self.index += 1
            else:
                return name

    def _applied(self, name: str) -> Tree | None:
        """The function of that name applied to the bracket that follows; None where it is a variable."""
        start = self.index
        letter = name.rstrip("'")
        is_function = letter[:1] in _NAMES_OF_FUNCTIONS or len(letter.partition("_")[0]) > 1
        if is_function and self.next.is_sign("^") and self._inverts():
            name += "⁻¹"
        if self.next.text != "(" or (self.next.has_space and not is_function):
            self.index = start
            return None
        inside = self.tokens[self.index + 1 : closing(self.tokens, self.index)]
        if any(token.is_sign("∪", "∩", "∖", "ᶜ") for token in inside):
            self.inside()
            return symbol(f"{name}({''.join(token.text for token in inside)})")
        separators = [token.text for token in inside if token.is_sign(",", ";", "|")]
        if name in ("C", "P", "nCr", "nPr") and separators == [","]:
            return chosen(name.strip("nr"), *self._arguments())
        if not (is_function or "'" in name or (separators and letter[:1].isupper())):
            self.index = start
            return None
        return Tree("call", tuple(self._arguments()), name + "".join(separators))

    def _inverts(self) -> bool:
        """Reads the -1 of an inverse function before its bracket."""
        texts = [token.text for token in self.tokens[self.index : self.index + 6]]
        for written in (["^", "{}", "-", "1", "{}", "("], ["^", "-", "1", "("]):
            if texts[: len(written)] == written:
                self.index += len(written) - 1
                return True
        return False

    def _arguments(self) -> list[Tree]:
        inside = self.inside()
        return [self.deeper(piece).whole() for piece in split(inside.tokens, ",", ";", "|")]

    def _word(self) -> Tree:
        """A word of plain text: a function with what follows, a differential, or a product of single letters."""
        token = self.next
        if token.mode == "text":
            self.index += 1
            name = self._decorated(token.text)
            if self.next.text == "(":
                return Tree("call", tuple(self._arguments()), name)
            raise Unreadable("a word")
        word = token.text
        if len(word) == 2 and word[0] == "d" and word[1].isascii():
            self.index += 1
            return symbol(self._decorated(word))
        if word in ("nCr", "nPr") and self.after().text == "(":
            self.index += 1
            return self._applied(word) or symbol(word)
        start = next((name for size in (6, 5, 4, 3, 2) if (name := word[:size]) in FUNCTIONS), "")
        if start and len(word) <= len(start) + 2:
            rest = word[len(start) :]
            self.tokens[self.index : self.index + 1] = [
                replace(token, kind="function", text=start),
                *(replace(token, kind="name", text=sign, has_space=False) for sign in rest),
            ]
            return self.primary()
        if len(word) > MAX_LETTERS or not word.isascii():
            raise Unreadable("a word")
        self.tokens[self.index : self.index + 1] = [
            replace(token, kind="name", text=sign, has_space=token.has_space and not index)
            for index, sign in enumerate(word)
        ]
        return self.primary()

    def function(self, name: str) -> Tree:
        """A function with its base, its power and its argument."""
        base = self.argument() if name == "log" and self.take("_") else None
        power = self.exponent() if self.take("^") else None
        arguments = self._function_arguments(name)
        if name == "log":
            arguments = [arguments[0], base if base is not None else number(10)]
            if base == symbol("e"):
                name, arguments = "ln", arguments[:1]
        if name == "cis":
            angle = arguments[0]
            return Tree("sum", (Tree("call", (angle,), "cos"), product(symbol("i"), Tree("call", (angle,), "sin"))))
        if power == number(-1) and not name.startswith("arc"):
            return Tree("call", tuple(arguments), f"arc{name}")
        tree = Tree("call", tuple(arguments), name)
        return tree if power is None else Tree("power", (tree, power))

    def _function_arguments(self, name: str) -> list[Tree]:
        if (
            self.next.kind == "open"
            and self.next.text in ("(", "[", "{")
            and (name in _SEVERAL or self.next.text == "(")
        ):
            arguments = self._arguments()
            if name in _SEVERAL and len(arguments) < 2:
                raise Unreadable("a function of several numbers has one")
            return arguments
        if name in _SEVERAL:
            raise Unreadable("a function without its arguments")
        if self.next.text == "{}":
            return [self.inside().whole()]
        if self.take("-"):
            return [negative(self.factor())]
        parts = [self.factor()]
        while self.begins_factor() and self.next.kind not in ("function", "operator", "open"):
            self._refuse_side_by_side()
            parts.append(self.factor())
        return [product(*parts)]

    def command(self, name: str) -> Tree:
        """A fraction, root, binomial or accent with its arguments."""
        if name == "frac":
            return quotient(self.argument(), self.argument())
        if name == "binom":
            return Tree("call", (self.argument(), self.argument()), "binom")
        if name == "sqrt":
            index = number(2)
            if self.next.text == "[":
                index = self.inside().whole()
            return Tree("root", (self._radicand(), index))
        assert name in ACCENTS
        return self._accent(name)

    def _radicand(self) -> Tree:
        """A group or bracket; without one a whole number of plain text, but a single digit behind a command."""
        if self.next.text == "(":
            return self.inside().whole()
        if self.next.kind == "number" and self.next.base is None and self.next.has_space:
            token = self.next
            self.index += 1
            return number(token.value)
        return self.argument()

    def _accent(self, name: str) -> Tree:
        end = closing(self.tokens, self.index) if self.next.kind == "open" else self.index
        inside = [token for token in self.tokens[self.index : end + 1] if token.text != "{}"]
        self.index = end + 1
        if not inside:
            raise Unreadable("an accent over nothing")
        if name == "overline" and len(inside) == 1 and inside[0].kind == "number":
            return number(inside[0].value)
        return symbol(self._decorated(f"{name} {''.join(token.text for token in inside)}"))

    def operator(self, name: str) -> Tree:
        """A sum, product, integral or limit with its bounds and body; the letter that it binds is written ``#``."""
        low, high, letter = self._bounds(name)
        if name.endswith("int"):
            letter, body = self._integrand()
        else:
            body = self.deeper(self._body())
        bound = [replace(token, text=f"#{self.depth}") if token.text == letter else token for token in body.tokens]
        tree = self.deeper(bound).whole()
        return Tree("operator", (*low, *high, tree), name)

    def _bounds(self, name: str) -> tuple[list[Tree], list[Tree], str]:
        low: list[Tree] = []
        high: list[Tree] = []
        letter = ""
        while self.next.is_sign("_", "^"):
            is_low = self.take("_")
            if not is_low:
                self.index += 1
            if is_low and self.next.text == "{}":
                inside = self.inside().tokens
                sides = split(inside, "=", "→")
                if len(sides) == 2 and len(sides[0]) == 1:
                    letter, inside = sides[0][0].text, sides[1]
                low = [self.deeper(inside).whole()]
            elif is_low:
                low = [self.argument()]
            else:
                high = [self.argument()]
        if name in ("sum", "prod", "lim") and not letter:
            raise Unreadable("an operator without its variable")
        return low, high, letter

    def _integrand(self) -> tuple[str, Parser]:
        depth = 0
        for index in range(self.index, len(self.tokens)):
            token = self.tokens[index]
            depth += (token.kind == "open") - (token.kind == "close")
            is_short = token.kind == "word" and len(token.text) == 2 and token.text[0] == "d"
            is_pair = (
                token.text == "d" and index + 1 < len(self.tokens) and self.tokens[index + 1].kind in ("name", "word")
            )
            if depth == 0 and (is_short or is_pair):
                body = self.tokens[self.index : index]
                self.index = index + 1 + is_pair
                return (token.text[1] if is_short else self.tokens[index].text), self.deeper(
                    body or [Token("number", "1", value=Fraction(1))]
                )
        raise Unreadable("an integral without its variable")

    def _body(self) -> list[Token]:
        """The factors that an operator acts on: up to the next sign of addition."""
        start, depth = self.index, 0
        while self.index < len(self.tokens):
            token = self.next
            if depth == 0 and (token.is_sign("+", "-", "±") or token.kind == "close") and self.index > start:
                break
            depth += (token.kind == "open") - (token.kind == "close")
            self.index += 1
        return self.tokens[start : self.index]

    def _environment(self) -> Tree:
        """A determinant; other tables are no expressions."""
        end = closing(self.tokens, self.index)
        if self.next.text not in ("vmatrix", "smallmatrix"):
            raise Unreadable("a table inside of an expression")
        inside = self.tokens[self.index + 1 : end]
        self.index = end + 1
        rows = [split(row, "&") for row in split(inside, "\\\\") if row]
        cells = [[self.deeper(cell).whole() for cell in row] for row in rows]
        if len({len(row) for row in cells}) != 1:
            raise Unreadable("rows of different lengths")
        return Tree("determinant", tuple(Tree("sum", tuple(row)) for row in cells))
