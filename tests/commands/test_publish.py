"""Is exactly the model uploaded, and never a key?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncurve.commands.publish import card_with_results, merge_with_card
from oncurve.errors import CheckpointError, ConfigError, DataError
from oncurve.session.upload import plan_upload, push_upload

KEY = "hf_" + "abcdefghij" * 3


def fill(folder: Path) -> Path:
    """A folder like that of a model, with things beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("# mine\n")
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / ".env").write_text(f"HF_TOKEN={KEY}\n")
    (folder / "logs").mkdir()
    return folder


def test_exactly_the_files_of_a_model_are_listed(tmp_path: Path) -> None:
    upload = plan_upload(fill(tmp_path / "model"), "me/my-model")
    names = [name for name, _ in upload.files]
    assert names == ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert upload.left == (
        ".env (no part of a model)",
        "logs (not a plain file)",
        "optimizer.pt (no part of a model)",
    )
    assert upload.total_bytes == sum((tmp_path / "model" / name).stat().st_size for name in names)
    text = upload.describe()
    assert text.startswith(f"me/my-model: 5 files, {upload.total_bytes:,} bytes")
    assert "stays here: .env" in text
    assert KEY not in text


@pytest.mark.parametrize("name", ["README.md", "config.json", "tokenizer_config.json"])
def test_a_key_in_a_text_is_refused_by_file_and_line_and_not_repeated(name: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    (folder / name).write_text(f"first\n{{'token': '{KEY}'}}\n")
    with pytest.raises(ConfigError, match=rf"{name}, line 2") as error:
        plan_upload(folder, "me/my-model")
    assert KEY not in str(error.value)


def test_a_key_in_the_header_of_weights_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    header = json.dumps({"__metadata__": {"command": f"train --token {KEY}"}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(ConfigError, match=r"model\.safetensors, its header"):
        plan_upload(folder, "me/my-model")


def test_the_value_of_a_secret_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    folder = fill(tmp_path / "model")
    (folder / "README.md").write_text("key: correct-horse-battery\n")
    with pytest.raises(ConfigError, match=r"README.md, line 1"):
        plan_upload(folder, "me/my-model")


def test_a_link_out_of_the_folder_stays_here(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "elsewhere.json")
    upload = plan_upload(folder, "me/my-model")
    assert "generation_config.json (not a plain file)" in upload.left


@pytest.mark.parametrize("repository", ["mine", "a/b/c", "me/", "/mine", "me/my model", "me/..", "me/a--b", ""])
def test_names_that_the_hub_does_not_allow_are_refused(repository: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="owner/name"):
        plan_upload(fill(tmp_path / "model"), repository)


@pytest.mark.parametrize(("gone", "said"), [("README.md", "has no README.md"), ("model.safetensors", "no model there")])
def test_a_folder_without_model_or_card_is_refused(gone: str, said: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    (folder / gone).unlink()
    with pytest.raises(CheckpointError, match=said):
        plan_upload(folder, "me/my-model")
    with pytest.raises(CheckpointError, match="no such folder"):
        plan_upload(tmp_path / "nothing", "me/my-model")


def test_an_adapter_is_refused_unless_others_can_find_its_base(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    for base, is_known in (("Qwen/Qwen2.5-0.5B", True), ("embedded", False), (str(tmp_path), False), (None, False)):
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        if is_known:
            assert "adapter_config.json" in [name for name, _ in plan_upload(folder, "me/my-model").files]
        else:
            with pytest.raises(CheckpointError, match="which nobody else can load"):
                plan_upload(folder, "me/my-model")


def test_without_a_token_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token"):
        push_upload(plan_upload(fill(tmp_path / "model"), "me/my-model"), private=True)


def test_what_was_listed_is_what_the_hub_is_asked_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls alone: no hub is there to answer them."""
    import huggingface_hub

    called: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            assert token is None

        def create_repo(self, repository: str, **options: Any) -> None:
            called.append((repository, options))

        def upload_folder(self, **options: Any) -> SimpleNamespace:
            called.append(("upload", options))
            return SimpleNamespace(commit_url="https://example.org/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "x")
    upload = plan_upload(fill(tmp_path / "model"), "me/my-model")
    assert push_upload(upload, private=True) == "https://example.org/commit"
    assert called[0] == ("me/my-model", {"private": True, "exist_ok": True})
    assert called[1][1]["allow_patterns"] == [name for name, _ in upload.files]


def test_a_hub_that_does_not_answer_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "x")
    with pytest.raises(CheckpointError, match="not uploaded"):  # HF_HUB_OFFLINE is set
        push_upload(plan_upload(fill(tmp_path / "model"), "me/my-model"), private=True)


def test_the_card_of_a_model_of_the_hub_cannot_be_written() -> None:
    with pytest.raises(DataError, match="is no folder here"):
        card_with_results("owner/model", {})


def test_the_card_of_a_merged_adapter_says_what_was_trained(
    checkpoints: dict[str, Path], make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    from oncurve.policy.final_model import write_model
    from oncurve.policy.lora import add_adapter
    from oncurve.policy.model_folder import load_model
    from oncurve.settings import LoraSettings

    base = str(checkpoints["qwen2"])
    model, _ = load_model(base)
    adapter = add_adapter(model, LoraSettings(rank=2, alpha=4.0), base=base)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps({"model": base, "run": {"steps": 1}}))
    (run / "manifest.json").write_text("{}")
    write_model(make_policy(model, adapter=adapter), run / "model")
    card = (merge_with_card(run / "model", tmp_path / "merged") / "README.md").read_text()
    assert "an adapter (LoRA), added to the weights of the base" in card
    assert "library_name: transformers" in card
