"""Are files of options trained on and turned into recipes as TRL's own command reads them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from oncurve.cli.app import app
from oncurve.recipe.load import load_config
from oncurve.trl.conversion import convert
from oncurve.trl.options import OptionOutcome

RECIPE = ("trl", "--recipe", "recipe.yaml")
OPTIONS: dict[str, Any] = {
    "model_name_or_path": "embedded", "dataset_name": "rows.jsonl", "reward_funcs": ["accuracy_reward"],
    "use_peft": True, "lora_r": 4, "learning_rate": "2e-6", "max_steps": 2, "num_generations": 4, "output_dir": "out",
    "per_device_train_batch_size": 8, "max_completion_length": 8, "use_cpu": True, "bf16": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def some_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"How much is {number} + 1?", "solution": f"${number + 1}$"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def oncurve(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", ["options.json", "options.yaml"])
def test_a_file_of_options_trains_and_becomes_a_recipe(name: str) -> None:
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in OPTIONS.items())
    Path(name).write_text(json.dumps(OPTIONS) if name.endswith("json") else lines)
    done = oncurve(*RECIPE, "--processes", "1", name)
    assert done.exit_code == 0, done.output
    assert "Lost" not in done.output
    config = load_config("recipe.yaml")
    assert (config.optimizer.learning_rate, config.run.steps, config.run.prompts_per_step) == (2e-6, 2, 2)
    assert config.policy.lora is not None
    assert config.policy.lora.rank == 4
    assert [reward.function for reward in config.rewards] == ["oncurve.trl.ready_rewards:accuracy_reward"]
    assert "exists already" in str(oncurve(*RECIPE, name).exception)
    if name.endswith("yaml"):
        assert oncurve("trl", name).exit_code == 0
        assert next(Path("out").glob("*/metrics.jsonl")).read_text().count("reward/mean") == 2


def test_a_reward_is_one_of_the_commands_or_one_of_the_users() -> None:
    (Path.cwd() / "settings.py").write_text(
        "def exact(completions, solution, **_):\n    return [0.0] * len(completions)\n"
    )
    rewards = ["get_soft_overlong_punishment", "settings.exact"]
    Path("a.yaml").write_text(json.dumps({**OPTIONS, "reward_funcs": rewards, "eval_strategy": False}))
    done = oncurve(*RECIPE, "a.yaml")
    assert done.exit_code == 0, done.output
    functions = [str(reward.function) for reward in load_config("recipe.yaml").rewards]
    assert functions[0] == "oncurve.trl.ready_rewards:soft_overlong_punishment"
    assert functions[1].endswith("exact")
    Path("a.yaml").write_text(json.dumps({**OPTIONS, "reward_funcs": "think_format_reward"}))
    assert oncurve(*RECIPE, "--overwrite", "--set", "run.refill_rounds=3", "a.yaml").exit_code == 0
    assert load_config("recipe.yaml").run.refill_rounds == 3
    assert load_config("recipe.yaml").rewards[0].function == "oncurve.trl.ready_rewards:think_format_reward"


def test_what_a_users_module_fails_of_is_said() -> None:
    Path("lacking.py").write_text("import not_there_at_all\n")
    Path("a.yaml").write_text(json.dumps({**OPTIONS, "reward_funcs": ["lacking.exact"]}))
    assert "needs the package not_there_at_all" in str(oncurve(*RECIPE, "a.yaml").exception)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "- 1", "no mapping"), ("a.yaml", "a: 1\nbeta: 0", "a.yaml: no option is named 'a'"),
        ("a.yaml", "trainer: {nnodes: 1}", "none of its keys .trainer. is an option of TRL's. Files of other systems"),
        ("a.json", "{", "not valid YAML"),
        ("a.txt", "", "is no script that is read here"), ("missing.py", None, "no such script"),
        ("other.py", "import not_there_at_all", "The script does not name TRL. Files of other systems are not read"),
        ("a.yaml", "loss_type: mine", "need model_name_or_path"),
        ("a.yaml", json.dumps({**OPTIONS, "reward_funcs": ["mine"]}), "reward_funcs: there is no 'mine'"),
        ("a.yaml", json.dumps({**OPTIONS, "num_generations": 3}), "does not divide the 8 completions"),
        ("a.yaml", json.dumps({**OPTIONS, "loss_type": "mine"}), "'mine'.* none of TRL's"),
        ("a.yaml", json.dumps({**OPTIONS, "dataset_name": "none.jsonl"}), "none.jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_one_message(name: str, text: str | None, expected: str) -> None:
    if text is not None:
        Path(name).write_text(text)
    import re

    assert re.search(expected, str(oncurve(*RECIPE, name).exception))


def test_steps_and_updates_keep_their_arithmetic() -> None:
    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8,
        "num_generations": 8, "max_steps": 100, "save_steps": 50, "warmup_steps": 0.1,
    }  # fmt: skip
    values = convert(OptionOutcome("the script", "embedded", options), processes=2, rows=100).values
    assert (values["run.prompts_per_step"], values["run.completions_per_update"]) == (8, 16)
    assert (values["run.steps"], values["run.save_every_steps"], values["run.keep_checkpoints"]) == (25, 12, 0)
    assert values["optimizer.warmup_updates"] == 10
