"""Checks of the reward: hacking, failing graders, and rewards that disagree with validation accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, pvariance

from oncurve.core.records import EQUAL_WITHIN
from oncurve.doctor.case import Case, Curve, Evidence, Finding
from oncurve.rewards.answer_locations import marked_answer
from oncurve.rewards.grammar.equality import exact_number
from oncurve.stats import share_interval

MIN_AUDITED = 5
"""Right and wrong answers, each, below which the grader is not judged."""


def grader_errors(case: Case) -> Finding | None:
    """Completions that the grader could not grade: more than 1 %, severe from 5 %."""
    errors = max((case.curve("reward/error_fraction"), case.validation("evaluation/error_fraction")), key=_mean_or_zero)
    if not errors or errors.mean <= 0.01:
        return None
    timeouts = case.curve("reward/timeout_fraction")
    evidence = [errors.over_all(), *([timeouts.over_all()] if timeouts and timeouts.mean > 0 else [])]
    is_slow = bool(timeouts) and timeouts.mean > 0.5 * errors.mean
    return Finding(
        severity="severe" if errors.mean >= 0.05 else "warning",
        what="The reward function fails on some completions; these are skipped",
        evidence=tuple(evidence),
        do="Make it faster or give it more time: most failures are timeouts."
        if is_slow
        else "Fix it: a failure should not count as a wrong answer. Tracebacks are in log.txt, errors in rollouts/.",
    )


def reward_constant(case: Case) -> Finding | None:
    """Lowest and highest reward of all steps are equal, while the answers are not known to be all equal."""
    low, high = case.curve("reward/min"), case.curve("reward/max")
    if min(len(low), len(high)) < 3 or max(high.values) - min(low.values) >= EQUAL_WITHIN:
        return None
    right, wrong, rewards = _explicit(case)
    forms, correct = case.curve("reward/format"), case.curve("reward/correct")
    is_known_unequal = min(len(right), len(wrong)) >= MIN_AUDITED and len(set(rewards)) == 1
    if forms and forms.mean < 0.02:  # then the form is what is missing, and the reward is right to be constant
        return None
    if correct and (correct.mean < 0.02 or correct.mean > 0.98) and not is_known_unequal:
        return None
    do = "Correct the reward function: it must distinguish right from wrong answers. Test it with `oncurve check`."
    if max(high.values) > min(low.values):
        do = (
            f"Scale the reward up, to a range near 1: rewards that differ by less than {EQUAL_WITHIN:g} count as equal."
        )
    return Finding(
        severity="severe",
        what="Every completion of every step earns the same reward, so nothing can be learned",
        evidence=(low.over_all(), high.over_all(), *(_audit_evidence(right, wrong) if is_known_unequal else ())),
        do=do,
    )


def no_format(case: Case) -> Finding | None:
    """Hardly any completion has the form that the reward asks for, although not nearly all of them are cut off."""
    form, cut = case.curve("reward/format"), case.curve("completion/truncated_fraction")
    if len(form) < 3 or form.start >= 0.02 or form.mean >= 0.02 or (cut and cut.mean >= 0.9):
        return None
    return Finding(
        severity="severe",
        what="No completion has the format that the reward expects, so no answer is ever counted",
        evidence=(form.over_all(), *case.configured("data.template")),
        do="Make prompt and reward use the same format (data.template, rewards); show examples (data.few_shot), or "
        "start from a model that knows the format.",
    )


def grader_inverted(case: Case) -> Finding | None:
    """Completions with a wrong number earn clearly more than those with the right one: by 0.3 of the rewards' range."""
    audit = _audit(case)
    if audit is None:
        return None
    right, wrong, span, _ = audit
    if fmean(wrong) - fmean(right) < 0.3 * span:
        return None
    return Finding(
        severity="severe",
        what="Wrong answers earn more reward than right ones",
        evidence=_audit_evidence(right, wrong),
        do="Look for a negative weight, swapped arguments, or an inverted comparison in the reward.",
    )


def reward_blind(case: Case) -> Finding | None:
    """Completions with the right number earn hardly more than those with a wrong one: 0.25 of the range, or chance."""
    audit = _audit(case)
    if audit is None:
        return None
    right, wrong, span, low = audit
    gain = fmean(right) - fmean(wrong)
    chance = 2 * (pvariance(right) / len(right) + pvariance(wrong) / len(wrong)) ** 0.5
    if gain < -0.3 * span or gain > max(0.25 * span, chance) or fmean(wrong) - low < 0.2 * span:
        return None
    return Finding(
        severity="severe",
        what="The reward hardly depends on whether the answer is right",
        evidence=_audit_evidence(right, wrong),
        do="Add a reward for the right answer (such as r1_zero or mathematics) that outweighs the others.",
    )


def reward_hacking(case: Case) -> Finding | None:
    """The reward rises in training, and neither answers nor a reward that is not trained on get better."""
    reward = case.curve("reward/mean")
    if not _has_risen(case, reward):
        return None
    evidence = _unpaid_reward(case)
    if not evidence and _is_validation_flat(case) and not _has_risen(case, case.curve("reward/correct")):
        validation = validation_answers(case)
        evidence = (validation.on(0), validation.on(-1))
    if not evidence:
        return None
    return Finding(
        severity="severe",
        what="The reward rises but the answers do not get better: the policy exploits the reward",
        evidence=(*reward.both_ends(), *evidence),
        do="Read completions with a high reward, close the loophole, and let correctness outweigh everything else. "
        "Restart from an earlier checkpoint.",
    )


def overfitting(case: Case) -> Finding | None:
    """Accuracy rises on training prompts, to above that on validation ones, which does not rise beyond its interval."""
    correct, validation = case.curve("reward/correct"), validation_answers(case)
    if not _has_risen(case, correct) or not _is_validation_flat(case) or validation.values[0] > 0.9:
        return None
    high = validation_interval(case, validation, -1)[1]
    if correct.end - correct.start <= high - validation.values[0] or correct.end <= high:
        return None
    return Finding(
        severity="warning",
        what="Accuracy rises on training prompts but not on validation ones: prompts are memorized, the two sets "
        "differ, or the reward is exploited",
        evidence=(*correct.both_ends(), validation.on(0), validation.on(-1)),
        do="Use more training prompts and fewer passes over them; read completions that are counted as correct.",
    )


def format_only(case: Case) -> Finding | None:
    """The form is learned: it rose by 0.2 or more, and the fraction of right answers in any form did not rise."""
    form, validation = case.curve("reward/format"), case.validation("evaluation/any_format_fraction")
    if not form.has_two_ends or form.end < 0.8 or len(validation) < 2:
        return None
    if form.end - form.start < max(0.2, 2.5 * reward_noise(case, form.window, spread=0.5)):
        return None
    if validation.values[-1] > validation_interval(case, validation, 0)[1]:
        return None
    return Finding(
        severity="warning",
        what="The model has learned the format but not the answers",
        evidence=(*form.both_ends(), validation.on(0), validation.on(-1)),
        do="Train longer with more completions per prompt; give no reward for the format alone.",
    )


def validation_higher(case: Case) -> Finding | None:
    """Validation accuracy is above that of training by 0.15 although both are sampled alike."""
    correct, validation = case.curve("reward/correct"), case.validation("evaluation/correct_fraction")
    if (
        not correct
        or len(validation) < 2
        or case.number("evaluation.temperature") != case.number("rollouts.temperature")
    ):
        return None
    if validation_interval(case, validation, -1)[0] - correct.end < 0.15:
        return None
    return Finding(
        severity="warning",
        what="Validation problems are solved more often than training problems at the same sampling settings",
        evidence=(correct.at_end(), validation.on(-1)),
        do="Look for validation problems in the training data (`oncurve check`), or for an easier validation set.",
    )


def evaluation_small(case: Case) -> Finding | None:
    """Fewer than 200 validation examples, and test problems: the 95 % interval is wider than about 14 points."""
    count, validation = case.validation("evaluation/num_examples"), case.validation("evaluation/correct_fraction")
    if not count or not validation or max(count.values[-1], case.compared.get("num_examples", 0)) >= 200:
        return None
    return Finding(
        severity="note",
        what="The validation set is small: differences of several points may be noise",
        evidence=(count.on(-1), validation.on(-1)),
        do="Evaluate on 500 or more problems (evaluation.num_prompts) before you trust a difference.",
    )


def validation_answers(case: Case) -> Curve:
    """Validation accuracy: in any form if that was measured, since it does not depend on the reward's own grader."""
    lenient, strict = case.validation("evaluation/any_format_fraction"), case.validation("evaluation/correct_fraction")
    return lenient if len(lenient) >= len(strict) else strict


def validation_interval(case: Case, curve: Curve, index: int) -> tuple[float, float]:
    """The 95 % interval of a validation share, from the number of examples; 100 where it was not recorded."""
    counts = case.validation("evaluation/num_examples")
    return share_interval(curve.values[index], counts.values[-1] if counts and counts.values[-1] >= 1 else 100.0)


def reward_noise(case: Case, steps: int, *, spread: float | None = None) -> float:
    """Largest standard deviation that chance alone gives a mean over ``steps`` steps: std / sqrt(prompts * steps).

    The completions of a prompt are taken as fully dependent, hence "largest"; ``spread`` None is the rewards' own.
    8 prompts are assumed without a recipe.
    """
    measured, prompts = case.curve("reward/std"), case.number("run.prompts_per_step")
    deviation = spread if spread is not None else measured.mean if measured else 0.0
    per_step = prompts if prompts == prompts and prompts > 0 else 8.0
    return deviation / (per_step * max(steps, 1)) ** 0.5


def reward_span(case: Case) -> float:
    """Distance between the lowest and the highest reward of the run; 1 where none was recorded or all were equal."""
    lowest, highest = case.curve("reward/min"), case.curve("reward/max")
    return (max(highest.values) - min(lowest.values) if lowest and highest else 0.0) or 1.0


def _has_risen(case: Case, curve: Curve) -> bool:
    """The end is above the start by a twentieth of the rewards' span and by more than chance."""
    if not curve.has_two_ends:
        return False
    return curve.end - curve.start > max(2.5 * reward_noise(case, curve.window), 0.05 * reward_span(case))


def _is_validation_flat(case: Case) -> bool:
    """Two evaluations or more, and the last is in no form clearly above the first: half the way to its upper end."""
    keys = ("evaluation/correct_fraction", "evaluation/any_format_fraction")
    curves = [curve for key in keys if len(curve := case.validation(key)) >= 2]
    return bool(curves) and all(
        curve.values[-1] <= (curve.values[0] + validation_interval(case, curve, 0)[1]) / 2 for curve in curves
    )


def _unpaid_reward(case: Case) -> tuple[Evidence, ...]:
    """Evidence that a reward that is graded and never trained on has fallen by more than 0.05, or nothing."""
    for curve in case.curves("reward/held_out/"):
        if curve.has_two_ends and curve.end < curve.start - max(2.5 * reward_noise(case, curve.window), 0.05):
            return curve.both_ends()
    return ()


def _mean_or_zero(curve: Curve) -> float:
    return curve.mean if curve else 0.0


def _audit(case: Case) -> tuple[list[float], list[float], float, float] | None:
    """Rewards of right and wrong explicit answers, the range of all rewards and the lowest; None if too few, or if no
    reward looks at answers.

    The same completion of the same problem counts once: a group of copies is no further evidence.
    """
    right, wrong, rewards = _explicit(case)
    span = max(rewards, default=0.0) - min(rewards, default=0.0)
    if span < 1e-9 or min(len(right), len(wrong)) < MIN_AUDITED or not case.pays_answers:
        return None
    return right, wrong, span, min(rewards)


def _explicit(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Rewards of completions whose explicit answer is right, of those where it is wrong, and of all."""
    rewarded = list(dict.fromkeys(_rewarded(case)))
    right = [reward for *_, is_right, reward in rewarded if is_right is True]
    wrong = [reward for *_, is_right, reward in rewarded if is_right is False]
    return right, wrong, [reward for *_, reward in rewarded]


def _rewarded(case: Case) -> Iterator[tuple[str, str, bool | None, float]]:
    """Completion, reference, whether the explicit answer is its number (None if either has none), and the reward."""
    for example in case.examples:
        reward, text, answer = example.get("reward"), example.get("completion"), example.get("answer")
        if isinstance(reward, (int, float)) and isinstance(text, str) and isinstance(answer, str):
            stated = marked_answer(text)
            number, gold = exact_number(stated) if stated else None, exact_number(answer)
            yield text, answer, (None if number is None or gold is None else number == gold), float(reward)


def _audit_evidence(right: list[float], wrong: list[float]) -> tuple[Evidence, ...]:
    return (
        Evidence(f"mean reward of {len(right)} completions with the right number", fmean(right)),
        Evidence(f"mean reward of {len(wrong)} completions with a wrong number", fmean(wrong)),
    )
