"""Does a comparison say what changed, how sure that is, and refuse to compare what cannot be compared?"""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_fakes import evaluation_of
from rich.console import Console

from oncurve.core.errors import DataError
from oncurve.evaluate.compare import Comparison, compare
from oncurve.evaluate.evaluation import LIKELIHOOD, Evaluation
from oncurve.stats import mcnemar_exact

#        same    answer   format   lost     lost form  same wrong
BEFORE = ["[1]", "[9]", "3", "[4]", "[5]", "[0]"]
AFTER = ["[1]", "[2]", "[3]", "[0]", "5", "[0]"]


@pytest.fixture
def comparison() -> Comparison:
    return compare(evaluation_of(BEFORE), evaluation_of(AFTER))


@pytest.mark.proves("F141", "D20")
def test_counts_change_and_paired_test_are_those_of_a_hand_count(comparison: Comparison) -> None:
    rows = {row.name: row for row in comparison.rows}
    correct = rows["correct"]
    assert (correct.before.successes, correct.after.successes) == (3, 3)
    assert correct.change == 0.0
    assert correct.p_value == mcnemar_exact(2, 2) == 1.0
    assert rows["correct, any format"].before.successes == 4
    assert rows["bad format"].change == 0.0
    assert list(rows) == [
        "correct",
        "correct, any format",
        "wrong, right format",
        "bad format",
        "cut off at limit",
    ]


def test_a_large_improvement_is_significant_and_its_interval_excludes_nothing() -> None:
    before = evaluation_of([f"[{n + 1 if n % 5 == 0 else 'x'}]" for n in range(60)])
    after = evaluation_of([f"[{n + 1 if n % 5 else 'x'}]" for n in range(60)])
    row = compare(before, after).rows[0]
    assert row.change == pytest.approx(0.6)
    assert 0.3 < row.low < 0.6 < row.high < 0.9
    assert row.p_value == mcnemar_exact(12, 48) < 1e-5
    assert row.factor == pytest.approx(4.0)
    counts = compare(before, after).summary()
    assert (counts["num_improved"], counts["num_improved_by_format_only"]) == (48, 0)
    assert (counts["num_worsened"], counts["num_worsened_by_format_only"]) == (12, 0)
    nothing = evaluation_of(["[x]"] * 60)
    assert compare(nothing, after).rows[0].factor == math.inf
    assert math.isnan(compare(nothing, nothing).rows[0].factor)


@pytest.mark.proves("F142")
def test_improvements_are_told_apart_from_mere_changes_of_form(comparison: Comparison) -> None:
    assert [(change.before.index, change.kind) for change in comparison.improved] == [(1, "answer"), (2, "format")]
    assert [(change.before.index, change.kind) for change in comparison.worsened] == [(3, "answer"), (4, "format")]


def test_without_the_loose_reward_nobody_knows_what_changed() -> None:
    found = compare(evaluation_of(BEFORE, loose=False), evaluation_of(AFTER, loose=False))
    assert {change.kind for change in (*found.improved, *found.worsened)} == {"unknown"}
    assert "correct, any format" not in [row.name for row in found.rows]


def test_failures_of_the_grader_get_a_row_of_their_own() -> None:
    found = compare(evaluation_of(["[1]", "boom"]), evaluation_of(["[1]", "[2]"]))
    assert {row.name: (row.before.successes, row.after.successes, row.after.total) for row in found.rows} == {
        "correct": (1, 1, 1), "correct, any format": (1, 1, 1), "wrong, right format": (0, 0, 1),
        "bad format": (0, 0, 1), "not gradable": (1, 0, 2), "cut off at limit": (0, 0, 2),
    }  # fmt: skip
    assert found.summary()["num_unchanged"] == 1
    assert [row["change"] for row in found.example_rows()] == ["same", "same"]


def rewarded(*rewards: float | None) -> Evaluation:
    """Rewards that say of nothing whether it is correct."""
    found = evaluation_of(["[0]"] * len(rewards), loose=False)
    examples = [
        replace(example, reward=reward, judged=(), category="error" if reward is None else "graded")
        for example, reward in zip(found.examples, rewards, strict=True)
    ]
    return replace(found, examples=tuple(examples))


def test_rewards_without_a_verdict_are_compared_by_their_means() -> None:
    found = compare(rewarded(0.5, 0.25, 1.0, 0.5, None, 0.0), rewarded(0.5, 0.75, 0.25, 0.75, 1.0, 1e-7))
    assert found.markdown() == (
        "**base and trained on 6 test problems**\n\n"
        "|  | base | trained | change | factor | p |\n|---|---:|---:|---:|---:|---:|\n"
        "| mean reward | 0.450 [0.200, 0.750] | 0.542 [0.250, 0.792] | +0.000 [-0.400, +0.300] | - | 1.0000 |\n"
        "| not gradable | 1/6 (16.7%) [3.0, 56.4] | 0/6 (0.0%) [0.0, 39.0] | -16.7 [-56.4, +24.7] | 0.00x | 1.0000 |\n"
        "| cut off at limit | 0/6 (0.0%) [0.0, 39.0] | 0/6 (0.0%) [0.0, 39.0] | +0.0 [-39.0, +39.0] | - | 1.0000 |\n\n"
        "Both greedy; mean length 3 and 3 tokens. [95 % intervals]: bootstrap over prompts; p: sign flips over prompts"
        ", paired. 2 examples improved, 1 got worse. 1 example not graded both times, left out of all other rows.\n"
    )
    assert found.headline() == ["reward: 0.450 before, 0.542 after training, +0.000 [-0.400, +0.300] (6 test problems)"]
    assert [(row["change"], row["kind"]) for row in found.example_rows()] == [
        ("same", None), ("improved", "unknown"), ("worsened", "unknown"), ("improved", "unknown"), ("same", None),
        ("same", None),
    ]  # fmt: skip
    assert [(change.before.index, change.before.reward) for change in found.improved] == [(1, 0.25), (3, 0.5)]
    assert "base (reward 0.25, 3 tokens):" in found.examples_text()
    with_likelihood = replace(found, after=replace(found.after, correct_means=LIKELIHOOD))
    assert f" Reward: {LIKELIHOOD}. " in with_likelihood.footnote()
    assert with_likelihood.headline()[1:] == [f"reward: {LIKELIHOOD}"]


def test_what_only_one_of_two_evaluations_says_is_not_compared() -> None:
    one = evaluation_of(["[1]", "[9]"])
    half = replace(one, examples=tuple(replace(example, reward=0.5) for example in one.examples))
    silent = rewarded(1.0, 0.0)
    meaning = replace(one, correct_means="all of it")
    for first, second in ((one, half), (half, one)):
        assert [found.is_binary for found in (compare(first, second), compare(one, one))] == [False, True]
        assert len(compare(first, second).headline()) == 2
    for first, second in ((one, silent), (silent, one)):
        assert [row.name for row in compare(first, second).rows] == ["cut off at limit"]
    for first, second in ((one, evaluation_of(["[1]", "[9]"], loose=False)), (replace(one, examples=()), one)):
        if first.examples:
            assert "correct, any format" not in [row.name for row in compare(first, second).rows]
            assert "correct, any format" not in [row.name for row in compare(second, first).rows]
    assert compare(one, meaning).footnote().endswith("0 got worse. Correct: all of it.")
    assert "Correct" not in compare(silent, replace(silent, correct_means="all of it")).footnote()


def test_several_completions_per_prompt_are_compared_prompt_by_prompt() -> None:
    before = evaluation_of([["[x]", "[x]"]] * 20, samples=2)
    after = evaluation_of([[f"[{n + 1}]", "[x]"] for n in range(20)], samples=2)
    found = compare(before, after)
    assert found.rows[0].change == 0.5
    assert (found.rows[0].low, found.rows[0].high) == (0.5, 0.5)
    assert found.rows[0].p_value < 0.001
    assert "20 test problems, 2 completions each" in found.title()
    assert "sign flips" in found.footnote()


def test_the_same_table_in_markdown_and_terminal(comparison: Comparison) -> None:
    out = io.StringIO()
    comparison.print(Console(file=out, width=80))
    for shown in (comparison.markdown(), " ".join(out.getvalue().split())):
        assert "base and trained on 6 test problems" in shown
        assert "Both greedy" in shown
        assert "2 examples improved, 2 got worse (1 of the improved changed only their format)" in shown
        assert "[18.8, 81.2]" in shown
    assert "3/6 (50.0%) [18.8, 81.2]" in comparison.markdown()
    assert {len(line) for line in out.getvalue().splitlines() if line} == {79}
    assert "correct, any format     4 (66.7%)     4 (66.7%)            +0.0   1.00x  1.0000" in out.getvalue()
    for width, has_factors in ((79, True), (78, False)):
        comparison.print(Console(file=(out := io.StringIO()), width=width))
        assert ("1.00x" in out.getvalue()) == has_factors
    table = [line for line in comparison.markdown().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {7}
    assert len(table) == 2 + len(comparison.rows)


@pytest.mark.proves("F142")
def test_examples_are_shown_with_both_completions(comparison: Comparison) -> None:
    first = (
        "Improved: 2 examples, the first:\n\n[1] What is 1 plus 1?\n  reference answer: 2\n"
        "  base (wrong, 3 tokens):\n    [9]\n  trained (correct, 3 tokens):\n    [2]\n\n"
        "Got worse: 2 examples, the first:\n\n[3] What is 3 plus 1?\n  reference answer: 4\n"
        "  base (correct, 3 tokens):\n    [4]\n  trained (wrong, 3 tokens):\n    [0]\n"
    )
    assert comparison.examples_text(limit=1, max_characters=3) == first
    second = (
        "\n[2] (the answer was right in both, only its form changed) What is 2 plus 1?\n  reference answer: 3\n"
        "  base (bad format, 1 tokens):\n    3\n  trained (correct, 3 tokens):\n    [3 [...]\n"
    )
    both = comparison.examples_text(limit=2, max_characters=2)
    assert both.startswith("Improved: 2 examples\n\n[1] ")
    assert second in both


def test_everything_is_written_and_counts_the_same(comparison: Comparison, tmp_path: Path) -> None:
    assert comparison.write(tmp_path / "new") == tmp_path / "new" / "comparison.md"
    summary = json.loads((tmp_path / "new" / "comparison.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "new" / "comparison.jsonl").read_text().splitlines()]
    assert summary["num_improved"] == sum(row["change"] == "improved" for row in rows) == 2
    form = [row["kind"] == "format" for row in rows if row["change"] == "improved"]
    assert summary["num_improved_by_format_only"] == sum(form) == 1
    assert summary["num_worsened"] == sum(row["change"] == "worsened" for row in rows) == 2
    assert [summary[key] for key in ("num_worsened_by_format_only", "num_unchanged", "num_prompts")] == [1, 2, 6]
    assert [(row["change"], row["kind"]) for row in rows[:5]] == [
        ("same", None), ("improved", "answer"), ("improved", "format"), ("worsened", "answer"), ("worsened", "format")
    ]  # fmt: skip
    assert rows[1]["before"]["completion"] == "[9]"
    assert rows[1]["after"]["category"] == "correct"
    assert "| correct |" in (tmp_path / "new" / "comparison.md").read_text()


@pytest.mark.proves("F138")
def test_other_examples_are_refused() -> None:
    with pytest.raises(DataError, match="2 and 1 examples"):
        compare(evaluation_of(["[1]", "[2]"]), evaluation_of(["[1]"]))
    with pytest.raises(DataError, match="1 and 2 examples"):
        compare(evaluation_of(["[1]"]), evaluation_of(["[1]", "[2]"]))
    swapped = evaluation_of(["[1]", "[2]"])
    swapped = replace(swapped, examples=swapped.examples[::-1])
    with pytest.raises(DataError, match="example 0 of the two evaluations is not the same problem"):
        compare(evaluation_of(["[1]", "[2]"]), swapped)


@pytest.mark.proves("D20", "D43")
def test_other_decoding_is_refused_but_a_list_read_from_a_file_is_the_same_as_a_tuple() -> None:
    found = evaluation_of(["[1]"])
    with pytest.raises(DataError, match=r"decoded differently: temperature 0\.0 and 1\.0"):
        compare(found, replace(found, params={**found.params, "temperature": 1.0}))
    compare(found, replace(found, params={**found.params, "stop": []}))


def test_a_model_compared_with_itself_shows_no_change() -> None:
    found = evaluation_of(BEFORE)
    same = compare(found, found, names=("model", "model"))
    assert all((row.change, row.p_value) == (0.0, 1.0) for row in same.rows)
    assert same.improved == same.worsened == ()
    assert json.dumps(same.summary(), allow_nan=False)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_number_of_the_table_is_cut_however_narrow_the_terminal(width: int) -> None:
    before, after = (evaluation_of(texts) for texts in (["[1]"] * 4, ["[1]", "[2]", "[3]", "[4]"]))
    out = io.StringIO()
    compared = compare(before, after, names=("a-model-with-a-long-name", "another-model"))
    compared.print(Console(file=out, width=width))
    assert "…" not in out.getvalue()
    assert ("factor" in out.getvalue()) == (width >= 120)
    assert "points" in out.getvalue()
    assert all(f"{row.p_value:.4f}" in out.getvalue() for row in compared.rows if row.p_value >= 1e-4)
