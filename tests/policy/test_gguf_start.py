"""GGUF files as a start: what is loaded is the model that was written, or it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from offenders import assert_none
from tiny_models import make_model, model_config
from torch import Tensor

from oncurve.core.errors import OncurveError
from oncurve.observe.model_files import read_model_files
from oncurve.observe.run_model import locate
from oncurve.policy.model_folder import inspect_folder, load_model, save_model
from oncurve.policy.passport import passport_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'oncurve[gguf]'")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 5e5}  # fmt: skip
Change = Callable[[dict[str, Any], dict[str, Any]], object]


def pairs_beside(weight: Tensor, heads: int) -> Tensor:
    """The rows of a head as llama.cpp turns them: the two of a pair one after the other."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, tokenizer: PreTrainedTokenizerFast, change: Change, kind: str) -> None:
    """As llama.cpp's own converter writes a model; ``change`` edits tensors and settings before."""
    family, config = model.config.model_type, model.config
    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    tensors = dict[str, Any]()
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        tensors[known.get_name(name, (".weight", ".bias"))] = (
            pairs_beside(weight, heads) if heads and family == "llama" else weight
        ).numpy()
    settings = {
        "context_length": 256, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "vocab_size": config.vocab_size,
    }  # fmt: skip
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    settings = {f"{family}.{key}": value for key, value in settings.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.tokens": [*tokens[:200], "12", "ab", *tokens[202:]],
        "tokenizer.ggml.token_type": [3 if token in tokenizer.all_special_tokens else 1 for token in tokens],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id, "tokenizer.ggml.padding_token_id": 1,
    }  # fmt: skip
    change(tensors, settings)
    writer = gguf.GGUFWriter(path, family)
    for key, value in settings.items():
        add = {list: writer.add_array, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        few = kind != "F32" and tensor.ndim > 1
        data = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType[kind]) if few else tensor
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind] if few else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def nothing(tensors: dict[str, Any], settings: dict[str, Any]) -> None: ...


def tensor(name: str, *shape: int, value: float = 1.0) -> Change:
    return lambda tensors, settings: tensors.update({name: np.full(shape, value, np.float32)})


def says(**changes: Any) -> Change:
    return lambda tensors, settings: settings.update({key.replace("__", "."): value for key, value in changes.items()})


def divided(by: Tensor | None) -> Change:
    """Divisors of the frequencies; those of Llama 3 if they are not given."""
    if by is None:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=LLAMA3)
        by = 5e5 ** -(torch.arange(0, 8, 2) / 8) / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    numbers = by.numpy()

    def edit(tensors: dict[str, Any], settings: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"], settings["llama.rope.freq_base"] = numbers, 5e5

    return edit


SAME = ""
CASES: dict[str, tuple[str, Change, str]] = {
    "llama": ("llama", nothing, SAME),
    "qwen2, tied, with biases": ("qwen2", nothing, SAME),
    "qwen2, a head of its own": (
        "qwen2", lambda tensors, _: tensors.update({"output.weight": tensors["token_embd.weight"].copy()}), SAME),
    "frequencies of nothing": ("llama", tensor("rope_freqs.weight", 4), SAME),
    "frequencies of Llama 3": ("llama3", divided(None), SAME),
    "other frequencies": ("llama", divided(torch.tensor([1.0, 1.0, 2.0, 8.0])), "rope_freqs.weight scales"),
    "a width that is right": ("llama", says(llama__attention__key_length=8, llama__rope__dimension_count=8), SAME),
    "a setting of nothing": ("llama", says(llama__expert_count=0, llama__rope__scaling__type="none"), SAME),
    "a scaling": ("llama", says(llama__rope__scaling__factor=4.0), "llama.rope.scaling.factor = 4.0"),
    "a window": ("qwen2", says(qwen2__attention__sliding_window=64), "qwen2.attention.sliding_window = 64"),
    "a width that is wrong": ("qwen2", says(qwen2__attention__key_length=16), "qwen2.attention.key_length = 16"),
    "biases": ("llama", tensor("blk.0.attn_q.bias", 32), "leaves out 1 tensor, such as blk.0.attn_q.bias"),
    "a norm of queries": ("qwen2", tensor("blk.1.attn_q_norm.weight", 8), "leaves out"),
    "a missing norm": ("llama", lambda tensors, _: tensors.pop("output_norm.weight"), "missing"),
    "half of a matrix": ("llama", tensor("blk.0.ffn_up.weight", 32, 32), "another shape"),
    "NaN": ("llama", tensor("output_norm.weight", 32, value=float("nan")), "NaN"),
    "one of two parts": ("llama", says(split__count=2), "one of 2 parts"),
    "an adapter": ("llama", says(general__type="adapter"), "general.type is 'adapter'"),
    "another way of cutting": ("llama", says(tokenizer__ggml__pre="default"), "cuts texts in the way 'default'"),
    "a pair of no token": ("llama", says(tokenizer__ggml__merges=["1 2", "1 3"]), "joins 1 pair"),
    "an architecture of nobody": ("llama", says(general__architecture="llama9"), "."),
}  # fmt: skip
"""By name: the model, the edit, and words of the refusal."""


def row(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits[0].log_softmax(-1)


def test_a_gguf_file_is_the_model_that_was_written_or_it_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = {kind: make_model(model_config(kind, tokenizer)) for kind in ("llama", "qwen2")}
    turned = model_config("llama", tokenizer)
    turned.rope_parameters = LLAMA3
    models["llama3"] = make_model(turned)

    def fault(name: str, kind: str, edit: Change, refusal: str) -> str | None:
        path = tmp_path / f"{name.replace(' ', '_')}.gguf"
        write_gguf(path, models[kind], tokenizer, edit, "F32")
        try:
            model, _ = load_model(str(path))
        except OncurveError as error:
            return None if refusal and re.search(refusal, str(error)) else f"refused: {error}"
        except Exception as error:  # noqa: BLE001  a traceback is what is looked for
            return f"TRACEBACK {type(error).__name__}: {error}"
        distance = float((row(model) - row(models[kind])).abs().max())
        return "not refused" if refusal else f"{distance:.2g} from the model" if distance > 1e-4 else None

    assert_none(f"{name}: {text}" for name, case in CASES.items() if (text := fault(name, *case)))
    for kind in ("llama", "qwen2"):  # eight bits: as transformers reads them, near what was written
        folder = tmp_path / f"{kind}-Q8"
        folder.mkdir()
        write_gguf(folder / "few.gguf", models[kind], tokenizer, nothing, "Q8_0")
        model, _ = load_model(str(folder))
        own = AutoModelForCausalLM.from_pretrained(folder, gguf_file="few.gguf", dtype=torch.float32)
        assert torch.equal(row(model), row(own))
        assert 0 < float((row(model) - row(models[kind])).abs().mean()) < 0.1


def test_a_gguf_file_has_a_passport_a_tokenizer_and_an_ordinary_model_behind_it(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written = make_model(model_config("qwen2", tokenizer))
    path = tmp_path / "small.gguf"
    write_gguf(path, written, tokenizer, CASES["qwen2, a head of its own"][1], "F32")
    model, own = load_model(str(path))
    assert own.eos_token == tokenizer.eos_token
    assert len(own("1").input_ids) == 1
    assert len(own("ab").input_ids) == 1, "a pair that the file joins"
    assert len(own("12").input_ids) == 2, "each digit stands alone, as the file says"
    passport = passport_of(model)
    assert passport is not None
    assert passport.lines == inspect_folder(str(path)).lines
    for part in (
        "dequantized from small.gguf (F32) to float32, all 27 tensors",
        "the output matrix is the embedding, quantized a second time",
    ):
        assert part in passport.beside
    assert passport.facts["made of"]["tensors"]["output.weight"] == ["F32", [len(tokenizer), 32]]
    saved = save_model(model, own, tmp_path / "saved")
    assert torch.equal(row(load_model(str(saved))[0]), row(model))
    assert not read_model_files(saved).made_of

    first = locate(str(path))
    assert locate(str(path)) == first
    own.save_pretrained(tmp_path)
    beside, _ = load_model(str(path))
    assert "Tokenizer from tokenizer.json beside it" in str(passport_of(beside))
    write_gguf(path, written, tokenizer, says(tokenizer__ggml__tokens=["x"] * len(tokenizer)), "F32")
    with pytest.raises(OncurveError, match=r"tokens? of tokenizer\.json beside it are others"):
        locate(str(path))
    (tmp_path / "other.gguf").write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(OncurveError, match=r"holds 2 GGUF files, other\.gguf, small\.gguf: name one"):
        locate(str(tmp_path))
    with pytest.raises(OncurveError, match="damaged"):
        locate(str(tmp_path / "other.gguf"))
    monkeypatch.setattr("oncurve.policy.gguf_start.is_gguf_available", lambda: False)
    with pytest.raises(OncurveError, match="pip install gguf"):
        locate(str(tmp_path / "other.gguf"))
