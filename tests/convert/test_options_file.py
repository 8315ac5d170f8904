"""Are files of options turned into recipes, and refused where they are none?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oncurve.commands.convert import convert_file
from oncurve.config.load import load_config
from oncurve.errors import ConfigError


def recipe(path: Path, **options: int) -> tuple[dict[str, object], str]:
    """The recipe that is written, with every default, and the report."""
    report, _ = convert_file(path, Path("recipe.yaml"), **options)
    return load_config("recipe.yaml").model_dump(), report


def test_options_of_the_command_are_read_from_yaml_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {
        "model_name_or_path": "org/model", "dataset_name": "x/y", "reward_funcs": ["accuracy_reward"], "use_peft": True,
        "learning_rate": "2e-6", "max_steps": 10, "num_generations": 4, "eval_strategy": "steps", "eval_steps": 5,
    }  # fmt: skip
    Path("options.json").write_text(json.dumps(options))
    Path("options.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in options.items()))
    texts = [convert_file(Path(name), None)[0].split("\n", 1)[1] for name in ("options.json", "options.yaml")]
    found, report = recipe(Path("options.yaml"))
    assert found["optimizer"]["learning_rate"] == 2e-6
    assert found["policy"]["lora"]["rank"] == 16
    assert found["evaluation"]["data"]["split"] == "test"
    assert found["evaluation"]["samples"] == 4
    assert "Lost" not in report
    assert texts[0] == texts[1]
    assert "# learning_rate" in texts[0]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "- 1", "no mapping"), ("a.yaml", "a: 1", "none of its keys"), ("a.json", "{", "not valid YAML"),
        ("a.txt", "", "neither .yaml"), ("missing.py", None, "no such file"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected):
        convert_file(tmp_path / name, None)


def test_a_recipe_that_exists_is_not_replaced_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("options.yaml")
    path.write_text("model_name_or_path: org/model\ndataset_name: x/y\nreward_funcs: accuracy_reward\n")
    recipe(path, rows=100)
    with pytest.raises(ConfigError, match="exists already"):
        convert_file(path, Path("recipe.yaml"))
    convert_file(path, Path("recipe.yaml"), overwrite=True)


def test_steps_and_updates_keep_their_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {
        "model_name_or_path": "org/model", "dataset_name": "x/y", "reward_funcs": ["accuracy_reward"],
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8,
        "num_generations": 8, "max_steps": 100, "save_steps": 50, "warmup_steps": 0.1,
    }  # fmt: skip
    Path("options.json").write_text(json.dumps(options))
    found, _ = recipe(Path("options.json"), processes=2)
    run = found["run"]
    assert (run["prompts_per_step"], run["completions_per_update"]) == (8, 16)
    assert (run["steps"], run["save_every_steps"], run["keep_checkpoints"]) == (25, 12, 2)
    assert found["optimizer"]["warmup_updates"] == 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [("num_generations: 3", "does not divide the 8 completions"), ("loss_type: mine", "'mine'.* none of TRL's")],
)
def test_what_trl_refuses_is_refused(tmp_path: Path, options: str, expected: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(options)
    with pytest.raises(ConfigError, match=expected):
        convert_file(path, None)
