"""Paired comparison of two evaluations of the same problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from oncurve import tables
from oncurve.core.errors import DataError
from oncurve.evaluate.evaluation import (
    LIKELIHOOD,
    ComparisonRow,
    Evaluation,
    Example,
    RewardChange,
    reward_change,
    share_change,
)
from oncurve.observe.record import write_json, write_lines, write_text
from oncurve.wording import counted, decimals, interval, p_text, percent, points, signed_decimals, signed_points

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class ExampleChange:
    """An example that only one of the two models solved, or whose reward differs where nothing says what is correct."""

    before: Example
    after: Example
    kind: Literal["answer", "format", "unknown"]
    """"answer": the answer itself became right (or wrong); "format": it was right all along and only its form
    changed; "unknown": the evaluations did not look for answers in other forms."""


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same examples under the same decoding; made by ``compare``."""

    before: Evaluation
    after: Evaluation
    names: tuple[str, str]
    problems: str
    """The kind of problems, for the title."""
    seed: int

    @cached_property
    def is_binary(self) -> bool:
        """All rewards of both are 0 or 1, so that the share that is correct says everything."""
        return self.before.is_binary and self.after.is_binary

    def judges(self, part: str) -> bool:
        """The reward said of everything whether it is "correct", or in the right "format"."""
        return self.before.judges(part) and self.after.judges(part)

    @cached_property
    def reward(self) -> RewardChange:
        """The mean rewards. NaN where nothing was graded."""
        means = self.before.mean_reward, self.after.mean_reward
        return reward_change(self._graded_pairs(), means, seed=self.seed)

    @cached_property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """Correct, correct in any format, wrong in the right format, bad format, not gradable, truncated: those that
        the reward defines, over the examples that were graded both times, and what could not be graded if anything."""
        rows: list[ComparisonRow] = []
        if self.judges("correct"):
            rows.append(self._row("correct", lambda example: example.is_correct))
            if self.before.any_format is not None and self.after.any_format is not None:
                rows.append(self._row("correct, any format", lambda example: example.correct_any_format is True))
            if self.judges("format"):
                rows.append(self._row("wrong, right format", lambda example: example.category == "wrong"))
        if self.judges("format"):
            rows.append(self._row("bad format", lambda example: example.category == "bad_format"))
        if self.before.counts["error"] or self.after.counts["error"]:
            rows.append(self._row("not gradable", lambda example: example.category == "error", of_all=True))
        rows.append(self._row("cut off at limit", lambda example: example.is_truncated, of_all=True))
        return tuple(rows)

    @cached_property
    def improved(self) -> tuple[ExampleChange, ...]:
        """Examples that the second model did better: those with a new answer, or the largest gains, first."""
        return self._changes(better=True)

    @cached_property
    def worsened(self) -> tuple[ExampleChange, ...]:
        """Examples that the second model did worse: those with a lost answer, or the largest losses, first."""
        return self._changes(better=False)

    def _changes(self, *, better: bool) -> tuple[ExampleChange, ...]:
        sign = 1.0 if better else -1.0
        gains = [(sign * self._gain(b, a), _change(b, a)) for b, a in self._graded_pairs()]
        changes = sorted((pair for pair in gains if pair[0] > 0), key=lambda pair: (pair[1].kind == "format", -pair[0]))
        return tuple(change for _, change in changes)

    def _gain(self, before: Example, after: Example) -> float:
        """The improvement of an example: solved or not where that is known, else by its reward."""
        if self.judges("correct"):
            return float(after.is_correct) - float(before.is_correct)
        difference = (after.reward or 0.0) - (before.reward or 0.0)
        return difference if abs(difference) > 1e-6 else 0.0

    @cached_property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean completion length of both."""
        first, second = (fmean(e.num_tokens for e in side.examples) for side in (self.before, self.after))
        return first, second

    def print(self, console: Console) -> None:
        """Show the table. Where it is wider than the console it goes without the factors, and is never cut."""
        table = self.table()
        unlimited = console.options.update(width=10_000)
        if console.measure(table, options=unlimited).maximum > console.width:
            table = self.table(has_factors=False)
        width = max(console.width, console.measure(table, options=unlimited).maximum)
        Console(file=console.file, width=width, force_terminal=console.is_terminal).print(table)

    def table(self, *, has_factors: bool = True) -> Table:
        """The comparison for a terminal, intervals below the numbers."""
        below = {"caption": Text(self.footnote(), style="dim"), "caption_justify": "left"}
        rows = self._cells(between="\n")
        made = tables.terminal(self.title(), self._header(), rows, pad_edge=False, padding=(0, 1, 0, 0), **below)
        if not has_factors:
            del made.columns[-2]
        return made

    def markdown(self) -> str:
        """The comparison as a Markdown table with its title and footnote."""
        lines = tables.markdown(self._header(), self._cells(between=" "))
        return "\n".join([f"**{self.title()}**", "", *lines, "", self.footnote()]) + "\n"

    def title(self) -> str:
        """A title: the models that were compared, and the data."""
        total, prompts = len(self.before.examples), len(self.before.by_prompt())
        samples = "" if total == prompts else f", {self.before.samples_per_prompt} completions each"
        return f"{self.names[0]} and {self.names[1]} on {prompts} {self.problems}{samples}"

    def footnote(self) -> str:
        """Decoding, lengths of completions, intervals and tests, and what changed sides."""
        temperature = self.before.params.get("temperature")
        decoding = "greedy" if temperature == 0 else f"sampled at temperature {temperature}"
        single = self.before.samples_per_prompt == 1
        test = "McNemar's exact test" if single else "sign flips over prompts"
        interval = "Wilson and Newcombe" if single else "bootstrap over prompts"
        sides = f"{counted(len(self.improved), 'example')} improved, {len(self.worsened)} got worse"
        if kinds := sum(change.kind == "format" for change in self.improved):
            sides += f" ({kinds} of the improved changed only their format)"
        tokens = f"mean length {self.mean_tokens[0]:.0f} and {self.mean_tokens[1]:.0f} tokens"
        if not self.judges("correct"):
            interval, test = "bootstrap over prompts", "sign flips over prompts"
        notes = [f"Both {decoding}; {tokens}.", f"[95 % intervals]: {interval}; p: {test}, paired.", f"{sides}."]
        if self.judges("correct") and self.after.correct_means:
            notes.append(f"Correct: {self.after.correct_means}.")
        elif self.after.correct_means == LIKELIHOOD:
            notes.append(f"Reward: {LIKELIHOOD}.")
        if left_out := len(self.before.examples) - self.reward.total:
            notes.append(f"{counted(left_out, 'example')} not graded both times, left out of all other rows.")
        return " ".join(notes)

    def summary(self) -> dict[str, Any]:
        """Everything but the examples, as one JSON object."""
        rows = [{**asdict(row), "factor": row.factor if math.isfinite(row.factor) else None} for row in self.rows]
        return {
            "names": list(self.names),
            "problems": self.problems,
            "num_prompts": len(self.before.by_prompt()),
            "num_examples": len(self.before.examples),
            "params": dict(self.before.params),
            "is_binary": self.is_binary,
            "reward": asdict(self.reward),
            "rows": rows,
            "mean_tokens": list(self.mean_tokens),
            "num_unchanged": sum(before.completion == after.completion for before, after in self._pairs()),
            "num_improved": len(self.improved),
            "num_improved_by_format_only": sum(change.kind == "format" for change in self.improved),
            "num_worsened": len(self.worsened),
            "num_worsened_by_format_only": sum(change.kind == "format" for change in self.worsened),
        }

    def example_rows(self) -> Iterator[dict[str, Any]]:
        """Every pair of examples as a JSON object, with how it changed."""
        for before, after in self._pairs():
            is_graded = before.category != "error" and after.category != "error"
            gain = self._gain(before, after) if is_graded else 0.0
            verdict, changed = "improved" if gain > 0 else "worsened", gain != 0
            yield {
                "index": before.index,
                "sample": before.sample,
                "question": before.question,
                "answer": before.answer,
                "change": verdict if changed else "same",
                "kind": _change(before, after).kind if changed else None,
                "before": _side(before),
                "after": _side(after),
            }

    def examples_text(self, *, limit: int = 3, max_characters: int = 600) -> str:
        """The first examples that improved and that got worse, in full up to ``max_characters``, for people."""
        lines: list[str] = []
        for heading, changes in (("Improved", self.improved), ("Got worse", self.worsened)):
            lines += [
                f"{heading}: {len(changes)} example{'s'[: len(changes) != 1]}"
                + ("" if len(changes) <= limit else ", the first:" if limit == 1 else f", the first {limit}:"),
                "",
            ]
            for change in changes[:limit]:
                lines += _change_lines(change, self.names, max_characters)
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: str | Path) -> Path:
        """Writes ``comparison.json``, ``comparison.md`` and ``comparison.jsonl`` (a line per example) to ``folder``."""
        path = Path(folder)
        write_lines(path / "comparison.jsonl", self.example_rows())
        write_json(path / "comparison.json", self.summary())
        fenced = f"~~~~text\n{self.examples_text()}~~~~\n"
        write_text(path / "comparison.md", f"{self.markdown()}\n{fenced}")
        return path / "comparison.md"

    def _pairs(self) -> Iterator[tuple[Example, Example]]:
        return zip(self.before.examples, self.after.examples, strict=True)

    def _graded_pairs(self) -> list[tuple[Example, Example]]:
        return [(b, a) for b, a in self._pairs() if b.category != "error" and a.category != "error"]

    def _row(self, name: str, holds: Callable[[Example], bool], *, of_all: bool = False) -> ComparisonRow:
        pairs = list(self._pairs()) if of_all else self._graded_pairs()
        sides = [b for b, _ in pairs], [a for _, a in pairs]
        shares = self.before.share(holds, sides[0]), self.after.share(holds, sides[1])
        return share_change(name, pairs, holds, shares, seed=self.seed)

    def _header(self) -> tuple[str, ...]:
        return ("", *self.names, "points" if self.is_binary else "change", "factor", "p")

    def headline(self) -> list[str]:
        """Before and after in a line or two: the mean reward where it says more than what is correct, and that."""
        lines: list[str] = []
        if not self.is_binary:
            reward = self.reward
            lines.append(
                f"reward: {decimals(reward.before.value)} before, {decimals(reward.after.value)} after training, "
                f"{signed_decimals(reward.change)} {interval(reward.low, reward.high, signed_decimals)} "
                f"({counted(reward.after.total, 'test problem')})"
            )
            if self.after.correct_means == LIKELIHOOD:
                lines.append(f"reward: {LIKELIHOOD}")
        if self.judges("correct"):
            before, after = self.before.correct, self.after.correct
            shares = f"{percent(before.fraction)} before, {percent(after.fraction)} after training"
            lines.append(f"correct: {shares} ({counted(after.total, 'test problem')})")
        return lines

    def _cells(self, *, between: str) -> list[tuple[str, ...]]:
        """The rows, with what stands ``between`` a number and its interval; totals are said where there is room."""
        cells = [] if self.is_binary else [_reward_cells(self.reward, between=between)]
        for row in self.rows:
            sides = [
                f"{share.successes}{f'/{share.total}' if between == ' ' else ''} ({percent(share.fraction)})"
                f"{between}{interval(share.low, share.high, points)}"
                for share in (row.before, row.after)
            ]
            factor = f"{row.factor:.2f}x" if math.isfinite(row.factor) else "-"
            ends = interval(row.low, row.high, signed_points)
            change = f"{signed_points(row.change)}{between}{ends}"
            cells.append((row.name, *sides, change, factor, p_text(row.p_value)))
        return cells


def compare(
    before: Evaluation,
    after: Evaluation,
    *,
    names: tuple[str, str] = ("base", "trained"),
    problems: str = "test problems",
    seed: int = 0,
) -> Comparison:
    """Two evaluations side by side. ``seed`` is that of the bootstrap.

    Raises DataError if they are not of the same examples in the same order, or were not decoded alike: their
    difference would then measure something else than the models.
    """
    _check_examples(before.examples, after.examples)
    changed = sorted(
        key
        for key in {*before.params, *after.params}
        if _as_written(before.params.get(key)) != _as_written(after.params.get(key))
    )
    if changed:
        differences = ", ".join(f"{key} {before.params.get(key)!r} and {after.params.get(key)!r}" for key in changed)
        raise DataError(f"the evaluations were decoded differently: {differences}. Evaluate both models the same way.")
    return Comparison(before, after, names, problems, seed)


def _check_examples(before: Sequence[Example], after: Sequence[Example]) -> None:
    if len(before) != len(after):
        raise DataError(
            f"the evaluations have {len(before)} and {len(after)} examples. Evaluate both on the same ones."
        )
    if not before:
        raise DataError("the evaluations hold no example. Evaluate both models on some.")
    for index, (first, second) in enumerate(zip(before, after, strict=True)):
        if _identity(first) != _identity(second):
            raise DataError(
                f"example {index} of the two evaluations is not the same problem (row {first.index}: "
                f"{first.question[:60]!r}; row {second.index}: {second.question[:60]!r}). The data has changed between "
                "them, so they cannot be compared. Evaluate both models again, on the same data."
            )


def _identity(example: Example) -> tuple[int, int, str, str]:
    return example.index, example.sample, example.question, example.answer


def _as_written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _change(before: Example, after: Example) -> ExampleChange:
    correct = (before.correct_any_format, after.correct_any_format)
    if None in correct:
        return ExampleChange(before, after, "unknown")
    return ExampleChange(before, after, "format" if correct[0] == correct[1] else "answer")


def _side(example: Example) -> dict[str, Any]:
    keys = ("completion", "num_tokens", "finish_reason", "category", "reward", "correct_any_format", "detail")
    return {key: value for key, value in asdict(example).items() if key in keys}


def _change_lines(change: ExampleChange, names: tuple[str, str], max_characters: int) -> list[str]:
    notes = {"format": " (the answer was right in both, only its form changed)", "answer": "", "unknown": ""}
    lines = [f"[{change.before.index}]{notes[change.kind]} {change.before.question.strip()}"]
    if change.before.answer:
        lines.append(f"  reference answer: {change.before.answer}")
    for name, example in zip(names, (change.before, change.after), strict=True):
        text = example.completion.strip()
        excerpt = text if len(text) <= max_characters else f"{text[:max_characters]} [...]"
        verdict = example.category.replace("_", " ")
        if example.category == "graded":
            verdict = f"reward {example.reward:.3g}"
        lines.append(f"  {name} ({verdict}, {example.num_tokens} tokens):")
        lines += [f"    {line}" for line in excerpt.splitlines()]
    return [*lines, ""]


def _reward_cells(change_of_reward: RewardChange, *, between: str) -> tuple[str, ...]:
    sides = [
        f"{decimals(side.value)}{between}{interval(side.low, side.high, decimals)}"
        for side in (change_of_reward.before, change_of_reward.after)
    ]
    ends = interval(change_of_reward.low, change_of_reward.high, signed_decimals)
    return (
        "mean reward",
        *sides,
        f"{signed_decimals(change_of_reward.change)}{between}{ends}",
        "-",
        p_text(change_of_reward.p_value),
    )
