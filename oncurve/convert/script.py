"""Scripts with GRPOConfig and GRPOTrainer, read as syntax and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from oncurve.convert.literals import NotLiteral, Script
from oncurve.convert.options import Note, OptionOutcome, OptionValue
from oncurve.convert.reward_functions import read_rewards
from oncurve.convert.script_datasets import trace
from oncurve.errors import ConfigError

TRAINER_ARGUMENTS = (
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes",
    "callbacks", "optimizers", "quantization_config", "peft_config", "tools", "rollout_func", "environment_factory",
)  # fmt: skip
"""In the order of the constructor."""
WITHOUT = {
    "reward_processing_classes": "reward models have no place here; a reward is a function",
    "callbacks": "there are no callbacks; alarms, checkpoints and tracking are keys of the recipe",
    "optimizers": "the optimizer is AdamW, set under `optimizer`",
    "tools": "completions call no tools",
    "rollout_func": "sampling is chosen by rollouts.type",
    "environment_factory": "completions have no environment",
}
MODEL_OPTIONS = {"revision": "revision", "trust_remote_code": "trust_remote_code"}
HARMLESS = ("torch_dtype", "dtype", "attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")
"""Arguments of from_pretrained that are chosen elsewhere: policy.compute_type, policy.device."""


def read_script(text: str, source: str) -> OptionOutcome:
    """Everything that the script gives to GRPOConfig, GRPOTrainer, LoraConfig and load_dataset.

    Raises ConfigError for what is no Python, and where it is not clear which configuration is meant.
    """
    try:
        script = Script(text, source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: cannot be read as Python: {error}. Give a script, or a YAML of options") from None
    found = OptionOutcome(source)
    trainer = _only_one(script, "GRPOTrainer")
    given = {} if trainer is None else _arguments(trainer, TRAINER_ARGUMENTS, found)
    config = _config_call(script, given.get("args"))
    if trainer is None and config is None:
        raise ConfigError(
            f"{source}: no GRPOConfig(...) or GRPOTrainer(...) found. If the options are in a YAML file "
            f"or on a command line, convert a YAML of them instead"
        )
    if config is not None:
        _read_config(script, config, found)
    _read_trainer(script, given, found)
    return found


def _only_one(script: Script, name: str) -> ast.Call | None:
    calls = script.calls(name)
    if len(calls) > 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        raise ConfigError(f"{script.source}: {name}(...) stands in lines {lines}; leave the one that is meant")
    return calls[0] if calls else None


def _config_call(script: Script, args: ast.expr | None) -> ast.Call | None:
    """The GRPOConfig that the trainer gets, or the only one."""
    behind = None if args is None else script.call_behind(args)
    if behind is not None and script.last_name(behind.func) == "GRPOConfig":
        return behind
    return _only_one(script, "GRPOConfig")


def _arguments(call: ast.Call, order: tuple[str, ...], found: OptionOutcome) -> dict[str, ast.expr]:
    """The arguments of a call by name; what cannot be named is noted."""
    given: dict[str, ast.expr] = {}
    for name, value in zip(order, call.args, strict=False):
        given[name] = value
    for keyword in call.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = keyword.value
        else:
            what = f"**{ast.unparse(keyword.value)}"
            found.notes.append(Note("unread", what, "its keys are only known when the script runs", call.lineno))
    return given


def _read_config(script: Script, call: ast.Call, found: OptionOutcome) -> None:
    """The options of GRPOConfig: its arguments, literal dictionaries behind ``**``, and attributes set afterwards."""
    pairs: list[tuple[str, ast.expr]] = []
    for keyword in call.keywords:
        if keyword.arg is not None:
            pairs.append((keyword.arg, keyword.value))
        else:
            _read_dictionary(script, keyword.value, found)
    if call.args:
        pairs.append(("output_dir", call.args[0]))
    pairs += list(_set_afterwards(script, call))
    for name, value in pairs:
        if (read := _value(script, value, name, found)) is not None:
            found.options[name] = read


def _read_dictionary(script: Script, node: ast.expr, found: OptionOutcome) -> None:
    try:
        values = script.value(node)
    except NotLiteral as error:
        found.notes.append(Note("unread", f"**{ast.unparse(node)}", str(error), node.lineno))
        return
    for name, value in values.items():
        found.options[str(name)] = OptionValue(value, node.lineno)


def _set_afterwards(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """``args.beta = 0.04`` after ``args = GRPOConfig(...)``."""
    names = {name for name, bound in script.bindings.items() for _, value in bound if value is call}
    for node in ast.walk(script.tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=attr)], value=value) if name in names:
                yield attr, value
            case _:
                pass


def _value(script: Script, node: ast.expr, what: str, found: OptionOutcome) -> OptionValue | None:
    try:
        return OptionValue(script.value(node), node.lineno)
    except NotLiteral as error:
        found.notes.append(Note("unread", what, f"{error}. Write its value into the recipe", node.lineno))
        return None


def _read_trainer(script: Script, given: dict[str, ast.expr], found: OptionOutcome) -> None:
    """The other arguments of GRPOTrainer."""
    given = {name: value for name, value in given.items() if not _is_nothing(value)}
    for name, why in WITHOUT.items():
        if name in given:
            found.notes.append(Note("unsupported", name, why, given[name].lineno))
    others = {name: value for name, value in given.items() if name not in TRAINER_ARGUMENTS}
    found.notes += [Note("unknown", n, "GRPOTrainer has no such argument", v.lineno) for n, v in others.items()]
    if "model" in given:
        _read_model(script, given["model"], found)
    if "reward_funcs" in given:
        read_rewards(script, given["reward_funcs"], found)
    if "train_dataset" in given:
        found.train = trace(script, given["train_dataset"], found.notes)
    if "eval_dataset" in given:
        found.evaluation = trace(script, given["eval_dataset"], found.notes)
    if "peft_config" in given:
        _read_lora(script, given["peft_config"], found)
    if "quantization_config" in given:
        _read_quantization(script, given["quantization_config"], found)


def _is_nothing(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _read_model(script: Script, node: ast.expr, found: OptionOutcome) -> None:
    """A name, or the name inside ``from_pretrained`` and ``get_peft_model``."""
    call = script.call_behind(node)
    if call is None:
        found.model = _value(script, node, "model", found)
        return
    name = script.last_name(call.func)
    if name == "get_peft_model" and len(call.args) >= 2:
        _read_lora(script, call.args[1], found)
        _read_model(script, call.args[0], found)
        return
    if name != "from_pretrained" or not call.args:
        what = f"`{script.full_name(call.func)}(...)` is only known when the script runs"
        found.notes.append(Note("unread", "model", f"{what}. Write its name into the recipe", node.lineno))
        return
    found.model = _value(script, call.args[0], "model", found)
    for keyword in call.keywords:
        if keyword.arg in MODEL_OPTIONS:
            if (read := _value(script, keyword.value, str(keyword.arg), found)) is not None:
                earlier = found.options.get("model_init_kwargs")
                before: dict[str, Any] = dict(earlier.value) if earlier else {}
                found.options["model_init_kwargs"] = OptionValue({**before, str(keyword.arg): read.value}, read.line)
        elif keyword.arg == "quantization_config":
            _read_quantization(script, keyword.value, found)
        elif keyword.arg in HARMLESS:
            found.notes.append(
                Note("nothing", str(keyword.arg), "policy.compute_type and policy.device say it", call.lineno)
            )
        else:
            found.notes.append(
                Note("unsupported", f"from_pretrained({keyword.arg}=...)", "there is no such key", call.lineno)
            )


def _read_lora(script: Script, node: ast.expr, found: OptionOutcome) -> None:
    call = script.call_behind(node)
    if call is None or script.last_name(call.func) != "LoraConfig":
        why = "it is no LoraConfig(...) in this script. Write policy.lora into the recipe"
        found.notes.append(Note("unread", "peft_config", why, node.lineno))
        return
    found.lora = {}
    for name, value in _arguments(call, ("task_type",), found).items():
        if (read := _value(script, value, name, found)) is not None:
            found.lora[name] = read


def _read_quantization(script: Script, node: ast.expr, found: OptionOutcome) -> None:
    call = script.call_behind(node)
    if call is None or script.last_name(call.func) != "BitsAndBytesConfig":
        if not _is_nothing(node):
            why = "it is no BitsAndBytesConfig(...) in this script. Write policy.quantization into the recipe"
            found.notes.append(Note("unread", "quantization_config", why, node.lineno))
        return
    given = {name: _value(script, value, name, found) for name, value in _arguments(call, (), found).items()}
    values = {name: read.value for name, read in given.items() if read is not None}
    found.quantization = quantization(values, call.lineno, found)


def quantization(values: dict[str, Any], line: int, found: OptionOutcome) -> OptionValue | None:
    """nf4 or int8, as bitsandbytes' options ask for."""
    if values.get("load_in_4bit"):
        if (kind := values.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            found.notes.append(Note("unsupported", f"4 bits of type {kind}", "nf4 is used instead", line))
        return OptionValue("nf4", line)
    return OptionValue("int8", line) if values.get("load_in_8bit") else None
