"""The page beside an evaluation's rows: a model's completions, category by category."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from oncurve import tables
from oncurve.evaluate.evaluation import CATEGORIES, Evaluation, Example
from oncurve.rewards.weighted_sum import Category
from oncurve.wording import counted

TITLES = {
    "correct": "Right answer in the right form",
    "wrong": "Wrong answer in the right form",
    "bad_format": "Not in the form that was asked for",
    "graded": "Graded without a verdict, by falling reward",
    "error": "Could not be graded",
}


def analysis_markdown(evaluation: Evaluation, *, limit: int = 3, max_characters: int = 1500) -> str:
    """Every category with its share, its mean length and its first ``limit`` examples.

    A category without an example has its line in the table and nothing else.
    """
    lines = [f"# {evaluation.name}, after {counted(evaluation.step, 'step')}", ""]
    groups: dict[Category, list[Example]] = {
        name: [row for row in evaluation.examples if row.category == name] for name in CATEGORIES
    }
    if not evaluation.is_binary:
        lines += [f"Mean reward: {evaluation.mean_reward}", ""]
    if groups["graded"]:
        groups = {name: examples for name, examples in groups.items() if examples}
        groups["graded"].sort(key=lambda example: -(example.reward or 0.0))
    rows: list[tuple[str, ...]] = []
    for name, examples in groups.items():
        length = f"{fmean(row.num_tokens for row in examples):.0f}" if examples else "-"
        cut = sum(row.is_truncated for row in examples)
        rows.append((TITLES[name], str(evaluation.category_share(name)), length, str(cut)))
    lines += tables.markdown(("category", "completions [95 %]", "mean tokens", "cut off"), rows)
    for name, examples in groups.items():
        if examples:
            lines += ["", f"## {TITLES[name]}: {len(examples)}"]
            for example in examples[:limit]:
                lines += ["", *_example_lines(example, max_characters)]
    return "\n".join(lines) + "\n"


def _example_lines(example: Example, max_characters: int) -> Iterator[str]:
    right_anyway = example.correct_any_format and not example.is_correct
    earned = f", reward {example.reward:.3g}" if example.category == "graded" else ""
    yield f"Row {example.index}{earned}, {example.num_tokens} tokens, ended by {example.finish_reason}" + (
        "; the answer is right, and only its form is not" if right_anyway else ""
    )
    if example.detail:
        yield f"The grader noted: {' '.join(example.detail.split())[:300]}"
    completion = example.completion
    if len(completion) > max_characters:
        completion = f"{completion[:max_characters]} [...]"
    for title, text in (("question", example.question), ("reference", example.answer), ("completion", completion)):
        yield ""
        yield f"{title}:"
        yield ""
        yield from (f"    {line}" for line in text.splitlines() or [""])  # indented: code, whatever it holds
