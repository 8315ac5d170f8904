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
    "agents.chat_request._not_here": "a call that a model wrote",
    "algorithm.presets.advantage_of": "names of a table, checked one by one",
    "algorithm.presets.build": "names of a table, checked one by one",
    "algorithm.table.resolve": "names of a table, checked one by one",
    "cli.plan.plan_inputs": "lengths, as guess_lengths takes them",
    "cli.plan.plan_recipe": "what plan_inputs takes",
    "core.decoder.BufferLayer.update": "a layer of transformers' caches",
    "episodes.tools._with_members": "a call that a model wrote",
    "fleet.inside_vllm.plugin.FileEngine.__init__": "an engine of vLLM's",
    "fleet.prefetch._AtOnce.submit": "an Executor",
    "model.trace_ranges.traced.around.call": "arguments of any function",
    "observe.manifest.describe_run": "facts of a run, written down as they are",
    "observe.record._nothing": "takes every call",
    "policy.lora_forward.FusedSum.__call__": "the forward of a layer of peft's",
    "policy.packed_attention.block_attention": "an attention function of transformers",
    "policy.packed_attention.packed_attention": "an attention function of transformers",
    "rewards.grammar.lexemes.NumberLexer.add": "properties of a token",
    "run.own_formula.own_formula.called": "a formula of the user's",
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
    "trl.chat.apply_chat_template": "variables of a template, as in TRL",
    "trl.chat.maybe_apply_chat_template": "variables of a template, as in TRL",
    "trl.grpo_config._ConfigMethods.__init_subclass__": "Python's own",
    "trl.grpo_config._Dating.__call__": "options of TRL, also those of older versions",
    "trl.names._Elsewhere.__call__": "a class of TRL's that cannot be made",
    "trl.overridden.TrlNames.__call__": "arguments of TRL's trainer",
    "trl.processes.ProcessState.print": "accelerate's",
    "trl.processes.ProcessState.unwrap_model": "accelerate's",
    "trl.ready_rewards.accuracy_reward": "columns of a data set",
    "trl.ready_rewards.get_cosine_scaled_reward.cosine_scaled_reward": "columns of a data set",
    "trl.ready_rewards.get_repetition_penalty_reward.repetition_penalty_reward": "columns of a data set",
    "trl.ready_rewards.get_soft_overlong_punishment.soft_overlong_punishment_reward": "columns of a data set",
    "trl.ready_rewards.reasoning_accuracy_reward": "columns of a data set",
    "trl.ready_rewards.soft_overlong_punishment": "columns of a data set",
    "trl.ready_rewards.think_format_reward": "columns of a data set",
    "trl.rewards_of_scripts.ScriptRewards._column": "columns of a data set",
    "trl.script_arguments.TrlParser.__init__": "the parser of transformers",
    "trl.script_callbacks._Flow.on_step_end": "a callback of transformers",
    "trl.script_files.ScriptFiles.create_model_card": "TRL's own",
    "trl.script_files.ScriptFiles.push_to_hub": "TRL's own",
    "trl.unsloth.FastLanguageModel.for_training": "Unsloth's",
    "trl.unsloth.FastLanguageModel.from_pretrained": "Unsloth's, checked one by one",
    "trl.unsloth.FastLanguageModel.get_peft_model": "Unsloth's, checked one by one",
    "trl.unsloth.VllmSamplingParams.__init__": "vLLM's, where it is not installed",
    "trl.unsloth._generate": "Unsloth's",
    "trl.unsloth._missing.call": "Unsloth's",
    "trl.unsloth._with_methods.save": "Unsloth's",
    "trl.unsloth.get_chat_template": "Unsloth's",
    "trl.unsloth.is_bfloat16_supported": "Unsloth's",
    "trl.unsloth.nothing": "Unsloth's",
}
"""Who takes keywords by ``**``, and what they are: an interface of others, or names that a table checks."""

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
    assert_none(f"{where} {name}: name its keywords" for name, where in found.items() if name not in KEYWORDS)
    assert KEYWORDS.keys() <= found.keys()
