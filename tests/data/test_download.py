"""Does ``oncurve download`` leave what recipes can read, and ask the hub for exactly what was asked of it?

There is no hub in the tests: its two functions are replaced, and everything around them is the product's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, DataError, OncurveError
from oncurve.data.datasets import load_rows
from oncurve.run_errors import CheckpointError

ROWS = {
    "math": [{"problem": f"What is {n}?", "solution": rf"It is \boxed{{{n}}}.", "level": 1} for n in range(4)],
    "gsm8k": [{"question": f"How many, {n}?", "answer": f"Count.\n#### 1,{n}00"} for n in range(4)],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the hub was asked for."""
    import datasets
    import huggingface_hub

    requests: list[dict[str, Any]] = []

    def load_dataset(name: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        requests.append({"name": name, "split": split, "revision": revision})
        rows = ROWS["gsm8k" if "gsm8k" in name else "math"]
        return datasets.Dataset.from_list(rows if split == "train" else rows[:2])

    def snapshot_download(name: str, **options: Any) -> str:
        requests.append({"name": name, **options})
        if name == "nobody/gated":
            raise OSError("401: you need access\nand a token")
        return str(options["local_dir"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return requests


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["download", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.proves("F82")
@pytest.mark.parametrize("name", ["math", "gsm8k"])
def test_a_data_set_becomes_a_folder_of_splits_that_recipes_read(
    name: str, hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    output = run(name, "--output", str(tmp_path / "data"), "--revision", "v1")
    assert [(request["split"], request["revision"]) for request in hub] == [("train", "v1"), ("test", "v1")]
    assert "4 rows, 0 repeated questions" in output
    assert len(load_rows(name, path=tmp_path / "data", split="train")) == 4
    rows = load_rows(name, path=tmp_path / "data", split="test")
    assert [row["answer"] for row in rows] == (["0", "1"] if name == "math" else ["1000", "1100"])


@pytest.mark.proves("F82")
def test_files_are_kept_unless_force_is_given(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("mine\n")
    with pytest.raises(DataError, match=r"test\.jsonl: exists already.*--force"):
        run("math", "--output", str(tmp_path))
    assert hub == []
    assert (tmp_path / "test.jsonl").read_text() == "mine\n"
    run("math", "--output", str(tmp_path), "--split", "test", "--force")
    assert len(load_rows("math", path=tmp_path, split="test")) == 2
    assert not (tmp_path / "train.jsonl").exists()


@pytest.mark.proves("F83")
def test_a_model_is_fetched_by_revision_and_by_the_names_of_its_files(
    hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    run(
        "Qwen/Qwen2.5-0.5B", "--output", str(tmp_path), "--revision", "abc", "--include", "*.json", "--include",
        "*.safetensors", "--exclude", "*.bin", "--force",
    )  # fmt: skip
    assert hub == [
        {
            "name": "Qwen/Qwen2.5-0.5B",
            "revision": "abc",
            "local_dir": tmp_path,
            "force_download": True,
            "allow_patterns": ["*.json", "*.safetensors"],
            "ignore_patterns": ["*.bin"],
        }
    ]


@pytest.mark.proves("F83")
def test_a_model_that_needs_a_token_says_so(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gated: not downloaded: 401: you need access and a token.*HF_TOKEN"):
        run("nobody/gated", "--output", str(tmp_path))
    assert len(hub) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mth"], "Did you mean 'math'"),
        (["./here/it"], "a model on the Hugging Face Hub"),
        (["math", "--include", "*.json"], "are for models"),
        (["a/b", "--split", "test"], "is for datasets"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(OncurveError, match=message) as caught:
        run(*arguments, "--output", str(tmp_path / "new"))
    assert isinstance(caught.value, ConfigError)
    assert not (tmp_path / "new").exists()
