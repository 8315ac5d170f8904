"""Does a recipe with a mistake get one clear message, and does an override change what it says and nothing else?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from oncurve.core.errors import ConfigError
from oncurve.data.settings import Gsm8kData, WordProblemsData
from oncurve.recipe.load import config_yaml, load_config, parse_config, read_run_config, run_folder_path
from oncurve.recipe.messages import known_keys
from oncurve.rewards.settings import FormatReward, MathematicsReward

BASE = "model: embedded\ndata: {type: word_problems, levels: [1]}\n"


def message(text: str, *overrides: str) -> str:
    """What the user reads about a recipe that is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, source="my.yaml")
    return str(caught.value)


def test_a_run_of_another_version_is_refused_with_its_version(tmp_path: Path) -> None:
    recorded, source = BASE + "run: {profile: true, steps: 7}\n", str(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"run\.profile: .*\n.* made by an unknown version of oncurve, and this is"):
        read_run_config(recorded, source=source)
    facts = {"oncurve": "0.0.9", "code": {"commit": "0123456789abcdef", "is_dirty": False}}
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"made by oncurve 0\.0\.9, commit 0123456789ab, and this is"):
        read_run_config(recorded, ["run.seed=3"], source=source)
    today = recorded.replace("profile: true, ", "")
    assert read_run_config(today, ["run.seed=3"], source=source).run.steps == 7
    with pytest.raises(ConfigError, match="profile") as typed:
        read_run_config(today, ["run.profile=false"], source=source)
    assert "made by" not in str(typed.value), "the mistake is in what was typed"


def test_a_recipe_holds_only_what_differs() -> None:
    config = parse_config(BASE + "run: {steps: 5}\n")
    assert config.run.steps == 5
    assert config.run.prompts_per_step == 16
    assert isinstance(config.data, WordProblemsData)
    assert config.data.levels == (1,)


@pytest.mark.parametrize(
    ("section", "wrong", "right"),
    [
        ("algorithm: {group_sise: 8}", "algorithm.group_sise", "algorithm.group_size"),
        ("run: {step: 8}", "run.step", "run.steps"),
        ("rewards: [{type: r1_zero, wieght: 1}]", "rewards.0.wieght", "rewards.0.weight"),
        ("evaluation: {data: {type: gsm8k, pth: x}}", "evaluation.data.pth", "evaluation.data.path"),
        ("learning_rate: 1e-6", "learning_rate", "optimizer.learning_rate"),
    ],
)
def test_a_misspelt_key_names_file_key_and_the_nearest_right_one(section: str, wrong: str, right: str) -> None:
    text = message(BASE + section)
    assert text.startswith(f"my.yaml: {wrong}: there is no such key")
    assert f"Did you mean '{right}'?" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("few_shot", 5),
        ("max_prompt_tokens", 64),
        ("retire_above", 0.9),
        ("shuffle", False),
        ("prefer_half_solved", True),
    ],
)
def test_a_key_that_an_evaluation_would_not_read_is_refused(key: str, value: object) -> None:
    asked = {"type": "word_problems", key: value}
    tree = {"model": "embedded", "data": {"type": "word_problems"}, "evaluation": {"data": asked}}
    assert f"evaluation.data.{key} is set" in message(yaml.safe_dump(tree))
    assert parse_config(yaml.safe_dump({**tree, "data": asked})).evaluation.data is not None


def test_a_misspelt_key_on_the_command_line_gets_the_same_hint() -> None:
    assert "optimizer.learning_rte: there is no such key. Did you mean 'optimizer.learning_rate'?" in message(
        BASE, "optimizer.learning_rte=1e-3"
    )


def test_every_mistake_of_a_recipe_is_listed_at_once() -> None:
    lines = message(BASE + "run: {step: 8, seed: -1}\noptimizer: {learning_rate: fast}").splitlines()
    assert len(lines) == 3
    assert all(line.startswith("my.yaml: ") for line in lines)


def test_the_same_key_twice_is_refused_with_its_line() -> None:
    assert message(BASE + "run: {steps: 5}\nrun: {steps: 6}\n") == (
        "my.yaml, line 4: duplicate key 'run'; remove one of them"
    )
    assert "duplicate key 'steps'" in message(BASE + "run: {steps: 5, steps: 5}\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "[1, 2]",
        "model: [",
        "\t- a: b",
        "a: b: c",
        "--- a\n--- b",
        "model: \x00",
        "a: &a {b: *a}",
        "!!python/object/apply:os.system [ls]",
        "actor_rollout_ref: {rollout: {n: 5}}\ntrainer: {}\nalgorithm: {adv_estimator: grpo}\ndata: {train_files: a}",
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(text: str) -> None:
    said = message(text)
    assert said.startswith("my.yaml")
    assert "\n" not in said


@pytest.mark.parametrize("text", ["? [a, b]\n: c", "? {a: b}\n: c", "{[a]: b}"])
def test_a_key_that_is_a_list_or_a_section_is_refused(text: str) -> None:
    assert message(text).startswith("my.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such recipe"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not a text file in UTF-8"):
        load_config(tmp_path)


def test_a_folder_stands_for_the_recipe_inside(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(BASE, encoding="utf-8")
    assert load_config(tmp_path) == load_config(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400"])
@pytest.mark.parametrize(
    "key", ["optimizer.learning_rate", "rollouts.temperature", "algorithm.kl_coef", "rewards.0.weight"]
)
def test_numbers_that_are_not_finite_are_refused(key: str, value: str) -> None:
    assert f"{key}: " in message(BASE + "rewards: [{type: r1_zero}]", f"{key}={value}")


@pytest.mark.parametrize("value", ["-1", "fast", "[1]", "null", "2026-01-01", "true"])
def test_what_is_no_learning_rate_is_refused_with_the_value(value: str) -> None:
    said = message(BASE, f"optimizer.learning_rate={value}")
    assert said.startswith("command line: optimizer")
    assert "learning_rate" in said
    assert "found" in said


def test_a_small_number_in_yaml_is_a_number_and_not_a_text() -> None:
    assert parse_config(BASE + "optimizer: {learning_rate: 1e-6}").optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_a_moving_average_that_never_moves_is_refused(beta: str) -> None:
    assert f"optimizer.{beta}" in message(BASE, f"optimizer.{beta}=1.0")


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_group_of_one_is_refused_with_the_remedy(size: int) -> None:
    assert message(BASE, f"algorithm.group_size={size}") == (
        f"my.yaml: algorithm.group_size is {size}; a group of one has no baseline. Use at least 2"
    )


@pytest.mark.proves("F34", "D8")
def test_an_update_that_does_not_divide_the_step_names_the_nearest_size_that_does() -> None:
    said = message(BASE, "run.prompts_per_step=3", "algorithm.group_size=8", "run.completions_per_update=7")
    assert "does not divide the 24 completions of a step" in said
    assert said.endswith("The nearest that does is 6")
    config = parse_config(BASE, ["run.prompts_per_step=3", "algorithm.group_size=8", "run.completions_per_update=6"])
    assert config.updates_per_step == 4


def test_samples_that_would_all_be_the_same_are_refused() -> None:
    assert "at evaluation.temperature 0" in message(BASE, "evaluation.samples=4")


def test_a_choice_without_its_type_or_with_a_wrong_one_is_refused() -> None:
    assert "the key data.type is needed and missing" in message("model: x\ndata: {path: y}")
    said = message("model: x\ndata: {type: gsm9k}")
    assert "'gsm9k'" in said
    assert "'gsm8k'" in said


def test_a_key_of_another_type_is_refused_and_its_owner_named() -> None:
    assert message(BASE, "data.type=gsm8k", "data.levels=[1]") == (
        "command line: data.levels: there is no such key in a section of type gsm8k; it belongs to word_problems. "
        "Remove it or change data.type"
    )
    assert message(BASE + "rewards: [{type: r1_zero, min_steps: 3}]").endswith(
        "rewards.0.min_steps: there is no such key in a section of type r1_zero; it belongs to step_format. "
        "Remove it or change rewards.0.type"
    )
    evaluated = message(BASE + "evaluation: {data: {type: gsm8k, levels: [1]}}")
    assert "it belongs to word_problems. Remove it or change evaluation.data.type" in evaluated


def test_a_misspelt_key_is_not_taken_for_one_of_another_type() -> None:
    assert "levels" not in message("model: x\ndata: {type: gsm8k, level: [1]}")
    assert "Did you mean 'data.levels'?" in message(BASE, "data.level=[1]")


def test_changing_one_reward_of_a_list_that_is_not_there_says_so() -> None:
    said = message(BASE, "rewards.0.weight=0.3")
    assert said.startswith("override 'rewards.0.weight=0.3': the recipe has no list rewards")
    assert "rewards=[...]" in said
    weighed = parse_config(BASE, ["rewards=[{type: r1_zero, weight: 0.3}]"]).rewards[0]
    assert weighed.weight == 0.3


def test_a_completion_cannot_have_to_be_longer_than_it_may_be() -> None:
    said = message(BASE, "rollouts.min_completion_tokens=300")
    assert "rollouts.min_completion_tokens is 300, more than rollouts.max_completion_tokens, 256" in said
    assert parse_config(BASE, ["rollouts.min_completion_tokens=256"]).rollouts.min_completion_tokens == 256


def test_another_type_on_the_command_line_empties_its_section() -> None:
    config = parse_config(BASE, ["data.limit=7", "data.type=gsm8k"])
    assert config.data == Gsm8kData(limit=7)
    rewards = BASE + "rewards: [{type: mathematics, scale: signed, weight: 2}]"
    assert parse_config(rewards, ["rewards.0.type=format"]).rewards == (FormatReward(),)


def test_the_same_type_on_the_command_line_keeps_its_section() -> None:
    assert parse_config(BASE, ["data.type=word_problems"]) == parse_config(BASE)


def test_one_item_of_a_list_can_be_changed() -> None:
    text = BASE + "rewards: [{type: mathematics}, {type: format, weight: 0.1}]"
    config = parse_config(text, ["rewards.1.weight=0.3", "rewards.0.scale=signed"])
    assert config.rewards == (MathematicsReward(scale="signed"), FormatReward(weight=0.3))


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("run.steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("rewards.1.weight=1", "'1' is not a place in a list of 1"),
        ("rewards.first.weight=1", "'first' is not a place in a list of 1"),
        ("run.steps.more=1", "run.steps is a value, not a section"),
        ("model.name=x", "model is a value, not a section"),
        ("run.steps={", "the value is not valid YAML"),
        ("run={steps: 1, steps: 2}", "duplicate key"),
        ("run=5", "run: "),
        ("run.steps=", "run.steps: "),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(override: str, complaint: str) -> None:
    assert complaint in message(BASE + "rewards: [{type: r1_zero}]\nrun: {steps: 2}", override)


def test_later_overrides_win_and_new_sections_appear() -> None:
    config = parse_config(BASE, ["run.steps=3", "run.steps=4", "evaluation.data.type=gsm8k"])
    assert config.run.steps == 4
    assert config.evaluation.data == Gsm8kData()


def test_the_typed_length_of_a_supervised_stage_counts_and_two_are_refused() -> None:
    text = BASE + "sft: {epochs: 2}\n"
    lengths = [
        (config.run.steps, config.sft and config.sft.epochs)
        for config in (
            parse_config(text, ["run.steps=7"]),
            parse_config(text, ["run={steps: 7, seed: 1}"]),
            parse_config(BASE + "run: {steps: 7}\nsft: {}", ["sft={epochs: 3}"]),
            parse_config(config_yaml(parse_config(text))),
        )
    ]
    assert lengths == [(7, None), (7, None), (100, 3), (100, 2)]
    earlier = read_run_config(text + "run: {steps: 7}", source="config.yaml")
    assert (earlier.run.steps, earlier.sft and earlier.sft.epochs) == (7, None)
    for both in (message(text + "run: {steps: 7}"), message(text, "run.steps=7", "sft.epochs=2")):
        assert "run.steps=7 and sft.epochs=2 both set the length" in both


def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "other")
    monkeypatch.setenv("RUN__STEPS", "1")
    config = parse_config(BASE)
    assert (config.model, config.run.steps) == ("embedded", 100)


@pytest.mark.proves("D49")
def test_a_resolved_recipe_is_a_recipe_that_says_the_same() -> None:
    config = parse_config(BASE + "rewards: [{type: custom, function: 'a:b', weight: 0.5}]\nrollouts: {stop: ['\\n']}")
    written = config_yaml(config)
    assert parse_config(written) == config
    assert set(yaml.safe_load(written)) == {key.split(".")[0] for key in known_keys()}


def test_a_config_cannot_change_after_loading() -> None:
    config = parse_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_reading_a_recipe_needs_no_torch() -> None:
    code = "import sys, oncurve.recipe.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_runs_without_a_name_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda layout: "20260102-030405")
    config = parse_config(BASE + f"run: {{folder: {tmp_path}}}\n")
    for _ in range(3):
        run_folder_path(config).mkdir()
    first = "embedded-word_problems-grpo-20260102-030405"
    assert sorted(path.name for path in tmp_path.iterdir()) == [first, f"{first}-2", f"{first}-3"]
