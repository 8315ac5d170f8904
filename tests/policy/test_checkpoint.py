"""Is a checkpoint either whole or absent, and does a broken one get a message that helps?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from oncurve.policy.model_folder import load_model, save_model
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from oncurve.policy.trained_policy import TrainedPolicy

MakeModel = Callable[..., "PreTrainedModel"]


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may break."""
    return Path(shutil.copytree(checkpoints["qwen2"], tmp_path / "model"))


def complaint(name: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(str(name))
    return str(caught.value)


@pytest.mark.proves("F37")
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_any_architecture_loads_in_float32_and_without_dropout(
    architecture: str, checkpoints: dict[str, Path], tiny_model: MakeModel
) -> None:
    model, tokenizer = load_model(str(checkpoints[architecture]))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert tokenizer("can")["input_ids"] == [66, 256]
    for one, other in zip(model.parameters(), tiny_model(architecture).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.proves("D9")
def test_half_width_weights_become_float32_masters(tiny_model: MakeModel, checkpoint: Path) -> None:
    tiny_model("qwen2").bfloat16().save_pretrained(checkpoint)
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "bfloat16"
    model, _ = load_model(str(checkpoint))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "~/nowhere-at-all", "/nowhere/at/all", "a/b/c", "embeddedd"])
def test_a_folder_that_is_not_there_is_named_with_the_remedy(name: str) -> None:
    said = complaint(name)
    assert repr(name) in said
    assert "no such folder." in said
    assert "Name a folder with a config.json" in said


def test_a_hub_name_that_cannot_be_reached_is_named() -> None:
    assert complaint("nobody/has-this-model").startswith("model 'nobody/has-this-model' cannot be loaded: ")


def test_a_home_folder_can_be_written_with_a_tilde(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    load_model("~/model")


@pytest.mark.parametrize("how", ["cut", "empty", "garbage", "gone"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_one_message(file: str, how: str, checkpoint: Path) -> None:
    path = checkpoint / file
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "garbage":
            path.write_bytes(b'{"a": 1}' if file.endswith("json") else b"\0" * 100)
        case _:
            path.unlink()
    said = complaint(checkpoint)
    assert str(checkpoint) in said
    assert "\n" not in said


def test_weights_that_are_missing_are_not_made_up(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    said = complaint(checkpoint)
    assert "1 weight that the files do not hold" in said
    assert "model.layers.1.self_attn.q_proj.weight" in said


def test_weights_of_another_shape_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 65}))
    assert "of another shape" in complaint(checkpoint)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_saved_policy_is_an_ordinary_checkpoint(
    architecture: str, make_policy: Callable[..., TrainedPolicy], tmp_path: Path
) -> None:
    policy = make_policy(architecture)  # packing changes how the model attends, and must leave no trace
    ids = torch.tensor([policy.tokenizer("Tom has 3 apples.")["input_ids"]])
    folder = save_model(policy.model, policy.tokenizer, tmp_path / "saved" / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy.model(ids).logits)
    assert tokenizer("Tom has 3 apples.")["input_ids"] == ids[0].tolist()
    assert "oncurve" not in (folder / "config.json").read_text()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_checkpoint_is_replaced_as_a_whole(
    tiny_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = save_model(tiny_model("qwen2"), tokenizer, tmp_path / "model")
    (folder / "left over").touch()
    save_model(tiny_model("llama"), tokenizer, folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not (folder / "left over").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("no"), RuntimeError("no")])
def test_a_failed_save_leaves_the_older_checkpoint_and_nothing_half_written(
    error: Exception,
    tiny_model: MakeModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_model(tiny_model("qwen2"), tokenizer, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(self: Any, place: Path) -> None:
        (Path(place) / "half").write_text("x")
        raise error

    monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    with pytest.raises(CheckpointError, match=f"model: the checkpoint cannot be written: {error}"):
        save_model(tiny_model("llama"), tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_older_checkpoint_comes_back_if_the_last_move_fails(
    tiny_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tiny_model("qwen2"), tokenizer, tmp_path / "model")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if "partial" in self.name:
            raise PermissionError("not allowed")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="not allowed"):
        save_model(tiny_model("llama"), tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def test_a_folder_that_cannot_be_written_is_named(
    tiny_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file/model: the checkpoint cannot be written"):
        save_model(tiny_model("qwen2"), tokenizer, tmp_path / "file" / "model")


def test_generation_settings_that_contradict_themselves_can_still_be_saved(
    checkpoint: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Many models of the hub have a temperature without sampling, which transformers calls invalid."""
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [260, 5], "pad_token_id": 259}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    model, tokenizer_again = load_model(str(checkpoint))
    saved = save_model(model, tokenizer_again, tmp_path / "saved")
    kept = GenerationConfig.from_pretrained(saved)
    assert (kept.eos_token_id, kept.temperature, kept.top_p) == ([260, 5], 0.6, 0.9)


def test_a_folder_with_something_else_in_it_is_not_replaced(
    tiny_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is no model, and saving would replace all of it"):
        save_model(tiny_model(), tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert (save_model(tiny_model(), tokenizer, empty) / "config.json").is_file()
