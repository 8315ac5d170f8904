"""TRL's command `trl grpo` as a script: model, data set and rewards are options, of which a file may hold all."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.data.sources import read_stored
from oncurve.trl.grpo_config import GRPOConfig
from oncurve.trl.grpo_trainer import GRPOTrainer
from oncurve.trl.ready_rewards import (
    accuracy_reward,
    reasoning_accuracy_reward,
    soft_overlong_punishment,
    think_format_reward,
)
from oncurve.trl.script_arguments import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from oncurve.wording import listed

READY = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": soft_overlong_punishment,
}
"""Rewards that the command knows by name, with its constants."""


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """The data set of the command, and its rewards by name."""

    reward_model_name_or_path: str | None = None
    reward_funcs: list[str] | None = None


def named_reward(name: str) -> Any:
    """One of those that are ready, or module.function. Raises ConfigError for another name."""
    module, _, last = name.rpartition(".")
    if name in READY:
        return READY[name]
    sys.path.insert(0, str(Path.cwd()))
    missing = ConfigError(f"reward_funcs: there is no {name!r}. Use {listed(READY)}, or module.function")
    if not module:
        raise missing
    try:
        value = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a package that the module itself needs
        raise missing from None
    if last not in vars(value):
        raise missing
    return vars(value)[last]


def main() -> None:
    """Train as the options say. Raises ConfigError or DataError for what is missing."""
    kinds = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    arguments, args, model, mixture = TrlParser(kinds).parse_args_and_config()
    if model.model_name_or_path is None or not (arguments.dataset_name or mixture.datasets):
        raise ConfigError("the options need model_name_or_path, and dataset_name or datasets")
    if model.model_revision != "main":
        args.model_init_kwargs = {"revision": model.model_revision, **(args.model_init_kwargs or {})}
    whole = get_dataset(mixture) if mixture.datasets else None

    def rows(split: str) -> Any:
        if whole is not None:
            return whole[split]
        located = read_stored("huggingface", arguments.dataset_name, split=split, subset=arguments.dataset_config)
        return [row for _, row in located]

    scored = [arguments.reward_model_name_or_path] if arguments.reward_model_name_or_path else []
    names: Any = arguments.reward_funcs or []
    names = [names] if isinstance(names, str) else names  # a file may hold one name, and no list
    GRPOTrainer(
        model.model_name_or_path,
        [*scored, *map(named_reward, names)],
        args,
        rows(arguments.dataset_train_split),
        rows(arguments.dataset_test_split) if args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    ).train(args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
