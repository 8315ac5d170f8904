"""Are names in the code words of the field, as the pages' are?"""

from __future__ import annotations

import ast
import re
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

NO_NOUNS = {
    "place": "index, position, path, location, source or key",
    "found": "match, result, value, or the thing itself",
    "one": "item, element, or the thing itself",
    "each": "item, element, or the thing itself",
    "given": "provided, value, or the thing itself",
    "asked": "requested, question, or the thing itself",
    "said": "message, text, or the thing itself",
    "told": "reported, message, or the thing itself",
    "shown": "printed text, excerpt, or the thing itself",
    "kept": "retained, rest, or the thing itself",
    "held": "retained, stack, or the thing itself",
    "taken": "used, excluded, or the thing itself",
    "wanted": "expected, requested, or the thing itself",
    "road": "path, backend or method",
    "way": "path, backend, method or kind",
    "objection": "mismatch or reason",
    "loose": "lenient",
    "poisoned": "corrupt",
    "halt": "pause",
    "owe": "reserve",
}
"""Pronouns, participles and pictures, and the nouns of the field that are written in their place."""

FIELD = ("held_out", "leave_one_out", "groups_of_one", "one_device", "one_process", "not_found")
"""Compounds of the field in which such a word stands."""

FORMATS = {
    ("fleet.inside_vllm.plugin", "way"): "a key of what is sent to vLLM's server",
    ("history.opened", "place"): "a key of `oncurve replay --json`",
    ("plan.shape", "ways"): "a key of `oncurve plan --json`",
    ("plan.step_time", "way"): "a key of `oncurve plan --json`",
}
"""Names that files or other programs read, by their modules."""


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


def bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """As ``names``, and attributes that are set, exceptions and captures of a match."""
    yield from names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name is not None:
            yield node.name, node.lineno
        elif isinstance(node, ast.arguments) and node.kwarg is not None and node.kwarg.arg == "words":
            yield "kept", node.kwarg.lineno


def words_in(name: str) -> list[str]:
    """The words of a name in lower case, in the singular, without compounds of the field.

    >>> words_in("_AnswerPlaces"), words_in("held_out_rows")
    (['answer', 'place'], ['rows'])
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    joined = "_".join(word.lower() for word in words)
    for compound in FIELD:
        joined = joined.replace(compound, "")
    singular = {f"{word}s": word for word in NO_NOUNS if word != "one"}
    return [singular.get(word, word) for word in joined.split("_") if word]


def test_names_are_words_of_the_field() -> None:
    assert_none(
        f"{place(module, line)} {name}: write {BANNED[name]}"
        for module, tree in modules().items()
        for name, line in names(tree)
        if name in BANNED
    )


def test_names_are_nouns() -> None:
    assert_none(
        f"{place(module, line)} {name}: write {NO_NOUNS[word]}"
        for module, tree in modules().items()
        for name, line in bound(tree)
        for word in words_in(name)
        if word in NO_NOUNS and (module, name) not in FORMATS
    )


def test_a_name_of_a_format_is_there() -> None:
    trees = modules()
    assert all(name in {name for name, _ in names(trees[module])} for module, name in FORMATS)


def test_a_name_that_is_banned_is_found() -> None:
    tree = ast.parse("def saying(wish):\n    for wishes in wish: f(wish=wishes)\n")
    assert [name for name, _ in names(tree) if name in BANNED] == ["saying", "wish", "wishes", "wish"]


def test_a_pronoun_or_a_participle_is_found_wherever_it_is_bound() -> None:
    tree = ast.parse("class KeptRow:\n  def find(self, place):\n    self._asked = [one for one in place if held_out]\n")
    found = [word for name, _ in bound(tree) for word in words_in(name) if word in NO_NOUNS]
    assert sorted(found) == ["asked", "kept", "one", "place"]
