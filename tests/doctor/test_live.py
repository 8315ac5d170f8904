"""Is a person told of every trouble once, as it happens?"""

from __future__ import annotations

import pytest
from doctor_cases import CONFIG, case, paid

from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.doctor.case import Finding
from oncurve.doctor.diagnose import MIN_STEPS, QUIET_STEPS, Alarms, alarm_text, examples_of


def watch(alarms: Alarms, metrics: list[dict[str, float]]) -> list[tuple[int, str, str]]:
    return [(row["step"], f.check, f.severity) for row in metrics for f in alarms.observe(row["step"], row)]  # type: ignore[misc]


def test_a_healthy_run_raises_no_alarm_at_any_step() -> None:
    assert watch(Alarms(CONFIG), list(case().metrics)) == []


def test_an_alarm_is_told_when_it_starts_and_only_once() -> None:
    rows = list(case({"reward/error_fraction": lambda x: 0.0 if x < 0.5 else 0.04}).metrics)
    told = watch(Alarms(CONFIG), rows)
    assert [check for _, check, _ in told] == ["grader_errors"]
    assert told[0][0] > 20


def test_an_alarm_that_gets_worse_is_told_again() -> None:
    rows = list(case({"policy/clip_fraction": lambda x: 0.2 + x}).metrics)
    assert [severity for _, check, severity in watch(Alarms(CONFIG), rows) if check == "clipping"] == [
        "warning",
        "severe",
    ]


def test_a_second_excursion_is_told_again() -> None:
    def unsolved(x: float) -> float:
        return 0.9 if x < 0.3 or x > 0.7 else 0.0

    told = watch(
        Alarms(CONFIG),
        list(case({"group/unsolved_fraction": unsolved, "group/zero_signal_fraction": unsolved}).metrics),
    )
    assert [severity for _, _, severity in told] == ["severe", "warning", "severe"]
    assert {check for _, check, _ in told} == {"too_hard"}
    assert told[1][0] - told[0][0] > QUIET_STEPS


def test_an_excursion_is_over_after_five_steps_without_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Finding] = []
    monkeypatch.setattr("oncurve.doctor.diagnose.diagnose", lambda case: found)
    alarms = Alarms(CONFIG)
    told = []
    for step, severity in (
        (4, "warning"),
        (9, "warning"),
        (15, "warning"),
        (16, "severe"),
        (17, "warning"),
        (18, "note"),
    ):
        found[:] = [Finding(severity=severity, what="a", evidence=(), do="b.", check="clipping")]
        told += [step for _ in alarms.observe(step, {})]
    assert told == [4, 15, 16]


def test_alarms_know_the_recipe() -> None:
    rows = list(case({"group/zero_signal_fraction": 0.7}, steps=8).metrics)
    narrow = {**CONFIG, "rollouts": {**CONFIG["rollouts"], "temperature": 0.1}}
    told = [[check for _, check, _ in watch(Alarms(config), rows)] for config in (CONFIG, narrow, None)]
    assert ["sampling_narrow" in checks for checks in told] == [False, True, False]


def test_the_first_steps_are_left_in_peace() -> None:
    alarms = Alarms(CONFIG)
    rows = list(case({"policy/clip_fraction": 0.9}).metrics)
    assert watch(alarms, rows[:MIN_STEPS]) == []
    assert [check for _, check, _ in watch(alarms, rows[MIN_STEPS:])] == ["clipping"]


def test_consequences_and_notes_are_left_to_the_command() -> None:
    given = {
        "reward/min": 1.0,
        "reward/max": 1.0,
        "reward/correct": None,
        "reward/format": None,
        "policy/skipped_updates": 1.0,
        "group/zero_signal_fraction": 1.0,
        "evaluation/num_examples": 30.0,
    }
    assert [check for _, check, _ in watch(Alarms(CONFIG), list(case(given).metrics))] == ["reward_constant"]


def test_an_evaluation_that_comes_later_belongs_to_its_step() -> None:
    alarms = Alarms(CONFIG)
    rows = list(case().metrics)
    watch(alarms, rows[:11])
    assert alarms.observe(10, {"evaluation/error_fraction": 0.5})[0].check == "grader_errors"


def test_completions_that_are_handed_in_tell_of_a_grader_that_pays_the_opposite() -> None:
    alarms = Alarms(CONFIG)
    rows = list(case().metrics)
    watch(alarms, rows[:6])
    told = alarms.observe(6, rows[6], examples=paid(right=0.0, wrong=1.0))
    assert [finding.check for finding in told] == ["grader_inverted"]


def test_examples_are_what_was_sampled_and_paid() -> None:
    prompt = Prompt(text="2+2?", prompt_ids=(1,), index=3, row={"answer": "4"})
    completion = Completion(
        prompt_ids=(1,),
        token_ids=(7,),
        text="4",
        sampler_logprobs=(-0.5,),
        finish_reason="stop",
        policy_version=0,
        index=0,
    )
    [example] = examples_of([Group(prompt, (completion,))], [[Reward(1.0)]])
    assert example == {"completion": "4", "prompt": "2+2?", "answer": "4", "reward": 1.0}
    for rewards in ([], [[]]):
        with pytest.raises(ValueError, match="zip"):
            examples_of([Group(prompt, (completion,))], rewards)


def test_a_long_run_is_remembered_in_part() -> None:
    alarms = Alarms(CONFIG)
    for step in range(1, 1200):
        alarms._rows[step] = {"step": step}
    alarms.observe(1200, {"reward/mean": 0.5})
    assert len(alarms._rows) == 320
    assert {1, 20, 901, 1200} <= set(alarms._rows)


def test_an_alarm_is_a_line_with_numbers_and_a_remedy() -> None:
    rows = list(case({"policy/clip_fraction": 0.9}).metrics)
    alarms = Alarms(CONFIG)
    told = [finding for row in rows for finding in alarms.observe(row["step"], row)]
    assert alarm_text(told[0]).startswith("SEVERE: Most of the gradient is clipped away")
    assert "policy/clip_fraction = 0.9 (steps 1 to 4)" in alarm_text(told[0])
    assert told[0].do in alarm_text(told[0])
    assert alarm_text(told[0]).count(" = ") == 2, "the two numbers that it rests on first"
    assert len(told[0].evidence) > 2
