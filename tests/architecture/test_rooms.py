"""The shape of the package: no circle of imports, no name that means two things, no riddle in a first line.

An import inside a function counts like any other. It carries ``# lazy``, which says that it stands there to keep
start-up fast, and for no other reason.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from source import PACKAGE, files, imports, known, module_name, modules

TOP_LEVEL = {
    "__init__", "__main__", "stats", "tables", "section", "extensions", "user_code", "chat_messages", "version_spans",
    "wording", "run_errors", "constants",
}  # fmt: skip
"""The only files at the top level of the package; everything else stands in a folder."""
TWICE = {"grading": {"core.grading", "doctor.grading"}}
"""Module names that stand in several folders, beside those of every room and the files of ``cli``."""
OF_A_ROOM = ("settings", "from_settings")
"""What a room is given of a recipe, and what it builds from that."""
MAX_FLOORS = 10
LAZY = "# lazy"


def arrows() -> dict[str, set[str]]:
    """Which module imports which, wherever the import stands."""
    found = {
        module: {theirs for name in imports(tree) if (theirs := known(name))} - {module}
        for module, tree in modules().items()
    }
    return {module: theirs for module, theirs in found.items() if module}


def rooms() -> dict[str, set[str]]:
    """The same between folders and files of the top level."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, theirs in arrows().items():
        found[room(module)] |= {room(each) for each in theirs} - {room(module)}
    return dict(found)


def room(module: str) -> str:
    """The folder of a module; a room's settings stand below the recipe that lists them, and count by themselves."""
    return module if module.endswith(".settings") else module.split(".", maxsplit=1)[0]


def sub_rooms() -> dict[str, set[str]]:
    """The same between all folders, those inside of a room included."""
    folders = {module.rpartition(".")[0] for module in modules()}
    found: dict[str, set[str]] = defaultdict(set)

    def folder(module: str) -> str:
        alone = module in folders or module.endswith(".settings")
        return module if alone else module.rpartition(".")[0] or module

    for module, theirs in arrows().items():
        found[folder(module)] |= {folder(each) for each in theirs} - {folder(module)}
    return dict(found)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What is left when everything that imports nothing of the rest has been taken away, again and again."""
    left = {name: set(theirs) & graph.keys() for name, theirs in graph.items()}
    while free := {name for name, theirs in left.items() if not theirs & left.keys()}:
        left = {name: theirs - free for name, theirs in left.items() if name not in free}
    return sorted(left)


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """How many rooms stand below each other down to the ground, itself included."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max(map(height, graph.get(name, ())), default=0)
        return heights[name]

    for name in graph:
        height(name)
    return heights


def places_of_classes() -> dict[str, list[str]]:
    """The modules in which a public class name stands."""
    found = defaultdict(list)
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def late_imports(tree: ast.Module) -> Iterator[ast.ImportFrom | ast.Import]:
    """Imports of the package inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.ImportFrom, ast.Import)) and any(
                    name.split(".")[0] == "oncurve" for name in imports(ast.Module([node], []))
                ):
                    yield node


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert circles(arrows()) == []


def test_rooms_do_not_import_each_other_in_circles() -> None:
    assert circles(rooms()) == []


def test_folders_inside_of_rooms_do_not_import_each_other_in_circles() -> None:
    assert circles(sub_rooms()) == []


def test_the_house_has_few_floors() -> None:
    tall = {name: height for name, height in floors(rooms()).items() if height > MAX_FLOORS and name != "__main__"}
    assert tall == {}


def test_only_the_nouns_stand_at_the_top_level() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == TOP_LEVEL


def test_no_public_class_name_means_two_things() -> None:
    assert {name: places for name, places in places_of_classes().items() if len(places) > 1} == {}


def test_a_module_name_stands_twice_only_where_the_folder_says_which() -> None:
    packages = {room(module) if "." not in module else module.rpartition(".")[0] for module in modules() if module}
    found = defaultdict(set)
    for module in modules():
        is_of_a_room = module.rpartition(".")[2] in OF_A_ROOM or room(module) == "cli"
        if module and module not in packages and not is_of_a_room:
            found[module.rsplit(".", 1)[-1]].add(module)
    assert {name: places for name, places in found.items() if len(places) > 1 and places != TWICE.get(name)} == {}


def test_the_first_line_of_a_module_is_no_question() -> None:
    first = {module: (ast.get_docstring(tree) or "").split("\n\n")[0] for module, tree in modules().items()}
    assert {module: line for module, line in first.items() if "?" in line} == {}


def test_an_import_inside_a_function_says_that_it_is_lazy() -> None:
    unmarked = []
    for path in files():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in late_imports(ast.parse(text)):
            if LAZY not in "\n".join(lines[node.lineno - 1 : node.end_lineno]):
                unmarked.append(f"{module_name(path)}, line {node.lineno}: write `{LAZY}` behind it or move it up")
    assert unmarked == []
