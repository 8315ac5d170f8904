"""The passport of a model: what its folder holds, what of it the model uses, and what is switched off or not applied.

What changes numbers is refused with names and counts; what does not is said once.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from oncurve.constants import ADAPTER_CONFIG
from oncurve.observe.model_files import QUANTIZATION, ModelFiles, has_all_weights, read_model_files
from oncurve.run_errors import CheckpointError
from oncurve.wording import counted

SWITCHES = {"output_attentions": False, "output_hidden_states": False, "return_dict": True, "torchscript": False}
"""Keys of a config.json that change what a call returns and no number of the model, each with what is used here."""
GENERATION = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "guidance_scale",
    "max_new_tokens", "max_length", "num_beams", "penalty_alpha",
)  # fmt: skip
"""Settings of a generation_config.json that change what is sampled; the recipe's own count."""
EXAMPLES = 3
"""Names in a sentence."""
FAR, FEWEST_LAYERS = 30.0, 3
"""Times by which a weight's norm differs from that of the median layer, with as many layers at least, until it is said;
weights of SmolLM2, Qwen2.5 and Gemma 3 differ by up to 23."""


@dataclass(frozen=True)
class Passport:
    """The account of a model's folder, in five lines."""

    weights: str
    beside: str
    config: str
    tokenizer: str
    generation: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: tensors by what became of them."""

    def and_weights(self, sentence: str) -> Passport:
        """The same with one more word on the weights."""
        return replace(self, weights=f"{self.weights}; {sentence}")

    @property
    def lines(self) -> tuple[str, ...]:
        """The five lines."""
        return (
            f"weights: {self.weights}",
            f"beside them: {self.beside}",
            f"config.json: {self.config}",
            f"tokenizer: {self.tokenizer}",
            f"generation_config.json: {self.generation}",
        )


_PASSPORTS: WeakKeyDictionary[PreTrainedModel, Passport] = WeakKeyDictionary()


def passport_of(model: PreTrainedModel) -> Passport | None:
    """The passport of a model that was loaded from its files; None for one that a program made."""
    return _PASSPORTS.get(model)


def set_passport(model: PreTrainedModel, passport: Passport) -> None:
    """Remember it."""
    _PASSPORTS[model] = passport


@dataclass(frozen=True)
class Names:
    """The names of weights in the files and in a class, compared by transformers' own rules for both."""

    dropped: tuple[str, ...]
    """In the files, and in no layer."""
    made_up: tuple[str, ...]
    """In a layer, and in no file."""
    misfits: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Names of tensors of another shape than the layer's, with the file's and the layer's."""

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> Names:
        """From what transformers says of a model that it loaded."""
        misfits = sorted((name, tuple(theirs), tuple(ours)) for name, theirs, ours in report["mismatched_keys"])
        return cls(tuple(sorted(report["unexpected_keys"])), tuple(sorted(report["missing_keys"])), tuple(misfits))


def compare_names(
    config: PreTrainedConfig, files: ModelFiles, *, kind: Any = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Names]:
    """The same without loading a weight, for a class or for that of a causal language model, with a model without
    numbers."""
    if kind is None:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        kind, config = type(made), made.config
    empty = {
        name: torch.empty(tensor.shape, dtype=TYPES.get(tensor.dtype, torch.float32), device="meta")
        for name, tensor in files.tensors.items()
    }
    load: Any = kind.from_pretrained
    model, report = load(
        None, config=copy.deepcopy(config), state_dict=empty, device_map={"": "meta"}, dtype=torch.float32,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    return model, Names.of_report(report)


TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Types of tensors by their names in safetensors files."""


def files_of(path: str, revision: str | None = None) -> ModelFiles | None:
    """The weight files of a folder, or of a model from the Hub all of whose weights are on this machine; else None.

    Raises CheckpointError as ``read_model_files``.
    """
    if Path(path).is_dir():
        return read_model_files(path)
    known = cached_file(
        path, "config.json", revision=revision or "main", local_files_only=True,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    if known is None or not has_all_weights(snapshot := Path(known).parent):
        return None  # its loading fetches what is missing
    return read_model_files(snapshot)


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The section of a config.json on weights of few bits; None where they are whole."""
    for part in (config, config.get_text_config()):
        for key in QUANTIZATION:
            known = vars(part).get(key)
            if known is not None:
                return dict(known if isinstance(known, Mapping) else known.to_dict())
    return None


def switch_off(config: PreTrainedConfig) -> list[str]:
    """Let a model return what transformers' models return by default; the settings that say otherwise."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    changed = dict[str, None]()
    for part in parts:
        known = {key.removeprefix("_"): value for key, value in vars(part).items()}
        for key in SWITCHES.keys() & known.keys():
            if known[key] not in (None, SWITCHES[key]):
                part.update({key: SWITCHES[key]})
                changed[f"{key}={known[key]}"] = None
    return sorted(changed)


def check_names(
    name: str, model: PreTrainedModel, names: Names, config: PreTrainedConfig, files: ModelFiles | None
) -> None:
    """Every tensor of the files goes into the model, and every weight of the model comes from them.

    What the class itself lists as ignorable, and parts for pictures and sounds of a larger model, may stay out.

    Raises CheckpointError otherwise.
    """
    kind = type(model).__name__
    if names.made_up:
        instead = f"; the files hold {listed(names.dropped)} instead" if names.dropped else ""
        raise CheckpointError(
            f"model {name!r}: config.json describes {kind} with {counted(len(names.made_up), 'weight')} that the files "
            f"do not hold, such as {names.made_up[0]}, and that would be random{instead}. Correct config.json "
            f"(num_hidden_layers, attention_bias, tie_word_embeddings, model_type), or take the complete checkpoint"
        )
    if names.misfits:
        first, theirs, ours = names.misfits[0]
        raise CheckpointError(
            f"model {name!r}: in its files {counted(len(names.misfits), 'tensor')} of another shape than config.json "
            f"asks for, such as {first}, with {list(theirs)} in the file and {list(ours)} in {kind}. Put the "
            f"config.json of these weights there"
        )
    if names.dropped and not _belong_to_other_parts(config, model, files):
        raise CheckpointError(
            f"model {name!r}: no layer of {kind} takes {counted(len(names.dropped), 'tensor')} of its files, such as "
            f"{listed(names.dropped)}; without them it is another model than the one that was saved. Correct "
            f"config.json (attention_bias for biases, num_hidden_layers for layers, quantization_config for scales), "
            f"or merge a LoRA first. Delete only what the model does not need, such as a value head"
        )
    _refuse_twice(name, model, files)
    _refuse_untied(name, model)


def _refuse_twice(name: str, model: PreTrainedModel, files: ModelFiles | None) -> None:
    """Two tensors for one weight, with and without the prefix of the model's body: one of them is read, by chance."""
    prefix, known = f"{model.base_model_prefix}.", model.state_dict().keys()
    stored = files.tensors.keys() if files is not None else ()
    twice = [key for key in stored if f"{prefix}{key}" in stored and not {key, f"{prefix}{key}"} <= known]
    if twice:
        raise CheckpointError(
            f"model {name!r}: its files hold {counted(len(twice), 'weight')} twice, such as {twice[0]} and "
            f"{prefix}{twice[0]}. Delete either the names with {prefix} or those without"
        )


def listed(names: Sequence[str]) -> str:
    """The first of some names, from as many kinds as there are."""
    kinds = dict.fromkeys(re.sub(r"\d+", "N", name) for name in names)
    first = {kind: next(name for name in names if re.sub(r"\d+", "N", name) == kind) for kind in [*kinds][:EXAMPLES]}
    return ", ".join(first.values())


def _belong_to_other_parts(config: PreTrainedConfig, model: PreTrainedModel, files: ModelFiles | None) -> bool:
    """The class that saved a larger model takes all tensors of its files, of which this model is the part for text."""
    if files is None or config.get_text_config() is config or type(model.config) is type(config):
        return False
    whole = next((vars(transformers).get(kind) for kind in config.architectures or ()), None)
    if whole is None or whole is type(model):
        return False
    _, names = compare_names(config, files, kind=whole)
    return not names.dropped and not names.misfits


def _refuse_untied(name: str, model: PreTrainedModel) -> None:
    """Two matrices where config.json asks for one: other programs read one of them only."""
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        head, embedding = (model.get_parameter_or_buffer(key) for key in (target, source))
        if head is not embedding and not (head.is_meta or torch.equal(head, embedding)):
            raise CheckpointError(
                f"model {name!r}: config.json asks for one matrix for {source} and {target} (tie_word_embeddings), and "
                f"its files hold two. Set tie_word_embeddings to false, or take {target} out of the files"
            )


def stored_tensors(files: ModelFiles, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of safetensors files, or of torch's, by their names there, one after the other."""
    opened: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in names:
            path = files.folder / files.tensors[name].file
            is_safe = path.suffix == ".safetensors"
            if path.name not in opened:
                opened[path.name] = (
                    stack.enter_context(safe_open(path, framework="pt"))
                    if is_safe
                    else torch.load(path, weights_only=True, map_location="cpu", mmap=True)
                )
            file = opened[path.name]
            yield name, file.get_tensor(name) if is_safe else file[name]


@dataclass(frozen=True)
class WeightNumbers:
    """Facts on the numbers of a model's weights that need no other model to compare with."""

    largest: float
    where: str
    """The weight that has it."""
    oddities: tuple[str, ...]
    """Sentences on what a trained model seldom shows; it is loaded all the same."""


def check_numbers(name: str, weights: Iterable[tuple[str, Tensor]]) -> WeightNumbers:
    """The largest number, and what is odd: zeros throughout, a matrix twice, rows of one number, a size far from that
    of the same weight in other layers.

    Raises CheckpointError for numbers that are none.
    """
    largest, where, bad, empty = 0.0, "", list[str](), list[str]()
    sizes, seen, twice, flat = dict[str, dict[str, float]](), dict[Any, str](), list[str](), list[str]()
    for key, weight in weights:
        if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
            continue
        low, high = (float(end) for end in torch.aminmax(weight.detach()))
        size = max(abs(low), abs(high))
        if not size < float("inf"):
            bad.append(key)
        elif size > largest:
            largest, where = size, key
        elif size == 0 and weight.ndim > 1:
            empty.append(key)
        if not 0 < size < float("inf"):
            continue
        kind = re.sub(r"\d+", "N", key)
        if kind != key:  # a weight of a layer: an embedding has rows that nobody uses
            norm = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float32))
            sizes.setdefault(kind, {})[key] = norm
            if weight.ndim > 1:
                even = weight.detach()[weight[..., 0] == weight[..., -1]]  # few rows begin and end with one number
                flat += [key] if bool((even == even[..., :1]).all(-1).any()) else []
                same = seen.setdefault((kind, norm, low, high), key)
                twice += [f"{same} and {key}"] if same != key else []
    if bad:
        raise CheckpointError(
            f"model {name!r}: NaN or infinity in {counted(len(bad), 'tensor')}, such as {bad[0]}. The files were "
            f"written by a run that failed, or in a type that is too narrow. Take an earlier checkpoint"
        )
    far = [text for known in sizes.values() for text in _far_sizes(known)]
    odd = {"zero throughout": empty, "the same numbers twice": twice, "rows of one number": flat, "odd in size": far}
    return WeightNumbers(
        largest, where, tuple(f"{what}: {listed(sorted(which))}" for what, which in odd.items() if which)
    )


def _far_sizes(sizes: Mapping[str, float]) -> Iterator[str]:
    """The weights of a kind that are far larger or smaller than in the median layer."""
    usual = median(sizes.values())
    for key, size in sizes.items() if len(sizes) >= FEWEST_LAYERS else ():
        if not key.endswith("bias") and not 1 / FAR < size / usual < FAR:
            yield f"{key} ({size / usual:.2g} times the median layer's)"


def make_passport(
    name: str,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    files: ModelFiles | None,
    *,
    switched: Sequence[str],
    numbers: WeightNumbers | None,
) -> Passport:
    """The account of a model whose names and numbers were checked.

    Raises CheckpointError for a configuration without layers, for one that names another class than it describes, and
    for a token that ends completions and is not in the embedding.
    """
    config = model.config.get_text_config()
    if config.to_dict().get("num_hidden_layers", 1) in (0, None):
        raise CheckpointError(f"model {name!r} has no layers: num_hidden_layers in its config.json is 0. Correct it")
    _refuse_other_class(name, model)
    counts = Counter(weight.dtype for weight in model.parameters())
    total = sum(weight.numel() for weight in model.parameters())
    ignored = _ignored(model, files)
    types = ", ".join(f"{kind}" for kind in (files.num_bytes if files else {}))
    kinds = " and ".join(str(kind).removeprefix("torch.") for kind in counts)
    stored = (
        f"{counted(len(files.tensors), 'tensor')} ({types}) in {_file_names(files)}" if files and files.tensors else ""
    )
    used = "all are used" if not ignored else f"{len(ignored)} of them are not used, as the class says: {ignored[0]}"
    parts = [part for part in (stored, stored and used, f"{total:,} weights in {kinds}, none made up") if part]
    if numbers is not None:
        parts.append(f"all finite, the largest {numbers.largest:.3g} ({numbers.where})")
        parts += numbers.oddities
    beside = [f"not read: {', '.join(files.unread)}"] if files and files.unread else []
    beside += files.remarks if files else []
    return Passport(
        weights="; ".join(parts),
        beside="; ".join(beside) or "nothing",
        config=_describe_config(model, switched),
        tokenizer=_describe_tokenizer(name, model, tokenizer),
        generation=_describe_generation(model.generation_config),
        facts={
            "class": type(model).__name__,
            "tensors": {key: [t.dtype, list(t.shape), t.file] for key, t in files.tensors.items()} if files else {},
            "ignored": ignored,
            "num_weights": total,
            "unread": list(files.unread) if files else [],
            "made of": dict(files.made_of) if files else {},
        },
    )


def with_adapter(passport: Passport, described: Mapping[str, Any], files: ModelFiles, dropout: float) -> Passport:
    """The same of a model with an adapter in it."""
    kind = (
        f"rank {described.get('r')}" if described.get("peft_type") == "LORA" else f"kind {described.get('peft_type')}"
    )
    text = f"over them an adapter of {kind}, {counted(len(files.tensors), 'tensor')} in {files.folder}"
    own = float(described.get("lora_dropout") or 0.0)
    remark = f"; lora_dropout is {own:g} in its {ADAPTER_CONFIG} and {dropout:g} here" if own != dropout else ""
    facts = {**passport.facts, "adapter": {key: [t.dtype, list(t.shape), t.file] for key, t in files.tensors.items()}}
    return replace(passport, weights=f"{passport.weights}; {text}, all used{remark}", facts=facts)


def _file_names(files: ModelFiles) -> str:
    return files.files[0] if len(files.files) == 1 else f"{len(files.files)} files"


def _ignored(model: PreTrainedModel, files: ModelFiles | None) -> list[str]:
    """Names in the files that the class lists as ignorable."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    known = model.state_dict().keys()
    return [
        name
        for name in (files.tensors if files else ())
        if any(re.search(pattern, name) for pattern in patterns) and name not in known
    ]


def _refuse_other_class(name: str, model: PreTrainedModel) -> None:
    """config.json names one class in ``architectures``, which vLLM opens, and describes another, opened here."""
    causal = {
        kind
        for kinds in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
    }
    opened = type(model).__name__
    stated = [kind for kind in model.config.architectures or () if kind in causal]
    if stated and opened in causal and opened not in stated and not type(model).is_custom_code():
        raise CheckpointError(
            f"model {name!r}: config.json names the class {stated[0]} in architectures, and its model_type "
            f"{model.config.model_type} is that of {opened}. Programs that go by one or by the other would compute two "
            f"models. Correct the wrong one"
        )


def _describe_config(model: PreTrainedModel, switched: Sequence[str]) -> str:
    config = model.config.get_text_config()
    parts = (
        [f"{type(model).__name__}, {config.num_hidden_layers} layers"] if hasattr(config, "num_hidden_layers") else []
    )
    parts = parts or [type(model).__name__]
    dropouts = [f"{key}={value:g}" for key, value in vars(config).items()
                if re.search(r"dropout|_pdrop$|_drop$", key) and type(value) is float and value > 0]  # fmt: skip
    if dropouts:
        parts.append(f"not applied in training: {', '.join(dropouts)}")
    if switched:
        parts.append(f"switched off, and left out where the model is saved: {', '.join(switched)}")
    return "; ".join(parts)


def _describe_tokenizer(name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> str:
    embedding = model.get_input_embeddings()
    rows = int(next(iter(embedding.parameters())).shape[0]) if embedding is not None else 0
    settings = model.generation_config
    listed_ends = None if settings is None else settings.eos_token_id
    ends = [tokenizer.eos_token_id, *(listed_ends if isinstance(listed_ends, list) else [listed_ends])]
    known = [end for end in ends if isinstance(end, int)]
    if rows and known and min(known) >= rows:
        raise CheckpointError(
            f"model {name!r}: its tokenizer ends texts with {tokenizer.eos_token!r}, token {known[0]}, and the "
            f"embedding has {rows} rows. The tokenizer is that of another model, or rows were added and not saved"
        )
    text = f"{len(tokenizer):,} tokens for {rows:,} rows of the embedding"
    over = [token for token, index in tokenizer.get_vocab().items() if index >= rows > 0]
    if over:
        text += f"; {counted(len(over), 'token')} without a row, such as {over[0]!r}, and prompts with them are refused"
    if not known:
        text += "; neither it nor generation_config.json names an end of a text"
    return text


def _describe_generation(settings: GenerationConfig | None) -> str:
    if settings is None:
        return "none"
    usual, own = GenerationConfig().to_dict(), settings.to_dict()
    changes = [f"{key}={own[key]}" for key in GENERATION if own.get(key) not in (None, usual.get(key), [], 1.0)]
    if not changes:
        return "nothing in it changes sampling"
    return f"not applied, since the recipe's sampling counts: {', '.join(changes)}"
