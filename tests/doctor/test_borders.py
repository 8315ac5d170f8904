"""Does every check begin to speak, and speak louder, exactly where its docstring says?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from doctor_cases import case, paid

from oncurve.doctor.case import Case, Curve
from oncurve.doctor.diagnose import diagnose
from oncurve.doctor.grading import reward_noise, reward_span, validation_interval

Verdicts = Mapping[float, str | None]
"""What a check says at each value: a severity, or nothing."""
NOTE, WARNING, SEVERE = "note", "warning", "severe"


def below(value: float) -> float:
    """A little less, by more than the rounding of a mean."""
    return value * (1 - 1e-9)


def above(value: float) -> float:
    return value * (1 + 1e-9)


def late(before: float, after: float) -> Callable[[float], float]:
    return lambda x: before if x < 0.5 else after


def up_to(low: float, high: float) -> Verdicts:
    """Silent up to ``low``, louder above ``high``: both bounds belong to the quieter side."""
    return {low: None, above(low): WARNING, high: WARNING, above(high): SEVERE}


def above_then_from(low: float, high: float) -> Verdicts:
    """Silent up to ``low``, louder from ``high``."""
    return {low: None, above(low): WARNING, below(high): WARNING, high: SEVERE}


def from_(low: float, high: float) -> Verdicts:
    """Speaks from ``low``, louder from ``high``: both bounds belong to the louder side."""
    return {below(low): None, low: WARNING, below(high): WARNING, high: SEVERE}


ALWAYS = {"reward/min": 1.0, "reward/max": 1.0, "reward/std": 0.0, "reward/format": None, "reward/correct": None}
DEAD = "group/zero_signal_fraction"
UNSOLVED = "group/unsolved_fraction"
CUT = "completion/truncated_fraction"
LENGTH = "completion/mean_tokens"
FALLEN = {"reward/mean": late(0.6, 0.05), "reward/correct": late(0.6, 0.05)}
FLAT = {"evaluation/correct_fraction": 0.25, "evaluation/any_format_fraction": 0.4}
STILL = {**FLAT, "evaluation/mean_tokens": 31.0}
COLLAPSED = {"policy/entropy": lambda x: 0.3 if x < 0.5 else 0.01, DEAD: late(0.25, 0.7)}
GREW = {LENGTH: late(32.0, 64.0)}
TOOLS = {"rollouts.tools": ["calculator"]}
NARROW = {"rollouts.temperature": 0.1}
LEAST = {"rollouts.min_completion_tokens": 90}

METRICS: list[tuple[str, str, Verdicts, dict[str, Any], dict[str, Any]]] = [
    # check, metric that is the same in all steps, verdicts; other curves, settings
    ("grader_errors", "reward/error_fraction", above_then_from(0.01, 0.05), {}, {}),
    ("reward_constant", "reward/correct", {below(0.02): None, 0.02: SEVERE, below(0.98): SEVERE, above(0.98): None},
     ALWAYS, {}),
    ("reward_constant", "reward/format", {below(0.02): None, 0.02: SEVERE}, ALWAYS, {}),
    ("no_format", "reward/format", {below(0.02): SEVERE, 0.02: None}, {}, {}),
    ("no_format", CUT, {below(0.9): SEVERE, 0.9: None}, {"reward/format": 0.0}, {}),
    ("overfitting", "evaluation/any_format_fraction", {0.4: WARNING, 0.9: None}, FLAT, {}),
    ("evaluation_small", "evaluation/num_examples", {199.0: NOTE, 200.0: None}, {}, {}),
    ("not_finite", "policy/nonfinite_updates", {0.0: None, 0.02: WARNING, above(0.02): SEVERE}, {}, {}),
    ("learning_rate_low", "group/std_mean", {0.01: None, above(0.01): SEVERE}, STILL, {}),
    ("lost_to_rounding", "policy/arrived", {below(0.5): SEVERE, 0.5: WARNING, 0.9: WARNING, above(0.9): None}, {}, {}),
    ("not_learning", DEAD, {0.6: WARNING, above(0.6): None}, {**FLAT, "reward/mean": 0.3, "reward/correct": 0.3}, {}),
    ("not_learning", "reward/correct", {0.9: WARNING, above(0.9): None}, {**FLAT, "reward/mean": 0.3}, {}),
    ("clipping", "policy/clip_fraction", up_to(0.2, 0.4), {}, {}),
    ("clipping", "policy/clip_fraction", up_to(0.05, 0.4),
     {}, {"algorithm.clip_low": 0.0, "algorithm.clip_high": 0.009}),
    ("kl_growth", "policy/kl", {1.0: None, above(1.0): WARNING}, {}, {}),
    ("kl_too_strong", "policy/kl", {0.01: WARNING, above(0.01): None},
     {"reward/mean": 0.2}, {"algorithm.kl_coef": 1.0}),
    ("entropy_collapse", "reward/correct", {0.9: WARNING, above(0.9): None}, COLLAPSED, {}),
    ("too_far_ahead", "mismatch/effective_sample_fraction", {below(0.7): WARNING, 0.7: None},
     {}, {"rollouts.staleness": 4}),
    ("mismatch", "mismatch/kl", up_to(0.01, 0.1), {}, {}),
    ("mismatch", "mismatch/effective_sample_fraction", {0.8: None, 0.79: WARNING, 0.5: WARNING, 0.49: SEVERE}, {}, {}),
    ("sampling_narrow", DEAD, from_(0.4, 0.6), {}, NARROW),
    ("too_easy", "group/solved_fraction", from_(0.6, 0.8), {}, {}),
    ("too_easy", "group/solved_fraction", {0.6: WARNING}, {}, {"algorithm.group_size": 3}),
    ("too_easy", "group/solved_fraction", {0.6: SEVERE}, {}, {"algorithm.group_size": 2}),
    ("too_hard", UNSOLVED, from_(0.6, 0.8), {DEAD: 0.95}, {}),
    ("too_hard", DEAD, {below(0.6): None, 0.6: SEVERE}, {UNSOLVED: 0.95}, {}),
    ("dead_groups", DEAD, from_(0.6, 0.9), {"group/solved_fraction": 0.0}, {}),
    ("dead_groups", "group/solved_fraction", {0.4: WARNING, above(0.4): None}, {DEAD: 0.8}, {}),
    ("skipped_updates", "policy/skipped_updates", up_to(0.1, 0.5), {}, {}),
    ("minimum_length", "completion/min_tokens", {88.9: None, 89.0: SEVERE, 91.0: SEVERE, 91.1: None},
     {CUT: 0.5}, LEAST),
    ("minimum_length", CUT, {below(0.1): None, 0.1: SEVERE}, {"completion/min_tokens": 90.0, LENGTH: 100.0}, LEAST),
    ("minimum_length", LENGTH, {99.0: SEVERE, 99.1: None}, {"completion/min_tokens": 90.0}, LEAST),
    ("truncation", CUT, above_then_from(0.1, 0.3), {}, {}),
    ("truncation", "episode/ended/failed", {0.39: WARNING, 0.41: None}, {CUT: 0.5}, {}),
    ("truncation", "episode/ended/turns", {0.19: SEVERE, 0.21: WARNING}, {CUT: 0.5}, {}),
    ("truncation", "episode/ended/answer", {0.5: SEVERE}, {CUT: 0.5}, {}),
    ("tools_unused", "episode/calls", {below(0.02): SEVERE, 0.02: None}, {}, TOOLS),
    ("calls_malformed", "episode/malformed_calls", from_(1 / 3, 2 / 3), {}, {}),
    ("tools_broken", "episode/tool_errors", {below(0.5): None, 0.5: WARNING}, {}, {}),
    ("tools_broken", "episode/tool_errors", {below(0.65): None, 0.65: WARNING}, {"episode/malformed_calls": 0.25}, {}),
    ("turns_at_limit", "episode/ended/turns", {below(0.2): None, 0.2: WARNING}, {}, {}),
    ("environments_fail", "episode/failed_fraction", above_then_from(0.01, 0.1), {}, {}),
    ("grading_bound", "time/grade_seconds", {3.0: None, above(3.0): WARNING}, {}, {}),
    ("rollout_bound", "time/sample_seconds", {8.5: None, above(8.5): NOTE}, {}, {}),
    ("trainer_bound", "time/train_seconds", {8.5: None, above(8.5): NOTE}, {}, {}),
    ("not_ahead_enough", "time/sample_seconds", {3.0: None, 3.01: NOTE},
     {"time/step_seconds": 9.0, "speed/server_idle_fraction": 0.4}, {}),
    ("not_ahead_enough", "speed/server_idle_fraction", {below(0.2): None, 0.2: NOTE}, {}, {}),
    ("slow_link", "weights/sync_seconds", {3.0: None, above(3.0): WARNING}, {}, {}),
    ("slow_link", "weights/late_servers", {0.9: None, 1.0: WARNING}, {"weights/sync_seconds": 0.1}, {}),
]  # fmt: skip
SETTINGS: list[tuple[str, str, Verdicts, dict[str, Any], dict[str, Any]]] = [
    ("clipping", "algorithm.clip_high", {below(0.01): WARNING, 0.01: None},
     {"policy/clip_fraction": 0.1}, {"algorithm.clip_low": 0.0}),
    ("clipping", "algorithm.clip_low", {below(0.01): WARNING, 0.01: None},
     {"policy/clip_fraction": 0.1}, {"algorithm.clip_high": 0.0}),
    ("kl_too_strong", "algorithm.kl_coef", {below(1.0): None, 1.0: WARNING},
     {"policy/kl": 0.001, "reward/mean": 0.2}, {}),
    ("entropy_bonus", "algorithm.entropy_coef", {below(0.1): None, 0.1: SEVERE}, FALLEN, {}),
    ("entropy_bonus", "algorithm.entropy_coef", {0.0: None, 0.001: WARNING}, {"policy/entropy": late(0.1, 0.9)}, {}),
    ("sampling_narrow", "rollouts.temperature", {below(0.5): SEVERE, 0.5: None}, {DEAD: 0.7}, {}),
    ("sampling_narrow", "rollouts.top_p", {below(0.7): SEVERE, 0.7: None}, {DEAD: 0.7}, {}),
    ("sampling_narrow", "rollouts.top_k", {0: None, 1: SEVERE, 5: SEVERE, 6: None}, {DEAD: 0.7}, {}),
    ("sampling_narrow", "rollouts.min_p", {0.3: None, above(0.3): SEVERE}, {DEAD: 0.7}, {}),
    ("minimum_length", "rollouts.min_completion_tokens", {49: None, 50: SEVERE},
     {"completion/min_tokens": 50.0, LENGTH: 52.0}, {}),
    ("not_ahead_enough", "rollouts.staleness", {7: NOTE, 8: None},
     {"time/sample_seconds": 4.0, "speed/server_idle_fraction": 0.4}, {}),
]  # fmt: skip
SECOND_HALF: list[tuple[str, str, float, Verdicts, dict[str, Any]]] = [
    # check, metric, its first half, verdicts on the second; other curves
    ("lost_to_rounding", "policy/arrived", 0.1, {0.9: WARNING, above(0.9): None}, {}),
    ("reward_hacking", "reward/mean", 0.3, {0.399: None, 0.4: SEVERE},
     {**FLAT, "reward/correct": 0.2}),  # by chance, 0.0994
    ("reward_hacking", "reward/mean", 0.3, {0.349: None, 0.351: SEVERE},
     {**FLAT, "reward/correct": 0.2, "reward/std": 0.0}),
    ("reward_hacking", "reward/held_out/brevity", 0.9, {0.851: None, 0.75: SEVERE}, {"reward/std": 0.0}),
    ("learning_rate_high", "reward/mean", 0.8, {0.41: None, 0.39: SEVERE}, {}),
    ("learning_rate_high", "reward/mean", 0.8, {0.01: None, -0.01: SEVERE}, {"reward/min": -0.8, "reward/std": 0.1}),
    ("entropy_explosion", "policy/entropy", 0.25, {0.75: None, above(0.75): WARNING}, {}),
    ("entropy_explosion", "policy/entropy", 0.0625, {0.3625: None, 0.3626: WARNING}, {}),
    ("entropy_collapse", "policy/entropy", 0.5, {0.05: None, below(0.05): WARNING}, {DEAD: late(0.25, 0.7)}),
    ("entropy_collapse", DEAD, 0.25, {below(0.5): None, 0.5: WARNING}, COLLAPSED),
    ("entropy_collapse", DEAD, 0.5, {below(0.7): None, 0.7: WARNING}, COLLAPSED),
    ("too_easy", "group/solved_fraction", 0.6, {0.6: WARNING, 1.0: SEVERE}, {}),
    ("too_easy", "group/solved_fraction", 0.5, {0.6: NOTE, 1.0: NOTE}, {}),
    ("too_hard", UNSOLVED, 0.0, {0.8: SEVERE}, {DEAD: 0.95}),
    ("length_explosion", LENGTH, 32.0, {below(64.0): None, 64.0: WARNING}, {CUT: 0.2}),
    ("length_explosion", CUT, 0.0, above_then_from(0.1, 0.3), GREW),
    ("length_collapse", LENGTH, 32.0, {16.0: None, below(16.0): WARNING, 8.0: WARNING, below(8.0): SEVERE},
     {"reward/correct": 0.3}),
    ("length_collapse", "reward/correct", 0.25, {0.3: WARNING, 0.31: None}, {LENGTH: late(32.0, 15.0)}),
    ("format_only", "reward/format", 0.5, {below(0.8): None, 0.8: WARNING}, {**FLAT, "reward/correct": 0.3}),
    ("format_only", "reward/format", 0.75, {0.949: None, 0.951: WARNING}, {**FLAT, "reward/correct": 0.3}),
    ("slowing", "time/step_seconds", 10.0, {20.0: None, above(20.0): WARNING}, {}),
    ("slowing", LENGTH, 10.0, {16.9: WARNING, 17.1: None}, {"time/step_seconds": late(10.0, 30.0)}),
]  # fmt: skip


def verdict(check: str, given: Case) -> str | None:
    return next((finding.severity for finding in diagnose(given) if finding.check == check), None)


def wrong(rows: list[Any], given: Callable[..., Case]) -> list[str]:
    """Rows of a table whose check says something else at some value."""
    return [
        f"{check}, {key} = {value!r}: {found}, not {expected}"
        for check, key, *first, verdicts, others, settings in rows
        for value, expected in verdicts.items()
        if (found := verdict(check, given(key, value, *first, others=others, settings=settings))) != expected
    ]


def test_bounds_of_a_metric() -> None:
    def given(key: str, value: float, *, others: dict[str, Any], settings: dict[str, Any]) -> Case:
        return case({**others, key: value}, settings)

    assert wrong(METRICS, given) == []
    assert verdict("reward_constant", case({**ALWAYS, "reward/correct": 0.98}, steps=32)) == SEVERE, (
        "a mean without rounding"
    )


def test_bounds_of_a_setting() -> None:
    def given(key: str, value: float, *, others: dict[str, Any], settings: dict[str, Any]) -> Case:
        return case(others, {**settings, key: value})

    assert wrong(SETTINGS, given) == []


def test_bounds_of_the_second_half_beside_the_first() -> None:
    def given(key: str, value: float, first: float, *, others: dict[str, Any], settings: dict[str, Any]) -> Case:
        return case({**others, key: late(first, value)}, settings)

    assert wrong([(*row, {}) for row in SECOND_HALF], given) == []


def test_bounds_of_what_is_paid() -> None:
    """Of a reward from 0 to 1: another completion without an answer earns 1."""

    def found(check: str, right: float, wrong: float, count: int = 40) -> bool:
        rows = [*paid(right=right, wrong=wrong, count=count), {"completion": "none", "answer": "3", "reward": 1.0}]
        return verdict(check, case(examples=rows)) is not None

    assert found("grader_inverted", 0.0, 0.3)
    assert not found("grader_inverted", 0.0, 0.299)
    assert found("grader_inverted", 0.0, 1.0, count=10), "five of each are enough"
    assert not found("grader_inverted", 0.0, 1.0, count=9)
    assert found("reward_blind", 1.0, 0.75)
    assert not found("reward_blind", 1.0, 0.749)
    assert found("reward_blind", 0.2, 0.2)
    assert not found("reward_blind", 0.199, 0.199)
    assert found("reward_blind", 0.25, 0.5)
    assert not found("reward_blind", 0.25, 0.56), "it is inverted"


def test_bounds_of_staleness_and_of_the_test_problems() -> None:
    lags = {1: None, 2: WARNING, 4: WARNING, 5: SEVERE}
    assert {lag: verdict("stale_weights", case(lags={3: 0, 40: lag})) for lag in lags} == lags
    allowed = {"rollouts.staleness": 6}
    lags = {6: None, 7: SEVERE}
    assert {lag: verdict("stale_weights", case({}, allowed, lags={40: lag})) for lag in lags} == lags

    def same(count: int, total: int = 500, **others: Any) -> str | None:
        compared = {"num_unchanged": count, "num_examples": total, "params": {"temperature": 0.0}}
        return verdict("learning_rate_low", replace(case(**others), compared=compared))

    assert (same(474), same(475)) == (None, WARNING)
    assert (same(19, 19), same(20, 20)) == (None, WARNING)
    assert (same(500, steps=9), same(500, steps=10)) == (None, WARNING)
    assert (same(500, changes={"reward/correct": 0.9}), same(500, changes={"reward/correct": 0.91})) == (WARNING, None)
    small = {"evaluation/num_examples": 30.0}
    assert [verdict("evaluation_small", replace(case(small), compared={"num_examples": n})) for n in (199, 200)] == [
        NOTE, None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "changes", "steps"),
    [
        ("reward_constant", ALWAYS, 3),
        ("no_format", {"reward/format": 0.0}, 3),
        ("grading_bound", {"time/grade_seconds": 9.0}, 3),
        ("slow_link", {"weights/sync_seconds": 9.0}, 3),
        ("slow_link", {"weights/late_servers": 1.0}, 3),
        ("not_ahead_enough", {"time/sample_seconds": 9.0, "speed/server_idle_fraction": 0.5}, 3),
        ("entropy_explosion", {"policy/entropy": lambda x: 0.1 + x}, 3),
        ("lost_to_rounding", {"policy/arrived": 0.1}, 4),
        ("gradient_spikes", {"policy/gradient_norm": lambda x: 9.0 if x == 1 else 0.3}, 5),
        ("kl_growth", {"policy/kl": 2.0}, 5),
        ("length_collapse", {LENGTH: late(32.0, 4.0), "reward/correct": 0.3}, 6),
        ("oscillation", {"reward/mean": lambda x: round(x * 9) % 2}, 10),
        ("not_learning", {**FLAT, "reward/mean": 0.3, "reward/correct": 0.3}, 20),
        ("slowing", {"time/step_seconds": late(1.0, 9.0)}, 20),
        ("memory_growth", {"memory/process_gib": lambda x: 2 + 3 * x}, 50),
    ],
)
def test_so_many_steps_are_needed(check: str, changes: dict[str, Any], steps: int) -> None:
    assert verdict(check, case(changes, steps=steps)) is not None
    assert verdict(check, case(changes, steps=steps - 1)) is None


def test_growth_of_the_kl_is_that_of_the_last_twelve_steps() -> None:
    def found(before: float, after: float) -> str | None:
        return verdict("kl_growth", case({"policy/kl": lambda x: before if x < 0.87 else after}))

    assert (found(0.25, 0.375), found(0.25, 0.376)) == (None, WARNING)
    assert (found(0.05, 0.1), found(0.05, 0.101)) == (None, WARNING)
    short = case({"policy/kl": lambda x: 0.2 if x < 0.6 else 0.35}, steps=5)
    assert verdict("kl_growth", short) == WARNING, "the last two of five beside the first two"


def test_spikes_are_above_ten_times_the_median_and_more_than_one_in_twenty_are_a_warning() -> None:
    def found(height: float, count: int) -> str | None:
        high = lambda x: height if x > 0.5 and round(x * 39) < 20 + count else 0.25  # noqa: E731
        return verdict("gradient_spikes", case({"policy/gradient_norm": high}))

    assert (found(2.5, 1), found(2.51, 1), found(2.51, 2), found(2.51, 3)) == (None, NOTE, NOTE, WARNING)


def test_memory_grows_in_every_fifth() -> None:
    def found(*fifths: float) -> str | None:
        grown = {"memory/process_gib": lambda x: fifths[min(4, round(x * 59) // 12)]}
        return verdict("memory_growth", case(grown, steps=60))

    assert found(2.0, 2.2, 2.5, 2.8, 3.1) == WARNING
    assert found(2.0, 2.2, 2.5, 2.8, 3.0) is None, "by half, and no more"
    assert found(2.0, 2.04, 2.5, 2.8, 3.1) is None, "hardly in the first fifth"


def test_chance_is_a_deviation_over_the_root_of_prompts_and_steps() -> None:
    given = case({"reward/std": 0.5}, {"run.prompts_per_step": 4})
    assert reward_noise(given, 25) == pytest.approx(0.5 / 10)
    assert reward_noise(given, 0) == pytest.approx(0.25), "one step at least"
    assert reward_noise(given, 25, spread=0.2) == pytest.approx(0.02)
    assert reward_noise(Case(given.metrics), 2) == pytest.approx(0.5 / 4), "eight prompts without a recipe"
    assert reward_noise(Case([]), 4) == 0.0
    assert reward_span(case({"reward/min": -0.5, "reward/max": 1.5})) == 2.0
    assert reward_span(Case([])) == reward_span(case({"reward/min": 1.0})) == 1.0
    swings = {"reward/mean": lambda x: 0.5 + (0.1 if round(x * 39) % 2 else -0.1), "reward/correct": 0.5}
    assert verdict("oscillation", case({**swings, "reward/std": 0.28})) == WARNING  # a swing of 0.141, twice 0.07
    assert verdict("oscillation", case({**swings, "reward/std": 0.29})) is None
    assert verdict("oscillation", case({**swings, "reward/std": 0.0})) is None


def test_the_interval_of_a_held_out_share_is_that_of_its_examples() -> None:
    for count, width in ((400.0, 0.097), (None, 0.192), (0.0, 0.192)):
        given = case({"evaluation/num_examples": count, "evaluation/correct_fraction": 0.5})
        low, high = validation_interval(given, given.validation("evaluation/correct_fraction"), 0)
        assert high - low == pytest.approx(width, abs=1e-3)
    higher = {"reward/correct": 0.3, "reward/mean": 0.3}
    at_one = {"evaluation.temperature": 1.0}
    for share, said in ((0.493, None), (0.495, WARNING)):  # its interval begins at 0.4495 or 0.4514
        assert verdict("validation_higher", case({**higher, "evaluation/correct_fraction": share}, at_one)) == said


def test_start_and_end_of_a_curve_are_a_fifth_of_its_steps() -> None:
    def curve(length: int) -> Curve:
        return Curve("reward/mean", tuple(range(1, length + 1)), tuple(map(float, range(length))))

    assert [curve(length).window for length in (0, 2, 5, 19, 20, 99, 100, 500)] == [0, 2, 3, 3, 4, 19, 20, 20]
    assert [length for length in range(9) if curve(length).has_two_ends] == [6, 7, 8]
    ten = curve(10)
    assert (ten.start, ten.end, ten.mean, ten.median, ten.best) == (1.0, 8.0, 4.5, 4.5, (7, 8.0))
    first, last = ten.both_ends()
    assert (first.steps, last.steps, ten.over_all().steps, ten.on(2).steps) == ((1, 3), (8, 10), (1, 10), (3, 3))
    assert [item.value for item in (first, last, ten.over_all(), ten.on(2))] == [1.0, 8.0, 4.5, 2.0]
    assert [item.steps for item in curve(5).both_ends()] == [(1, 5)]
    assert Curve("a", (1, 2, 3, 4, 5, 6), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)).best == (0, 1.0), "the first of equals"
