"""What of a recipe may change when a run is resumed, and what is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.run.identity import recorded
from oncurve.run.resume import (
    _changed,
    _fresh,
    config_differences,
    fact_differences,
    finished,
    run_and_step,
    warn_of_machine,
)

WAS = recorded(load_config(find_recipe("word_problems")))


def changed(*overrides: str) -> list[str]:
    return config_differences(WAS, load_config(find_recipe("word_problems"), overrides))


def test_a_key_that_changes_numbers_is_named_with_both_values() -> None:
    assert changed() == []
    assert changed("algorithm.group_size=4") == ["algorithm.group_size: 8 -> 4"]


def test_a_key_that_changes_no_number_may_change() -> None:
    assert changed("run.keep_checkpoints=5", "run.max_error_fraction=0.5") == []


def test_facts_are_named_in_words() -> None:
    was = {"data": "a", "base": "b", "world_size": 1, "given": {"reward mine": "x"}}
    assert fact_differences(was, was) == []
    [line, given] = fact_differences(was, {**was, "world_size": 2, "given": {"reward mine": "y"}})
    assert line == "the number of processes: 1 -> 2"
    assert given.startswith("reward mine: not as when the run began")


@pytest.mark.parametrize(
    ("key", "was", "now", "said"),
    [
        ("data", "a", "b", ["the training prompts: a -> b"]),
        ("base", "a", "b", ["the weights of the base model: a -> b"]),
        ("columns", {"x": "1"}, {"x": "2"}, ["the column 'x' of the training rows: not as when the run began"]),
        ("columns", {"x": "1"}, {"x": "1", "y": "1"}, []),
        ("columns", {"x": "1"}, {}, ["the column 'x' of the training rows: not as when the run began"]),
        ("columns", None, {"x": "1"}, []),
        ("code", {"a.py": "1"}, {"a.py": "2"}, ["the file of the a.py: not as when the run began"]),
        ("code", {}, {"b.py": "1", "a.py": "1"}, [
            "the file of the a.py: not as when the run began", "the file of the b.py: not as when the run began"]),
        ("model_files", {"config.json": "1"}, {}, ["the model's config.json: not as when the run began"]),
        ("code", None, {"a.py": "1"}, []),
    ],
)  # fmt: skip
def test_each_fact_is_compared_and_named(key: str, was: Any, now: Any, said: list[str]) -> None:
    same = {"data": 1, "base": 1, "world_size": 1}
    assert fact_differences({**same, key: was}, {**same, key: now}) == said
    assert _changed(None, {"a": "1"}) == []


def test_a_machine_is_told_of_and_changes_nothing() -> None:
    was = {
        "device": "cpu",
        "threads": 1,
        "versions": {"torch": "1", "oncurve": "2"},
        "environment": {"A": "", "B": "x"},
    }
    told: list[str] = []
    warn_of_machine(was, was, warn=told.append)
    assert told == []
    now = {
        "device": "cuda",
        "threads": 1,
        "versions": {"torch": "3", "oncurve": "2"},
        "environment": {"A": "y", "B": "z"},
    }
    warn_of_machine(was, now, warn=told.append)
    assert [text.split(". ")[0].split(", and")[0] for text in told] == [
        "device: cpu when it was saved, cuda now",
        "versions: {'torch': '1'} when it was saved, {'torch': '3'} now",
        "the environment variable A: not set when it was saved",
        "the environment variable B: had another value when it was saved",
    ]


@pytest.mark.parametrize(
    ("changed", "more", "fresh"),
    [
        ([], [], set()),
        (["policy.tokens_per_microbatch: 1 -> 2"], [], {"tokens_per_microbatch"}),
        (["algorithm.entropy_coef: 0 -> 1"], [], {"entropy"}),
        (["algorithm.type: grpo -> dapo"], ["the training prompts: a -> b"], {"entropy", "curriculum"}),
        (["run.seed: 1 -> 2"], ["the number of processes: 1 -> 2"], set()),
    ],
)
def test_what_a_change_makes_meaningless_begins_anew(changed: list[str], more: list[str], fresh: set[str]) -> None:
    assert _fresh(changed, more) == fresh


def test_advice_for_a_finished_run_is_more_steps_than_it_has() -> None:
    for requested, more in ((0, 8), (4, 8), (5, 5)):
        assert finished(Path("run"), 4, requested_steps=requested).endswith(
            f"oncurve resume run run.steps={more} --allow-change"
        )
    assert "run={'name': 'run', 'steps': 8} and resume(extends=True)" in finished(Path("a/run"), 4, is_of_program=True)


def test_a_run_is_named_by_itself_or_by_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    assert run_and_step(checkpoint) == (checkpoint, None), "of no run"
    for name in ("config.yaml", "status.json", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    assert run_and_step(tmp_path) == (tmp_path, None)
    assert run_and_step(checkpoint) == (tmp_path, 4)
    assert run_and_step(tmp_path / "checkpoints" / "step_000005") == (tmp_path / "checkpoints" / "step_000005", None)
