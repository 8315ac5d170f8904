"""Models in folders: how they are loaded and saved, so that a folder is either whole or absent."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
import textwrap
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from oncurve.algorithm.precision import SavedCopies, use_dither
from oncurve.constants import MODEL_FILES
from oncurve.observe.model_files import ModelFiles
from oncurve.observe.run_model import bases_under, is_adapter, locate, locate_model
from oncurve.policy.passport import (
    Names,
    Passport,
    check_names,
    check_numbers,
    compare_names,
    files_of,
    make_passport,
    passport_of,
    quantization_of,
    set_passport,
    stored_tensors,
    switch_off,
)
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from oncurve.policy.lora import Quantization, Savable

log = logging.getLogger(__name__)


def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, from a folder, the hub, or this package.

    A folder with an adapter gives its base model with the adapter in it. The model has a ``passport``.

    Raises CheckpointError if there is none, if its files cannot be read, or if they hold something else than it.
    """
    path, _ = locate_model(name)
    own: dict[str, Any] = {"trust_remote_code": trust_remote_code, "quantization": quantization}
    if is_adapter(path):
        from oncurve.policy.lora import open_adapter  # lazy

        model, _ = load_base(path, {"dtype": dtype, "device": device, **own})
        return open_adapter(model, path).model, load_tokenizer(name, trust_remote_code=trust_remote_code)[1]
    config, tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    _refuse_kind(name, config)
    files = files_of(path, revision)
    loading, sentence = _options_of_type(name, config, files, dtype, quantization, device)
    loading |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with _LOADING:
            model, report = _from_files(path, {"revision": revision, "trust_remote_code": trust_remote_code}, loading)
    except UNLOADABLE as error:
        raise unloadable(name, error) from None
    switched = switch_off(model.config)
    files = files or files_of(path, revision)
    check_names(name, model, Names.of_report(report), config, files)
    numbers = check_numbers(name, model.named_parameters())
    _say_what_stays_out(name, model, config)
    passport = make_passport(name, model, tokenizer, files, switched=switched, numbers=numbers)
    set_passport(model, passport if sentence is None else passport.and_weights(sentence))
    model = model if quantization else cast("Any", model).to(device)
    model.eval()  # no dropout, neither in sampling nor in training: log-probabilities must be the same function
    return model, tokenizer


def _options_of_type(
    name: str,
    config: PreTrainedConfig,
    files: ModelFiles | None,
    dtype: torch.dtype,
    quantization: Quantization | None,
    device: torch.device | str,
) -> tuple[dict[str, Any], str | None]:
    """Arguments by which weights become those of few bits that a recipe asks for, or whole ones of a checkpoint of few
    bits, with a sentence on that."""
    if quantization:
        from oncurve.policy.lora import quantized  # lazy

        return quantized(quantization, device), None
    if quantization_of(config) is None:
        return {}, None
    from oncurve.policy.few_bits import as_whole_numbers  # lazy

    return as_whole_numbers(name, config, files, dtype)


def _from_files(path: str, options: Mapping[str, Any], loading: Mapping[str, Any]) -> tuple[PreTrainedModel, Any]:
    """A model and what transformers reports of its names, from its files, or from weights that were read before."""
    if "state_dict" in loading:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(loading["config"], trust_remote_code=options["trust_remote_code"])
        load: Any = type(made).from_pretrained
        return load(None, **loading)
    load = AutoModelForCausalLM.from_pretrained
    model, report = load(path, **options, **loading)
    if all(weight.is_floating_point() for weight in model.parameters()) and "quantization_config" in loading:
        vars(model).pop(
            "_weight_conversions"
        )  # by which transformers would save the numbers as if they were of few bits
    return model, report


def _refuse_kind(name: str, config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "auto_map" not in vars(config):
        raise unloadable(name, ValueError("Unrecognized configuration class"))


def load_base(
    adapter: str | Path, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model under an adapter, with the ``options`` of ``load_model``; where that is an adapter over another base,
    with that one added to its weights.

    Raises CheckpointError as ``load_model``, and for adapters that lie over each other in a circle.
    """
    *adapters, (name, revision) = bases_under(adapter)
    model, tokenizer = load_model(name, revision=revision, **options)
    for lower, _ in reversed(adapters):
        from oncurve.policy.lora import open_adapter  # lazy

        model = open_adapter(model, locate(lower)).merge()
        tokenizer = load_tokenizer(lower, trust_remote_code=bool(options.get("trust_remote_code")))[1]
    return model, tokenizer


def inspect_folder(name: str, *, trust_remote_code: bool = False) -> Passport:
    """The passport of a model, from its files: their numbers are read one after the other, and no model is made.

    An adapter is put into its base. Raises CheckpointError as ``load_model``.
    """
    path, _ = locate_model(name)
    if not is_adapter(path):
        _refuse_kind(name, load_tokenizer(name, trust_remote_code=trust_remote_code)[0])
    files = files_of(path)
    few_bits = not is_adapter(path) and "quantization_config" in AutoConfig.from_pretrained(path).to_dict()
    if is_adapter(path) or files is None or not files.tensors or few_bits:
        passport = passport_of(load_model(name, trust_remote_code=trust_remote_code)[0])
        assert passport is not None  # every model that is loaded has one
        return passport
    config, tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    try:
        with _LOADING:
            model, names = compare_names(config, files, trust_remote_code=trust_remote_code)
        if (files.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(files.folder)
    except UNLOADABLE as error:
        raise unloadable(name, error) from None
    switched = switch_off(model.config)
    check_names(name, model, names, config, files)
    numbers = check_numbers(name, stored_tensors(files, files.tensors))
    return make_passport(name, model, tokenizer, files, switched=switched, numbers=numbers)


def _say_what_stays_out(name: str, model: PreTrainedModel, config: PreTrainedConfig) -> None:
    if config.get_text_config() is not config and type(model.config) is not type(config):
        log.warning(
            "%s is of the kind %s, of which %s is the part for text: the parts for pictures and sounds are neither "
            "trained nor saved. To keep them, put the trained weights into the whole model",
            name,
            config.model_type,
            type(model).__name__,
        )


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer of a model, without its weights.

    An adapter's folder counts before its base: its tokenizer, or its chat template where it has nothing but that.

    Raises CheckpointError as ``load_model``.
    """
    path, _ = locate_model(name)
    if is_adapter(path):
        base, revision = bases_under(path)[0]
        config, tokenizer = load_tokenizer(base, revision=revision, trust_remote_code=trust_remote_code)
        return config, _own_tokenizer(Path(path), config, trust_remote_code=trust_remote_code) or _with_own_template(
            tokenizer, Path(path)
        )
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except UNLOADABLE as error:
        raise unloadable(name, error) from None
    if len(tokenizer.get_added_vocab()) >= len(tokenizer):
        raise CheckpointError(
            f"model {name!r}: its tokenizer has no vocabulary. Put its tokenizer.json into the folder"
        )
    return config, tokenizer


def _own_tokenizer(
    folder: Path, config: PreTrainedConfig, *, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in an adapter's folder; None where there is none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=trust_remote_code)
    except UNLOADABLE as error:
        raise unloadable(str(folder), error) from None


def _with_own_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The base's tokenizer with the chat template of an adapter's folder, if there is one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def declared_end_ids(name: str, tokenizer: PreTrainedTokenizerBase, *, revision: str | None = None) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's end token and those of the model's generation settings."""
    path, _ = locate_model(name)
    if is_adapter(path):
        path, revision = bases_under(path)[-1]
        path = locate(path)
    options: dict[str, Any] = {"revision": revision}
    try:
        listed = GenerationConfig.from_pretrained(path, **options).eos_token_id
    except OSError:  # a folder without such settings
        listed = AutoConfig.from_pretrained(path, **options).eos_token_id
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    return tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))


def add_end_token(model: PreTrainedModel, token: int) -> None:
    """Let one more token end completions; it is saved with the model, so that other engines stop there too."""
    if model.generation_config is None:
        model.generation_config = GenerationConfig()
    declared = model.generation_config.eos_token_id
    known = declared if isinstance(declared, list) else [declared]
    model.generation_config.eos_token_id = [
        *(known_token for known_token in known if isinstance(known_token, int)),
        token,
    ]


def unloadable(name: str, error: Exception, *, is_local: bool | None = None) -> CheckpointError:
    """Our words for what went wrong when a model was loaded; those of the library only where we know none."""
    text = " ".join(str(error).split())
    log.debug("model %s: %s", name, text)
    path, is_local = locate_model(name) if is_local is None else (name, is_local)
    value = _value_named_by(Path(path) / "config.json", text)
    for phrases, reason, remedy in _KNOWN:
        if any(word in text for word in phrases):
            detail = f" ({value})" if value and "config.json" in reason else ""
            return CheckpointError(f"model {name!r} cannot be loaded: {reason}{detail}. {remedy}")
    if isinstance(error, StrictDataclassError):
        return CheckpointError(
            f"model {name!r} cannot be loaded: a value in its config.json is of the wrong type "
            f"({text.rpartition('TypeError: ')[2][:200]}). Correct it, or download the file again"
        )
    if not is_local and isinstance(error, OSError):
        reason = "it is not on this machine, and the Hugging Face Hub cannot be reached or has no such model"
        return CheckpointError(f"model {name!r} cannot be loaded: {reason}. {_GET_IT}")
    what = f"{type(error).__name__}: {textwrap.shorten(text, 300, placeholder=' ...')}"
    frames = traceback.extract_tb(error.__traceback__)
    if value is not None:
        reason = f"its config.json has {value}, which transformers does not know ({what}). Correct it"
    elif any("token" in Path(frame.filename).name for frame in frames):
        reason = f"its tokenizer cannot be read ({what}). Put the tokenizer files of its source into the folder"
    else:
        reason = f"transformers makes no model of its files ({what}). Compare its config.json with that of its source"
    return CheckpointError(f"model {name!r} cannot be loaded: {reason}, or download it again")


def _value_named_by(file: Path, text: str) -> str | None:
    """The first key of a config.json whose value, a word, an error names; None where there is none."""
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    words = set(re.findall(r"[\w.-]{3,}", text))
    nested = [keys, *(inner for inner in keys.values() if isinstance(inner, dict))] if isinstance(keys, dict) else []
    named = ((key, value) for section in nested for key, value in section.items() if isinstance(value, str))
    return next((f"{key}: {value!r}" for key, value in named if value in words), None)


UNLOADABLE = (
    OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError, IndexError, AssertionError,
    ArithmeticError, SafetensorError, StrictDataclassError,
)  # fmt: skip
"""Errors of transformers for a folder that it cannot make a model of; those of types are of values in config.json."""
_GET_IT = "Check the name; without a network, set model=FOLDER to a folder that holds the model"
_KNOWN = (
    (("Unrecognized configuration class",),
     "transformers has no causal language model of its kind, as of encoders with a decoder and of most models for "
     "pictures and sounds", "Name a causal language model; the part for text of a larger one can be saved on its own"),
    (("gated repo", "401 Client", "403 Client"), "it is gated or private on the Hugging Face Hub",
     "Accept its terms there, then log in with `hf auth login` or set HF_TOKEN"),
    (("trust_remote_code",), "it comes with Python code of its own",
     "If you trust its authors, set policy.trust_remote_code=true"),
    (("model_type", "model type"), "its config.json has no model type that the installed transformers knows",
     "Check that it is a causal language model; a newer transformers may know it"),
    (("is not a valid JSON file", "not a valid JSON"), "its config.json is not valid JSON", "Download it again"),
    (("MetadataIncompleteBuffer", "HeaderTooSmall", "HeaderTooLarge", "InvalidHeader", "deserializing header",
      "cannot reshape array", "mmap length", "cannot mmap", "unpack_from requires", "GGUF magic"),
     "one of its weight files is damaged", "Download or save it again"),
    (("no file named",), "the folder has no weights, such as model.safetensors", "Download or save it again"),
)  # fmt: skip


def is_converted(model: PreTrainedModel) -> bool:
    """Transformers names or cuts this model's weights otherwise in files than in modules, as those of many experts."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


_LOADING = threading.Lock()
"""Transformers replaces functions of its classes while it loads a model: one at a time in a process."""


def under_module_names(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights by the names of its modules, from those by which files know them; what they do not have is
    left out, and what the model does not have stays.

    Raises AnotherModel for weights that do not fit together.
    """
    load: Any = type(model).from_pretrained
    options = {"config": copy.deepcopy(model.config), "dtype": model.dtype, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True
    try:
        with _LOADING:
            other, report = load(None, state_dict=dict(weights), **options)
    except (RuntimeError, KeyError) as error:
        from oncurve.model.lora_weights import AnotherModel  # lazy

        raise AnotherModel(" ".join(str(error).split())[:300]) from None
    absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    own_weights = {name: weight for name, weight in other.state_dict().items() if name not in absent}
    return own_weights | {name: weights[name] for name in report["unexpected_keys"] if name in weights}


def write_around(model: PreTrainedModel, folder: Path, files: Mapping[str, str]) -> None:
    """Everything of a model's folder but the weights; the index if they lie in ``files``, given by their names."""
    model.save_pretrained(folder, state_dict={})
    (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
    if not files:
        return
    index = {"metadata": {}, "weight_map": dict(files)}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def save_model(model: Savable, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Write an ordinary Hugging Face checkpoint, or peft's for an adapter; the folder appears only when it is whole.

    Raises CheckpointError if it cannot be written; an older checkpoint of that name is then still there. A folder that
    holds something else is refused: an older checkpoint is replaced as a whole.
    """
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).is_file() for name in MODEL_FILES):
        raise CheckpointError(
            f"{folder}: exists and is no model, and saving would replace all of it. Name a new or an empty folder"
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be written: {error}. Older ones are untouched"
        ) from error
    shutil.rmtree(old, ignore_errors=True)
    return folder


def merge_adapter(
    adapter: Path, output: Path, kind: torch.dtype | None = None, *, seed: int | None = 0
) -> tuple[Path, float]:
    """Write the base model of an adapter's folder with the adapter added to its weights; the folder, and the share of
    the adapter that is in it after rounding (``arrived_share``).

    The weights are written in ``kind``, or in the type of the base's files: by the dither of the ``seed``, or to the
    nearest if it is None.

    Raises CheckpointError if the folder holds no adapter, or if one of the two cannot be read or written.
    """
    if not is_adapter(adapter):
        if (adapter / "config.json").is_file():
            raise CheckpointError(
                f"{adapter}: is a whole model, not an adapter. Nothing is to be merged: use it as it is"
            )
        raise CheckpointError(
            f"{adapter}: no adapter there (adapter_config.json is missing). Name a run that trained with policy.lora, "
            f"or the folder of an adapter"
        )
    from oncurve.policy.lora import open_adapter  # lazy
    from oncurve.policy.lora_merge import arrived_share  # lazy

    model, _ = load_base(adapter)
    base, revision = bases_under(adapter)[-1]
    opened = open_adapter(model, adapter)
    kind = kind or stored_type(base, revision) or model.dtype
    share = arrived_share(opened.model, kind, seed) if kind != model.dtype else 1.0
    merged = opened.merge()
    if seed is not None:
        use_dither(merged, seed)
    copies = SavedCopies(merged)
    for name, weight in merged.named_parameters():
        weight.data = copies.copy(name, weight, kind)
    torch.nn.Module.to(merged, kind)
    return save_model(merged, load_tokenizer(str(adapter))[1], output), share


def stored_type(name: str, revision: str | None = None) -> torch.dtype | None:
    """The type in which a model's files hold its weights, as its config.json says; None if it does not."""
    config = AutoConfig.from_pretrained(locate_model(name)[0], **cast("dict[str, Any]", {"revision": revision}))
    dtype = config.get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else None
