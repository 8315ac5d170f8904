"""Does what a newcomer tries in the first hour succeed, or say what to do?"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, RewardError
from oncurve.evaluate.evaluation import read_evaluation
from oncurve.observe.record import read_metrics

REWARDS = """
def typo(completion, stpes):
    return 1.0

def third(completion, answer, stpes=0):
    return float(answer in completion)

def swapped(answer, completion):
    return float(completion.endswith(f"<answer> {answer} </answer>"))

def batched(prompts, completions, stpes, **columns):
    return [0.0] * len(completions)

def steps_too(completion, answer, steps):
    return float(str(answer) in completion)

def constant(completion, answer):
    return 1.0

def letters(completion):
    return len(completion)

def unread(completion):
    return 0.3

def contains(completion, answer):
    return float(str(answer) in completion)

def half(completion, answer):
    return 0.5 * (str(answer) in completion)

def exact(completion, answer):
    return float(completion.rstrip().endswith(f"<answer> {answer} </answer>"))

def crashing(completion, answer):
    if "<answer>" not in completion:
        raise KeyError("boom")
    return exact(completion, answer)

def silent(completion, answer):
    return None if "<answer>" not in completion else exact(completion, answer)
"""


def command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with thirty problems, rewards and a recipe of one's own."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": f"Tom has {n} apples and buys {n + 3}. How many?", "answer": 2 * n + 3, "steps": 2}
        for n in range(2, 32)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)
    recipe = (
        "model: embedded\ndata: {type: jsonl, path: rows.jsonl}\nrewards: [{type: custom, function: 'mine.py:exact'}]\n"
    )
    (tmp_path / "recipe.yaml").write_text(
        recipe + "run: {steps: 2, prompts_per_step: 4}\nrollouts: {max_completion_tokens: 48}\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", ["typo", "third", "batched"])
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_misspelled_parameter_of_a_reward_is_an_error_wherever_it_stands(here: Path, name: str, verb: str) -> None:
    with pytest.raises(ConfigError, match=r"parameter 'stpes'.*Did you mean 'steps'\?"):
        command(verb, "recipe.yaml", f"rewards.0.function=mine.py:{name}")
    assert not (here / "runs").exists()


def test_a_completion_that_does_not_come_first_is_found_by_its_name(here: Path) -> None:
    said = command("check", "recipe.yaml", "rewards.0.function=mine.py:swapped")
    assert "does not tell right from wrong" not in said


def test_a_reward_that_pays_everything_fails_the_check(here: Path) -> None:
    said = command("check", "recipe.yaml", "rewards.0.function=mine.py:constant", code=1)
    assert "does not tell right from wrong: all 18 probes" in said
    assert "Check failed: fix the error above" in said
    said = command("check", "recipe.yaml", "rewards.0.function=mine.py:unread", code=1)
    assert "pays every completion the same (0.3): all 18 probes" in said


def test_a_reward_of_another_form_is_not_said_to_pay_everything_the_same(here: Path) -> None:
    (here / "bare.py").write_text("def near(completion, answer):\n    return float(completion.strip() == answer)\n")
    said = command("check", "recipe.yaml", "rewards.0.function=bare.py:near", "data.template=question_only", code=1)
    assert "the form of data.template=plain" in said
    assert "pays every completion the same" not in said
    assert "Check failed: fix the error above" in said


def test_prompts_that_are_used_as_they_are_say_the_form_themselves(here: Path) -> None:
    (here / "bare.py").write_text(
        "def near(completion, answer):\n    return float(completion.strip() == answer)\n\n\n"
        "def odd(completion, answer):\n    return float(completion == f'ANSWER {answer}!')\n\n\n"
        "def broken(completion, answer):\n    return float(completion.strip() == answer[9])\n"
    )
    said = command("check", "recipe.yaml", "rewards.0.function=bare.py:near", "data.template=as_is")
    assert "as_is leaves the form to your prompts; the reward accepts that of plain" in said
    assert "gold                       1.000" in said
    said = command("check", "recipe.yaml", "rewards.0.function=bare.py:odd", "data.template=as_is")
    assert "the reward accepts none of the forms that are tried here" in said
    assert "OK, with 1 warning to read above" in said
    said = command("check", "recipe.yaml", "rewards.0.function=bare.py:broken", "data.template=as_is", code=1)
    assert "grading the row's own reference answer failed" in said


def test_a_bound_that_everything_reaches_fails_the_check_and_a_weight_of_0_is_refused(here: Path) -> None:
    graded = '{type: custom, function: "mine.py:contains", correct_at: -1}'
    said = command("check", "recipe.yaml", f"rewards=[{graded}]", code=1)
    assert "every completion counts as correct, all 18 probes included. Set correct_at" in said
    with pytest.raises(ConfigError, match="every reward has weight 0"):
        command("check", "recipe.yaml", "rewards.0.weight=0")


def test_a_reward_that_can_be_hacked_is_a_warning_and_the_table_is_explained(here: Path) -> None:
    said = command("check", "recipe.yaml", "rewards.0.function=mine.py:contains")
    assert "2 of 18 probes earn more than 20%" in said
    assert "gold_quoted, hedge" in said
    assert "n/a: it returned None" in said
    assert "OK, with 1 warning to read above: 20 training rows, 6 test, 4 validation" in said


def test_an_honest_reward_passes_the_check_without_a_warning(here: Path) -> None:
    assert "OK: 20 training rows" in command("check", "recipe.yaml", "rewards.0.function=mine.py:exact")
    assert "OK: 20 training rows" in command("check", "recipe.yaml", "rewards=[{type: r1_zero}]")


def test_a_reward_that_fails_on_other_completions_is_a_warning_with_the_error(here: Path) -> None:
    said = command("check", "recipe.yaml", "rewards.0.function=mine.py:crashing")
    assert "the reward function fails on" in said
    assert "KeyError: 'boom'" in said


def test_a_reference_answer_below_what_counts_as_correct_is_a_warning(here: Path) -> None:
    assert "less than" not in command("check", "recipe.yaml", "rewards.0.function=mine.py:half")
    said = command("check", "recipe.yaml", "rewards.0.function=mine.py:half", "rewards.0.correct_at=0.8")
    assert "the reference answer earns less than what counts as correct" in said


def test_some_groups_of_the_model_show_whether_there_is_anything_to_learn_from(here: Path) -> None:
    easy = ("rewards=[{type: custom, function: mine.py:letters}]", "--sample", "6")
    said = command("check", "recipe.yaml", *easy)
    assert re.search(r"6 groups of \d+ from the untrained model, in \d+ s: [1-6] have a signal", said)
    assert "would be learned from" in said
    said = command("check", "recipe.yaml", "rollouts.max_completion_tokens=1", "--sample", "3", code=1)
    assert "No group has a signal, so GRPO would learn nothing from them" in said
    assert "raise rollouts.max_completion_tokens" in said


def test_a_function_of_any_name_decides_what_is_correct(here: Path) -> None:
    command("train", "recipe.yaml", "run.name=own", "run.steps=1")
    found = read_evaluation(here / "runs" / "own" / "evaluations", "trained")
    assert [one.is_correct for one in found.examples] == [one.reward == 1.0 for one in found.examples]
    assert "reward/correct" in read_metrics(here / "runs" / "own")[1]


def test_the_held_out_problems_do_not_follow_the_seed(here: Path) -> None:
    for seed in (0, 1):
        command("train", "recipe.yaml", f"run.name=seed{seed}", f"run.seed={seed}", "run.steps=1")
    tested = [
        [one.question for one in read_evaluation(here / "runs" / f"seed{seed}" / "evaluations", "base").examples]
        for seed in (0, 1)
    ]
    assert tested[0] == tested[1]
    assert "cannot be paired" not in command("compare", "runs/seed0", "runs/seed1")


def test_a_run_of_another_version_is_not_resumed_and_its_version_is_named(here: Path) -> None:
    command("train", "recipe.yaml", "run.name=old", "run.steps=1")
    path = here / "runs" / "old" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config | {"policy": {**config["policy"], "train_only": ["norm"]}}))
    with pytest.raises(ConfigError, match=r"policy.train_only: .*\n.* was made by oncurve .*train again"):
        command("resume", "runs/old", "run.steps=2")


def test_a_recipe_is_shown_and_recorded_with_the_values_of_its_algorithm(here: Path) -> None:
    shown = yaml.safe_load(command("recipe", "show", "recipe.yaml", "algorithm.type=dapo"))["algorithm"]
    assert (shown["clip_low"], shown["clip_high"], shown["kl_coef"], shown["loss"]) == (0.2, 0.28, 0.0, "clipped")
    command("train", "recipe.yaml", "run.name=shown", "run.steps=1")
    recorded = yaml.safe_load((here / "runs" / "shown" / "config.yaml").read_text())["algorithm"]
    assert (recorded["clip_high"], recorded["normalize"]) == (0.2, "sequence_mean")
    again = yaml.safe_load(command("recipe", "show", "runs/shown/config.yaml"))
    assert again["algorithm"] == recorded


def test_errors_of_a_reward_stand_in_the_step_and_their_first_traceback_in_the_log(here: Path) -> None:
    said = command(
        "train", "recipe.yaml", "run.name=bad", "rewards.0.function=mine.py:crashing", "run.max_error_fraction=1"
    )
    steps = [line for line in said.splitlines() if line.startswith("step ") and "/" in line.split()[1]]
    measured = [row["reward/error_fraction"] for row in read_metrics(here / "runs" / "bad") if row["step"]]
    assert ["errors" in line for line in steps] == [value > 0 for value in measured]
    assert any(measured)
    assert said.count("WARNING step") == 1
    log = (here / "runs" / "bad" / "log.txt").read_text()
    assert 'mine.py", line' in log
    assert "KeyError: 'boom'" in log


def test_a_run_that_stops_for_errors_names_step_place_and_key(here: Path) -> None:
    with pytest.raises(RewardError, match=r"boom.*mine\.py, line \d+.*run\.max_error_fraction=") as caught:
        command("train", "recipe.yaml", "rewards.0.function=mine.py:crashing", "run.max_error_fraction=0")
    assert "at most 0% may fail" in str(caught.value)


def test_no_opinion_is_no_error(here: Path) -> None:
    said = command(
        "train", "recipe.yaml", "run.name=none", "rewards.0.function=mine.py:silent", "run.max_error_fraction=0"
    )
    rows = [row for row in read_metrics(here / "runs" / "none") if row["step"]]
    assert all(row["reward/error_fraction"] == 0 for row in rows)
    assert any(row.get("reward/not_applicable_fraction", 0) > 0 for row in rows)
    assert "errors" not in said
    assert "grader fails" not in command("doctor", "runs/none", code=0)


def test_evaluations_get_folders_of_their_own_and_say_which(here: Path) -> None:
    command("train", "recipe.yaml", "run.name=one", "run.steps=1")
    said = command("evaluate", "runs/one")
    folders = list((here / "evaluations").iterdir())
    assert len(folders) == 1
    assert folders[0].name.startswith("one-")
    assert f"evaluation: evaluations/{folders[0].name}" in said
    with pytest.raises(ConfigError, match=r"already holds a finished evaluation\. Choose another"):
        command("evaluate", "runs/one", "--output", f"evaluations/{folders[0].name}")


def test_a_stopped_evaluation_is_resumed_by_the_same_command(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oncurve.evaluate import evaluate, resumable

    monkeypatch.setattr(resumable, "PROMPTS_PER_CALL", 2)
    words = ("evaluate", "recipe.yaml", "--output", "out")
    calls = []
    genuine = evaluate.grade_groups

    def interrupted(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return genuine(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate, "grade_groups", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        stopped = CliRunner().invoke(app, list(words))
    finally:
        signal.signal(signal.SIGINT, before)
    assert "--output out resumes it" in str(stopped.exception)
    assert len((here / "out" / "unfinished" / "0-embedded" / "samples.jsonl").read_text().splitlines()) == 2
    command(*words)
    assert len(calls) == 2 + 2, "the first part is not sampled again"
    assert not (here / "out" / "unfinished").exists()
    whole = command("evaluate", "recipe.yaml", "--output", "whole")
    assert "evaluation: whole" in whole
    texts = [
        [one.completion for one in read_evaluation(Path(name) / "evaluations", "evaluation").examples]
        for name in ("out", "whole")
    ]
    assert texts[0] == texts[1]
