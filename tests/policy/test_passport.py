"""A model's folder, edited in a hundred ways: what is loaded is what its owner saved, or it is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offenders import assert_none
from safetensors.torch import load_file, save_file
from tiny_models import make_model, model_config
from torch import Tensor

from oncurve.core.errors import OncurveError
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import inspect_folder, load_model
from oncurve.policy.passport import check_numbers, files_of, listed, passport_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Edit = Callable[[Path], object]
FILE, ADAPTER_FILE, INDEX = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"


def write(folder: Path, weights: dict[str, Tensor], name: str = FILE) -> None:
    save_file({key: weight.contiguous() for key, weight in weights.items()}, folder / name, metadata={"format": "pt"})


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str = FILE) -> Edit:
    """Other tensors in the file."""
    return lambda folder: write(folder, change(load_file(folder / name)), name)


def each(part: str, change: Callable[[Tensor], Tensor], name: str = FILE) -> Edit:
    """Another tensor for each of which the name has a part."""
    return weights(
        lambda known: {key: change(weight) if part in key else weight for key, weight in known.items()}, name
    )


def without(part: str, name: str = FILE) -> Edit:
    return weights(lambda known: {key: weight for key, weight in known.items() if part not in key}, name)


def more(name: str, *shape: int, dtype: torch.dtype = torch.float32, file: str = FILE) -> Edit:
    return weights(lambda known: known | {name: torch.ones(shape).to(dtype)}, file)


def renamed(old: str, new: str, name: str = FILE) -> Edit:
    return weights(lambda known: {re.sub(old, new, key): weight for key, weight in known.items()}, name)


def put(file: str, **changes: Any) -> Edit:
    """Other keys in a file of JSON; None takes one out."""

    def edit(folder: Path) -> None:
        known = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        known |= changes
        (folder / file).write_text(json.dumps({key: value for key, value in known.items() if value is not None}))

    return edit


def config(**changes: Any) -> Edit:
    return put("config.json", **changes)


def both(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for change in edits:
            change(folder)

    return edit


def beside(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str) -> Edit:
    """Another weight file, of torch's or of safetensors' kind."""

    def edit(folder: Path) -> None:
        known = change(load_file(folder / FILE))
        torch.save(known, folder / name) if name.endswith(".bin") else write(folder, known, name)

    return edit


def file(name: str, content: bytes = b"", *, cut: int = 0) -> Edit:
    """Another content of a file, or the file without its last bytes."""

    def edit(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-cut] if cut else content)

    return edit


def gone(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def index(change: Callable[[dict[str, str]], dict[str, str]]) -> Edit:
    def edit(folder: Path) -> None:
        known = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(known | {"weight_map": change(known["weight_map"])}))

    return edit


def scaled(known: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: 1.5 * weight for key, weight in known.items()}


def with_nan(weight: Tensor) -> Tensor:
    return torch.where(torch.arange(weight.numel()).view_as(weight) == 1, torch.nan, weight)


SAME, AND_SAYS = "", "same, and says "
"""The folder is loaded, and its model is the one that was edited; one that "says" something is loaded, and says so."""
CASES: dict[str, tuple[str, Edit, str]] = {
    "nothing": ("llama", both(), SAME),
    "bfloat16 beside it": ("llama", beside(lambda w: {k: v.bfloat16() for k, v in w.items()}, "m.safetensors"), SAME),
    "the same as torch's file": ("llama", beside(dict, "pytorch_model.bin"), SAME),
    "float16 in torch's file": (
        "llama", beside(lambda w: {k: v.half() for k, v in w.items()}, "pytorch_model.bin"), SAME),
    "torch's file alone": ("llama", both(beside(dict, "pytorch_model.bin"), gone(FILE)), SAME),
    "other torch's file": (
        "llama", beside(scaled, "pytorch_model.bin"),
        "two sets of weights: 21 of 21 tensors in pytorch_model.bin"),
    "other file beside": ("llama", beside(scaled, "model-00001-of-00002.safetensors"), "two sets of weights"),
    "a file of another shape": (
        "llama", beside(lambda w: {k: v[:2] for k, v in w.items()}, "model.old.safetensors"), "two sets of weights"),
    "consolidated beside": (
        "llama", beside(lambda w: {f"x.{k}": v for k, v in w.items()}, "consolidated.safetensors"), SAME),
    "optimizer beside": ("llama", beside(scaled, "optimizer.bin"), SAME),
    "gguf beside": ("llama", file("model.gguf", b"GGUF"), "same, and says beside='not read: model.gguf'"),
    "gguf alone": ("llama", both(file("model.gguf", b"GGUF"), gone(FILE)), r"damaged|llama\.cpp"),
    "no weights": ("llama", gone(FILE), "edited: the folder has no weights, such as model.safetensors. Download"),
    "no config": ("llama", gone("config.json"), "no config.json"),
    "gguf and no config": ("llama", both(gone("config.json"), gone(FILE), file("a.gguf")), r"damaged|llama\.cpp"),
    "consolidated and no config": (
        "llama", both(gone("config.json"), gone(FILE), file("consolidated.00.pth")), "consolidated"),
    "cut off": ("llama", file(FILE, cut=100), "it has 143,212 bytes of 143,312"),
    "an empty file": ("llama", file(FILE), "damaged"),
    "no header": ("llama", file(FILE, b"\xff" * 64), "its header is longer than the file"),
    "a pointer of Git LFS": (
        "llama", file(FILE, b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "git lfs pull"),
    "torch's file cut off": (
        "llama", both(beside(dict, "pytorch_model.bin"), gone(FILE), file("pytorch_model.bin", cut=999)), "."),
    "biases": (
        "llama", more("model.layers.0.self_attn.q_proj.bias", 32), "no layer of LlamaForCausalLM takes 1 tensor"),
    "a norm of keys": (
        "llama", more("model.layers.1.self_attn.k_norm.weight", 8),
        "takes 1 tensor of its files, such as model.layers.1.self_attn.k_norm.weight;"),
    "one more layer": ("llama", more("model.layers.2.mlp.up_proj.weight", 64, 32), "no layer"),
    "a head for scores": ("llama", more("score.weight", 1, 32), "no layer"),
    "a value head": ("llama", more("v_head.summary.weight", 1, 32), "no layer"),
    "scales": ("llama", more("model.layers.0.mlp.up_proj.weight_scale", 64, 1), "no layer"),
    "inverse scales": ("llama", more("model.layers.0.mlp.up_proj.weight_scale_inv", 1, 1), "no layer"),
    "an input scale": ("llama", more("model.layers.0.mlp.up_proj.input_scale", 1), "no layer"),
    "a head for other tokens": ("llama", more("model.mtp.0.weight", 32, 32), "no layer"),
    "a LoRA left in": ("llama", more("model.layers.0.self_attn.q_proj.lora_A.default.weight", 4, 32), "no layer"),
    "old angles": (
        "llama", more("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
        "same, and says 1 of them are not used, as the class says: model.layers.0.self_attn.rotary_emb.inv_freq"),
    "positions": ("llama", more("model.rotary_emb.inv_freq", 4), SAME),
    "a name of a wrapper": (
        "llama", renamed("^", "_orig_mod."),
        "the files hold _orig_mod.lm_head.weight, _orig_mod.model.embed_tokens.weight, "
        "_orig_mod.model.layers.0.input_layernorm.weight instead"),
    "names of another class": ("llama", renamed("^model.", "transformer."), "the files do not hold"),
    "a name without its prefix": ("llama", renamed("^model.", ""), SAME),
    "twice, with and without prefix": (
        "llama", weights(lambda w: w | {k.removeprefix("model."): 2 * v for k, v in w.items()}), "twice"),
    "a missing norm": (
        "llama", without("model.norm"),
        "1 weight that the files do not hold, such as model.norm.weight, and that would be random. Correct"),
    "a missing layer": (
        "llama", without("layers.1."),
        "9 weights that the files do not hold, such as model.layers.1.input"),
    "no head": ("llama", without("lm_head"), "the files do not hold"),
    "no embedding": ("llama", without("embed_tokens"), "the files do not hold"),
    "float8": ("llama", each("_proj", lambda v: v.to(torch.float8_e4m3fn)), "F8_E4M3"),
    "float8 of the other kind": ("llama", each("_proj", lambda v: v.to(torch.float8_e5m2)), "F8_E5M2"),
    "int8": (
        "llama", each("up_proj", lambda v: (40 * v).to(torch.int8)),
        "2 of 21 tensors are of the type I8, such as model.layers.0.mlp.up"),
    "packed int32": ("llama", each("up_proj", lambda v: (40 * v).to(torch.int32)), "I32"),
    "uint8": ("llama", each("lm_head", lambda v: (40 * v).to(torch.uint8)), "U8"),
    "float16": ("llama", each("", lambda v: v.half()), SAME),
    "bfloat16": ("llama", each("", lambda v: v.bfloat16()), SAME),
    "types mixed": (
        "llama", each("norm", lambda v: v.bfloat16()),
        "same, and says 21 tensors (F32, BF16) in model.safetensors; all are used; 35,296 weights in float32, none "
        "made up"),
    "NaN": ("llama", each("1.mlp.up_proj", with_nan), "NaN or infinity in 1 tensor"),
    "infinity in a norm": ("llama", each("model.norm", lambda v: v / 0), "NaN or infinity"),
    "NaN in the embedding": ("llama", each("embed", with_nan), "NaN or infinity"),
    "zeros": (
        "llama", each("1.mlp.down_proj", lambda v: 0 * v), "says zero throughout: model.layers.1.mlp.down_proj.weight"),
    "a layer twice": (
        "llama", weights(lambda w: w | {k: w[k.replace("s.1.", "s.0.")].clone() for k in w if "s.1." in k}),
        "says the same numbers twice: model.layers.0.mlp.down_proj.weight and model.layers.1.mlp.down_proj.weight"),
    "a row of zeros": (
        "llama", each("1.mlp.up_proj", lambda v: v * (torch.arange(len(v)) != 3)[:, None]), "says rows of one number"),
    "half of a matrix": (
        "llama", each("1.mlp.up_proj", lambda v: v[:16]),
        "1 tensor of another shape .* with \\[16, 32\\] in the file and \\[64, 32\\] in Llama"),
    "a matrix that lies": ("llama", each("up_proj", lambda v: v.T), "another shape"),
    "a larger vocabulary": ("llama", each("embed_tokens", lambda v: v.repeat(2, 1)), "another shape"),
    "config: more layers": ("llama", config(num_hidden_layers=3), "the files do not hold"),
    "config: fewer layers": ("llama", config(num_hidden_layers=1), "takes 9 tensors"),
    "config: no layers": ("llama", config(num_hidden_layers=0), "takes 18 tensors"),
    "config: biases": ("llama", config(attention_bias=True), "the files do not hold"),
    "config: biases of the MLP": ("llama", config(mlp_bias=True), "the files do not hold"),
    "config: another width": ("llama", config(intermediate_size=65), "another shape"),
    "config: another vocabulary": ("llama", config(vocab_size=300), "another shape"),
    "config: more keys": ("llama", config(num_key_value_heads=4), "another shape"),
    "config: tied": (
        "llama", config(tie_word_embeddings=True),
        "one matrix for model.embed_tokens.weight and lm_head.weight"),
    "config: attentions": (
        "llama", config(output_attentions=True),
        "same, and says 2 layers; switched off, and left out where the model is saved: output_attentions=True"),
    "config: hidden states": ("llama", config(output_hidden_states=True), SAME),
    "config: tuples": ("llama", config(return_dict=False), "same, and says return_dict=False"),
    "config: no cache": ("llama", config(use_cache=False), "same, and says config='LlamaForCausalLM, 2 layers'"),
    "config: dropout": (
        "llama", config(attention_dropout=0.1),
        "same, and says not applied in training: attention_dropout=0.1"),
    "config: a text": ("llama", config(num_attention_heads="4"), "Field 'num_attention_heads' expected int"),
    "config: another text": ("llama", config(rms_norm_eps="1e-6"), "rms_norm_eps"),
    "config: a list": ("llama", config(hidden_size=[32]), "hidden_size"),
    "config: null": ("llama", config(hidden_size=7), "The hidden size .7. is not a multiple"),
    "config: an activation": (
        "llama", config(hidden_act="no_such"),
        "config.json has hidden_act: 'no_such', which transformers does not know"),
    "config: a rope": ("llama", config(rope_parameters="x"), "rope_parameters"),
    "config: a rope of no type": (
        "llama", config(rope_parameters={"rope_type": "no_such", "rope_theta": 1.0}),
        "config.json has rope_type: 'no_such', which"),
    "config: another class": (
        "llama", config(architectures=["MistralForCausalLM"]),
        "class MistralForCausalLM in architectures, and its model_type llama is that of LlamaForCausalLM"),
    "config: a class of nobody": ("llama", config(architectures=["LLaMAForCausalLM"]), SAME),
    "config: no class": ("llama", config(architectures=None), SAME),
    "config: another type": ("llama", config(model_type="qwen3"), "4 weights that the files do not hold"),
    "config: no type": ("llama", config(model_type=None), "knows. Check that it is a causal"),
    "config: a type of nobody": ("llama", config(model_type="llama9"), "knows .model_type: 'llama9'"),
    "config: no JSON": ("llama", file("config.json", b"{"), "its config.json is not valid JSON. Download it again"),
    "config: a list of things": ("llama", file("config.json", b"[1]"), "config.json"),
    "tied": (
        "qwen2", both(),
        "same, and says 262 tokens for 261 rows of the embedding; 1 token without a row, such as '<|endoftext|>'"),
    "tied, head in the file": (
        "qwen2", weights(lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()}), SAME),
    "tied, another head": (
        "qwen2", weights(lambda w: w | {"lm_head.weight": 2 * w["model.embed_tokens.weight"]}), "one matrix"),
    "tied, only the head": ("qwen2", renamed("model.embed_tokens", "lm_head"), SAME),
    "untied, no head": ("qwen2", config(tie_word_embeddings=False), "Qwen2ForCausalLM with 1 weight that"),
    "qwen2 without a bias": ("qwen2", without("0.self_attn.q_proj.bias"), "the files do not hold"),
    "qwen2 called llama": (
        "qwen2", config(model_type="llama", architectures=None),
        "takes 6 tensors of its files, such as model.layers.0.self_attn.k_proj.bias, "
        "model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.v_proj.bias;"),
    "gpt2": ("gpt2", both(), SAME),
    "gpt2 with masks": (
        "gpt2", more("transformer.h.0.attn.bias", 1, 1, 8, 8, dtype=torch.uint8),
        "same, and says 29 tensors (F32, U8) in model.safetensors; 1 of them are not used"),
    "gpt2 with a strange mask": ("gpt2", more("transformer.h.0.attn.mask", 8, 8), "no layer"),
    "parts": ("parts", both(), SAME),
    "a part is missing": ("parts", gone("model-00002-of-00003.safetensors"), "1 of them are not there"),
    "an index that knows more": (
        "parts", index(lambda m: m | {"a.weight": next(iter(m.values()))}),
        "same, and says names 1 tensor that no file has, such as a.weight"),
    "an index that knows less": ("parts", index(lambda m: {k: v for k, v in m.items() if "norm" not in k}), SAME),
    "an index of nothing": ("parts", index(lambda m: {}), "no weight_map"),
    "an index of another generation": (
        "parts", index(lambda m: {k: v.replace("of-00003", "of-00004") for k, v in m.items()}),
        "names 3 files, and 3 of them are not there"),
    "a part twice": (
        "parts", lambda folder: shutil.copy(
            folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors"), "hold the same"),
    "parts of a newer generation": (
        "parts", lambda folder: write(
            folder, scaled(load_file(folder / "model-00001-of-00003.safetensors")), "model-00001-of-00002.safetensors"),
        "two sets of weights"),
    "one file and old parts": (
        "parts", lambda folder: write(folder, scaled(load_file(folder / "model-00001-of-00003.safetensors"))),
        "7 of 7 tensors in model-00001-of-00003.safetensors are others"),
    "generation settings": (
        "llama", put("generation_config.json", temperature=0.6, top_p=0.9, do_sample=True),
        "same, and says \"not applied, since the recipe's sampling counts: temperature=0.6, top_p=0.9\""),
    "an end outside": ("llama", put("generation_config.json", eos_token_id=999), SAME),
    "adapter": ("adapter", both(), "same, and says /edited, all used'"),
    "adapter: half": (
        "adapter", without("layers.1", ADAPTER_FILE),
        "4 of the 8 tensors that adapter_config.json describes are in no file"),
    "adapter: no B": ("adapter", without("0.self_attn.q_proj.lora_B", ADAPTER_FILE), "1 of the 8 tensors"),
    "adapter: fewer targets": ("adapter", put("adapter_config.json", target_modules=["q_proj"]), "no layer takes 4"),
    "adapter: more targets": (
        "adapter", put("adapter_config.json", target_modules=["q_proj", "v_proj", "o_proj"]), "4 of the 12 tensors"),
    "adapter: one layer": ("adapter", put("adapter_config.json", layers_to_transform=[0]), "no layer takes 4"),
    "adapter: another rank": (
        "adapter", put("adapter_config.json", r=8),
        "8 of its weights have another shape, .*_proj.lora_A.default.weight, .4, 32. in the file and .8, 32. by "
        "the base"),
    "adapter: another kind": ("adapter", put("adapter_config.json", peft_type="LOHA"), "are in no file"),
    "adapter: no kind": ("adapter", put("adapter_config.json", peft_type=None), "does not fit"),
    "adapter: dropout": (
        "adapter", put("adapter_config.json", lora_dropout=0.05),
        "same, and says an adapter of rank 4, 8 tensors in"),
    "adapter: replication": (
        "adapter", put("adapter_config.json", layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    "adapter: only after tokens": ("adapter", put("adapter_config.json", alora_invocation_tokens=[1]), "alora"),
    "adapter: no base": ("adapter", put("adapter_config.json", base_model_name_or_path=None), "names no base"),
    "adapter: base is nowhere": (
        "adapter", put("adapter_config.json", base_model_name_or_path="/no/base"), "no such folder"),
    "adapter: itself its base": (
        "adapter", lambda folder: put("adapter_config.json", base_model_name_or_path=str(folder))(folder),
        "over itself"),
    "adapter: DoRA's flag": ("adapter", put("adapter_config.json", use_dora=True), "in no file"),
    "adapter: one more tensor": (
        "adapter", more("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", 4, 32, file=ADAPTER_FILE),
        "no layer takes 1 tensor of its files, such as base_model.model.model.layers.0.self_attn.k_proj"),
    "adapter: NaN": ("adapter", each("1.self_attn.v_proj.lora_A", with_nan, ADAPTER_FILE), "NaN or infinity"),
    "adapter: names of a trainer": ("adapter", renamed("base_model.model.", "", ADAPTER_FILE), "8 of the 8 tensors"),
    "adapter: names with default": (
        "adapter", renamed("lora_(.)", r"lora_\1.default", ADAPTER_FILE), "are in no file"),
    "adapter: no file": ("adapter", gone(ADAPTER_FILE), "weights of the adapter"),
    "adapter: cut off": ("adapter", file(ADAPTER_FILE, cut=50), "cut off"),
    "adapter: an embedding beside": (
        "adapter", more("base_model.model.model.embed_tokens.weight", 261, 32, file=ADAPTER_FILE), "other numbers"),
    "adapter and whole weights": (
        "adapter", lambda folder: shutil.copy(folder.parents[0] / "llama" / FILE, folder), "holds two models"),
    "an adapter's file beside whole weights": (
        "llama", lambda folder: shutil.copy(folder.parents[0] / "adapter" / ADAPTER_FILE, folder), SAME),
}  # fmt: skip
"""By name: the folder that is edited, the edit, and words of the refusal."""


@pytest.fixture(scope="module")
def folders(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right folders: three whole models, one in parts, an adapter."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("folders")
    for kind in ("llama", "qwen2", "gpt2"):
        make_model(model_config(kind, tokenizer)).save_pretrained(root / kind)
    model = make_model(model_config("llama", tokenizer), seed=1)
    model.save_pretrained(root / "parts", max_shard_size="64KB")
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    peft = get_peft_model(
        make_model(model_config("llama", tokenizer)), LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    )
    peft.peft_config["default"].base_model_name_or_path = str(root / "llama")
    peft.save_pretrained(str(root / "adapter"))
    for kind in ("llama", "qwen2", "gpt2", "parts"):
        tokenizer.save_pretrained(str(root / kind))
    return root


def row(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits[0].log_softmax(-1)


@pytest.mark.filterwarnings("ignore")  # transformers' and peft's, of folders that are refused
def test_a_hundred_folders_are_what_they_hold_or_are_refused(folders: Path, tmp_path: Path) -> None:
    right = {kind: row(load_model(str(folders / kind))[0]) for kind in ("llama", "qwen2", "gpt2", "parts", "adapter")}

    def fault(kind: str, edit: Edit, refusal: str) -> str | None:
        folder = folders / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders / kind, folder)
        edit(folder)
        try:
            model, _ = load_model(str(folder))
        except OncurveError as error:
            return None if refusal and re.search(refusal, str(error)) else f"refused: {error}"
        except Exception as error:  # noqa: BLE001  a traceback is what is looked for
            return f"TRACEBACK {type(error).__name__}: {error}"
        if refusal.startswith("says "):
            said = str(passport_of(model))
            return None if refusal.removeprefix("says ") in said else said
        if refusal != SAME and not refusal.startswith(AND_SAYS):
            return "not refused"
        said, distance = str(passport_of(model)), float((row(model) - right[kind]).abs().max())
        if refusal.removeprefix(AND_SAYS) not in said:
            return said
        return f"{distance:.2g} from the model" if distance > 0.2 else None

    results = {name: fault(*case) for name, case in CASES.items()}
    assert_none(f"{name}: {text}" for name, text in results.items() if text)


def test_a_weight_of_another_size_than_in_other_layers_is_said() -> None:
    """Not that of a bias, whose sizes differ in right models, and not of fewer than three layers."""
    plain = {f"layers.{layer}.norm.{kind}": torch.ones(4) for layer in range(3) for kind in ("weight", "bias")}
    assert check_numbers("m", plain.items()).oddities == ()
    for scale, said in (
        (100.0, "layers.1.norm.weight (1e+02 times the median layer's)"),
        (29.0, None),
        (0.03, "(0.03"),
    ):
        scaled_one = plain | {"layers.1.norm.weight": scale * torch.ones(4), "layers.2.norm.bias": 1e4 * torch.ones(4)}
        oddities = check_numbers("m", scaled_one.items()).oddities
        assert oddities == () if said is None else said in oddities[0], scale
    assert check_numbers("m", [*scaled_one.items()][:4]).oddities == ()


@pytest.mark.parametrize(
    ("weights", "largest", "where", "oddities"),
    [
        ({"a": [-3.0, 2.0], "b": [3.0]}, 3.0, "a", ()),
        ({"a": [-3.0, 2.0], "b": [[1.0, -3.5]]}, 3.5, "b", ()),
        ({"a": [0.0, 0.0], "b": [1.0]}, 1.0, "b", ()),
        ({"a": [[0.0, 0.0]], "b": [1.0]}, 1.0, "b", ("zero throughout: a",)),
        ({"head": [[1.0, 1.0]]}, 1.0, "head", ()),
        ({"layers.0": [[1.0, 2.0, 1.0], [3.0, 3.0, 3.0]]}, 3.0, "layers.0", ("rows of one number: layers.0",)),
        ({"layers.0": [[1.0, 2.0, 1.0], [3.0, 1.0, 3.0]]}, 3.0, "layers.0", ()),
        ({"layers.0": [1.0, 2.0], "layers.1": [1.0, 2.0]}, 2.0, "layers.0", ()),
        (
            {"layers.0": [[1.0, 2.0]], "layers.1": [[1.0, 2.0]]},
            2.0, "layers.0", ("the same numbers twice: layers.0 and layers.1",),
        ),
        ({"layers.0": [[1.0, 2.0]], "layers.1": [[2.0, 0.5]], "x.2": [[1.0, 2.0]]}, 2.0, "layers.0", ()),
        ({}, 0.0, "", ()),
    ],
)  # fmt: skip
def test_what_is_odd_among_the_numbers(
    weights: dict[str, Any], largest: float, where: str, oddities: tuple[str, ...]
) -> None:
    found = check_numbers("m", [(name, torch.tensor(numbers)) for name, numbers in weights.items()])
    assert (found.largest, found.where, found.oddities) == (largest, where, oddities)


def test_names_in_a_sentence_are_the_first_of_three_kinds() -> None:
    assert listed(["a.1", "a.2", "b.1", "c.10", "d.1"]) == "a.1, b.1, c.10"


def test_a_folder_is_told_without_making_its_model(folders: Path) -> None:
    from typer.testing import CliRunner

    from oncurve.cli.app import make_app

    for kind in ("llama", "qwen2", "gpt2", "parts"):
        passport = passport_of(load_model(str(folders / kind))[0])
        assert passport is not None
        assert inspect_folder(str(folders / kind)).lines == passport.lines
        facts = passport.facts
        assert len(facts["tensors"]) == {"llama": 21, "qwen2": 26, "gpt2": 28, "parts": 21}[kind]
        assert (facts["ignored"], facts["unread"], facts["made of"]) == ([], [], {})
    assert passport.lines == (
        "weights: 21 tensors (F32) in 3 files; all are used; 35,296 weights in float32, none made up; all finite, the "
        "largest 1.05 (model.embed_tokens.weight)",
        "beside them: nothing",
        "config.json: LlamaForCausalLM, 2 layers",
        "tokenizer: 261 tokens for 261 rows of the embedding",
        "generation_config.json: nothing in it changes sampling",
    )
    assert facts["num_weights"] == 35296
    assert facts["tensors"]["model.norm.weight"] == ["F32", [32], "model-00002-of-00003.safetensors"]
    done = CliRunner().invoke(make_app("check"), ["check", str(folders / "parts")])
    assert "21 tensors (F32) in 3 files; all are used" in done.output
    assert "OK: the model is what its files hold." in done.output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_dropout_of_an_adapter_is_that_of_the_recipe(dropout: float, folders: Path, tmp_path: Path) -> None:
    from oncurve.policy.lora import open_adapter

    shutil.copytree(folders / "adapter", tmp_path / "own")
    put("adapter_config.json", lora_dropout=0.05)(tmp_path / "own")
    model, _ = load_model(str(folders / "llama"))
    adapter = open_adapter(model, tmp_path / "own", dropout=dropout)
    assert adapter.has_dropout is (dropout > 0)
    passport = passport_of(model)
    assert passport is not None
    assert f"lora_dropout is 0.05 in its adapter_config.json and {dropout:g} here" in passport.weights
    adapter.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["lora_dropout"] == dropout


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_over_an_adapter_adds_both_to_the_base(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "adapter", tmp_path / "upper")
    put("adapter_config.json", base_model_name_or_path=str(folders / "adapter"))(tmp_path / "upper")
    base, once, twice = (
        load_model(str(path))[0].get_submodule("model.layers.0.self_attn.q_proj")
        for path in (folders / "llama", folders / "adapter", tmp_path / "upper")
    )
    inputs = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    added = once(inputs) - base(inputs)
    assert added.abs().max() > 0.01
    assert torch.allclose(twice(inputs), base(inputs) + 2 * added, atol=1e-5)


def test_weights_of_the_hub_are_accounted_for_when_all_of_them_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, their loading fetches them: at the first use of a model, or after a download that was interrupted."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--somebody--a-model"
    snapshot = model / "snapshots" / ("a" * 40)
    shutil.copytree(EMBEDDED, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    assert files_of("somebody/a-model") is None
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert files_of("somebody/a-model") is None
    (snapshot / "model.safetensors.index.json").unlink()
    shutil.copy(EMBEDDED / "model.safetensors", snapshot)
    found = files_of("somebody/a-model")
    assert found is not None
    assert found.tensors
