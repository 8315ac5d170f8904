"""Is exactly the model uploaded, with a card that the hub can read and never a key?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, DataError
from oncurve.run.publish import files_to_upload, is_hub_name, merge_with_card, push, write_card
from oncurve.run_errors import CheckpointError

KEY = "hf_" + "abcdefghij" * 3


def fill(folder: Path) -> Path:
    """A folder like that of a model, with things beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("# mine\n")
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / ".env").write_text(f"HF_TOKEN={KEY}\n")
    (folder / "logs").mkdir()
    return folder


def make_run(folder: Path, **recipe: Any) -> Path:
    """A run's folder with a recipe and a comparison."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"model": "Qwen/Qwen2.5-0.5B", **recipe}))
    (folder / "comparison.md").write_text("base and trained on 3 test problems\n\n~~~~\nQuestion 1\n")
    return folder


def test_the_hub_reads_the_card_of_a_run_with_its_recipe_and_measurements(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my-run", data={"type": "gsm8k", "path": "/home/somebody/train.jsonl"})
    card = ModelCard.load(write_card(run / "model", name="my-run", run=run))
    assert (card.data.base_model, card.data.library_name) == ("Qwen/Qwen2.5-0.5B", "transformers")
    assert card.data.model_name == "my-run"
    assert "base and trained on 3 test problems" in card.content
    assert "Question 1" not in card.content
    assert "path: train.jsonl" in card.content


def test_nothing_of_the_machine_and_no_key_is_in_a_card(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my-run", model="/home/somebody/base", run={"name": KEY})
    text = write_card(run / "model", name="my-run", run=run).read_text()
    assert "somebody" not in text
    assert KEY not in text
    assert ModelCard(text).data.base_model is None


def test_a_folder_that_is_no_run_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run whose recipe can be read"):
        write_card(tmp_path, name="mine", run=tmp_path)


def test_exactly_the_files_of_a_model_are_listed(tmp_path: Path) -> None:
    names = [path.name for path in files_to_upload(fill(tmp_path / "model"))]
    assert names == ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", ["README.md", "config.json", "tokenizer_config.json"])
def test_a_key_in_a_text_is_refused_by_file_and_not_repeated(name: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    (folder / name).write_text(f"{{'token': '{KEY}'}}\n")
    with pytest.raises(ConfigError, match=name) as error:
        files_to_upload(folder)
    assert KEY not in str(error.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model there"):
        files_to_upload(tmp_path / "nothing")


def test_the_card_of_an_adapter_says_that_others_cannot_find_its_base(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    for base, is_known in (("Qwen/Qwen2.5-0.5B", True), ("embedded", False), (str(tmp_path / "mine"), False)):
        described = {"base_model_name_or_path": base, "peft_type": "IA3"}
        (folder / "adapter_config.json").write_text(json.dumps(described))
        text = write_card(folder, name="mine").read_text()
        assert ("Its base is not on the Hub" in text) != is_known
        assert is_known or f"needs the model `{Path(base).name}`" in text
        assert {"README.md", "adapter_config.json"} <= {path.name for path in files_to_upload(folder)}


def test_without_a_token_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token"):
        push(fill(tmp_path / "model"), "me/my-model", private=True)


def test_what_is_listed_is_what_the_hub_is_asked_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls alone: no hub is there to answer them."""
    import huggingface_hub

    called: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            assert token is None

        def create_repo(self, repository: str, **options: Any) -> SimpleNamespace:
            called.append((repository, options))
            return SimpleNamespace(repo_id=repository)

        def upload_folder(self, **options: Any) -> SimpleNamespace:
            called.append(("upload", options))
            return SimpleNamespace(commit_url="https://example.org/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "x")
    folder = fill(tmp_path / "model")
    assert push(folder, "me/my-model", private=True) == "https://example.org/commit"
    assert called[0] == ("me/my-model", {"private": True, "exist_ok": True})
    assert called[1][1]["allow_patterns"] == [path.name for path in files_to_upload(folder)]


def test_the_command_lists_what_it_would_upload_and_refuses_what_is_no_name(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    for name in ("me/my-model", "my_model.v2"):
        listed = CliRunner().invoke(app, ["push", str(folder), "--repo", name, "--dry-run"], catch_exceptions=False)
        assert [line.split() for line in listed.output.splitlines()] == [
            [str(path.stat().st_size), path.name] for path in files_to_upload(folder)
        ]
    for name in ("a/b/c", "me/my model", ""):
        with pytest.raises(ConfigError, match="is not the name of a repository"):
            CliRunner().invoke(app, ["push", str(folder), "--repo", name, "--dry-run"], catch_exceptions=False)


@pytest.mark.parametrize("repository", ["me/my-model", "me/my model"])
def test_a_hub_that_does_not_answer_and_a_name_that_it_does_not_allow_are_messages(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "x")
    with pytest.raises(CheckpointError, match="not uploaded"):  # HF_HUB_OFFLINE is set
        push(fill(tmp_path / "model"), repository, private=True)


def test_an_adapter_and_the_model_that_it_is_merged_into_get_their_cards(
    checkpoints: dict[str, Path], make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    from oncurve.policy.final_model import write_model
    from oncurve.policy.lora import add_adapter
    from oncurve.policy.model_folder import load_model
    from oncurve.policy.settings import LoraSettings

    base = str(checkpoints["qwen2"])
    model, _ = load_model(base)
    adapter = add_adapter(model, LoraSettings(rank=2, alpha=4.0), base=base)
    run = make_run(tmp_path / "run", model=base)
    (run / "model").rmdir()
    write_model(make_policy(model, adapter=adapter), run / "model")
    assert ModelCard.load(write_card(run / "model", name="run", run=run)).data.library_name == "peft"
    card = ModelCard.load(merge_with_card(run / "model", tmp_path / "merged")[0] / "README.md")
    assert card.data.library_name == "transformers"
    assert "base and trained on 3 test problems" in card.content


def test_names_of_repositories_are_told_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert is_hub_name("Qwen/Qwen2.5-0.5B")
    for name in ("runs/demo", "embedded", "/a/b", "./a/b", "a/b/c", None):
        assert not is_hub_name(name)
