"""The reported numbers of an evaluation, with their denominators and intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from oncurve.evaluate.estimators import majority_at_k
from oncurve.evaluate.evaluate import Evaluation, Example
from oncurve.stats import bootstrap_interval, pass_at_k, wilson_interval

Numbers = dict[str, Any]
"""JSON: ``docs/evaluation.md`` explains every key."""
Prompts = list[list[Example]]


def report_numbers(
    evaluation: Evaluation, categories: Mapping[str, Mapping[int, str]] | None = None, *, has_votes: bool = True
) -> Numbers:
    """Everything that is reported of one model on one benchmark.

    Completions whose grader failed are left out of every share, and counted; a prompt without a graded completion
    is left out with them. ``categories`` gives for a column of the data the value of each row. ``has_votes``: answers
    were extracted, so that a majority can be counted.
    """
    examples, seed = evaluation.examples, evaluation.seed
    prompts = _graded(evaluation.by_prompt())
    samples = evaluation.samples_per_prompt
    failed = Counter(str(example.error or "unknown") for example in examples if example.category == "error")
    columns = categories or {}
    return {
        "num_prompts": len(evaluation.by_prompt()),
        "num_prompts_graded": len(prompts),
        "samples_per_prompt": samples,
        "num_completions": len(examples),
        "num_graded": sum(map(len, prompts)),
        "num_errors": sum(failed.values()),
        "errors": dict(failed),
        "num_truncated": sum(example.finish_reason != "stop" for example in examples),
        "counts": dict(evaluation.counts),
        "avg": {"k": samples, **mean_of_prompts(prompts, seed=seed)},
        "avg_if_errors_were": _bounds(evaluation) if failed else None,
        "any_format": _any_format(prompts, seed=seed),
        "pass": {str(k): _pass(prompts, k, seed=seed) for k in _sizes(samples)},
        "majority": _majorities(prompts, samples, seed=seed) if has_votes and samples > 1 else None,
        "by_category": {name: _by_category(prompts, values, seed=seed) for name, values in columns.items()},
        "by_length": _by_length([example for row in prompts for example in row]),
        "tokens": _tokens(examples),
    }


def mean_of_prompts(prompts: Prompts, *, seed: int) -> Numbers:
    """avg@k: the mean over prompts of the share of right completions, 1/P sum_p c_p / n_p, and its interval.

    It is for other prompts of the same kind: the means of prompts differ by both the prompts and the chance of
    decoding, so it holds both.
    """
    return _estimate([fmean(example.is_correct for example in row) for row in prompts], seed=seed)


def pooled_outcomes(evaluations: Iterable[Evaluation]) -> list[list[float]]:
    """Share of right completions by model and prompt, over the prompts that every model has a graded completion of."""
    shares: list[dict[int, float]] = []
    for evaluation in evaluations:
        graded: dict[int, list[float]] = {}
        for example in evaluation.examples:
            if example.category != "error":
                graded.setdefault(example.index, []).append(float(example.is_correct))
        shares.append({index: sum(values) / len(values) for index, values in graded.items()})
    common = sorted(set.intersection(*(set(one) for one in shares))) if shares else []
    return [[one[index] for index in common] for one in shares]


def _estimate(values: Sequence[float], *, seed: int) -> Numbers:
    """Mean of one value per prompt, with its interval over prompts: Wilson's where each is 0 or 1, else a bootstrap."""
    if not values:
        return {"value": None, "over_prompts": None, "num_prompts": 0}
    if set(values) <= {0.0, 1.0}:
        low, high = wilson_interval(round(sum(values)), len(values))
    else:
        low, high = bootstrap_interval(values, seed=seed)
    return {"value": fmean(values), "over_prompts": [low, high], "num_prompts": len(values)}


def _graded(prompts: Prompts) -> Prompts:
    rows = ([example for example in row if example.category != "error"] for row in prompts)
    return [row for row in rows if row]


def _bounds(evaluation: Evaluation) -> Numbers:
    """avg@k if every completion that could not be graded were wrong, or right."""
    rows = evaluation.by_prompt()

    def mean(is_right: Callable[[Example], bool]) -> float:
        return fmean(fmean(map(is_right, row)) for row in rows)

    return {
        "wrong": mean(lambda example: example.is_correct),
        "right": mean(lambda example: example.is_correct or example.category == "error"),
    }


def _any_format(prompts: Prompts, *, seed: int) -> Numbers | None:
    known = [[e for e in row if e.correct_any_format is not None] for row in prompts]
    if not any(known):
        return None
    return _estimate([fmean(bool(e.correct_any_format) for e in row) for row in known if row], seed=seed)


def _pass(prompts: Prompts, k: int, *, seed: int) -> Numbers:
    enough = [row for row in prompts if len(row) >= k]
    return _estimate([pass_at_k(len(row), sum(e.is_correct for e in row), k) for row in enough], seed=seed)


def _majorities(prompts: Prompts, samples: int, *, seed: int) -> Numbers:
    """maj@k for several k."""
    found: Numbers = {}
    for k in (size for size in _sizes(samples) if size > 1):
        votes = [[(e.extracted, e.is_correct) for e in row] for row in prompts if len(row) >= k]
        found[str(k)] = _estimate([majority_at_k(row, k) for row in votes], seed=seed)
    return found


def _sizes(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of completions itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def _by_category(prompts: Prompts, values: Mapping[int, str], *, seed: int) -> Numbers:
    groups: dict[str, Prompts] = {}
    for row in prompts:
        groups.setdefault(values.get(row[0].index, "(none)"), []).append(row)
    return {value: mean_of_prompts(groups[value], seed=seed) for value in sorted(groups)}


def _by_length(examples: Sequence[Example]) -> list[Numbers]:
    """Graded completions in four groups of about equal size by their tokens, with the share that is right."""
    if len(examples) < 4:
        return []
    cuts = sorted(set(quantiles((e.num_tokens for e in examples), n=4, method="inclusive")))
    groups: dict[int, list[Example]] = {}
    for example in examples:
        groups.setdefault(sum(example.num_tokens > cut for cut in cuts), []).append(example)
    return [
        {
            "min_tokens": min(e.num_tokens for e in groups[place]),
            "max_tokens": max(e.num_tokens for e in groups[place]),
            "num_completions": len(groups[place]),
            "correct_fraction": fmean(e.is_correct for e in groups[place]),
            "truncated_fraction": fmean(e.finish_reason != "stop" for e in groups[place]),
        }
        for place in sorted(groups)
    ]


def _tokens(examples: Sequence[Example]) -> Numbers:
    right = [e.num_tokens for e in examples if e.is_correct]
    wrong = [e.num_tokens for e in examples if not e.is_correct and e.category != "error"]
    lengths = [e.num_tokens for e in examples]
    return {
        "mean": fmean(lengths),
        "median": median(lengths),
        "mean_of_right": fmean(right) if right else None,
        "mean_of_wrong": fmean(wrong) if wrong else None,
    }
