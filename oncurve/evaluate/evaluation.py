"""Results of a model on test or validation problems: every example, counts, shares and means with their intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from oncurve.core.errors import DataError
from oncurve.core.records import ENDED_BY_ITSELF, NOT_APPLICABLE, html_table
from oncurve.observe.record import read_json, read_rows
from oncurve.rewards.weighted_sum import FIXED_PARTS, Category
from oncurve.stats import (
    bootstrap_interval,
    mcnemar_exact,
    paired_difference_interval,
    pass_at_k,
    sign_flip_p,
    wilson_interval,
)
from oncurve.wording import decimals, interval, percent

CATEGORIES: tuple[Category, ...] = get_args(Category)


LIKELIHOOD = "the mean log-probability of a token of the row's demonstration, which is minus its loss"
"""The reward of a supervised stage whose rows have no answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One completion of one prompt, graded.

    Example: ``Example(index=12, question="2+3?", answer="5", completion="2+3 is 5. \\\\boxed{5}", num_tokens=9,
    finish_reason="stop", category="correct", reward=1.0, correct_any_format=True)``
    """

    index: int
    """Row of the data set."""
    question: str
    """The column ``question``; the whole prompt where there is none."""
    answer: str
    """The reference answer."""
    completion: str
    num_tokens: int
    finish_reason: str
    category: Category
    """"bad_format" comes before right and wrong: an answer in the wrong form was not given."""
    reward: float | None
    """None if the grader failed."""
    correct_any_format: bool | None
    """The answer is right wherever it stands in the text, so also when the category is "correct"; None if nobody
    looked or the grader failed."""
    detail: str = ""
    """A note of the grader: the extracted answer, the exception."""
    sample: int = 0
    """Which of the prompt's completions this is."""
    error: str | None = None
    """Cause of a missing reward: "timeout", "crashed", "unparsable_reference", "not_applicable", ...; else None."""
    judged: Sequence[str] = FIXED_PARTS
    """The fixed parts that the reward reports: "correct", "format", both or neither."""
    episode: Mapping[str, Any] | None = None
    """Segments, calls and waiting as rollouts record them; None for a completion without tools."""

    @property
    def is_correct(self) -> bool:
        """Right answer in the right form."""
        return self.category == "correct"

    @property
    def is_truncated(self) -> bool:
        """The completion never ended by itself, as ``Completion.is_truncated`` says of those of a run."""
        return self.finish_reason not in ENDED_BY_ITSELF


@dataclass(frozen=True, slots=True)
class Share:
    """A counted share with its interval."""

    successes: int
    total: int
    low: float
    """Lower end of the 95 % interval."""
    high: float

    @property
    def fraction(self) -> float:
        """The share; NaN over nothing."""
        return self.successes / self.total if self.total else float("nan")

    def __str__(self) -> str:
        return f"{self.successes}/{self.total} = {percent(self.fraction)} {interval(self.low, self.high, percent)}"


@dataclass(frozen=True, slots=True)
class MeanReward:
    """The mean reward of what was graded, with its interval."""

    value: float
    total: int
    """Completions that were graded."""
    low: float
    """Lower end of the 95 % interval over prompts."""
    high: float

    def __str__(self) -> str:
        return f"{decimals(self.value)} {interval(self.low, self.high, decimals)}"


@dataclass(frozen=True)
class Evaluation:
    """A model's completions of a set of prompts, with everything needed to compare it with another model."""

    name: str
    """Which evaluation of the run this is, such as "base" or "trained"; also the name of its files."""
    examples: tuple[Example, ...]
    """In the order of the prompts; the completions of one prompt stand together."""
    params: Mapping[str, Any]
    """Settings of sampling: the fields of SamplingParams."""
    step: int = 0
    """Training steps done by the model."""
    seconds: float = 0.0
    """Wall time of sampling and grading."""
    seed: int = 0
    """Seed of the bootstrap."""
    correct_means: str = ""
    """Meaning of "correct" here, in a few words; ``LIKELIHOOD`` where nothing is, and the reward is that."""

    @cached_property
    def graded(self) -> tuple[Example, ...]:
        """The examples with a reward."""
        return tuple(example for example in self.examples if example.error is None and example.category != "error")

    def judges(self, part: str) -> bool:
        """The reward says of everything that it graded whether it is "correct", or in the right "format"."""
        return bool(self.graded) and all(part in example.judged for example in self.graded)

    @cached_property
    def is_binary(self) -> bool:
        """All rewards are 0 or 1, and 1 means correct."""
        return self.judges("correct") and all(example.reward in (0.0, 1.0) for example in self.graded)

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt."""
        return max((example.sample for example in self.examples), default=0) + 1

    @cached_property
    def counts(self) -> Mapping[Category, int]:
        """Examples per category; every category is there, also with 0."""
        counter = Counter(example.category for example in self.examples)
        return {category: counter[category] for category in CATEGORIES}

    @cached_property
    def correct(self) -> Share:
        """Right answer in the right form, of what was graded."""
        return self.share(lambda example: example.is_correct, self.graded)

    @cached_property
    def mean_reward(self) -> MeanReward:
        """Mean reward of what was graded; its interval is a bootstrap over prompts. NaN over nothing."""
        values = [float(example.reward or 0.0) for example in self.graded]
        means = [fmean(float(example.reward or 0.0) for example in rows) for rows in by_prompt(self.graded)]
        low, high = bootstrap_interval(means, seed=self.seed)
        return MeanReward(fmean(values) if values else math.nan, len(values), low, high)

    @cached_property
    def any_format(self) -> Share | None:
        """Right answer in whatever form; None if the evaluation did not look for it."""
        if all(example.correct_any_format is None for example in self.examples):
            return None
        return self.share(lambda example: example.correct_any_format is True, self.graded)

    def category_share(self, category: Category) -> Share:
        """One of the categories."""
        return self.share(lambda example: example.category == category)

    def share(self, holds: Callable[[Example], bool], among: Sequence[Example] | None = None) -> Share:
        """The fraction of examples, or of those in ``among``, for which something holds.

        The interval is Wilson's with one completion per prompt. With more it is a bootstrap over prompts, since the
        completions of a prompt resemble each other and count for less than as many prompts would; where all or none
        hold, it is Wilson's over the prompts, since drawing equal prompts again would give no width at all.
        """
        outcomes = [
            [holds(example) for example in prompt] for prompt in by_prompt(self.examples if among is None else among)
        ]
        successes, total = sum(map(sum, outcomes)), sum(map(len, outcomes))
        if self.samples_per_prompt == 1:
            low, high = wilson_interval(successes, total)
        elif successes in (0, total):
            low, high = wilson_interval(len(outcomes) if successes else 0, len(outcomes))
        else:
            low, high = bootstrap_interval([fmean(row) for row in outcomes], seed=self.seed)
        return Share(successes, total, low, high)

    def by_prompt(self) -> list[list[Example]]:
        """The examples, those of one prompt in one list."""
        return by_prompt(self.examples)

    def pass_at_k(self, k: int) -> float:
        """Chance that at least one of k completions of a prompt is correct, unbiased, mean over prompts.

        Raises ValueError if k is above the completions per prompt.
        """
        return fmean(pass_at_k(len(rows), sum(row.is_correct for row in rows), k) for rows in self.by_prompt())

    def metrics(self) -> dict[str, float]:
        """The ``evaluation/`` rows of metrics.jsonl."""
        total, mean = len(self.examples), self.mean_reward
        measured = {
            "evaluation/mean_reward": mean.value,
            "evaluation/mean_reward_low": mean.low,
            "evaluation/mean_reward_high": mean.high,
            "evaluation/error_fraction": sum(e.error not in (None, NOT_APPLICABLE) for e in self.examples) / total,
            "evaluation/truncated_fraction": sum(example.is_truncated for example in self.examples) / total,
            "evaluation/mean_tokens": fmean(example.num_tokens for example in self.examples),
            "evaluation/num_examples": float(total),
        }
        if self.judges("correct"):
            correct = self.correct
            measured["evaluation/correct_fraction"] = correct.fraction
            measured["evaluation/correct_low_fraction"] = correct.low
            measured["evaluation/correct_high_fraction"] = correct.high
            measured["evaluation/wrong_fraction"] = self.counts["wrong"] / total
            if self.any_format is not None:
                measured["evaluation/any_format_fraction"] = self.any_format.fraction
        if self.judges("format"):
            measured["evaluation/bad_format_fraction"] = self.counts["bad_format"] / total
        return {key: value for key, value in measured.items() if not math.isnan(value)}

    def summary(self) -> dict[str, Any]:
        """Counts, shares and intervals as one JSON object; ``read_evaluation`` needs it beside the rows."""
        shares = {"correct": self.correct, "any_format": self.any_format} if self.judges("correct") else {}
        intervals = "wilson" if self.samples_per_prompt == 1 else "bootstrap over prompts"
        return {
            "name": self.name,
            "step": self.step,
            "num_examples": len(self.examples),
            "num_prompts": len(self.by_prompt()),
            "samples_per_prompt": self.samples_per_prompt,
            "counts": dict(self.counts),
            "mean_reward": asdict(self.mean_reward),
            "is_binary": self.is_binary,
            "correct_means": self.correct_means,
            **{key: _share_entry(share) for key, share in shares.items()},
            "pass_at_k": {str(k): self.pass_at_k(k) for k in _powers_of_two(self.samples_per_prompt) if shares},
            "intervals": f"95 %, {intervals}",
            "metrics": self.metrics(),
            "params": dict(self.params),
            "seconds": self.seconds,
            "seed": self.seed,
        }

    def __repr__(self) -> str:
        return f"<Evaluation {self.name} after step {self.step}: {self.headline()}>"

    def headline(self) -> str:
        """The number that this is about: the share that is correct, or the mean reward where that says more."""
        parts = [] if self.is_binary else [f"reward {self.mean_reward}"]
        return ", ".join([*parts, *([f"correct {self.correct}"] if self.judges("correct") else [])])

    def _repr_html_(self) -> str:
        """Shares with their intervals, and the first examples of every category, for a notebook."""
        shares: list[tuple[str, object]] = [] if self.is_binary else [("reward", self.mean_reward)]
        if self.judges("correct"):
            shares += [("correct", self.correct), ("correct, whatever the format", self.any_format)]
        counts = [(name.replace("_", " "), self.category_share(name)) for name in CATEGORIES if self.counts[name]]
        counts = [count for count in counts if count[0] not in ("correct", "graded")]
        table = html_table((self.name, ""), [(name, share) for name, share in (*shares, *counts) if share is not None])
        chosen = [example for name in CATEGORIES for example in [e for e in self.examples if e.category == name][:2]]
        rows = [(example.category, example.question, example.completion, example.answer) for example in chosen]
        return table + html_table(("", "question", "completion", "reference"), rows)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every example as a JSON object."""
        for example in self.examples:
            row = asdict(example)
            if example.episode is None:
                del row["episode"]
            yield row


def by_prompt(examples: Sequence[Example]) -> list[list[Example]]:
    """The examples, those of one prompt in one list."""
    return [list(rows) for _, rows in groupby(examples, key=lambda example: example.index)]


def read_evaluation(folder: str | Path, name: str) -> Evaluation:
    """An evaluation from the files ``<name>.json`` and ``<name>.jsonl`` in ``folder``.

    Raises DataError if they are missing, broken or of another shape.
    """
    summary = read_json(Path(folder) / f"{name}.json")
    rows = read_rows(Path(folder) / f"{name}.jsonl", may_be_torn=False)
    try:
        examples = tuple(Example(**row) for row in rows)
        return Evaluation(
            summary["name"],
            examples,
            summary["params"],
            summary["step"],
            summary["seconds"],
            summary["seed"],
            summary["correct_means"],
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder}/{name}.jsonl: is no evaluation of this version ({error}). Evaluate again."
        ) from error


def _share_entry(share: Share | None) -> dict[str, float] | None:
    return None if share is None else {**asdict(share), "fraction": share.fraction}


def _powers_of_two(limit: int) -> Iterator[int]:
    return (2**power for power in range(limit.bit_length()))


Pair = tuple[Example, Example]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One line of the comparison: a share of the examples before and after, and the difference."""

    name: str
    before: Share
    after: Share
    change: float
    """Difference of the shares."""
    low: float
    """Lower end of the 95 % interval of the difference, which knows that both models had the same examples."""
    high: float
    p_value: float
    """Chance of a difference this large between equal models, from the same examples."""

    @property
    def factor(self) -> float:
        """After over before; infinite from nothing, NaN for nothing from nothing."""
        if self.before.fraction:
            return self.after.fraction / self.before.fraction
        return math.inf if self.after.fraction else math.nan


@dataclass(frozen=True, slots=True)
class RewardChange:
    """The mean reward before and after, and the paired difference."""

    before: MeanReward
    after: MeanReward
    change: float
    """Difference of the means, over the examples that were graded both times."""
    low: float
    """Lower end of the 95 % interval of the difference, by a bootstrap over prompts."""
    high: float
    p_value: float
    """By sign flips over prompts."""
    total: int
    """Examples that were graded both times."""


def share_change(
    name: str, pairs: Sequence[Pair], holds: Callable[[Example], bool], shares: tuple[Share, Share], *, seed: int
) -> ComparisonRow:
    """The change in the share of examples for which something holds; ``shares`` are those before and after.

    With one completion per prompt the interval is Newcombe's and the test McNemar's; with more, both are over prompts:
    a bootstrap and sign flips.
    """
    before, after = shares
    rows = _by_prompt(pairs)
    differences = [fmean(float(holds(a)) - float(holds(b)) for b, a in row) for row in rows]
    if all(len(row) == 1 for row in rows):
        lost, won = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
        both = before.successes - lost
        low, high = paired_difference_interval(both, lost, won, before.total - both - lost - won)
        p_value = mcnemar_exact(lost, won)
    else:
        low, high = bootstrap_interval(differences, seed=seed)
        p_value = sign_flip_p(differences, seed=seed)
    return ComparisonRow(name, before, after, after.fraction - before.fraction, low, high, p_value)


def reward_change(pairs: Sequence[Pair], means: tuple[MeanReward, MeanReward], *, seed: int) -> RewardChange:
    """The change in the mean reward of the pairs; ``means`` are those before and after."""
    differences = [fmean(_gain(pair) for pair in row) for row in _by_prompt(pairs)]
    low, high = bootstrap_interval(differences, seed=seed)
    change = fmean(map(_gain, pairs)) if pairs else math.nan
    return RewardChange(*means, change, low, high, sign_flip_p(differences, seed=seed), len(pairs))


def _gain(pair: Pair) -> float:
    return (pair[1].reward or 0.0) - (pair[0].reward or 0.0)


def _by_prompt(pairs: Sequence[Pair]) -> list[list[Pair]]:
    return [list(rows) for _, rows in groupby(pairs, key=lambda pair: pair[0].index)]
