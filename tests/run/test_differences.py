"""What of a recipe may change when a run is resumed, and what is named."""

from __future__ import annotations

from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.run.identity import recorded
from oncurve.run.resume import config_differences, fact_differences

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
