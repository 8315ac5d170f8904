"""Values of expressions in a script, as far as they are known without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LONGEST = 10_000
"""Characters or items of a value; a product such as "a" * 10**9 is not computed."""


class NotLiteral(Exception):
    """An expression whose value only running the script would tell."""


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


class Script:
    """A script as syntax, with what its names were bound to, line by line."""

    def __init__(self, text: str, source: str) -> None:
        """Raises SyntaxError for what is no Python."""
        self.source, self.text = source, text
        self.tree = ast.parse(text, source)
        self.bindings: dict[str, list[tuple[int, ast.expr | None]]] = {}
        """Name to (line, expression); None where a loop, an argument or an import binds it."""
        self.functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        self.aliases: dict[str, str] = {}
        """Local name to the full one, from imports."""
        for node in ast.walk(self.tree):
            self._bind(node)
        for bound in self.bindings.values():
            bound.sort(key=lambda pair: pair[0])

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._add(name, node.lineno, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._add(name, node.lineno, value)
            case ast.Assign(targets=targets):
                for target in targets:
                    self._lose(target, node.lineno)
            case ast.AugAssign(target=target) | ast.For(target=target) | ast.NamedExpr(target=target):
                self._lose(target, node.lineno)
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                self._bind_arguments(arguments, node.lineno)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case _:
                pass

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            else:
                first = alias.name.split(".")[0]
                self.aliases[alias.asname or first] = alias.name if alias.asname else first

    def _bind_arguments(self, arguments: ast.arguments, line: int) -> None:
        named = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(named) - len(arguments.defaults)) + list(arguments.defaults)
        for argument, default in zip(named, defaults, strict=True):
            self._add(argument.arg, line, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            self._add(argument.arg, line, default)

    def _lose(self, target: ast.expr, line: int) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._add(node.id, line, None)

    def _add(self, name: str, line: int, value: ast.expr | None) -> None:
        self.bindings.setdefault(name, []).append((line, value))

    def full_name(self, node: ast.AST) -> str:
        """The dotted name of a function or class, through the imports: ``trl.GRPOConfig``."""
        name = dotted(node)
        first, _, rest = name.partition(".")
        whole = self.aliases.get(first, first)
        return f"{whole}.{rest}" if rest else whole

    def last_name(self, node: ast.AST) -> str:
        """The last part of the full name: ``GRPOConfig``."""
        return self.full_name(node).rpartition(".")[2]

    def bound(self, name: str, line: int) -> ast.expr | None:
        """What a name was bound to last before a line; None if nothing or nothing that can be read."""
        before = [pair for pair in self.bindings.get(name, ()) if pair[0] < line]
        return before[-1][1] if before else None

    def calls(self, name: str) -> list[ast.Call]:
        """All calls of a function or class by the last part of its name, in their order."""
        found = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.last_name(node.func) == name
        ]
        return sorted(found, key=lambda call: call.lineno)

    def call_behind(self, node: ast.AST) -> ast.Call | None:
        """The call that an expression is, or that its name was bound to."""
        if isinstance(node, ast.Name):
            bound = self.bound(node.id, node.lineno)
            return None if bound is None else self.call_behind(bound)
        return node if isinstance(node, ast.Call) else None

    def value(self, node: ast.AST, *, depth: int = 0) -> Any:
        """The value of an expression made of literals, of names bound once to such, and of arithmetic.

        Raises NotLiteral, saying what is in the way.
        """
        if depth > 50:
            raise NotLiteral("it is nested too deep")
        try:
            return ast.literal_eval(node)  # type: ignore[arg-type]
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return self._compound(node, depth + 1)

    def _compound(self, node: ast.AST, depth: int) -> Any:
        match node:
            case ast.Name(id=name):
                return self._named(name, node, depth)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, depth=depth) for item in items]
            case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
                pairs = zip(keys, values, strict=True)
                return {self.value(k, depth=depth): self.value(v, depth=depth) for k, v in pairs if k is not None}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                if all(keyword.arg for keyword in keywords):
                    return {str(keyword.arg): self.value(keyword.value, depth=depth) for keyword in keywords}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, depth)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
                return self._computed(type(sign), left, right, depth)
            case ast.JoinedStr(values=values):
                return "".join(str(self._piece(value, depth)) for value in values)
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                return attr  # torch.bfloat16: the name is what is asked for
            case _:
                pass
        raise NotLiteral(f"`{_short(node)}` is only known when the script runs")

    def _piece(self, node: ast.expr, depth: int) -> Any:
        return self.value(node.value if isinstance(node, ast.FormattedValue) else node, depth=depth)

    def _number(self, node: ast.AST, depth: int) -> Any:
        value = self.value(node, depth=depth)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise NotLiteral(f"`{_short(node)}` is no number")
        return value

    def _computed(self, sign: type[ast.operator], left: ast.expr, right: ast.expr, depth: int) -> Any:
        one, other = self.value(left, depth=depth), self.value(right, depth=depth)
        texts = isinstance(one, str) and isinstance(other, str) and sign is ast.Add
        if texts and len(one) + len(other) <= LONGEST:
            return one + other
        try:
            return _ARITHMETIC[sign](self._number(left, depth), self._number(right, depth))
        except (ZeroDivisionError, OverflowError) as error:
            raise NotLiteral(str(error)) from None

    def _named(self, name: str, node: ast.Name, depth: int) -> Any:
        bound = self.bindings.get(name, [])
        if len(bound) > 1:
            lines = ", ".join(str(line) for line, _ in bound)
            raise NotLiteral(f"`{name}` gets a value in lines {lines}")
        if not bound or bound[0][1] is None:
            raise NotLiteral(f"`{name}` is only known when the script runs")
        return self.value(bound[0][1], depth=depth)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
