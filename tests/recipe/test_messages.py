"""Is a mistake in a recipe or on the command line explained in our words, with what to write instead?"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError
from oncurve.recipe.load import parse_config

BASE = "model: embedded\ndata: {type: word_problems, levels: [1]}\n"
FOREIGN = (
    "Input should",
    "input tag",
    "instance of",
    "unable to parse",
    "pydantic",
    "unicode string",
    "after validation",
    "literal[",
    "datetime",
)


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, source="my.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("runs.steps=3", "there is no such section. Did you mean 'run.steps'?"),
        (
            "rewards=[{type:mathematics}]",
            "'type:mathematics' has no colon with a space behind its key. Write {type: mathematics}",
        ),
        ("algorithm=dapo", "Write algorithm: {type: dapo}"),
        ("data=gsm8k", "Write data: {type: gsm8k}"),
        ("data=d.jsonl", "Write data: {path: d.jsonl}"),
        ("rewards=[r1_zero]", "Write rewards: [{type: r1_zero}]"),
        ("rollouts.environments=nim.py:Nim", "Write environments: {a_name: nim.py:Nim}"),
        ("policy.lora=16", "a section with keys of its own, such as policy.lora.rank; found 16"),
        ("rewards=[]", "name at least one reward, such as rewards=[{type: mathematics}]"),
        ("rewards=mathematics", "such as rewards: [{type: mathematics}]"),
        ("rewards=[{type: maths}]", "Did you mean 'mathematics'?"),
        ("rewards=[{weight: 1}]", "the key rewards.0.type is needed and missing"),
        ("run.steps=abc", "must be a whole number; found 'abc'"),
        ("run.steps=1.5", "must be a whole number; found 1.5"),
        ("run.steps=0", "must be greater than 0; found 0"),
        ("optimizer.learning_rate=fast", "must be a number; found 'fast'"),
        ("optimizer.learning_rate=.nan", "must be a finite number"),
        ("policy.packing=maybe", "must be true or false; found 'maybe'"),
        ("data.type=json", "there is no type 'json'. Did you mean 'jsonl'?"),
        ("rollouts.type=engin", "Did you mean 'engine'?"),
        ("algorithm.loss=clip", "algorithm.loss: this must be 'policy_gradient', "),
        ("run={steps 3}", "run: 'steps 3' has no colon with a space behind its key. Write {steps: 3}"),
        ("run=[steps: 3]", "run: this is a section and no list. Leave the dashes and brackets out: run: {steps: 3}"),
        ("run='steps=3'", "run: 'steps=3' has no colon with a space behind its key. Write steps: 3"),
        ("run=2026-01-01", "found 2026-01-01"),
        ("data.columns=[a]", "must be a mapping of names to values"),
        ("model=[1]", "must be text"),
    ],
)
def test_a_wrong_value_is_explained_without_the_words_of_a_library(override: str, said: str) -> None:
    found = message(BASE, override)
    assert said in found
    assert not any(words in found for words in FOREIGN)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: x\ndata:\n\ttype: gsm8k\n", "line 3 is indented with a tab. Indent with spaces"),
        ("model: x\ndata: {path: rows}\n", "the key data.type is needed and missing"),
        (
            "model: x\ndata: {path: rows.jsonl.gz}\n",
            "since the ending of 'rows.jsonl.gz' says none. Name a file that ends in .jsonl",
        ),
        ("model: x\n", "such as `data: {type: gsm8k}`"),
        ("data: {type: gsm8k}\n", "such as `model: Qwen/Qwen2.5-0.5B`"),
        ("model: [", "not valid YAML: line 1"),
        ("model: x\nrun\n  steps: 3\n", "line 2 ('run') has no colon with a space behind its key. Write run:"),
        ("model: x\nrun:\n  steps 3\n  seed: 1\n", "line 3 ('steps 3') has no colon"),
        ("run.steps=3\nmodel: x\n", "Write run: {steps: 3}"),
        ("model = x\n", "line 1 ('model = x') has no colon with a space behind its key. Write model: x"),
        ("model: x\n  data: {type: math}\n", "is indented deeper than 'model: x' above it"),
        ("run:\n   steps: 3\n seed: 1\n", "line 3 ('seed: 1') is indented by 1 space, as no line above it is"),
        ("model: x\ndata {type: math}\n", "my.yaml: 'data' has no colon behind it"),
        ("model: x\ndata: {type: math}\nrewards:\n  -type: format\n", "Write - type: format"),
        ("model: x\ndata: {type: math}\nrun:\nsteps: 3\n", "found nothing. Indent its keys below it"),
        ("model: x\nrun: {steps: 3}}\n", "line 2, column 16: a brace too many"),
        ("model: x\ndata: {stop: [a,\n b\n", "a bracket or brace before this is not closed"),
        ("a: 'x", "line 1, column 6: a quotation mark before this is not closed"),
        ("a: *x", "line 1, column 4: a value that begins with * needs quotation marks"),
        ("a: !!python/x 1", "line 1, column 4: tags such as !!python are not allowed; write a plain value"),
        ("a: b: c", "line 1, column 5: a colon is out of place: check the indentation, or quote the value"),
        ("a: [1, 2", "line 1, column 9: "),
        ("a: {b: 1 c: 2}", "line 1, column "),
        ("--- 1\n--- 2", "line 2, column 1: --- begins a second recipe here; a file holds one"),
        ("a: 1\n b: 2", "line 2 ('b: 2') is indented deeper than 'a: 1' above it, which has its value"),
        ("a: [1] 2", "line 1, column 8: "),
    ],
)
def test_a_recipe_that_is_not_whole_gets_an_example_or_a_line(text: str, said: str) -> None:
    found = message(text)
    assert said in found
    assert not any(words in found for words in FOREIGN)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "word_problems", "--steps", "3"], "run.steps=3"),
        (["train", "word_problems", "--learning-rate=0.1"], "optimizer.learning_rate=0.1"),
        (["check", "word_problems", "--data.limit", "9"], "data.limit=9"),
        (["plan", "word_problems", "--gpu", "H100", "--group_size"], "algorithm.group_size=VALUE"),
    ],
)
def test_a_setting_written_as_an_option_is_answered_with_the_way_to_write_it(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"Settings are written key=value: {key}$"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_an_option_that_stands_for_nothing_is_still_refused() -> None:
    result = CliRunner().invoke(app, ["train", "word_problems", "--bogus", "3"])
    assert result.exit_code == 2
    assert "--bogus" in result.output


@pytest.mark.parametrize("name", ["runs/nowhere", "./nowhere", "empty"])
def test_a_model_that_is_not_there_is_said_without_asking_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oncurve.run_errors import CheckpointError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no such folder|the folder has no config.json"):
        CliRunner().invoke(app, ["sample", name, "?"], catch_exceptions=False)


def test_a_small_file_trains_with_the_usual_settings(tmp_path: Path) -> None:
    rows = "".join(f'{{"question": "How much is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(30))
    (tmp_path / "rows.jsonl").write_text(rows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: embedded\ndata: {type: jsonl, path: rows.jsonl}\n")
    said = CliRunner().invoke(app, ["check", str(recipe)], catch_exceptions=False)
    assert said.exit_code == 0
    assert "OK: 20 training rows, 6 test, 4 validation (evaluation.every_steps is 0: not measured)." in said.output
