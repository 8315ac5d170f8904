"""The files behind a function of the user's: its own and those beside it that it imports, by what they say."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def file_of(location: str) -> Path | None:
    """The file of ``module:name`` or ``path/to/file.py:name``; None for one of an installed package."""
    place = location.rpartition(":")[0] or location
    if place.endswith(".py"):
        return Path(place)
    try:
        found = importlib.util.find_spec(place)
    except (ImportError, ValueError, AttributeError):
        return None
    origin = Path(found.origin) if found is not None and found.origin else None
    return origin if origin is not None and is_local(origin) else None


def is_local(path: Path) -> bool:
    """A file of the user's: no part of Python, of an installed package or of this one."""
    resolved = path.resolve()
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed.append(Path(__file__).parents[1])
    return resolved.suffix == ".py" and not any(resolved.is_relative_to(place.resolve()) for place in installed)


def fingerprints(first: Path) -> dict[str, str]:
    """Fingerprints of a file and of the files that it imports from beside it, comments and layout apart, by name."""
    return {name: hashlib.sha256(ast.dump(tree).encode()).hexdigest() for name, tree in _trees(first).items()}


def variables(first: Path) -> set[str]:
    """The environment variables that these files ask for by name: `os.environ["NAME"]`, `os.getenv("NAME")`."""
    nodes = [node for tree in _trees(first).values() for node in ast.walk(tree)]
    asked = [(node.value, node.slice) for node in nodes if isinstance(node, ast.Subscript)]
    asked += [(node.func, node.args[0]) for node in nodes if isinstance(node, ast.Call) and node.args]
    return {
        str(name.value)
        for where, name in asked
        if isinstance(name, ast.Constant) and re.search(r"\b(environ(\.get)?|getenv)$", ast.unparse(where))
    }


def _trees(first: Path) -> dict[str, ast.Module]:
    """A file and the files that it imports from beside it, by name."""
    root, waiting, found = first.resolve().parent, [first.resolve()], dict[str, ast.Module]()
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        if name in found:
            continue
        try:
            found[name] = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # whoever imports it says what is wrong
            continue
        waiting += [each for each in _imported(found[name], path, root) if is_local(each)]
    return found


def _imported(tree: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """Files that a module imports, looked for beside it and beside the first file."""
    for node in ast.walk(tree):
        names: list[str] = []
        places = [path.parent, root, Path.cwd()]
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                places = [path.parents[node.level - 1]] if len(path.parents) >= node.level else []
            names = [base, *(f"{base}.{each.name}".lstrip(".") for each in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            for place in places:
                for count in range(1, len(parts) + 1):
                    inner = place.joinpath(*parts[:count])
                    yield from (one for one in (inner.with_suffix(".py"), inner / "__init__.py") if one.is_file())
