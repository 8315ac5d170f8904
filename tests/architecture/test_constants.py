"""A constant stands in one file: a second one of the same name and value is imported or has another meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from offenders import assert_none
from source import modules

ALONE = ("sandbox.inside",)
"""Modules that run where the rest of the package is not."""


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names in capitals that a module assigns at its top, with what they are, as text."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, what in pairs:
                is_constant = isinstance(name, ast.Name) and name.id.isupper() and len(name.id.strip("_")) > 1
                if is_constant and not (isinstance(what, ast.Call) and not what.args):  # a table that begins empty
                    yield name.id.strip("_"), ast.unparse(what)


def twice(trees: dict[str, ast.Module]) -> list[str]:
    """Name, value and modules of every constant that stands in several."""
    homes = defaultdict(set)
    for module, tree in trees.items():
        if not module.startswith(ALONE):
            for constant in constants(tree):
                homes[constant].add(module)
    return [f"{name} = {what}: {', '.join(sorted(found))}" for (name, what), found in homes.items() if len(found) > 1]


def test_a_constant_stands_in_one_file() -> None:
    assert_none(twice(modules()))


def test_a_second_one_is_found_also_within_a_pair() -> None:
    trees = {
        name: ast.parse(code) for name, code in {"a": "MANY = 3", "b": "FEW, MANY = 1, 3", "c": "MANY = 4"}.items()
    }
    assert twice(trees) == ["MANY = 3: a, b"]
