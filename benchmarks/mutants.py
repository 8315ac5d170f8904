"""What does a right program look like with one operator wrong?"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitXor: ast.BitOr,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
"""Every operator and what takes its place: its opposite where it has one."""

Change = Callable[[], str]
"""Mutates the tree in place and says what it did."""


def mutate(source: str, function: str, *, seed: str) -> tuple[str, str]:
    """The program with one operator of a function replaced, and what was replaced.

    Without any operator in the function one is put in: the first returned value is negated.
    """
    tree = ast.parse(source)
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    changes = list(_changes(body)) or list(_negations(body))
    described = random.Random(seed).choice(changes)()
    return ast.unparse(ast.fix_missing_locations(tree)), described


def _changes(body: ast.AST) -> Iterator[Change]:
    for node in ast.walk(body):
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                yield _replace(node, node.ops, place, OPERATORS[type(operator)])
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in OPERATORS:
            yield _replace(node, node, "op", OPERATORS[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield _replace(node, node, "op", ast.UAdd if isinstance(node.op, ast.USub) else ast.Invert)


def _replace(node: ast.AST, holder: object, place: int | str, operator: type[ast.AST]) -> Change:
    def change() -> str:
        before = ast.unparse(node)
        if isinstance(holder, list):
            holder[int(place)] = operator()
        elif operator is ast.Invert:
            _drop_not(node)
        else:
            setattr(holder, str(place), operator())
        return f"{before}  ->  {ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))}"

    return change


def _drop_not(node: ast.AST) -> None:
    """Makes ``not x`` a ``not not x``."""
    assert isinstance(node, ast.UnaryOp)
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _negations(body: ast.AST) -> Iterator[Change]:
    for node in ast.walk(body):
        if isinstance(node, ast.Return) and node.value is not None:
            yield _negate(node)
            return


def _negate(node: ast.Return) -> Change:
    def change() -> str:
        assert node.value is not None
        before = ast.unparse(node)
        node.value = ast.UnaryOp(ast.Not(), node.value)
        return f"{before}  ->  {ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))}"

    return change
