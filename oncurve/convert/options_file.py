"""YAML and JSON files of options, such as those given to `trl grpo --config`."""

from __future__ import annotations

from typing import Any

import yaml

from oncurve.convert.options import DatasetSource, Note, OptionOutcome, RewardSource, older, table
from oncurve.errors import ConfigError

MODEL = ("model_name_or_path", "model", "model_revision", "dtype", "torch_dtype", "attn_implementation")
LORA = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "use_rslora": "use_rslora", "use_dora": "use_dora",
    "lora_task_type": "task_type", "lora_target_parameters": "target_parameters",
}  # fmt: skip
COMMAND_LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""What `trl grpo` gives to LoraConfig where its options do not say it."""
COMMAND_OVERLONG = {"type": "overlong", "max_tokens": 1280, "buffer_tokens": 256}
BITS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
DATA = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming")
OTHERS = ("use_peft", "reward_funcs", "reward_model_name_or_path", "ignore_bias_buffers", "datasets")


def read_options(text: str, source: str) -> OptionOutcome:
    """Everything that a mapping of options says.

    Raises ConfigError for what is no mapping.
    """
    given = read_mapping(text, source)
    found = OptionOutcome(source)
    known = {*MODEL, *LORA, *BITS, *DATA, *OTHERS}
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
        found.notes.append(
            Note("nothing", "ignore_bias_buffers", "it is a setting of DDP, which policy.parallel sets up")
        )
    return found


def read_mapping(text: str, source: str) -> dict[str, Any]:
    """The options of a YAML or JSON text by their names. Raises ConfigError for what is no mapping."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: it holds no mapping of options such as `learning_rate: 1e-6`")
    return {str(name): _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    """YAML reads 1e-6 as a text, which transformers turns into a number."""
    if not isinstance(value, str) or not any(sign.isdigit() for sign in value):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _read_model(given: dict[str, Any], found: OptionOutcome) -> None:
    found.model = given.get("model_name_or_path") or given.get("model")
    if given.get("model_revision", "main") != "main":
        found.options["model_init_kwargs"] = {"revision": given["model_revision"]}
    for name in ("dtype", "torch_dtype", "attn_implementation"):
        if name in given:
            found.notes.append(Note("nothing", name, "policy.compute_type and policy.device say it"))
    if given.get("use_peft"):
        found.lora = COMMAND_LORA | {LORA[name]: value for name, value in given.items() if name in LORA}
    bits = {name: value for name, value in given.items() if name in BITS}
    found.quantization = quantization({"bnb_4bit_quant_type": "nf4"} | bits, found)


def quantization(values: dict[str, Any], found: OptionOutcome) -> str | None:
    """nf4 or int8, as bitsandbytes' options ask for."""
    if values.get("load_in_4bit"):
        if (kind := values.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            found.notes.append(Note("unsupported", f"4 bits of type {kind}", "nf4 is used instead"))
        return "nf4"
    return "int8" if values.get("load_in_8bit") else None


def _read_data(given: dict[str, Any], found: OptionOutcome) -> None:
    if "datasets" in given:
        why = "a mixture of data sets has no place here. Save its rows as JSON lines and name that file in data.path"
        found.notes.append(Note("unsupported", "datasets", why))
    if (name := given.get("dataset_name")) is None:
        return
    subset = given.get("dataset_config")
    found.train = DatasetSource(name, subset, str(given.get("dataset_train_split", "train")))
    if found.options.get("eval_strategy", "no") not in ("no", False):
        found.evaluation = DatasetSource(name, subset, str(given.get("dataset_test_split", "test")))


def _read_rewards(given: dict[str, Any], found: OptionOutcome) -> None:
    if given.get("reward_model_name_or_path") is not None:
        why = "a reward model is none of the rewards; write a function that asks it, or a judge (docs/rewards.md)"
        found.notes.append(Note("unsupported", "reward_model_name_or_path", why))
    functions = given.get("reward_funcs") or []
    for name in functions if isinstance(functions, list) else [functions]:
        if name == "get_soft_overlong_punishment":  # with the constants of `trl grpo`
            found.rewards.append(RewardSource(dict(COMMAND_OVERLONG)))
            continue
        module, _, last = str(name).rpartition(".")
        answer = "solution" if last in ("accuracy_reward", "reasoning_accuracy_reward") else None
        keys = {"type": "custom", "function": f"{module or 'oncurve.trl.ready_rewards'}:{last}"}
        found.rewards.append(RewardSource(keys, answer))
