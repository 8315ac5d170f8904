"""Are parameters counted as the modules of transformers count them?"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import EMBEDDED
from oncurve.plan.find_shape import find_shape, known_shapes
from oncurve.plan.shape import ModelShape, shape_of_config
from oncurve.run import model_paths
from oncurve.run_errors import CheckpointError

SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CONFIGS = [
    LlamaConfig(**SIZES, tie_word_embeddings=False),
    LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=8),
    Qwen2Config(**SIZES, tie_word_embeddings=True),
    Qwen2Config(**SIZES, tie_word_embeddings=False),
    Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=10),
    Qwen3Config(**SIZES, tie_word_embeddings=True, attention_bias=True),
]
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
}
"""Parameters as the checkpoints' own files count them."""


def count(config: PreTrainedConfig) -> int:
    classes = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
    with torch.device("meta"):
        model = classes[config.model_type](config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_are_those_of_the_modules(config: PreTrainedConfig) -> None:
    written = json.loads(config.to_json_string(use_diff=False))
    assert shape_of_config(written, name="tiny").num_parameters == count(config)


@pytest.mark.proves("F37")
@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_known_models_have_the_parameters_that_their_checkpoints_have(name: str, parameters: int) -> None:
    assert find_shape(name).num_parameters == parameters


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "meta-llama/Meta-Llama-3-8B"])
def test_the_table_agrees_with_modules_of_full_size(name: str) -> None:
    shape = find_shape(name)
    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    config = classes[shape.family](
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.is_tied,
    )
    assert shape.num_parameters == count(config)


def test_the_embedded_model_is_counted_from_its_folder() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    assert find_shape("embedded").num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_an_adapter_is_counted_as_peft_makes_it() -> None:
    from oncurve.policy.lora import add_adapter
    from oncurve.policy.settings import LoraSettings

    config = Qwen2Config(**SIZES)
    model = add_adapter(Qwen2ForCausalLM(config), LoraSettings(rank=4), base="tiny").model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shape = shape_of_config(json.loads(config.to_json_string(use_diff=False)), name="tiny")
    assert shape.lora_parameters(4) == trained
    assert shape.lora_parameters(4, ("q_proj", "v_proj")) < trained


def test_instruct_models_have_the_shape_of_their_siblings() -> None:
    assert find_shape("qwen/qwen2.5-7b-INSTRUCT") == find_shape("Qwen/Qwen2.5-7B")


def test_every_known_model_has_a_whole_shape() -> None:
    assert len(known_shapes()) >= 20
    for shape in known_shapes().values():
        assert isinstance(shape, ModelShape)
        assert shape.heads % shape.kv_heads == 0


def test_an_unknown_family_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'mamba'.*qwen3.*model=Qwen"):
        shape_of_config({"model_type": "mamba"}, name="mine")


@pytest.mark.usefixtures("starts_forks")
@pytest.mark.parametrize("kind", ["Mamba", "Gemma2", "Mixtral", "GPT2"])
def test_a_family_without_a_formula_is_counted_on_its_modules(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them by a process of its own, as planning does, and the others in this one."""
    import transformers

    def count_here(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=0, stdout=json.dumps(model_paths._described(command[-1])))

    if kind != "Mixtral":
        monkeypatch.setattr("oncurve.plan.shape.subprocess", SimpleNamespace(run=count_here))
    config = getattr(transformers, f"{kind}Config")(vocab_size=260)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.lora_parameters(4) > 0
    assert shape.counted is not None
    packed = "padded" if kind in ("Mamba", "Gemma2") else "packed"
    assert (shape.counted.ways or ("",))[0].startswith(f"{packed} rows through the model's modules")


@pytest.mark.usefixtures("starts_forks")
def test_a_model_type_that_nobody_knows_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match=r"model_type 'no_such_model'.*Plan with a model"):
        find_shape(str(tmp_path))


def test_a_config_without_sizes_is_refused() -> None:
    for size in ("wide", 0, -1, True, None):
        with pytest.raises(ConfigError, match="no usable hidden_size; is the file whole"):
            shape_of_config({"model_type": "llama", **SIZES, "hidden_size": size}, name="mine")


def test_what_a_config_does_not_say_is_what_transformers_takes() -> None:
    bare = {"model_type": "llama", **{key: size for key, size in SIZES.items() if key != "num_key_value_heads"}}
    shape = shape_of_config(bare, name="mine")
    assert (shape.kv_heads, shape.head_size, shape.max_tokens) == (6, 4, 32_768)
    assert (shape.is_tied, shape.has_attention_bias, shape.has_mlp_bias, shape.is_plain) == (False, False, False, True)
    for said, is_plain in (
        ({"use_sliding_window": True}, False), ({"use_sliding_window": False}, True), ({"hidden_act": "gelu"}, False),
        ({"model_type": "mistral"}, False), ({"model_type": "mistral", "use_sliding_window": False}, True),
        ({"rope_scaling": {"rope_type": "dynamic"}}, False), ({"rope_scaling": {"type": "linear"}}, True),
        ({"rope_parameters": {"rope_type": "default"}}, True),
    ):  # fmt: skip
        assert shape_of_config({**bare, **said}, name="mine").is_plain == is_plain, said


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_shape(str(tmp_path))


def test_an_adapter_has_the_shape_of_its_base_and_a_run_that_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "status.json").touch()
    (tmp_path / "model").mkdir()
    described = tmp_path / "model" / "adapter_config.json"
    described.write_text(json.dumps({"base_model_name_or_path": "embedded", "revision": None}))
    assert find_shape(str(tmp_path)) == find_shape(str(tmp_path / "model")) == find_shape("embedded")
    described.write_text("{}")
    with pytest.raises(CheckpointError, match="names no base model"):
        find_shape(str(tmp_path))


def test_a_broken_config_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_shape(str(tmp_path))


def test_a_name_that_is_nowhere_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen2\.5-0\.5B"):
        find_shape("nothing-here")


def test_an_unknown_hub_model_offline_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        find_shape("somebody/some-model-that-is-not-cached")


def test_a_cached_config_of_the_hub_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SIZES}))
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: str(tmp_path / "config.json")
    )
    assert find_shape("somebody/cached").hidden == SIZES["hidden_size"]

    def fetched(name: str, file: str, *, revision: str | None, local_files_only: bool, etag_timeout: int) -> str:
        asked.append((name, file, local_files_only))
        return str(tmp_path / "config.json")

    asked: list[tuple[str, str, bool]] = []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert find_shape("somebody/fetched").hidden == SIZES["hidden_size"]
    assert asked == [("somebody/fetched", "config.json", False)]
