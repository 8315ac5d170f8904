"""Changes of one node of a file's code, as ``tests/mutants.py`` plants them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text between two offsets is replaced."""

    file: str
    line: int
    last_line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        """One line: where, what stood there, what stands there now."""
        return f"{self.file}:{self.line}  {' '.join(self.before.split())[:70]}  ->  {' '.join(self.after.split())[:70]}"


COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
EITHER_ORDER = ("min", "max", "minimum", "maximum", "equal", "isclose", "gcd", "logaddexp")
"""Functions whose first two arguments may be exchanged."""
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


def changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST | str]:
    """What may stand in the place of a node."""
    match node:
        case ast.Return(value=ast.Constant(value=None | False | 0 | "") | ast.Tuple(elts=[]) | ast.List(elts=[])):
            return  # as false as None
        case ast.Return(value=ast.expr()):
            yield "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in EITHER_ORDER:
            return
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(one, ast.Starred) for one in node.args):
            yield ast.Call(node.func, [second, first, *rest], node.keywords)
        case ast.expr():
            yield from changed_operators(node)


def changed_operators(node: ast.expr) -> Iterator[ast.expr]:
    """Comparisons, sums, conditions."""
    match node:
        case ast.Compare(ops=[operator, *_]):
            for other in COMPARED[type(operator)]:
                yield ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in COMPUTED and not is_text(node):
            yield ast.BinOp(node.left, COMPUTED[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)


def is_text(node: ast.BinOp) -> bool:
    """Texts are joined or filled in, which is no sum."""
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that decide what is computed: no annotations, no messages of errors, no assertions."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_left = name in ("annotation", "returns", "decorator_list") or isinstance(
                child, (ast.Raise, ast.Assert, ast.JoinedStr)
            )
            if isinstance(child, ast.AST) and not is_left:
                yield child
                yield from mutable(child)


def mutants_of(file: str, lines: set[int]) -> list[Mutant]:
    """All changes on the lines, which are counted from 1."""
    text = (ROOT / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for node in {inner: None for function in functions for inner in mutable(function)}:
        if not isinstance(node, (ast.expr, ast.stmt)) or node.lineno not in lines:
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = text.encode()[start:end].decode()
        for after in changes(node):
            written = after if isinstance(after, str) else f"({ast.unparse(after)})"
            found.append(Mutant(file, node.lineno, node.end_lineno, start, end, before, written))
    return found


def compiles(mutant: Mutant) -> bool:
    """A call may stand where only a name may, as in a pattern."""
    try:
        ast.parse(mutated((ROOT / mutant.file).read_text(encoding="utf-8"), mutant))
    except SyntaxError:
        return False
    return True


def mutated(text: str, mutant: Mutant) -> str:
    """The file with the change."""
    data = text.encode()
    return (data[: mutant.start] + mutant.after.encode() + data[mutant.end :]).decode()
