"""Parser of arithmetic: signs, products, quotients, powers and factorials; what an atom is, says who inherits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Self

from oncurve.rewards.grammar.lexemes import Token, Unreadable, closing
from oncurve.rewards.grammar.values import Tree, negative, number, product, quotient, symbol

MAX_DEPTH = 48
"""Brackets, powers and functions inside of each other."""
_MATCHING = {"(": ")", "[": "]", "{": "}", "{}": "{}", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉"}
END = Token("sign", "")
_HALF_TURN = quotient(symbol("π"), number(180))


class ArithmeticParser:
    """A reader from left to right; ``atom`` of its subclass reads what is no sum, product or power."""

    def __init__(self, tokens: Sequence[Token], depth: int = 0) -> None:
        self.tokens, self.index, self.depth = list(tokens), 0, depth

    @property
    def next(self) -> Token:
        """The token to be read; an empty sign at the end."""
        return self.tokens[self.index] if self.index < len(self.tokens) else END

    def after(self, steps: int = 1) -> Token:
        """The token so many steps behind the next one."""
        index = self.index + steps
        return self.tokens[index] if 0 <= index < len(self.tokens) else END

    def take(self, *texts: str) -> bool:
        """Reads the next token if it is one of these signs."""
        if self.next.is_sign(*texts):
            self.index += 1
            return True
        return False

    def inside(self) -> Self:
        """A reader of what stands in the bracket that opens here, which is left behind."""
        end = closing(self.tokens, self.index)
        opening = self.next.text
        if self.tokens[end].text != _MATCHING.get(opening):
            raise Unreadable("brackets that do not match")
        parser = self.deeper(self.tokens[self.index + 1 : end])
        self.index = end + 1
        return parser

    def deeper(self, tokens: Sequence[Token]) -> Self:
        """A reader of some tokens one level deeper."""
        if self.depth >= MAX_DEPTH:
            raise Unreadable("brackets too deep")
        return type(self)(tokens, self.depth + 1)

    def whole(self) -> Tree:
        """The expression that is left, all of it."""
        tree = self.sum()
        if self.take("choose"):
            tree = Tree("call", (tree, self.sum()), "binom")
        elif self.take("over"):
            tree = quotient(tree, self.sum())
        elif self.take("mod"):
            tree = Tree("call", (tree, self.sum()), "mod")
        if self.index < len(self.tokens):
            raise Unreadable(f"what follows: {self.next.text}")
        return tree

    def sum(self) -> Tree:
        """Terms with signs between them."""
        terms = [self._signed_term()]
        while self.next.is_sign("+", "-", "±", "∓"):
            if self.after(1).is_sign("+", "-"):
                raise Unreadable("two signs")
            terms.append(self._signed_term())
        return terms[0] if len(terms) == 1 else Tree("sum", tuple(terms))

    def _signed_term(self) -> Tree:
        sign = self.next.text
        if not self.take("+", "-", "±", "∓"):
            sign = "+"
        if sign != "+" and self.next.is_sign("+", "-"):
            raise Unreadable("two signs")
        tree = self.term()
        if sign == "-":
            return negative(tree)
        return Tree("plusminus", (tree,), sign) if sign in ("±", "∓") else tree

    def term(self) -> Tree:
        """Factors, with or without signs of multiplication and division between them."""
        parts = [self.factor()]
        while True:
            if self._takes_times():
                parts.append(self._signed_factor())
            elif self.take("/"):
                bottom = self._signed_factor()
                parts = [quotient(product(*parts), bottom)]
            elif self.begins_factor():
                self._refuse_side_by_side()
                parts.append(self.factor())
            else:
                return product(*parts)

    def _takes_times(self) -> bool:
        if self.take("*"):
            return True
        before, after = self.after(-1), self.after(1)
        is_cross = self.next.kind == "name" and self.next.text in ("x", "X")
        if is_cross and before.kind in ("number", "close") and after.kind == "number":
            self.index += 1
            return True
        return False

    def _signed_factor(self) -> Tree:
        if self.take("-"):
            return negative(self.factor())
        self.take("+")
        return self.factor()

    def _refuse_side_by_side(self) -> None:
        """Numbers with nothing between them are no product, also in bare braces."""
        before, after = self.after(-1), self.next
        is_power = self.after(-2).is_sign("^") and after.has_space
        is_number = (before.kind == "number" and not is_power) or (
            before.text == "{}" and self.after(-2).kind == "number" and self._is_bare()
        )
        begins = after.kind == "number" or (after.text == "{}" and self.after(1).kind == "number")
        if is_number and begins:
            raise Unreadable("numbers side by side")

    def _is_bare(self) -> bool:
        """Whether the group that ends here is no argument of a command, exponent or index."""
        depth = 0
        for index in range(self.index - 1, -1, -1):
            depth += (self.tokens[index].kind == "close") - (self.tokens[index].kind == "open")
            if depth == 0:
                before = self.tokens[index - 1] if index else END
                return not (before.kind in ("command", "function") or before.is_sign("^", "_") or before.text == "{}")
        return True

    def begins_factor(self) -> bool:
        """Whether the next token begins a factor that needs no sign before it."""
        token = self.next
        return (
            token.kind in ("number", "name", "function", "command", "operator", "begin")
            or (token.kind == "word" and (token.mode != "text" or self.after().text in ("(", "_")))
            or (token.kind == "open" and token.text in ("(", "[", "{}", "⌊", "⌈"))
        )

    def factor(self) -> Tree:
        """A primary expression with its powers, factorials and degrees."""
        tree = self.primary()
        while True:
            if self.take("^"):
                tree = self._raised(tree)
            elif self.next.is_sign("!", "!!"):
                if tree.kind == "factorial":
                    raise Unreadable("a factorial of a factorial")
                tree = Tree("factorial", (tree,), self.next.text)
                self.index += 1
            elif self.take("°"):
                tree = product(tree, _HALF_TURN)
            else:
                return tree

    def _raised(self, base: Tree) -> Tree:
        return Tree("power", (base, self.exponent()))

    def exponent(self) -> Tree:
        """The exponent behind the sign of a power: a group, or one signed factor."""
        if self.next.text == "{}" or self.next.text == "(":
            return self._with_power(self.inside().whole())
        if self.take("-"):
            self._descend()
            tree = negative(self.exponent())
            self.depth -= 1
            return tree
        self.take("+")
        return self._with_power(self.primary())

    def _with_power(self, tree: Tree) -> Tree:
        """Powers of powers go upwards: ``2^3^2`` is ``2^{3^2}``."""
        if self.take("^"):
            self._descend()
            tree = Tree("power", (tree, self.exponent()))
            self.depth -= 1
        return tree

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

    def argument(self) -> Tree:
        """An argument as LaTeX reads it: a group, or one digit, letter or command."""
        token = self.next
        if token.text == "{}" and token.kind == "open":
            return self.inside().whole()
        if token.kind == "number" and token.base is None and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.index] = replace(
                token, text=token.text[1:], value=Fraction(token.text[1:]), has_space=False
            )
            return number(int(token.text[0]))
        if token.kind == "word" and token.mode != "text":
            self.tokens[self.index : self.index + 1] = [replace(token, kind="name", text=sign) for sign in token.text]
        return self.primary()

    def primary(self) -> Tree:
        """An atom, one level deeper."""
        self._descend()
        tree = self.atom()
        self.depth -= 1
        return tree

    def _number(self) -> Tree:
        token = self.next
        self.index += 1
        if (tree := self.combination(token)) is not None:
            return tree
        mixed = self._mixed(token)
        return number(token.value) if mixed is None else mixed

    def _mixed(self, whole: Token) -> Tree | None:
        """``2\\frac12`` and ``2 1/2`` are two and a half; None where no fraction of integers follows."""
        if whole.value.denominator != 1 or not whole.text.isdigit():
            return None
        if self.next.text == "frac":
            start = self.index
            self.index += 1
            top, bottom = self.argument(), self.argument()
            if (
                all(part.kind == "number" and part.value.denominator == 1 for part in (top, bottom))
                and bottom.value > 0
            ):
                return number(whole.value + top.value / bottom.value)
            self.index = start
            return None
        top, slash, bottom = self.next, self.after(1), self.after(2)
        is_fraction = top.kind == bottom.kind == "number" and slash.is_sign("/") and top.has_space
        if is_fraction and top.text.isdigit() and bottom.text.isdigit() and bottom.value:
            self.index += 3
            return number(whole.value + top.value / bottom.value)
        return None

    def combination(self, before: Token | None) -> Tree | None:
        """``8C3``, ``_8C_3`` and ``^8C_3``; with P the number of arrangements."""
        start = self.index
        n: Tree | None = None if before is None else number(before.value)
        if before is None:
            self.index += 1
            if self.next.kind == "number":
                n, self.index = number(self.next.value), self.index + 1
            elif self.next.text == "{}":
                n = self.argument()
        token = self.next
        is_sign = token.kind == "name" and token.text in ("C", "P") and (before is None or not token.has_space)
        if n is None or not is_sign:
            self.index = start
            return None
        self.index += 1
        self.take("_")
        if self.next.kind != "number" and self.next.text != "{}":
            self.index = start
            return None
        return chosen(token.text, n, self.argument())

    def atom(self) -> Tree:
        """A number, name, function or bracket."""
        raise NotImplementedError


def chosen(sign: str, n: Tree, k: Tree) -> Tree:
    """The number of choices (C) or arrangements (P) of k out of n."""
    if sign == "C":
        return Tree("call", (n, k), "binom")
    rest = Tree("sum", (n, negative(k)))
    return quotient(Tree("factorial", (n,), "!"), Tree("factorial", (rest,), "!"))
