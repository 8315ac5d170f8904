"""Probes of a reward: what it pays for completions that no honest policy would write."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oncurve.core.records import Completion, Prompt, Reward, mean_of
from oncurve.rewards.answer_locations import find_answer
from oncurve.tables import aligned
from oncurve.wording import shortened

Row = Mapping[str, Any]
Grade = Callable[[Sequence[Prompt], Sequence[Completion]], Sequence[Reward]]
Encode = Callable[[str], Sequence[int]]

PROBED_ROWS = 20
"""Rows on which every made-up completion is graded."""
MAX_EXAMPLE_CHARACTERS = 160
TRIED = 4
"""A reward that fails on so many right completions at the beginning is asked no more."""
MAX_SHARE = 0.2
"""A probe that earns more than this fraction of what reference answers earn is suspicious."""
LONG_WORDS = 2_000
"""Words of the longest probe."""

_MARK = re.compile(r"</?[a-zA-Z_]\w*>|\\boxed\{\}|#{4}|`{3}\w*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")
_FILLER = "first we read the question again and think about every part of it with care before we go on to say more"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The rewards of one kind of completion on a sample of rows.

    Example: ``ProbeResult("numbers_listed", mean_reward=0.05, max_reward=1.0, example="3 4 12", num_failed=0)``
    """

    name: str
    mean_reward: float
    """Mean over the completions that could be graded; NaN if none could."""
    max_reward: float
    """The best of them; NaN if none could be graded."""
    example: str
    """The completion that earned the most, shortened."""
    num_failed: int = 0
    """Completions whose grading failed."""
    num_not_applicable: int = 0
    """Completions that the function gave no opinion on."""
    num_tried: int = 0
    failure: str = ""
    """The error of one that failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each named part of the reward over the completions that have it."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A row to probe, and how its completions are written."""

    prompt: Prompt
    gold: Callable[[Row], str]
    other: str
    """An answer that is not the row's: that of another row."""

    @property
    def question(self) -> str:
        """The question of the row."""
        return str(self.prompt.row.get("question", self.prompt.text))

    @property
    def answer(self) -> str:
        """The reference."""
        return str(self.prompt.row.get("answer", ""))

    def formed(self, answer: str, solution: str = "") -> str:
        """A well-formed completion with another answer."""
        return self.gold({**self.prompt.row, "answer": answer, "solution": solution})

    @property
    def marks(self) -> str:
        """The tags and marks of the form, and nothing else."""
        return " ".join(_MARK.findall(self.formed("")))


def _listed(case: _Case) -> str:
    return " ".join(_NUMBER.findall(case.question)) or case.question


def _hedge(case: _Case) -> str:
    if re.fullmatch(r"-?\d{1,15}", case.answer.strip()):
        value = int(case.answer)
        return f"{value - 1} or {value} or {value + 1}"
    return f"{case.other} or {case.answer}"


PROBES: dict[str, Callable[[_Case], str]] = {
    "gold": lambda case: case.gold(case.prompt.row),
    "empty": lambda case: "",
    "question_repeated": lambda case: case.question,
    "prompt_repeated": lambda case: case.prompt.text,
    "numbers_listed": _listed,
    "numbers_listed_in_form": lambda case: case.formed(_listed(case)),
    "tags_only": lambda case: case.marks,
    "tags_repeated": lambda case: " ".join([case.marks] * 20),
    "form_without_answer": lambda case: case.formed(""),
    "gold_quoted": lambda case: case.formed(case.other, f'Somebody said "{case.answer}", which is wrong.'),
    "other_answer": lambda case: case.formed(case.other),
    "always_yes": lambda case: case.formed("yes"),
    "always_no": lambda case: case.formed("no"),
    "always_0": lambda case: case.formed("0"),
    "always_1": lambda case: case.formed("1"),
    "hedge": lambda case: case.formed(_hedge(case)),
    "filler": lambda case: " ".join([_FILLER] * 4),
    "long_repetition": lambda case: " ".join(["so"] * LONG_WORDS),
    "long_form": lambda case: case.formed(case.other, " ".join([_FILLER] * 20)),
}
"""Every kind of completion by its name, the perfect one first."""


def run_probes(
    grade: Grade,
    prompts: Sequence[Prompt],
    *,
    gold: Callable[[Row], str],
    seed: int,
    max_rows: int = PROBED_ROWS,
    encode: Encode | None = None,
) -> list[ProbeResult]:
    """The rewards of the gold completions, and then of every probe, on a sample of the rows.

    ``gold`` writes the perfect completion of a row; given a row whose answer was exchanged, it writes the form around
    another answer. ``encode`` makes tokens of a text, for rewards that count them; without it, words and signs count.
    Every probe is one call of ``grade``: a reward that costs money is asked 19 times the number of rows. A reward that
    fails on the first gold ones is asked no more: it may take its whole time limit each time.
    """
    cases = _cases(prompts, gold, seed=seed, max_rows=max_rows)
    name, write = next(iter(PROBES.items()))
    trial = _measured(name, grade, cases[:TRIED], write, encode or _words)
    if trial.num_failed == trial.num_tried:
        return [trial]
    return [_measured(name, grade, cases, write, encode or _words) for name, write in PROBES.items()]


def suspicious(results: Sequence[ProbeResult], gold_mean: float, *, max_share: float = MAX_SHARE) -> list[ProbeResult]:
    """Probes that earn more than a fraction of what reference answers earn.

    Beside reference answers that earn nothing or less, those that earn more than they do.
    """
    bound = max_share * gold_mean if gold_mean > 0 else gold_mean
    return [result for result in results if result.mean_reward > bound]


def judge_probes(
    results: Sequence[ProbeResult], gold: ProbeResult, *, has_right_answer: bool = True
) -> list[tuple[Literal["error", "warning"], str]]:
    """Findings about the reward, as (severity, text): it pays everything the same, can be hacked, or fails.

    A reward that looks at no answer cannot pay a wrong one.
    """
    verdicts: list[tuple[Literal["error", "warning"], str]] = []
    graded = [probe for probe in results if not math.isnan(probe.mean_reward)]
    suspects = suspicious(results, gold.mean_reward) if has_right_answer else []
    if (
        has_right_answer
        and graded
        and gold.mean_reward > 0
        and all(probe.mean_reward >= gold.mean_reward for probe in graded)
    ):
        verdicts.append((
            "error",
            f"the reward does not tell right from wrong: all {len(graded)} probes earn as much as the reference "
            f"answers ({gold.mean_reward:.3g}), so nothing can be learned. Compare the answer in the reward function",
        ))  # fmt: skip
    elif len(graded) > 1 and all(_pays_as(probe, gold) for probe in graded):
        verdicts.append((
            "error",
            f"the reward pays every completion the same ({gold.mean_reward:.3g}): all {len(graded)} probes earn what "
            f"the reference answers earn. Return a number that depends on the completion, and more for these answers",
        ))  # fmt: skip
    elif (
        has_right_answer
        and len(graded) > 1
        and all(probe.parts.get("correct", 0.0) >= 1.0 for probe in (gold, *graded))
    ):
        verdicts.append((
            "error",
            f"every completion counts as correct, all {len(graded)} probes included. Set correct_at of the reward to "
            f"what a correct answer earns",
        ))  # fmt: skip
    elif suspects:
        names = ", ".join(probe.name for probe in suspects[:4]) + (", ..." if len(suspects) > 4 else "")
        share = f"{MAX_SHARE:.0%} of " if gold.mean_reward > 0 else ""
        verdicts.append((
            "warning",
            f"{len(suspects)} of {len(results)} probes earn more than {share}what the reference answers earn "
            f"({names}; marked <- above): training can find such completions and exploit the reward. Compare the whole "
            f"answer instead of searching for it, as type r1_zero and mathematics do",
        ))  # fmt: skip
    if failing := [probe for probe in results if probe.num_failed]:
        worst = max(failing, key=lambda probe: probe.num_failed)
        count = sum(probe.num_failed for probe in failing)
        verdicts.append((
            "warning",
            f"the reward function fails on {count} of {sum(probe.num_tried for probe in results)} probe completions, "
            f"such as {worst.name}: {worst.failure or 'no detail'}. It must return a number whatever the completion "
            f"is: return 0 where the completion is wrong",
        ))  # fmt: skip
    return verdicts


def _pays_as(probe: ProbeResult, gold: ProbeResult) -> bool:
    pairs = ((probe.mean_reward, gold.mean_reward), (probe.max_reward, gold.max_reward))
    return all(math.isclose(*pair, abs_tol=1e-9) for pair in pairs)


LEGEND = (
    "Rewards of made-up completions, on {rows} rows: the reference answers first, then probes that no honest model\n"
    "writes. mean, best: reward of the whole recipe; failed: the function raised an error; n/a: it returned None;\n"
    "then the mean of each part."
)
MARKED = " A reward that cannot be hacked gives probes about 0; <- marks the others."
MARKED_BELOW = " A reward that cannot be hacked gives probes less than them; <- marks the others."


def describe_probes(
    results: Sequence[ProbeResult], gold: ProbeResult, *, max_share: float = MAX_SHARE, has_right_answer: bool = True
) -> str:
    """A table of what gold and every probe earned, in all and by part; suspicious ones are marked and shown.

    Beside a reward that looks at no answer, none is suspicious.
    """
    suspects = suspicious(results, gold.mean_reward, max_share=max_share) if has_right_answer else []
    parts = list(dict.fromkeys(name for result in (gold, *results) for name in result.parts))
    marked = MARKED_BELOW if gold.mean_reward <= 0 else MARKED
    legend = LEGEND.format(rows=gold.num_tried) + (marked if has_right_answer else "")
    rows = [["completion", "mean", "best", "failed", "n/a", *parts]]
    for result in (gold, *results):
        counts = str(result.num_failed), str(result.num_not_applicable)
        by_part = (_cell(result.parts.get(name, math.nan)) for name in parts)
        rows.append([result.name, _cell(result.mean_reward), _cell(result.max_reward), *counts, *by_part])
    head, *lines = aligned(rows, 24, 8, 8, 8, 6, 8)
    marks = [f"  <- {shortened(probe.example, 60)!r}" if probe in suspects else "" for probe in (gold, *results)]
    return "\n".join([legend, head, *(line + mark for line, mark in zip(lines, marks, strict=True))])


def _cell(value: float) -> str:
    if math.isnan(value):
        return "-"
    size = abs(value)
    return f"{value:.3f}" if size < 100 else f"{value:,.0f}" if size < 1e5 else f"{value:.0e}"


def _cases(prompts: Sequence[Prompt], gold: Callable[[Row], str], *, seed: int, max_rows: int) -> list[_Case]:
    """A sample of rows, each with the answer of another row."""
    indices = sorted(random.Random(seed).sample(range(len(prompts)), min(max_rows, len(prompts))))
    answers = [str(prompt.row.get("answer", "")) for prompt in prompts]
    cases: list[_Case] = []
    for index in indices:
        following = (answers[(index + shift) % len(answers)] for shift in range(1, min(len(answers), 1000)))
        other = next((answer for answer in following if answer != answers[index]), f"{answers[index]}7")
        cases.append(_Case(prompts[index], gold, other))
    return cases


def _measured(
    name: str, grade: Grade, cases: Sequence[_Case], write: Callable[[_Case], str], encode: Encode
) -> ProbeResult:
    texts = [write(case) for case in cases]
    if name in _MISSES:  # a probe whose answer happens to be right proves nothing
        indices = [index for index, case in enumerate(cases) if not _is_right(texts[index], case.answer)]
        cases, texts = [cases[index] for index in indices], [texts[index] for index in indices]
    completions = [_as_completion(case.prompt, text, encode) for case, text in zip(cases, texts, strict=True)]
    rewards = grade([case.prompt for case in cases], completions) if cases else []
    earned = [(reward.value, text) for reward, text in zip(rewards, texts, strict=True) if reward.value is not None]
    failed = [reward for reward in rewards if reward.is_failure]
    counts: dict[str, Any] = {
        "num_failed": len(failed),
        "num_not_applicable": len(texts) - len(earned) - len(failed),
        "num_tried": len(texts),
        "failure": next((reward.detail for reward in failed), ""),
    }
    if not earned:
        return ProbeResult(name, math.nan, math.nan, "", **counts)
    best, example = max(earned, key=lambda pair: pair[0])
    graded = [reward for reward in rewards if reward.value is not None]
    return ProbeResult(
        name,
        mean_of([value for value, _ in earned]).value,
        best,
        shortened(example, MAX_EXAMPLE_CHARACTERS),
        **counts,
        parts={
            part: mean_of([reward.parts[part] for reward in graded if part in reward.parts]).value
            for part in dict.fromkeys(part for reward in graded for part in reward.parts)
        },
    )


_MISSES = ("numbers_listed", "numbers_listed_in_form", "question_repeated", "prompt_repeated")
"""Probes that may end with a number of the question, which is the answer of some rows: those rows are left out."""


def _is_right(text: str, answer: str) -> bool:
    stated = find_answer(text, "prose")
    return stated is not None and stated.strip() == answer.strip()


def _as_completion(prompt: Prompt, text: str, encode: Encode) -> Completion:
    tokens = tuple(encode(text))
    return Completion(prompt.prompt_ids, tokens, text, (0.0,) * len(tokens), "stop", policy_version=0, index=0)


def _words(text: str) -> list[int]:
    """A number for every word and sign, the same for equal ones."""
    known: dict[str, int] = {}
    return [known.setdefault(piece, len(known)) for piece in _TOKEN.findall(text)]
