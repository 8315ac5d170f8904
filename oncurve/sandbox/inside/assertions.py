"""Test code rewritten to give one result per assertion, and the names that it expects of the program."""

from __future__ import annotations

import ast
import builtins
import symtable

RECORD = "__record_result__"
"""Name under which the rewritten code finds the function that opens one test."""

SOLUTION_MODULES = ("solution", "main", "candidate", "submission", "program")
"""Modules that stand for the program when test code imports from them."""


class _ResultPerAssertion(ast.NodeTransformer):
    """Puts every assertion, and every ``try`` that holds one, into a block that records how it ended."""

    def __init__(self) -> None:
        self.num_tests = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._recorded(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
            return self._recorded(node)
        return self.generic_visit(node)

    def _recorded(self, node: ast.stmt) -> ast.stmt:
        call = ast.Call(ast.Name(RECORD, ast.Load()), [ast.Constant(self.num_tests)], [])
        self.num_tests += 1
        return ast.copy_location(ast.With([ast.withitem(call)], [node]), node)


def result_per_assertion(source: str) -> tuple[ast.Module, int]:
    """The code with every assertion in a block of its own, and the number of such blocks.

    Raises SyntaxError.
    """
    transformer = _ResultPerAssertion()
    tree = transformer.visit(ast.parse(source))
    return ast.fix_missing_locations(tree), transformer.num_tests


def uncalled_tests(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods of pytest that the code leaves to pytest to call."""
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    others = [node for node in tree.body if node not in defined]
    called = {inner.id for node in others for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    tests = [node for node in defined if node.name.startswith("test") and node.name not in called]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not node.bases:
            tests += [
                method
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name.startswith("test")
            ]
    return tests


def free_names(source: str) -> set[str]:
    """The names that code reads and nothing in it defines: what it expects of the program.

    >>> sorted(free_names("import math\\ndef check(f): assert f(math.pi) == area(len([1]))"))
    ['area']

    Raises SyntaxError.
    """
    top = symtable.symtable(source, "<tests>", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                defined.add(symbol.get_name())
            elif symbol.is_referenced() and (table is top or symbol.is_global()):
                read.add(symbol.get_name())
    return {name for name in read - defined if not hasattr(builtins, name) and not name.startswith("__")}


def shadowed_builtin(source: str) -> str | None:
    """The builtin that an assertion calls first, for programs whose function bears such a name: ``sum(2, 3) == 5``.

    >>> shadowed_builtin("assert sum(2, 3) == 5")
    'sum'
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for inner in ast.walk(node.test):
                if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
                    return inner.func.id if hasattr(builtins, inner.func.id) else None
    return None


def imported_from_solution(source: str) -> set[str]:
    """The names that test code imports from the program by name."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module in SOLUTION_MODULES
        for alias in node.names
    }
