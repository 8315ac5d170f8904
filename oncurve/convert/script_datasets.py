"""Data sets of a script: ``load_dataset`` and what is chained to it, as far as it can be read."""

from __future__ import annotations

import ast

from oncurve.convert.literals import NotLiteral, Script, dotted
from oncurve.convert.options import DatasetSource, Note

KEPT = ("shuffle", "with_format", "remove_columns", "flatten_indices", "select_columns", "with_transform")
"""Methods that leave the rows as they are; they are always shuffled here."""
ADVICE = (
    'the rows that it makes are not known here. Run it once, save them with `.to_json("rows.jsonl")` while the prompt '
    "is still plain text, and name that file in data.path"
)


def trace(script: Script, node: ast.expr, notes: list[Note]) -> DatasetSource:
    """Where the rows of an expression come from and what was done to them; what cannot be followed is noted."""
    rows = DatasetSource(line=node.lineno)
    _follow(script, node, rows, notes, depth=0)
    return rows


def _follow(script: Script, node: ast.expr | None, rows: DatasetSource, notes: list[Note], depth: int) -> None:
    match node:
        case ast.Name(id=name) if depth < 50 and (bound := script.bound(name, node.lineno)) is not None:
            _follow(script, bound, rows, notes, depth + 1)
        case ast.Subscript(value=value, slice=ast.Constant(value=str() as split)):
            rows.split = split
            _follow(script, value, rows, notes, depth + 1)
        case ast.Subscript(value=value, slice=ast.Name(id=name)) if depth < 50:
            bound = script.bound(name, node.lineno + 1)
            if isinstance(bound, ast.Constant) and isinstance(bound.value, str):
                rows.split = bound.value
            _follow(script, value, rows, notes, depth + 1)
        case ast.Call() if script.last_name(node.func) == "load_dataset":
            _loaded(script, node, rows, notes)
        case ast.Call(func=ast.Attribute(attr="from_json" | "from_csv" | "from_parquet" as kind)) if node.args:
            rows.path, rows.is_json = _text(script, node.args[0]), kind == "from_json"
        case ast.Call(func=ast.Attribute(value=value)) if dotted(value) not in script.aliases:
            _method(script, node, rows, notes)
            _follow(script, value, rows, notes, depth + 1)
        case ast.Call(func=ast.Name(id=name)) if name in script.functions and depth < 50:
            _inside(script, node, rows, notes, depth)
        case _:
            why = (
                f"`{ast.unparse(node)[:60]}` is only known when the script runs"
                if node
                else "it is set by no expression"
            )
            notes.append(Note("unread", "the data set", f"{why}. Write `data` into the recipe", rows.line))


def _inside(script: Script, call: ast.Call, rows: DatasetSource, notes: list[Note], depth: int) -> None:
    """The rows that a function of the script gives back."""
    assert isinstance(call.func, ast.Name)
    function = script.functions[call.func.id]
    returned = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    if len(returned) != 1:
        why = f"`{function.name}` returns in several places, or nowhere. Write `data` into the recipe"
        notes.append(Note("unread", "the data set", why, call.lineno))
        return
    _follow(script, returned[0].value, rows, notes, depth + 1)
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "split")]
    if given and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
        rows.split = given[0].value


def _text(script: Script, node: ast.expr) -> str | None:
    try:
        value = script.value(node)
    except NotLiteral:
        return None
    return value if isinstance(value, str) else None


def _loaded(script: Script, call: ast.Call, rows: DatasetSource, notes: list[Note]) -> None:
    """``load_dataset(path, name, split=..., data_files=...)``."""
    given = dict(zip(("path", "name"), call.args, strict=False))
    given |= {str(keyword.arg): keyword.value for keyword in call.keywords if keyword.arg}
    values = {name: _text(script, value) for name, value in given.items()}
    rows.path, rows.subset, rows.line = values.get("path"), values.get("name"), call.lineno
    for name in ("path", "name", "split", "data_files"):
        if name in given and values[name] is None:
            why = f"`{ast.unparse(given[name])[:60]}` is no single text. Write `data` into the recipe"
            notes.append(Note("unread", f"load_dataset({name}=...)", why, call.lineno))
    if rows.path in ("json", "csv", "parquet", "arrow"):
        rows.is_json, rows.path = rows.path == "json", values.get("data_files")
    if (split := values.get("split")) is not None:
        _read_split(split, rows, notes)


def _read_split(split: str, rows: DatasetSource, notes: list[Note]) -> None:
    """``train``, or ``train[:1000]``."""
    name, bracket, rest = split.partition("[")
    rows.split = name
    if not bracket:
        return
    count = rest.removesuffix("]").removeprefix(":")
    if count.isdigit():
        rows.limit = int(count)
    else:
        notes.append(
            Note("unsupported", f"split {split}", "only the first rows can be chosen, by data.limit", rows.line)
        )


def _method(script: Script, call: ast.Call, rows: DatasetSource, notes: list[Note]) -> None:
    """One step of a chain such as ``.rename_column("problem", "prompt").select(range(100))``."""
    assert isinstance(call.func, ast.Attribute)
    name = call.func.attr
    match name, call.args:
        case "rename_column", [old, new]:
            theirs, ours = _text(script, old), _text(script, new)
            if theirs and ours:
                rows.columns.setdefault(_ours(ours), theirs)
        case (("select" | "take"), [one]):
            limit = _limit(script, one)
            if limit is None:
                notes.append(
                    Note("unread", f".{name}(...)", "only the first rows can be chosen, by data.limit", call.lineno)
                )
            rows.limit = limit if rows.limit is None else rows.limit
        case "map", [function, *_]:
            _mapped(script, function, rows, notes, call.lineno)
        case _ if name in KEPT:
            pass
        case _:
            notes.append(Note("unread", f".{name}(...)", ADVICE, call.lineno))


def _ours(name: str) -> str:
    return "question" if name == "prompt" else name


def _limit(script: Script, node: ast.expr) -> int | None:
    inner = (
        node.args[0] if isinstance(node, ast.Call) and dotted(node.func) == "range" and len(node.args) == 1 else node
    )
    try:
        value = script.value(inner)
    except NotLiteral:
        return None
    return value if isinstance(value, int) else None


def _mapped(script: Script, function: ast.expr, rows: DatasetSource, notes: list[Note], line: int) -> None:
    """The columns that a function of one row makes, where each is another column as it is."""
    made = _made_columns(script, function)
    if made is None:
        notes.append(Note("unread", ".map(...)", ADVICE, line))
        return
    for name, value in made.items():
        column, is_chat, system = _column(script, value)
        if system is not None:
            why = f"{system!r:.60} stands before every prompt; choose data.template so that it says the same"
            notes.append(Note("unsupported", "system message", why, value.lineno))
        if column is None:
            known = name == "answer" and _is_gsm8k(script)
            why = "data type gsm8k makes it: the number after ####" if known else ADVICE
            notes.append(Note("differs" if known else "unread", f"column {name!r} of .map(...)", why, value.lineno))
            continue
        rows.is_chat |= is_chat
        if _ours(name) != column:
            rows.columns.setdefault(_ours(name), column)


def _is_gsm8k(script: Script) -> bool:
    return any(
        call.args and str(_text(script, call.args[0])).endswith("gsm8k") for call in script.calls("load_dataset")
    )


def _made_columns(script: Script, function: ast.expr) -> dict[str, ast.expr] | None:
    body: ast.expr | None = None
    if isinstance(function, ast.Lambda):
        body = function.body
    elif isinstance(function, ast.Name) and function.id in script.functions:
        returned = [n for n in ast.walk(script.functions[function.id]) if isinstance(n, ast.Return)]
        body = returned[0].value if len(returned) == 1 else None
    if not isinstance(body, ast.Dict):
        return None
    names = [key.value if isinstance(key, ast.Constant) else None for key in body.keys]
    if not all(isinstance(name, str) for name in names):
        return None
    return {str(name): value for name, value in zip(names, body.values, strict=True)}


def _column(script: Script, node: ast.expr) -> tuple[str | None, bool, str | None]:
    """The column that a value is, whether as a message of the user, and the system message before it."""
    match node:
        case ast.Subscript(value=ast.Name(), slice=ast.Constant(value=str() as name)):
            return name, False, None
        case ast.List(elts=[*messages]) if messages and all(isinstance(one, ast.Dict) for one in messages):
            return _conversation(script, messages)
        case _:
            return None, False, None


def _conversation(script: Script, messages: list[ast.expr]) -> tuple[str | None, bool, str | None]:
    column: str | None = None
    system: str | None = None
    for message in messages:
        assert isinstance(message, ast.Dict)
        parts = {
            key.value: value
            for key, value in zip(message.keys, message.values, strict=True)
            if isinstance(key, ast.Constant)
        }
        role = _text(script, parts["role"]) if "role" in parts else None
        if role == "system" and "content" in parts:
            system = _text(script, parts["content"]) or ast.unparse(parts["content"])
        elif role == "user" and "content" in parts and column is None:
            column = _column(script, parts["content"])[0]
        else:
            return None, True, system
    return column, True, system
