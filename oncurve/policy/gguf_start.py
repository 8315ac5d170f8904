"""GGUF files as a start: the model in one becomes an ordinary folder of whole numbers, once, in the user's cache.

Transformers' own reader makes the numbers and the tokenizer. What the file holds and the reader leaves out is looked at
here: tensors, settings of the architecture, the way in which a tokenizer cuts texts.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.import_utils import is_gguf_available

from oncurve.observe.model_files import GGUF_ACCOUNT
from oncurve.policy.model_folder import UNLOADABLE, save_model, unloadable
from oncurve.policy.passport import Names, check_names, listed
from oncurve.run_errors import CheckpointError
from oncurve.wording import counted

FROM_SOURCE = "Name the model that it was made from"
WIDTHS: tuple[str, ...] = ("key_length", "value_length", "dimension_count")
"""Last parts of keys of a file that give the width of a head."""
SYNONYMS: dict[str, str] = dict.fromkeys(WIDTHS, "head_dim")
"""Last parts of keys of a file, and the names in config.json where these are others."""
NEUTRAL = (0, 1, "none", "")
"""Values that ask for nothing: no experts, a factor of one, no scaling."""
FREQUENCIES = "rope_freqs.weight"
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
"""Settings of Llama 3.1 and later, of which a file holds the divisors of frequencies that they lead to."""
BESIDE = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""Files of a tokenizer beside a GGUF file."""
NORMAL = 1
"""Kind of a token that is no control sign, no byte, and in use."""
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Ways of cutting texts by which each digit stands alone, and the rest is cut as by GPT-2; the reader takes GPT-2's."""
AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
"""Ways of cutting texts that are GPT-2's."""
ALIKE = 0.99
"""Mean cosine of the rows of two matrices above which they are one, rounded twice."""


def as_folder(file: Path) -> Path:
    """The folder that is made of a GGUF file; it is made again when the file or the tokenizer beside it changes.

    Raises CheckpointError for a file that cannot be read, or of which something would be left out.
    """
    about = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in _sources(file)]
    key = hashlib.sha256(json.dumps([about, transformers.__version__]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncurve" / "gguf"
    folder = cache / f"{file.stem}-{key}"
    if not (folder / GGUF_ACCOUNT).is_file():
        with redirect_stderr(io.StringIO()):  # the reader's bars
            _convert(file, folder)
    return folder


def _sources(file: Path) -> list[Path]:
    return [file, *(path for name in BESIDE if (path := file.parent / name).is_file())]


def _convert(file: Path, folder: Path) -> None:
    if not is_gguf_available():
        raise CheckpointError(
            f"{file} is a model in llama.cpp's format, which the package gguf reads. `pip install gguf`, or "
            f"name the model that it was made from"
        )
    from gguf import GGUFReader

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        about, _ = read_gguf_metadata(str(file), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
        _refuse_parts(file, about)
        stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
        config = AutoConfig.from_pretrained(**source)
        _refuse_unread_settings(file, config, about)
        _apply_frequencies(file, config, stored)
        tokenizer, origin = _tokenizer_of(file, config, about)
        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(
            **source, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except CheckpointError:
        raise
    except (*UNLOADABLE, NotImplementedError, struct.error) as error:
        raise unloadable(str(file), error, is_local=True) from None
    names = Names.of_report(report)
    if dropped := [*names.dropped, *_left_out(model, about["general.architecture"], stored)]:
        raise CheckpointError(
            f"{file}: transformers' reader leaves out {counted(len(dropped), 'tensor')}, such as {listed(dropped)}, so "
            f"that it would be another model than the one in the file. {FROM_SOURCE}"
        )
    check_names(str(file), model, names, config, None)
    kinds = {name: [tensor.tensor_type.name, [int(size) for size in reversed(tensor.shape)]]
             for name, tensor in stored.items()}  # fmt: skip
    sentence = (
        f"dequantized from {file.name} ({', '.join(dict.fromkeys(kind for kind, _ in kinds.values()))}) to float32, "
        f"all {counted(len(stored), 'tensor')}: close to the original model and not identical. Training updates and "
        f"saves unquantized weights; quantize them again for llama.cpp. Tokenizer {origin}"
    )
    if repeats_embedding(model):
        sentence += (
            "; the output matrix is the embedding, quantized a second time: the original model ties them, here they "
            "are two matrices"
        )
    save_model(_plain(model, about), tokenizer, folder)
    account = {"file": str(file.resolve()), "sentence": sentence, "tensors": kinds}
    (folder / GGUF_ACCOUNT).write_text(json.dumps(account) + "\n", encoding="utf-8")


def _plain(model: PreTrainedModel, about: Mapping[str, Any]) -> PreTrainedModel:
    """A model with the same weights that can be saved, which the reader's own cannot, and the tokens that end texts."""
    vars(model.config).pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    ends = [about.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = [*dict.fromkeys(end for end in ends if end is not None)]
    plain.generation_config = GenerationConfig(
        eos_token_id=known if len(known) > 1 else next(iter(known), None),
        bos_token_id=about.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=about.get("tokenizer.ggml.padding_token_id"),
    )
    return plain


def _refuse_parts(file: Path, about: Mapping[str, Any]) -> None:
    if (parts := int(about.get("split.count") or 0)) > 1:
        raise CheckpointError(
            f"{file} is one of {parts} parts of a model. Join them with `llama-gguf-split --merge`, and name the result"
        )
    if (kind := str(about.get("general.type") or "model")) != "model":
        raise CheckpointError(
            f"{file} holds no model: its general.type is {kind!r}. Name the GGUF file of the whole model"
        )


def _left_out(model: PreTrainedModel, architecture: str, stored: Iterable[str]) -> list[str]:
    """Tensors of a file that the reader skips without a word. Its newer part, for some architectures, reports them."""
    if is_gguf_arch_supported(architecture):
        return []
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = {*get_gguf_hf_weights_map(model, processor), FREQUENCIES}
    return [name for name in stored if not {name, name.removesuffix(".weight")} & known]


def _refuse_unread_settings(file: Path, config: PreTrainedConfig, about: Mapping[str, Any]) -> None:
    """Settings of the architecture that the reader does not look at are those of the configuration, or are refused."""
    prefix = f"{about['general.architecture']}."
    if is_gguf_arch_supported(prefix[:-1]):
        return
    kinds = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    read = {key for key, name in (kinds.get(config.model_type) or kinds[prefix[:-1]]).items() if name}
    has = config.to_dict()
    for key, value in about.items():
        last = key.rpartition(".")[2]
        if not key.startswith(prefix) or key.removeprefix(prefix) in read or value in NEUTRAL:
            continue
        own = has.get(last, has.get(SYNONYMS.get(last, "")))
        own = _width(config, last) if own is None and last in WIDTHS else own
        if own != value and not (isinstance(own, float) and math.isclose(own, value, rel_tol=1e-6)):
            raise CheckpointError(
                f"{file}: it says {key} = {value}, which transformers' reader does not apply, so that it would be "
                f"another model than the one in the file. {FROM_SOURCE}"
            )


def _width(config: PreTrainedConfig, kind: str) -> int:
    """Numbers of a head, or those of them that rotate."""
    turned = (config.to_dict().get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    return int(config.hidden_size // config.num_attention_heads * (turned if kind == "dimension_count" else 1.0))


def _apply_frequencies(file: Path, config: PreTrainedConfig, stored: Mapping[str, Any]) -> None:
    """Divisors of the rotary frequencies: those that Llama 3.1 and later have become the settings that lead to them.

    Raises CheckpointError for others.
    """
    divisors = torch.from_numpy(stored[FREQUENCIES].data.copy()).float() if FREQUENCIES in stored else torch.ones(1)
    if bool((divisors == 1).all()):
        return
    plain = dict(config.rope_parameters)
    config.rope_parameters = plain | LLAMA3 | {"factor": float(divisors.max())}
    powers = torch.arange(0, 2 * len(divisors), 2) / (2 * len(divisors))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    expected = plain["rope_theta"] ** -powers / divisors
    if scaled.shape != expected.shape or not torch.allclose(scaled, expected, rtol=1e-5, atol=0):
        raise CheckpointError(
            f"{file}: its {FREQUENCIES} scales the rotary frequencies otherwise than Llama 3.1 and later do, which is "
            f"not applied here. {FROM_SOURCE}"
        )


def repeats_embedding(model: PreTrainedModel) -> bool:
    """A model's output matrix and its embedding are two roundings of a matrix that the model it was made from ties."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding) or head.weight is embedding.weight:
        return False
    with torch.no_grad():
        return float(nn.functional.cosine_similarity(head.weight, embedding.weight).mean()) > ALIKE


def _tokenizer_of(file: Path, config: PreTrainedConfig, about: Mapping[str, Any]) -> tuple[Tokenizer, str]:
    """The tokenizer in the files beside a GGUF file, or its own, and from where it is.

    Raises CheckpointError for one with other tokens, and for one whose way of cutting texts the reader does not know.
    """
    folder, tokens = file.parent, about.get("tokenizer.ggml.tokens") or []
    if beside := [name for name in BESIDE[:2] if (folder / name).is_file()]:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
        kinds = about.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
        spelled = tokenizer.convert_ids_to_tokens(list(range(min(len(tokens), len(tokenizer)))))
        other = [
            (theirs, own)
            for theirs, own, kind in zip(tokens, spelled, kinds, strict=False)
            if kind == NORMAL and theirs.replace(" ", "\u2581") != str(own).replace(" ", "\u2581")
        ]
        if other:
            raise CheckpointError(
                f"{file}: {counted(len(other), 'token')} of {beside[0]} beside it are others than those in the file, "
                f"such as {other[0][1]!r} in the place of {other[0][0]!r}. Put the tokenizer of this model there, or "
                f"move {beside[0]} away"
            )
        return tokenizer, f"from {beside[0]} beside it"
    kind, cut = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre")
    if kind == "gpt2" and cut not in (*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS, *AS_GPT2):
        raise CheckpointError(
            f"{file}: its tokenizer cuts texts in the way {cut!r}, which transformers' reader does not know. Put the "
            f"tokenizer.json of the model that it was made from beside it"
        )
    known = {*tokens}
    if absent := [pair for pair in about.get("tokenizer.ggml.merges") or [] if pair.replace(" ", "") not in known]:
        raise CheckpointError(
            f"{file}: its tokenizer joins {counted(len(absent), 'pair')} to tokens that it has not, such as "
            f"{absent[0]!r}. The file is damaged; download or make it again"
        )
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    if kind == "gpt2" and cut in DIGITS:
        backend: Any = tokenizer
        backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer, "from the file"
