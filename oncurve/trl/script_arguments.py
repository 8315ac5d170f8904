"""Objects that scripts import beside the trainer: their command line, and the model's and adapter's options."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError
from oncurve.recipe.messages import OTHER_SYSTEMS
from oncurve.recipe.schema import Config
from oncurve.trl.grpo_config import GRPOConfig
from oncurve.trl.options import older
from oncurve.wording import did_you_mean


@dataclass
class ScriptArguments:
    """The data set of a script."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetMixtureConfig:
    """Several data sets that are trained on together."""

    datasets: list[dict[str, Any]] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """The rows of all data sets of a mixture, as a train split and, with ``test_split_size``, a test split."""
    from datasets import DatasetDict, concatenate_datasets, load_dataset

    parts = []
    for source in mixture_config.datasets:
        options = {key: source[key] for key in ("name", "data_dir", "data_files") if source.get(key) is not None}
        part = load_dataset(source["path"], split=source.get("split", "train"), **options)
        part = part.select_columns(source["columns"]) if source.get("columns") else part
        if source.get("fraction") is not None:
            part = part.select(range(int(len(part) * source["fraction"])))
        parts.append(part)
    if not parts:
        raise ConfigError("datasets: the mixture names none")
    whole = concatenate_datasets(parts)
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": whole})
    return whole.train_test_split(test_size=mixture_config.test_split_size)


@dataclass
class ModelConfig:
    """The model of a script, and its adapter."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    torch_dtype: InitVar[str | None] = None
    """The former name of dtype."""
    trust_remote_code: InitVar[bool] = False
    """An option of GRPOConfig today."""

    def __post_init__(self, torch_dtype: str | None, trust_remote_code: bool) -> None:
        """Both names of the type of the weights can be read, whichever was set."""
        self.dtype = torch_dtype or self.dtype
        self.torch_dtype = self.dtype  # type: ignore[misc]
        self.trust_remote_code = trust_remote_code  # type: ignore[misc]


def get_peft_config(model_args: ModelConfig) -> Any:
    """The LoraConfig that the options ask for; None without ``use_peft``."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )


def get_quantization_config(model_args: ModelConfig) -> Any:
    """The BitsAndBytesConfig that the options ask for; None without few bits."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if not model_args.load_in_4bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
    )


def get_kbit_device_map() -> None:
    """The device map of a quantized model: none, the device is chosen here (policy.device)."""
    return


class TrlParser(HfArgumentParser):
    """Dataclasses from a command line, with ``--config FILE`` for a YAML of the same options."""

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kinds = [] if dataclass_types is None else dataclass_types
        self._kinds = list(kinds) if isinstance(kinds, Iterable) else [kinds]
        try:
            super().__init__(dataclass_types=self._kinds, **kwargs)
        except (ArgumentError, RuntimeError, TypeError, ValueError) as error:  # of classes that do not fit together
            raise ConfigError(f"TrlParser: these dataclasses are not the options of one command: {error}") from None

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses, from the command line before the file. Raises ConfigError for an option that none has."""
        options = ["--dtype" if word == "--torch_dtype" else word for word in (sys.argv[1:] if args is None else args)]
        path, config = _file(options)
        if "torch_dtype" in config:
            config["dtype"] = config.pop("torch_dtype")
        known = {field.name for kind in self._kinds for field in fields(kind)}
        takes_old = any(isinstance(kind, type) and issubclass(kind, GRPOConfig) for kind in self._kinds)
        old = {name: config.pop(name) for name in list(config) if takes_old and name in older() and name not in known}
        old |= _take_old_options(options, known) if takes_old else {}
        unknown = [name for name in config if name not in known]
        if unknown and fail_with_unknown_args:
            if set(unknown) <= set(Config.model_fields):
                raise ConfigError(
                    f"{path}: the file is a recipe of oncurve, and no options of TRL's: `oncurve train {path}`"
                )
            near = [name for name in unknown if did_you_mean(name, known) and not isinstance(config[name], Mapping)]
            if not known.intersection(config) and not near:
                names = ", ".join(unknown[:4])
                raise ConfigError(f"{path}: none of its keys ({names}) is an option of TRL's. {OTHER_SYSTEMS}")
            hints = "; ".join(f"{name!r}. {did_you_mean(name, known)}".rstrip() for name in unknown)
            raise ConfigError(f"{path}: no option is named {hints}")
        self.set_defaults(**{name: value for name, value in config.items() if name in known})
        for action in self._actions:
            if action.dest in config:
                action.required = False
        parsed = self.parse_args_into_dataclasses(options, return_remaining_strings=not fail_with_unknown_args)
        set_names = {*config, *(word.removeprefix("--").split("=")[0] for word in options if word.startswith("--"))}
        made = [_dated(section, set_names, old) if isinstance(section, GRPOConfig) else section for section in parsed]
        rest = [] if fail_with_unknown_args else made.pop()
        return (*made, rest) if return_remaining_strings else tuple(made)


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


def _file(options: list[str]) -> tuple[Path | None, dict[str, Any]]:
    """The file behind --config, which is taken out of the words, and its options."""
    if "--config" not in options:
        return None, {}
    index = options.index("--config")
    path = Path(options[index + 1]) if index + 1 < len(options) else None
    if path is None or not path.is_file():
        raise ConfigError(f"--config: there is no file {path}")
    del options[index : index + 2]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid YAML: it is no text") from None
    return path, {name: value for name, value in read_mapping(text, str(path)).items() if name != "env"}


def _take_old_options(options: list[str], known: set[str]) -> dict[str, Any]:
    """Options that only earlier versions had, taken out of the words."""
    values: dict[str, Any] = {}
    for word in [word for word in options if word.startswith("--")]:
        name, _, value = word.removeprefix("--").partition("=")
        if name in known or name not in older():
            continue
        index = options.index(word)
        follows = options[index + 1] if index + 1 < len(options) else ""
        takes_next = not value and follows and not follows.startswith("--")
        values[name] = yaml.safe_load(value or (follows if takes_next else "true"))
        del options[index : index + (2 if takes_next else 1)]
    return values


def _dated(made: Any, set_names: set[str], old: Mapping[str, Any]) -> Any:
    """The configuration again, from what was said and names of earlier versions."""
    if not old:
        return made
    named = {field.name: vars(made)[field.name] for field in fields(made) if field.name in set_names}
    return type(made)(**named, **old)


def require_kinds(model: Any, args: Any, tokenizer: Any) -> None:
    """Raises ConfigError for an argument of a trainer that is of another type."""
    if model is None:
        raise ConfigError("model is None. Pass a name, a folder or a model: GRPOTrainer(model=...)")
    expected = {"args": (args, GRPOConfig), "processing_class": (tokenizer, PreTrainedTokenizerBase)}
    for name, (value, kind) in expected.items():
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} is a {type(value).__name__}. Pass a {kind.__name__}")
