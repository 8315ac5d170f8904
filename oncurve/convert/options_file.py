"""YAML and JSON files of options, such as those given to `trl grpo --config`."""

from __future__ import annotations

from typing import Any

import yaml

from oncurve.convert.options import DatasetSource, Note, OptionOutcome, OptionValue, RewardSource, older, table
from oncurve.errors import ConfigError

MODEL = {
    "model_name_or_path": "", "model": "", "model_revision": "revision", "dtype": "", "torch_dtype": "",
    "attn_implementation": "",
}  # fmt: skip
LORA = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "use_rslora": "use_rslora", "use_dora": "use_dora",
    "lora_task_type": "task_type", "lora_target_parameters": "target_parameters",
}  # fmt: skip
COMMAND_LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""What `trl grpo` gives to LoraConfig where its options do not say it."""
COMMAND_OVERLONG = {"type": "overlong", "max_tokens": 1280, "buffer_tokens": 256}
BITS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
DATA = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming")
OTHERS = ("use_peft", "reward_funcs", "reward_model_name_or_path", "ignore_bias_buffers", "datasets")


def read_options(text: str, source: str) -> OptionOutcome:
    """Everything that a mapping of options says.

    Raises ConfigError for what is no mapping.
    """
    given = _with_lines(text, source)
    found = OptionOutcome(source)
    known = {**MODEL, **LORA, **dict.fromkeys((*BITS, *DATA, *OTHERS))}
    ours = {name: value for name, value in given.items() if name in known and name not in table()}
    found.options = {name: value for name, value in given.items() if name not in ours}
    if not set(given) & ({*known, *table(), *older()} - {"model"}):
        raise ConfigError(
            f"{source}: none of its keys is an option of GRPOConfig. Give a script, or a YAML of its options"
        )
    _read_model(ours, found)
    _read_data(ours, found)
    _read_rewards(ours, found)
    if "ignore_bias_buffers" in ours:
        why = "it is a setting of DDP, which policy.parallel sets up"
        found.notes.append(Note("nothing", "ignore_bias_buffers", why, ours["ignore_bias_buffers"].line))
    return found


def _with_lines(text: str, source: str) -> dict[str, OptionValue]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise ConfigError(f"{source}: it holds no mapping of options such as `learning_rate: 1e-6`")
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
    return {str(name): OptionValue(_number(value), lines.get(str(name), 1)) for name, value in values.items()}


def _number(value: Any) -> Any:
    """YAML reads 1e-6 as a text, which transformers turns into a number."""
    if isinstance(value, str):
        try:
            return float(value) if any(sign.isdigit() for sign in value) else value
        except ValueError:
            return value
    return value


def _read_model(given: dict[str, OptionValue], found: OptionOutcome) -> None:
    found.model = given.get("model_name_or_path") or given.get("model")
    if (revision := given.get("model_revision")) is not None and revision.value != "main":
        found.options["model_init_kwargs"] = OptionValue({"revision": revision.value}, revision.line)
    for name in ("dtype", "torch_dtype", "attn_implementation"):
        if name in given:
            why = "policy.compute_type and policy.device say it"
            found.notes.append(Note("nothing", name, why, given[name].line))
    lora = {LORA[name]: value for name, value in given.items() if name in LORA}
    uses = given.get("use_peft")
    if uses is not None and uses.value:
        found.lora = {**{name: OptionValue(value, uses.line) for name, value in COMMAND_LORA.items()}, **lora}
    bits = {name: value for name, value in given.items() if name in BITS}
    if bits:
        values = {"bnb_4bit_quant_type": "nf4"} | {name: value.value for name, value in bits.items()}
        found.quantization = quantization(values, min(value.line or 0 for value in bits.values()), found)


def quantization(values: dict[str, Any], line: int | None, found: OptionOutcome) -> OptionValue | None:
    """nf4 or int8, as bitsandbytes' options ask for."""
    if values.get("load_in_4bit"):
        if (kind := values.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            found.notes.append(Note("unsupported", f"4 bits of type {kind}", "nf4 is used instead", line))
        return OptionValue("nf4", line)
    return OptionValue("int8", line) if values.get("load_in_8bit") else None


def _read_data(given: dict[str, OptionValue], found: OptionOutcome) -> None:
    if "datasets" in given:
        why = "a mixture of data sets has no place here. Save its rows as JSON lines and name that file in data.path"
        found.notes.append(Note("unsupported", "datasets", why, given["datasets"].line))
    if (name := given.get("dataset_name")) is None:
        return
    subset = given.get("dataset_config")
    train = given.get("dataset_train_split", OptionValue("train", name.line))
    found.train = DatasetSource(name.value, subset.value if subset else None, str(train.value), line=name.line)
    evaluates = found.options.get("eval_strategy", OptionValue("no", 0)).value not in ("no", False)
    if evaluates:
        test = given.get("dataset_test_split", OptionValue("test", name.line))
        found.evaluation = DatasetSource(name.value, subset.value if subset else None, str(test.value), line=test.line)


def _read_rewards(given: dict[str, OptionValue], found: OptionOutcome) -> None:
    if (model := given.get("reward_model_name_or_path")) is not None:
        why = "a reward model is none of the rewards; write a function that asks it, or a judge (docs/rewards.md)"
        found.notes.append(Note("unsupported", "reward_model_name_or_path", why, model.line))
    if (functions := given.get("reward_funcs")) is None:
        return
    names = functions.value if isinstance(functions.value, list) else [functions.value]
    for name in names:
        if name == "get_soft_overlong_punishment":  # with the constants of `trl grpo`
            found.rewards.append(RewardSource(dict(COMMAND_OVERLONG), (), functions.line, str(name)))
            continue
        module, _, last = str(name).rpartition(".")
        columns = ("solution",) if last in ("accuracy_reward", "reasoning_accuracy_reward") else ()
        keys = {"type": "custom", "function": f"{module or 'oncurve.trl.ready_rewards'}:{last}"}
        found.rewards.append(RewardSource(keys, columns, functions.line, str(name)))
