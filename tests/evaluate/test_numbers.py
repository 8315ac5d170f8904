"""Do the reported numbers leave out what could not be graded, and say so?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from evaluation_fakes import evaluation_of

from oncurve.evaluate.evaluate import Evaluation
from oncurve.evaluate.numbers import report_numbers
from oncurve.stats import wilson_interval


def with_answers(evaluation: Evaluation) -> Evaluation:
    """The same with the text as the answer that a vote compares."""
    return replace(evaluation, examples=tuple(replace(e, extracted=e.completion) for e in evaluation.examples))


def test_one_completion_each_gives_a_share_with_wilsons_interval() -> None:
    numbers = report_numbers(evaluation_of(["[1]", "[9]", "3", "[4]"]))
    assert numbers["avg"]["value"] == 0.5
    assert tuple(numbers["avg"]["over_prompts"]) == wilson_interval(2, 4)
    assert numbers["majority"] is None
    assert numbers["pass"] == {"1": {"value": 0.5, "over_prompts": list(wilson_interval(2, 4)), "num_prompts": 4}}
    assert numbers["any_format"]["value"] == 0.75
    assert numbers["avg_if_errors_were"] is None


def test_what_could_not_be_graded_counts_neither_way_and_is_shown() -> None:
    numbers = report_numbers(evaluation_of(["[1]", "[9]", "boom", "boom"]))
    assert numbers["avg"]["value"] == 0.5
    assert (numbers["num_prompts"], numbers["num_prompts_graded"], numbers["num_errors"]) == (4, 2, 2)
    assert numbers["errors"] == {"timeout": 2}
    assert numbers["avg_if_errors_were"] == {"wrong": 0.25, "right": 0.75}


def test_if_nothing_could_be_graded_there_is_no_number_rather_than_zero() -> None:
    numbers = report_numbers(evaluation_of(["boom", "boom"]))
    assert numbers["avg"]["value"] is None
    assert numbers["pass"]["1"]["value"] is None
    assert numbers["any_format"] is None
    assert numbers["by_length"] == []


def test_an_error_among_several_completions_leaves_the_others() -> None:
    texts = [["[1]", "boom", "[1]", "[9]"], ["[9]", "[9]", "[2]", "[9]"]]
    numbers = report_numbers(with_answers(evaluation_of(texts, samples=4)))
    assert numbers["avg"]["value"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert numbers["pass"]["2"]["value"] == pytest.approx((1.0 + 0.5) / 2)
    assert numbers["pass"]["4"] == {"value": 1.0, "over_prompts": list(wilson_interval(1, 1)), "num_prompts": 1}
    assert numbers["majority"]["2"]["num_prompts"] == 2
    assert numbers["majority"]["4"]["value"] == 0.0


def test_a_majority_that_is_right_is_right_however_many_are_wrong() -> None:
    texts = [["[1]", "[1]", "[8]", "[9]"]] * 1 + [["[2]", "[7]", "[7]", "[7]"]]
    numbers = report_numbers(with_answers(evaluation_of(texts, samples=4)))
    assert numbers["majority"]["4"]["value"] == 0.5
    assert list(numbers["majority"]) == ["2", "4"]
    assert list(numbers["pass"]) == ["1", "2", "4"]
    assert report_numbers(with_answers(evaluation_of(texts, samples=4)), has_votes=False)["majority"] is None


def test_the_number_of_completions_is_a_size_even_if_no_power_of_two() -> None:
    numbers = report_numbers(evaluation_of([["[1]", "[9]", "[9]"]], samples=3))
    assert list(numbers["pass"]) == ["1", "2", "3"]


def test_categories_hold_their_prompts_and_add_up() -> None:
    found = evaluation_of(["[1]", "[9]", "[3]", "[9]"])
    columns = {"subject": {0: "Algebra", 1: "Algebra", 2: "Geometry", 3: "Geometry"}, "level": {0: "1"}}
    numbers = report_numbers(found, columns)
    by_subject = numbers["by_category"]["subject"]
    assert {name: one["value"] for name, one in by_subject.items()} == {"Algebra": 0.5, "Geometry": 0.5}
    assert sum(one["num_prompts"] for one in by_subject.values()) == 4
    assert set(numbers["by_category"]["level"]) == {"(none)", "1"}


def test_lengths_are_cut_into_groups_that_hold_every_graded_completion() -> None:
    texts = ["[1]", "[2]", "[3] " * 5, "[9]" * 10, "boom", "x" * 50]
    groups = report_numbers(evaluation_of(texts))["by_length"]
    assert sum(group["num_completions"] for group in groups) == 5
    assert all(a["max_tokens"] < b["min_tokens"] for a, b in pairwise(groups))
    assert groups[0]["correct_fraction"] == 1.0


def test_completions_that_were_cut_off_are_counted() -> None:
    found = evaluation_of(["[1]", "[9]"])
    cut = replace(found, examples=(found.examples[0], replace(found.examples[1], finish_reason="length")))
    assert report_numbers(cut)["num_truncated"] == 1
