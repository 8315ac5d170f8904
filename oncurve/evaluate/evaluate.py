"""Evaluation on held-out problems: sample, grade, count, and keep every example."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from oncurve.errors import DataError
from oncurve.observe.episode_metrics import episode_row
from oncurve.observe.record import read_json, read_rows
from oncurve.records import ENDED_BY_ITSELF, NOT_APPLICABLE, Completion, Group, Prompt, Reward, html_table
from oncurve.rewards.base import Category, RewardFunction, categorize, grade
from oncurve.sample.base import Sampler, SamplingParams
from oncurve.stats import bootstrap_interval, pass_at_k, wilson_interval

CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One completion of one held-out prompt, graded.

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
    """What the grader noted: the extracted answer, the exception."""
    sample: int = 0
    """Which of the prompt's completions this is."""
    extracted: str | None = None
    """The final answer as a majority vote compares it; None if there is none or nobody looked."""
    error: str | None = None
    """Why there is no reward: "timeout", "crashed", "unparsable_reference", "not_applicable", ...; None if there is."""
    episode: Mapping[str, Any] | None = None
    """Who wrote what, calls and waiting, as rollouts record them, and all tokens; None for a completion without
    tools."""

    @property
    def is_correct(self) -> bool:
        """Right answer in the right form."""
        return self.category == "correct"


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
        return f"{self.successes}/{self.total} = {self.fraction:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True)
class Evaluation:
    """What a model did on a set of prompts, with everything needed to compare it with another model."""

    name: str
    """Which evaluation of the run this is, such as "base" or "trained"; also the name of its files."""
    examples: tuple[Example, ...]
    """In the order of the prompts; the completions of one prompt stand together."""
    params: Mapping[str, Any]
    """How tokens were drawn: the fields of SamplingParams."""
    step: int = 0
    """Training steps done by the model."""
    seconds: float = 0.0
    """Wall time of sampling and grading."""
    seed: int = 0
    """Of the bootstrap."""

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt."""
        return max((example.sample for example in self.examples), default=0) + 1

    @cached_property
    def counts(self) -> Mapping[Category, int]:
        """Examples per category; every category is there, also with 0."""
        found = Counter(example.category for example in self.examples)
        return {category: found[category] for category in CATEGORIES}

    @cached_property
    def correct(self) -> Share:
        """Right answer in the right form, over all examples: what could not be graded does not count as right."""
        return self.share(lambda example: example.is_correct)

    @cached_property
    def any_format(self) -> Share | None:
        """Right answer in whatever form; None if the evaluation did not look for it."""
        if all(example.correct_any_format is None for example in self.examples):
            return None
        return self.share(lambda example: example.correct_any_format is True)

    def category_share(self, category: Category) -> Share:
        """One of the categories."""
        return self.share(lambda example: example.category == category)

    def share(self, holds: Callable[[Example], bool]) -> Share:
        """The fraction of examples for which something holds.

        The interval is Wilson's with one completion per prompt. With more it is a bootstrap over prompts, since the
        completions of a prompt resemble each other and count for less than as many prompts would; where all or none
        hold, it is Wilson's over the prompts, since drawing equal prompts again would give no width at all.
        """
        held = [[holds(example) for example in prompt] for prompt in self.by_prompt()]
        successes, total = sum(map(sum, held)), len(self.examples)
        if self.samples_per_prompt == 1:
            low, high = wilson_interval(successes, total)
        elif successes in (0, total):
            low, high = wilson_interval(len(held) if successes else 0, len(held))
        else:
            low, high = bootstrap_interval([fmean(row) for row in held], seed=self.seed)
        return Share(successes, total, low, high)

    def by_prompt(self) -> list[list[Example]]:
        """The examples, those of one prompt in one list."""
        return [list(rows) for _, rows in groupby(self.examples, key=lambda example: example.index)]

    def pass_at_k(self, k: int) -> float:
        """Chance that at least one of k completions of a prompt is correct, unbiased, mean over prompts.

        Raises ValueError if k is above the completions per prompt.
        """
        return fmean(pass_at_k(len(rows), sum(row.is_correct for row in rows), k) for rows in self.by_prompt())

    def metrics(self) -> dict[str, float]:
        """The ``evaluation/`` rows of metrics.jsonl."""
        total = len(self.examples)
        correct = self.correct
        measured = {
            "evaluation/correct_fraction": correct.fraction,
            "evaluation/correct_low_fraction": correct.low,
            "evaluation/correct_high_fraction": correct.high,
            "evaluation/wrong_fraction": self.counts["wrong"] / total,
            "evaluation/bad_format_fraction": self.counts["bad_format"] / total,
            "evaluation/error_fraction": sum(e.error not in (None, NOT_APPLICABLE) for e in self.examples) / total,
            "evaluation/truncated_fraction": sum(e.finish_reason not in ENDED_BY_ITSELF for e in self.examples) / total,
            "evaluation/mean_tokens": fmean(example.num_tokens for example in self.examples),
            "evaluation/num_examples": float(total),
        }
        if self.any_format is not None:
            measured["evaluation/any_format_fraction"] = self.any_format.fraction
        return measured

    def summary(self) -> dict[str, Any]:
        """Counts, shares and intervals as one JSON object; ``read_evaluation`` needs it beside the rows."""
        shares = {"correct": self.correct, "any_format": self.any_format}
        intervals = "wilson" if self.samples_per_prompt == 1 else "bootstrap over prompts"
        return {
            "name": self.name,
            "step": self.step,
            "num_examples": len(self.examples),
            "num_prompts": len(self.by_prompt()),
            "samples_per_prompt": self.samples_per_prompt,
            "counts": dict(self.counts),
            **{key: _share_entry(share) for key, share in shares.items()},
            "pass_at_k": {str(k): self.pass_at_k(k) for k in _powers_of_two(self.samples_per_prompt)},
            "intervals": f"95 %, {intervals}",
            "metrics": self.metrics(),
            "params": dict(self.params),
            "seconds": self.seconds,
            "seed": self.seed,
        }

    def __repr__(self) -> str:
        return f"<Evaluation {self.name} after step {self.step}: correct {self.correct}>"

    def _repr_html_(self) -> str:
        """Shares with their intervals, and the first examples of every category, for a notebook."""
        shares = [("correct", self.correct), ("correct, whatever the format", self.any_format)]
        counts = [(name.replace("_", " "), self.category_share(name)) for name in CATEGORIES if name != "correct"]
        table = html_table((self.name, ""), [(name, share) for name, share in (*shares, *counts) if share is not None])
        chosen = [one for name in CATEGORIES for one in [e for e in self.examples if e.category == name][:2]]
        shown = [(one.category, one.question, one.completion, one.answer) for one in chosen]
        return table + html_table(("", "question", "completion", "reference"), shown)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every example as a JSON object."""
        for example in self.examples:
            row = asdict(example)
            if example.episode is None:
                del row["episode"]
            yield row


class Kept:
    """Where the examples of an evaluation are kept as they come: in memory alone."""

    draws_by_part = False
    """Each call of the sampler has random numbers of its own, so that it gives the same whenever it is made."""

    def __init__(self) -> None:
        self.examples: list[Example] = []

    def add(self, examples: Sequence[Example]) -> None:
        """Keep a part."""
        self.examples += examples


def evaluate(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    reward_function: RewardFunction,
    *,
    params: SamplingParams,
    loose_reward_function: RewardFunction | None = None,
    extract: Callable[[str], str | None] | None = None,
    samples_per_prompt: int = 1,
    step: int = 0,
    prompts_per_call: int = 128,
    kept: Kept | None = None,
    name: str = "evaluation",
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """What the sampler's model does on the prompts, graded by the reward function.

    ``params`` is a required argument so that no model is ever measured with the decoding of training by accident.
    ``loose_reward_function`` finds the answer wherever it stands; its part "correct" decides. ``extract`` finds the
    answer that a majority vote compares. The prompts go to the sampler ``prompts_per_call`` at a time, and
    ``on_progress(done, total)`` is told before the first call and after each. With ``kept``, every part is kept as it
    comes, and only what it does not hold yet is sampled; each part then has random numbers of its own.

    Raises DataError without prompts; ValueError if a data set row appears twice, or if greedy decoding is asked for
    several completions of a prompt, which would all be the same.
    """
    _check_prompts(prompts)
    if params.temperature == 0 and samples_per_prompt > 1:
        raise ValueError(
            f"greedy decoding cannot give {samples_per_prompt} different completions; sample, or ask for 1"
        )
    started = time.monotonic()
    kept = kept or Kept()
    show = on_progress or (lambda done, total: None)
    done = len(kept.examples) // samples_per_prompt
    show(done, len(prompts))
    for first in range(done, len(prompts), prompts_per_call):
        part = prompts[first : first + prompts_per_call]
        draws = first if kept.draws_by_part else step
        groups = sampler.sample(part, samples_per_prompt, step=draws, params=params)
        kept.add(list(grade_groups(groups, reward_function, loose_reward_function, extract=extract)))
        show(first + len(part), len(prompts))
    seconds = time.monotonic() - started
    return Evaluation(name, tuple(kept.examples), asdict(params), step=step, seconds=seconds, seed=seed)


def read_evaluation(folder: str | Path, name: str) -> Evaluation:
    """An evaluation from the files ``<name>.json`` and ``<name>.jsonl`` in ``folder``.

    Raises DataError if they are missing, broken or of another shape.
    """
    summary = read_json(Path(folder) / f"{name}.json")
    rows = read_rows(Path(folder) / f"{name}.jsonl", may_be_torn=False)
    try:
        examples = tuple(Example(**row) for row in rows)
        return Evaluation(
            summary["name"], examples, summary["params"], summary["step"], summary["seconds"], summary["seed"]
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder}/{name}.jsonl: is no evaluation of this version ({error}). Evaluate again."
        ) from error


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise DataError("there is no prompt to evaluate on; give the data set a held-out part.")
    if len({prompt.index for prompt in prompts}) != len(prompts):
        twice = Counter(prompt.index for prompt in prompts).most_common(1)[0][0]
        raise ValueError(f"row {twice} is among the prompts more than once; it would count twice")


def grade_groups(
    groups: Sequence[Group],
    reward_function: RewardFunction,
    loose_reward_function: RewardFunction | None = None,
    *,
    extract: Callable[[str], str | None] | None = None,
) -> Iterator[Example]:
    """The examples of some groups, in their order; ``extract`` finds the answer that a majority vote compares."""
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    rewards = grade(reward_function, prompts, completions)
    loose: Sequence[Reward | None] = [None] * len(completions)
    if loose_reward_function is not None:
        loose = grade(loose_reward_function, prompts, completions)
    return map(partial(_example, extract=extract), prompts, completions, rewards, loose)


def _example(
    prompt: Prompt,
    completion: Completion,
    reward: Reward,
    loose: Reward | None,
    *,
    extract: Callable[[str], str | None] | None,
) -> Example:
    category, shown = categorize(reward), episode_row(completion)
    any_format = None
    if loose is not None and (category == "correct" or loose.error is None):
        any_format = category == "correct" or loose.parts.get("correct", 0.0) >= 1.0
    return Example(
        index=prompt.index,
        question=str(prompt.row.get("question", prompt.text)),
        answer=str(prompt.row.get("answer", "")),
        completion=completion.text,
        num_tokens=completion.num_tokens,
        finish_reason=completion.finish_reason,
        category=category,
        reward=reward.value,
        correct_any_format=any_format,
        detail=reward.detail,
        sample=completion.index,
        extracted=None if extract is None else extract(completion.text),
        error=reward.error,
        episode=shown or None,
    )


def _share_entry(share: Share | None) -> dict[str, float] | None:
    return None if share is None else {**asdict(share), "fraction": share.fraction}


def _powers_of_two(limit: int) -> Iterator[int]:
    return (2**power for power in range(limit.bit_length()))
