"""Signatures: a class takes its section of the recipe and not its keys, and passes no keywords on unseen."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from offenders import assert_none
from source import modules, place

MAX_PARAMETERS = 11
"""Of a function or a constructor that is written by hand; ``self`` and ``cls`` do not count."""
MANY = {
    "cli.plan.plan": "options of a command, each of which typer reads from the signature",
    "trl.grpo_trainer.GRPOTrainer.__init__": "TRL's own",
}
"""Who has more, and whose interface it is."""
KEYWORDS = {
    "algorithm.presets.build": "names of a table, checked one by one",
    "algorithm.table.resolve": "names of a table, checked one by one",
    "core.decoder.BufferLayer.update": "a layer of transformers' caches",
    "episodes.tools._with_members": "a call that a model wrote",
    "fleet.inside_vllm.plugin.FileEngine.__init__": "an engine of vLLM's",
    "fleet.prefetch._AtOnce.submit": "an Executor",
    "observe.manifest.describe_run": "facts of a run, written down as they are",
    "observe.null_run_folder._nothing": "takes every call",
    "policy.lora_forward.OneSum.__call__": "the forward of a layer of peft's",
    "policy.packed_attention.block_attention": "an attention function of transformers",
    "policy.packed_attention.packed_attention": "an attention function of transformers",
    "rewards.grammar.figures.NumberLexer.add": "properties of a token",
    "run.assemble._own_formula.called": "a formula of the user's",
    "run.stages.sft": "sections of a recipe, from Python",
    "run.trainer.Trainer.__init__": "sections of a recipe, from Python",
    "run.trainer.train": "sections of a recipe, from Python",
    "run.verbs.Engine.__init__": "sampling parameters, from Python",
    "run.verbs.advantages": "names of a table, checked one by one",
    "run.verbs.load_policy": "sections of a recipe, from Python",
    "sandbox.inside.pytest_stand_in._Mark.parametrize": "pytest's own",
    "sandbox.inside.remote.RemoteCoroutineFunction.__call__": "a function in another process",
    "sandbox.inside.remote.RemoteFunction.__call__": "a function in another process",
    "tables.terminal": "options of rich",
}
"""Who takes keywords by ``**``, and what they are."""
WITHOUT = ("agents", "cli", "history", "report", "trl")
"""Rooms whose keywords are those of scripts, commands and pages."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
    """Every function below a node, with its name in dots."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield inner, node
            yield from functions(node, inner)
        else:
            yield from functions(node, name)


def all_functions() -> Iterator[tuple[str, str, Function]]:
    """Every function of the package, with its place and its name in dots."""
    for module, tree in modules().items():
        for name, function in functions(tree, module):
            yield place(module, function.lineno), name, function


def num_parameters(function: Function) -> int:
    """Parameters of a function beside the object or class that it belongs to."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_a_function_has_few_parameters() -> None:
    many = {name: where for where, name, function in all_functions() if num_parameters(function) > MAX_PARAMETERS}
    assert_none(f"{where} {name}: let it take a section" for name, where in many.items() if name not in MANY)
    assert MANY.keys() <= many.keys()


def test_keywords_are_named() -> None:
    found = {name: where for where, name, function in all_functions() if function.args.kwarg is not None}
    own = {name: where for name, where in found.items() if name.partition(".")[0] not in WITHOUT}
    assert_none(f"{where} {name}: name its keywords" for name, where in own.items() if name not in KEYWORDS)
    assert KEYWORDS.keys() <= own.keys()
