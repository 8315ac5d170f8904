"""Checks of the policy: divergence, entropy collapse, stalled updates, stale or mismatched sampler weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

from oncurve.doctor.case import Case, Curve, Evidence, Finding
from oncurve.doctor.grading import reward_noise, reward_span, validation_answers, validation_interval
from oncurve.stats import kendall_trend

WATCHED = ("policy/loss", "policy/gradient_norm", "policy/entropy", "policy/kl", "policy/ratio_mean", "reward/mean")
"""Metrics that must be numbers in every step in which they are measured. The loss is read for nothing else."""

HEAVY_BONUS = 0.1
"""An entropy coefficient ten times the largest in common use."""


def not_finite(case: Case) -> Finding | None:
    """A loss, gradient, entropy, KL, ratio or reward that is no finite number, or updates left out for that."""
    values = [(step, key) for key in WATCHED for step in case.columns.broken(key) if step > 0]
    broken = [
        Evidence(key, "not a finite number", (step, step)) for step, key in sorted(values, key=lambda pair: pair[0])
    ]
    left_out = case.curve("policy/nonfinite_updates")
    skipped = [left_out.on(index) for index, value in enumerate(left_out.values) if value > 0]
    if not broken and not skipped:
        return None
    return Finding(
        severity="severe" if broken or left_out.mean > 0.02 else "warning",
        what="Training has produced numbers that are not finite",
        evidence=(*broken[:5], *skipped[:3]),
        do="Restart from a checkpoint before that step and lower optimizer.learning_rate; if it happens in the first "
        "steps, look for a reward that is not finite or for 16-bit overflow (policy.compute_type).",
    )


def learning_rate_high(case: Case) -> Finding | None:
    """The policy collapses: validation answers fall below the base, or the reward to half its best."""
    evidence = _test_fall(case) or _validation_fall(case) or _reward_fall(case)
    if not evidence:
        return None
    curves = (case.curve("policy/gradient_norm"), case.curve("policy/entropy"))
    return Finding(
        severity="severe",
        what="The policy has collapsed: answers are worse than before. The usual cause is too high a learning rate",
        evidence=(
            *evidence,
            *(curve.over_all() for curve in curves if curve),
            *case.configured("optimizer.learning_rate"),
        ),
        do="Restart from a checkpoint before the drop, divide optimizer.learning_rate by 10, warm it up "
        "(optimizer.warmup_updates), make fewer updates on a batch, take more prompts per step, and keep "
        "max_gradient_norm at 1 or below.",
    )


def learning_rate_low(case: Case) -> Finding | None:
    """Greedy answers stay the same, all validation ones or 95 % of the test's, although groups have a signal."""
    if not case.curve("group/std_mean").mean > 0.01:
        return None
    same = _same_validation(case)
    evidence = same or _same_on_test(case)
    if not evidence:
        return None
    return Finding(
        severity="severe" if same else "warning",
        what=f"The weights hardly move: {'the' if same else 'nearly all'} greedy answers to "
        f"{'validation' if same else 'test'} problems are the same as before training",
        evidence=(*evidence, *case.configured("optimizer.learning_rate")),
        do="Raise optimizer.learning_rate tenfold until something changes: 1e-6 is common for large models, 1e-5 and "
        "more for small ones and for LoRA, 1e-4 for those of a few million weights.",
    )


def lost_to_rounding(case: Case) -> Finding | None:
    """The copies of the weights that sample show less than nine tenths of what the updates changed."""
    arrived = case.curve("policy/arrived")
    if len(arrived) < 4 or arrived.end > 0.9:
        return None
    return Finding(
        severity="severe" if arrived.end < 0.5 else "warning",
        what="Updates are lost to rounding: the policy that samples shows a part of what was learned",
        evidence=(
            *arrived.both_ends(),
            *case.configured("policy.rounding"),
            *case.configured("optimizer.learning_rate"),
        ),
        do="Set policy.rounding to dither, or policy.compute_type to float32. A learning rate that was chosen with "
        "rounding to the nearest is too high without it: begin with a third.",
    )


RISEN = 3.0
"""Standard errors of a rise at any one step from which chance is none."""


def _rise(case: Case, values: Sequence[float]) -> float:
    """The largest rise of the mean reward from the steps before a step to those from it on, in standard errors.

    A run that learns within its first steps has it where the two ends and the trend show none.
    """
    noise = reward_noise(case, 1)
    return max(
        (fmean(values[k:]) - fmean(values[:k])) / (noise * math.sqrt(1 / k + 1 / (len(values) - k)) or math.inf)
        for k in range(1, len(values))
    )


def not_learning(case: Case) -> Finding | None:
    """Over 20 steps and more no reward, validation or test has risen beyond chance, although groups have a signal."""
    reward, dead = case.curve("reward/mean"), case.curve("group/zero_signal_fraction")
    if len(reward) < 20 or not dead or dead.mean > 0.6 or case.curve("reward/correct").end > 0.9:
        return None
    validation = validation_answers(case)
    if len(validation) > 1 and validation.values[-1] > validation_interval(case, validation, 0)[1]:
        return None
    if any(row["change"] > 0 and (row["p_value"] or 0.0) < 0.05 for _, _, row in _test_changes(case)):
        return None
    noise, trend, span = reward_noise(case, reward.window), kendall_trend(reward.values), reward_span(case)
    room = max(case.curve("reward/max").values, default=math.inf) - reward.end
    if room <= max(2 * noise, 0.1 * span) or abs(trend) > 2:  # at the top, or a rise that two ends do not show
        return None
    if abs(reward.end - reward.start) > max(2 * noise, 0.02 * span) or _rise(case, reward.values) > RISEN:
        return None
    return Finding(
        severity="warning",
        what="The reward has not risen beyond chance yet, although groups carry a signal",
        evidence=(
            *reward.both_ends(),
            Evidence("deviation of such a mean by chance, at most", noise),
            Evidence("trend over all steps, in standard deviations of chance", trend),
            dead.over_all(),
            *case.configured("optimizer.learning_rate"),
        ),
        do="Take more prompts per step (run.prompts_per_step) and larger groups: the gradient of few or short "
        "completions is mostly noise. Then train longer, and while late completions look healthy, raise "
        "optimizer.learning_rate threefold. Check whether the reward is noise; the loss does not show it.",
    )


def oscillation(case: Case) -> Finding | None:
    """From step to step the reward jumps by more than twice what sampling prompts explains."""
    reward, noise = case.curve("reward/mean"), reward_noise(case, 1)
    if len(reward) < 10 or noise <= 0:
        return None
    jumps = [after - before for before, after in pairwise(reward.values)]
    swing = pstdev(jumps) / math.sqrt(2)
    if swing <= 2 * noise:
        return None
    return Finding(
        severity="warning",
        what="The reward swings wildly from step to step",
        evidence=(
            reward.over_all(),
            Evidence("swing of reward/mean between steps", swing),
            Evidence("swing that chance explains at most", noise),
        ),
        do="Lower optimizer.learning_rate, or use more prompts per step (run.prompts_per_step).",
    )


def gradient_spikes(case: Case) -> Finding | None:
    """Gradient norms above ten times their median."""
    norms = case.curve("policy/gradient_norm")
    if len(norms) < 5:
        return None
    usual = norms.median
    spikes = [index for index, value in enumerate(norms.values) if value > 10 * usual > 0]
    if not spikes:
        return None
    return Finding(
        severity="warning" if len(spikes) > 0.05 * len(norms) else "note",
        what="The gradient has spikes",
        evidence=(Evidence("median of policy/gradient_norm", usual), *(norms.on(k) for k in spikes[:3])),
        do="Keep optimizer.max_gradient_norm at 1 or below, lower the learning rate, or warm it up for longer.",
    )


def clipping(case: Case) -> Finding | None:
    """Clipping removes the gradient of a fifth of the trained tokens and more; of a twentieth if it is very narrow."""
    clipped = case.curve("policy/clip_fraction")
    if not clipped or clipped.mean <= (0.05 if _is_narrow(case) else 0.2):
        return None
    return Finding(
        severity="severe" if clipped.mean > 0.4 else "warning",
        what="Most of the gradient is clipped away: too many updates on one batch",
        evidence=(
            clipped.over_all(),
            *case.configured("run.completions_per_update"),
            *case.configured("algorithm.clip_low"),
            *case.configured("algorithm.clip_high"),
        ),
        do="Make fewer updates on each batch (raise run.completions_per_update), lower the learning rate, or widen "
        "the clip (0.2 is common for ratios of tokens).",
    )


def kl_growth(case: Case) -> Finding | None:
    """KL to the reference above 0.1 nats and growing by half within twelve steps, or above 1 nat."""
    kl = case.curve("policy/kl")
    if len(kl) < 5:
        return None
    width, first = min(5, len(kl) // 2), max(0, len(kl) - 12)
    before, now = median(kl.values[first : first + width]), median(kl.values[-width:])
    is_growing = now > 0.1 and now > 1.5 * before
    if not is_growing and kl.end <= 1.0:
        return None
    return Finding(
        severity="warning",
        what="The policy drifts away from the reference: the KL is high and growing"
        if is_growing
        else "The policy is far from the reference: the KL is high",
        evidence=(
            Evidence("median of policy/kl", before, (kl.steps[first], kl.steps[first + width - 1])),
            Evidence("median of policy/kl", now, (kl.steps[-width], kl.steps[-1])),
            *(() if is_growing else (kl.at_end(),)),
            *case.configured("algorithm.kl_coef"),
        ),
        do="Raise algorithm.kl_coef (doubling it is a start; lowering it would speed the drift), or lower the "
        "learning rate; if answers got worse, restart from an earlier checkpoint.",
    )


def kl_too_strong(case: Case) -> Finding | None:
    """A KL coefficient of 1 or more holds the policy at the reference: the KL is near 0 and the reward is flat."""
    kl, reward = case.curve("policy/kl"), case.curve("reward/mean")
    if not case.number("algorithm.kl_coef") >= 1 or not kl or kl.mean > 0.01 or not reward.has_two_ends:
        return None
    if reward.end - reward.start > 2 * reward_noise(case, reward.window):
        return None
    return Finding(
        severity="warning",
        what="The KL term holds the policy where it started",
        evidence=(kl.over_all(), *reward.both_ends(), *case.configured("algorithm.kl_coef")),
        do="Lower algorithm.kl_coef: 0 to 0.04 is usual where the reward can be verified.",
    )


def entropy_bonus(case: Case) -> Finding | None:
    """With an entropy bonus the entropy triples and rises by 0.3 nats; or a bonus of 0.1 and more, and answers fall."""
    entropy, weight = case.curve("policy/entropy"), case.number("algorithm.entropy_coef")
    fall = (_test_fall(case) or _validation_fall(case) or _reward_fall(case)) if weight >= HEAVY_BONUS else ()
    if not weight > 0 or not entropy or not (_has_exploded(entropy) or fall):
        return None
    return Finding(
        severity="severe" if fall or entropy.end > 1.0 or entropy.best[1] > 1.0 else "warning",
        what="The entropy bonus drives the policy towards random tokens",
        evidence=(entropy.on(0), entropy.at_end(), *(fall or ()), *case.configured("algorithm.entropy_coef")),
        do="Lower algorithm.entropy_coef tenfold, or set a target instead (algorithm.entropy_target).",
    )


def entropy_explosion(case: Case) -> Finding | None:
    """The entropy has tripled and risen by 0.3 nats."""
    entropy = case.curve("policy/entropy")
    if not _has_exploded(entropy):
        return None
    return Finding(
        severity="warning",
        what="The entropy rises: the policy becomes more random",
        evidence=(entropy.on(0), entropy.at_end()),
        do="Lower the learning rate; look for a noisy reward; lower algorithm.entropy_coef if used.",
    )


def entropy_collapse(case: Case) -> Finding | None:
    """The entropy fell below a tenth of its start and groups lost their signal while many answers are still wrong."""
    entropy, dead = case.curve("policy/entropy"), case.curve("group/zero_signal_fraction")
    if not entropy.has_two_ends or not dead or entropy.end >= 0.1 * entropy.start or dead.end < 0.5:
        return None
    if dead.end < dead.start + 0.2 or case.curve("reward/correct").end > 0.9:
        return None
    return Finding(
        severity="warning",
        what="Entropy has collapsed: the completions of a prompt are all the same, right or wrong",
        evidence=(*entropy.both_ends(), *dead.both_ends()),
        do="Raise algorithm.clip_high (0.28), sample at temperature 1, add an entropy target "
        "(algorithm.entropy_target), lower the learning rate, or take larger groups.",
    )


def stale_weights(case: Case) -> Finding | None:
    """Completions come from weights more than one step older than those they train, and than the recipe allows."""
    allowed = case.setting("rollouts.staleness") or 0
    if not case.lags or max(case.lags.values()) <= max(1, allowed):
        return None
    worst = max(case.lags, key=lambda step: case.lags[step])
    return Finding(
        severity="severe" if case.lags[worst] > max(4, allowed) else "warning",
        what="Completions were sampled from stale weights",
        evidence=(Evidence("steps between sampling and training", float(case.lags[worst]), (worst, worst)),),
        do="Make sure that every rollout server has the newest weights; allow less staleness, or correct for it "
        "(algorithm.correction).",
    )


def too_far_ahead(case: Case) -> Finding | None:
    """Sampling is ahead of training, and less than 0.7 of the tokens count as samples of the policy that is trained."""
    effective = case.curve("mismatch/effective_sample_fraction")
    if not case.setting("rollouts.staleness") or len(effective) < 3 or effective.end >= 0.7:
        return None
    return Finding(
        severity="warning",
        what="Sampling is too far ahead of training: the policy has moved away from what it trains on",
        evidence=(*effective.both_ends(), *case.configured("rollouts.staleness")),
        do="Lower rollouts.staleness or the learning rate, and correct for the difference "
        "(algorithm.correction=truncate).",
    )


def mismatch(case: Case) -> Finding | None:
    """Sampler and trainer disagree about the same tokens: KL above 0.01 nats, or effective sample below 0.8."""
    kl, effective = case.curve("mismatch/kl"), case.curve("mismatch/effective_sample_fraction")
    is_apart, is_thin = bool(kl) and kl.mean > 0.01, bool(effective) and effective.mean < 0.8
    if not is_apart and not is_thin:
        return None
    is_severe = (bool(kl) and kl.mean > 0.1) or (bool(effective) and effective.mean < 0.5)
    return Finding(
        severity="severe" if is_severe else "warning",
        what="Sampler and trainer disagree about the probability of the sampled tokens",
        evidence=tuple(curve.over_all() for curve in (kl, effective, case.curve("mismatch/max_ratio")) if curve),
        do="Make sure that both have the same weights, precision and temperature; correct for the rest "
        "(algorithm.correction truncate).",
    )


def _test_changes(case: Case) -> list[tuple[str, float, Mapping[str, Any]]]:
    """Rows of the comparison of base and trained model on the test problems, each with its name and its range."""
    rows = [row for row in case.compared.get("rows", ()) if row["name"] == "correct"]
    changes = [("correct on test problems", 1.0, row) for row in rows]
    if not case.compared.get("is_binary", True):
        changes.append(("mean reward on test problems", reward_span(case), case.compared["reward"]))
    return changes


def _test_fall(case: Case) -> tuple[Evidence, ...]:
    """Evidence that the test problems are answered clearly worse than by the base: by a twentieth and at p < 0.01."""
    for name, span, row in _test_changes(case):
        p_value = row["p_value"]
        if p_value is not None and p_value < 0.01 and row["change"] < -0.05 * span:
            before, after = (
                side["value"] if "value" in side else side["successes"] / side["total"]
                for side in (row["before"], row["after"])
            )
            return (
                Evidence(f"{name}, before", before), Evidence(f"{name}, after", after), Evidence("p, paired", p_value)
            )  # fmt: skip
    return ()


def _same_validation(case: Case) -> tuple[Evidence, ...]:
    """Evidence that greedy validation completions have the same lengths and results in three evaluations and more."""
    curves = (case.validation("evaluation/mean_tokens"), validation_answers(case))
    if case.number("evaluation.temperature") != 0 or any(
        len(set(curve.values)) != 1 or len(curve) < 3 for curve in curves
    ):
        return ()
    return tuple(Evidence(curve.key, curve.values[0], (curve.steps[0], curve.steps[-1])) for curve in curves)


def _same_on_test(case: Case) -> tuple[Evidence, ...]:
    """Evidence that after ten steps and more 95 % of the greedy test completions are the base's, and not for being
    right already."""
    same, total = case.compared.get("num_unchanged", 0), case.compared.get("num_examples", 0)
    is_greedy = case.compared.get("params", {}).get("temperature") == 0
    if len(case.curve("reward/mean")) < 10 or not is_greedy or total < 20 or same < 0.95 * total:
        return ()
    if case.curve("reward/correct").end > 0.9:
        return ()
    return (Evidence("unchanged completions of test problems", same / total), case.curve("group/std_mean").over_all())


def _validation_fall(case: Case) -> tuple[Evidence, ...]:
    """Evidence that the last evaluation is worse than the first by more than chance, or nothing."""
    validation = validation_answers(case)
    if len(validation) < 2 or validation.steps[0] != 0:
        return ()
    low, high = validation_interval(case, validation, 0)[0], validation_interval(case, validation, -1)[1]
    return (validation.on(0), validation.on(-1)) if high < low else ()


def _reward_fall(case: Case) -> tuple[Evidence, ...]:
    """Evidence that the reward fell from its best by more than half of its range and by more than chance."""
    reward = case.curve("reward/mean")
    if not reward.has_two_ends:
        return ()
    index, best = reward.best
    lowest = min(case.curve("reward/min").values, default=0.0)
    fall = best - reward.end
    if fall <= 0.5 * (best - min(lowest, 0.0)) or fall <= 3 * reward_noise(case, reward.window):
        return ()
    peak = Evidence(reward.key, best, (reward.steps[index], reward.steps[index + reward.window - 1]))
    return (peak, reward.at_end())


def _is_narrow(case: Case) -> bool:
    """A clip below a hundredth for the ratios of tokens; those of whole sequences (gspo) are clipped more narrowly."""
    widest = max(case.number("algorithm.clip_low"), case.number("algorithm.clip_high"))
    return widest < 0.01 and not str(case.setting("algorithm.type")).startswith("gspo")


def _has_exploded(entropy: Curve) -> bool:
    if len(entropy) < 3:
        return False
    top = max(entropy.end, fmean(entropy.values[len(entropy) // 2 :]))
    return top > 3 * entropy.values[0] and top > entropy.values[0] + 0.3
