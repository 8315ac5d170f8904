"""Are names in the code words of the field, as the pages' are?"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from offenders import assert_none
from source import modules, place

BANNED = {
    "saying": "what the function does, such as call_with_memory_error",
    "said_as": "memory_error_as",
    "wish": "request",
    "wishes": "request",
    "Crew": "ProcessSupervisor",
    "Errand": "AgentTask",
    "_told": "_reported",
    "Flight": "the step that is under way",
    "thin_weights": "adapter_weights",
    "gold_answer": "reference answer",
    "helper": "what it does",
    "utils": "what is in it",
}
"""Names that a reader would have to look up, and what is written in their place."""


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module gives to something, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value.lineno


def test_names_are_words_of_the_field() -> None:
    assert_none(
        f"{place(module, line)} {name}: write {BANNED[name]}"
        for module, tree in modules().items()
        for name, line in names(tree)
        if name in BANNED
    )


def test_a_name_that_is_banned_is_found() -> None:
    tree = ast.parse("def saying(wish):\n    for wishes in wish: f(wish=wishes)\n")
    assert [name for name, _ in names(tree) if name in BANNED] == ["saying", "wish", "wishes", "wish"]
