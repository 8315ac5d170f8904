"""Does the planted cause come first, before what follows from it?"""

from __future__ import annotations

from doctor_cases import case, paid

from oncurve.doctor.case import Case, Evidence
from oncurve.doctor.diagnose import CHECKS, check_names, diagnose


def collapsed() -> Case:
    """A learning rate that ruins the policy in the first steps, with all that follows."""
    return case(
        {
            "reward/mean": 0.0,
            "reward/correct": 0.0,
            "reward/max": 0.0,
            "reward/std": 0.0,
            "reward/format": lambda x: 0.6 * (1 - x),
            "group/zero_signal_fraction": 0.95,
            "group/unsolved_fraction": 0.95,
            "group/std_mean": 0.0,
            "completion/mean_tokens": lambda x: 30 + 60 * x,
            "completion/truncated_fraction": lambda x: 0.5 * min(10 * x, 1),
            "policy/entropy": lambda x: 0.1 + 3 * x,
            "policy/skipped_updates": 0.9,
            "evaluation/correct_fraction": lambda x: 0.3 if x == 0 else 0.0,
            "evaluation/any_format_fraction": lambda x: 0.5 if x == 0 else 0.02,
        },
        examples=[],
    )


def test_a_collapse_comes_before_what_follows_from_it() -> None:
    findings = diagnose(collapsed())
    assert findings[0].check == "learning_rate_high"
    assert {finding.check: finding.follows for finding in findings[1:] if finding.severity != "note"} == {
        "too_hard": "learning_rate_high",
        "dead_groups": "learning_rate_high",
        "length_explosion": "learning_rate_high",
        "entropy_explosion": "learning_rate_high",
        "skipped_updates": "learning_rate_high",
    }


def test_a_grader_that_pays_the_opposite_comes_before_the_collapse_that_it_causes() -> None:
    given = collapsed()
    worse = Case(given.metrics, config=given.config, examples=paid(right=0.0, wrong=1.0))
    assert [finding.check for finding in diagnose(worse)][:1] == ["grader_inverted"]


def test_warnings_with_a_cause_of_their_own_come_before_severe_consequences() -> None:
    both = collapsed()
    rows = [{**row, "time/grade_seconds": 5.0} for row in both.metrics]
    order = [(f.check, f.follows) for f in diagnose(Case(rows, config=both.config))]
    assert order[:2] == [("learning_rate_high", None), ("grading_bound", None)]


def test_a_cause_comes_before_a_worse_consequence_of_it_although_it_is_one_itself() -> None:
    """Malformed calls, a warning that truncation explains, are above the dead groups that follow from truncation."""
    found = diagnose(
        case(
            {
                "completion/truncated_fraction": 0.9,
                "episode/malformed_calls": 0.5,
                "episode/ended/turns": 0.5,
                "group/zero_signal_fraction": 0.95,
            }
        )
    )
    places = {finding.check: place for place, finding in enumerate(found)}
    assert all(places[finding.follows] < places[finding.check] for finding in found if finding.follows)
    assert {"calls_malformed", "turns_at_limit", "dead_groups"} <= set(places)


def test_a_kl_term_that_holds_the_policy_is_the_cause_of_weights_that_do_not_move() -> None:
    flat = {"evaluation/correct_fraction": 0.25, "evaluation/any_format_fraction": 0.4, "evaluation/mean_tokens": 31.0}
    still = {**flat, "policy/kl": 0.001, "reward/mean": 0.2, "reward/correct": 0.2}
    found = {one.check: one for one in diagnose(case(still, {"algorithm.kl_coef": 10.0}))}
    assert next(iter(found)) == "kl_too_strong"
    assert found["learning_rate_low"].follows == "kl_too_strong"


def test_groups_that_are_dead_because_a_hole_was_found_follow_from_it() -> None:
    shown = [
        {
            "step": step,
            "prompt": f"How much is {k}?",
            "answer": str(k),
            "reward": reward,
            "completion": text.format(k=k),
        }
        for step, reward, text in ((1, 0.0, "it is {k} </think> <answer> {k} </answer>"), (30, 1.0, "9."))
        for k in range(20, 60)
    ]
    found = diagnose(case({"group/zero_signal_fraction": 0.95}, examples=shown))
    assert [found[0].check, found[1].check, found[1].follows] == ["reward_exploited", "dead_groups", "reward_exploited"]
    assert "give the same answer to different questions" in found[0].what


def test_notes_come_last() -> None:
    findings = diagnose(case({"evaluation/num_examples": 30.0, "policy/skipped_updates": 0.2}))
    assert [finding.severity for finding in findings] == ["warning", "note"]


def test_what_a_check_follows_from_is_a_check() -> None:
    names = list(check_names())
    assert len(set(names)) == len(names)
    for check in CHECKS:
        assert set(check.follows) <= set(names) - {check.name}


def test_no_finding_can_follow_from_itself_in_a_circle() -> None:
    above: set[str] = set()
    for check in CHECKS:
        assert set(check.follows) <= above, check.name
        above.add(check.name)


def test_evidence_reads_like_a_sentence() -> None:
    assert str(Evidence("reward/mean", 0.25, (1, 3))) == "reward/mean = 0.25 (steps 1 to 3)"
    assert str(Evidence("policy/kl", 0.1, (4, 4))) == "policy/kl = 0.1 (step 4)"
    assert str(Evidence("optimizer.learning_rate", 1e-4)) == "optimizer.learning_rate = 0.0001"


def test_a_supervised_stage_is_judged_by_the_checks_that_need_no_reward() -> None:
    changes = {"policy/nonfinite_updates": 0.5, "reward/error_fraction": 0.5, "time/step_seconds": lambda x: 1 + 9 * x}
    given = case(changes)
    both = Case(given.metrics, config={**given.config, "sft": {"epochs": 1}})
    assert [finding.check for finding in diagnose(both)] == ["not_finite", "slowing"]
    assert "grader_errors" in [finding.check for finding in diagnose(given)]
