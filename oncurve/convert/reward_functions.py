"""Reward functions of a script, and where they can be loaded from without running it."""

from __future__ import annotations

import ast
from typing import Any

from oncurve.convert.literals import NotLiteral, Script
from oncurve.convert.options import Note, OptionOutcome, RewardSource

OWN_ARGUMENTS = (
    "self", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments",
)  # fmt: skip
"""What every reward function of TRL may take; the others are columns."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FILE = "{script}"
"""Stands for the file that functions are loaded from, until it is known where the recipe goes."""


def read_rewards(script: Script, node: ast.expr, found: OptionOutcome) -> None:
    """The rewards of GRPOTrainer, one after the other."""
    behind = script.bound(node.id, node.lineno) if isinstance(node, ast.Name) else None
    listed = behind if isinstance(behind, (ast.List, ast.Tuple)) else node
    items = listed.elts if isinstance(listed, (ast.List, ast.Tuple)) else [node]
    for item in items:
        read = _reward(script, item, found)
        if read is not None:
            found.rewards.append(read)
    own = [reward.what for reward in found.rewards if reward.keys.get("function", "").startswith(FILE)]
    if own and not is_safe_to_import(script.tree):
        found.extracted = extract(script, own)


def _reward(script: Script, node: ast.expr, found: OptionOutcome) -> RewardSource | None:
    line, text = node.lineno, ast.unparse(node)
    full = script.full_name(node)
    if isinstance(node, ast.Name) and node.id in script.functions and _is_at_top(script, node.id):
        columns = _columns(script.functions[node.id])
        return RewardSource({"type": "custom", "function": f"{FILE}:{node.id}"}, columns, line, node.id)
    if isinstance(node, (ast.Name, ast.Attribute)) and "." in full:
        module, _, name = full.rpartition(".")
        if module == "trl":
            module = "trl.rewards"
        columns = ("solution",) if name in ("accuracy_reward", "reasoning_accuracy_reward") else ()
        return RewardSource({"type": "custom", "function": f"{module}:{name}"}, columns, line, name)
    call = script.call_behind(node)
    if call is not None and script.last_name(call.func) == "get_soft_overlong_punishment":
        return _overlong(script, call, found)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    why = (
        "a reward model is none of the rewards; write a function that asks it, or a judge (docs/rewards.md)"
        if is_text
        else "it is no function with a name. Write it as `def` at the top of a file, and name it as a custom reward"
    )
    found.notes.append(Note("unsupported" if is_text else "unread", f"reward {text[:60]}", why, line))
    return None


def _overlong(script: Script, call: ast.Call, found: OptionOutcome) -> RewardSource | None:
    given = dict(zip(("max_completion_len", "soft_punish_cache"), call.args, strict=False))
    given |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    try:
        longest, buffer = (script.value(given[name]) for name in ("max_completion_len", "soft_punish_cache"))
    except (KeyError, NotLiteral) as error:
        found.notes.append(Note("unread", "get_soft_overlong_punishment", f"{error} is not known", call.lineno))
        return None
    keys: dict[str, Any] = {"type": "overlong", "max_tokens": longest, "buffer_tokens": buffer}
    return RewardSource(keys, (), call.lineno, "get_soft_overlong_punishment")


def _is_at_top(script: Script, name: str) -> bool:
    return any(isinstance(node, FUNCTIONS) and node.name == name for node in script.tree.body)


def _columns(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return tuple(argument.arg for argument in arguments if argument.arg not in OWN_ARGUMENTS)


def is_safe_to_import(tree: ast.Module) -> bool:
    """Nothing but definitions happens at the top of the script, outside of ``if __name__ == "__main__"``."""
    return all(_only_defines(node) for node in tree.body)


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return "__name__" in ast.unparse(node.test)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(inner, ast.Call) and not _is_plain(inner) for inner in ast.walk(node))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Import, ast.ImportFrom, *FUNCTIONS, ast.ClassDef, ast.Pass))


def _is_plain(call: ast.Call) -> bool:
    """Calls that only make a value, such as a compiled pattern or a set."""
    return ast.unparse(call.func) in ("re.compile", "dict", "set", "frozenset", "tuple", "list", "range", "Path")


def extract(script: Script, names: list[str]) -> str:
    """The functions as a file of their own: their text, and the imports, constants and functions that they use."""
    top: dict[str, ast.stmt] = {}
    for node in script.tree.body:
        for name in _defined(node):
            top[name] = node
    wanted: set[ast.stmt] = set()
    left = list(names)
    while left:
        node = top.get(left.pop())
        if node is None or node in wanted:
            continue
        wanted.add(node)
        left += [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    kept = [node for node in script.tree.body if node in wanted or _is_future(node)]
    pieces = [_source(script, node) for node in kept]
    return f'"""Reward functions, copied from {script.source}."""\n\n' + "\n\n".join(pieces) + "\n"


def _source(script: Script, node: ast.stmt) -> str:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)):
        return ast.unparse(node)
    lines = script.text.splitlines()
    decorators = node.decorator_list if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign):
        return [inner.id for target in node.targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
