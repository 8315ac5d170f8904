"""Replays and regrades as pages of HTML: one file without scripts, in the style of the reports."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from oncurve.history.describe import (
    AGREEMENT_HEADS,
    GROUP_HEADS,
    TOKEN_HEADS,
    agreement_rows,
    group_rows,
    step_heads,
    step_rows,
    token_cells,
    value_text,
)
from oncurve.history.opened import OpenedStep, TokenView
from oncurve.history.regrade import Disagreement, Regrade
from oncurve.history.replay import Replay
from oncurve.report.plain_page import plain_page, section, table, tiles
from oncurve.wording import decimals

WIDTH, HEIGHT = 900, 220
MAX_TEXT = 4_000


def regrade_page(regraded: Regrade) -> str:
    """A regrading as a page."""
    total = regraded.total("num_completions")
    sides = [(name.replace("_", " "), f"{regraded.total(name):,}") for name in ("became_right", "became_wrong")]
    if not regraded.total("num_judged"):
        sides = []
    numbers = [
        ("completions", f"{total:,}"),
        ("get another reward", f"{regraded.total('changed'):,}"),
        *sides,
        ("advantages change their sign", f"{regraded.total('flipped'):,}"),
        ("groups gain / lose a signal", f"{regraded.total('gained_signal'):,} / {regraded.total('lost_signal'):,}"),
        ("correlation in groups", decimals(regraded.correlation)),
    ]
    curves = [
        ("then", [(step.step, step.mean_was) for step in regraded.steps]),
        ("now", [(step.step, step.mean_now) for step in regraded.steps]),
    ]
    sections = [
        tiles(numbers),
        section("Mean reward by step", _chart(curves)),
        section("Verdicts, then and now", table(AGREEMENT_HEADS, agreement_rows(regraded, most=24))),
        section("By step", table(step_heads(regraded), step_rows(regraded, most=100))),
        section(
            "Prompts by damage",
            table(
                ("prompt", "advantages move by", "text"),
                (
                    (index, f"{damage:.2f}", regraded.prompts[index][:300])
                    for index, damage in regraded.worst_prompts[:50]
                ),
            ),
        ),
        section("Completions that the two rewards see most differently", "".join(map(_example, regraded.examples))),
        "".join(f"<p>{html.escape(note)}</p>" for note in regraded.notes),
    ]
    title = f"{regraded.run}, graded again"
    return plain_page(title, f"Graded by {regraded.reward}.", sections)


def replay_page(replayed: Replay) -> str:
    """A step done again, as a page."""
    step = replayed.step
    same = f"Same bits as the record: {', '.join(replayed.compared)}." if replayed.is_same else replayed.differences[0]
    numbers = [
        ("as recorded", "yes" if replayed.is_same else "no"),
        ("norm of the gradient", f"{step.norm:.4g}"),
        ("after clipping", f"{step.clipped_norm:.4g}"),
        ("tokens trained on", f"{int(step.batch.mask.sum()):,}"),
        ("of them without weight", f"{step.num_without_weight:,}"),
    ]
    sections = [tiles(numbers)]
    if replayed.causes:
        sections.append(
            section("What is different now", "".join(f"<p>{html.escape(text)}</p>" for text in replayed.causes))
        )
    if replayed.change is not None:
        now = replayed.change
        rows = [
            ("advantages of another sign", now.flipped),
            ("groups that gain a signal", now.gained_signal),
            ("groups that lose it", now.lost_signal),
            ("cosine of the gradients", decimals(now.cosine)),
            ("norm of the gradient", f"{step.norm:.4g} -> {now.step.norm:.4g}"),
        ]
        sections.append(section(f"With {now.described}", table(("", ""), rows)))
    sections += [
        section(
            "Groups by their share of the gradient",
            table(GROUP_HEADS, group_rows(step, in_full=True)),
        ),
        section("Tokens that weigh most", _token_table(step, step.by_weight)),
        section("Tokens on which trainer and sampler differ most", _token_table(step, step.by_ratio)),
        section("Completions", "".join(_completions(step))),
    ]
    return plain_page(f"{replayed.run}, step {replayed.number}", same, sections)


def _example(example: Disagreement) -> str:
    then, now = (value_text(reward.value) for reward in (example.was, example.now))
    head = (
        f"step {example.step}, prompt {example.prompt_index}: reward {then} then, {now} now; advantage "
        f"{example.advantage_was:+.2f} then, {example.advantage_now:+.2f} now"
    )
    details = "".join(
        f"<p>{name}: {html.escape(detail)}</p>"
        for name, detail in (("then", example.was.detail), ("now", example.now.detail or example.now.error or ""))
        if detail
    )
    return (
        f"<h3>{html.escape(head)}</h3>{details}<pre>{html.escape(example.prompt[-MAX_TEXT:])}</pre>"
        f"<pre>{html.escape(example.text[-MAX_TEXT:])}</pre>"
    )


def _token_table(step: OpenedStep, tokens: Sequence[TokenView]) -> str:
    return table(("token", *TOKEN_HEADS), ((repr(token.text), *token_cells(step, token)) for token in tokens))


def _completions(step: OpenedStep) -> Iterable[str]:
    owners = step.batch.episode_ids
    rows: dict[int, list[str]] = {}
    for row in range(len(step.batch)):
        rows.setdefault(row if owners is None else int(owners[row]), []).append(str(row))
    count = 0
    for index, group in enumerate(step.groups):
        yield f"<h3>prompt {group.prompt.index}</h3><pre>{html.escape(group.prompt.text[-MAX_TEXT:])}</pre>"
        for completion, reward in zip(group.completions, step.rewards[index], strict=True):
            weight = float(step.advantages[index, completion.index])
            row_numbers = ", ".join(rows.get(count, []))
            yield f"<p>row {row_numbers}: reward {value_text(reward.value)}, advantage {weight:+.2f}</p>"
            count += 1
            yield f"<pre>{html.escape(completion.text[-MAX_TEXT:])}</pre>"


def _chart(curves: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> str:
    """Lines over steps as SVG; the first one is dashed."""
    points = [(x, y) for _, line in curves for x, y in line if not math.isnan(y)]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin, span = 0.05 * (high - low) or 0.5, max(right - left, 1)
    low, high = low - margin, high + margin

    def at(x: float, y: float) -> str:
        return f"{50 + (WIDTH - 60) * (x - left) / span:.1f},{10 + (HEIGHT - 40) * (high - y) / (high - low):.1f}"

    drawn = []
    for index, (name, line) in enumerate(curves):
        path = " ".join(at(x, y) for x, y in line if not math.isnan(y))
        dashes = ' stroke-dasharray="6 4"' if index == 0 else ""
        drawn.append(f'<polyline fill="none" stroke="currentColor" stroke-width="2" points="{path}"{dashes}/>')
        drawn.append(
            f'<text x="{350 + 120 * index}" y="{HEIGHT - 18}" fill="currentColor" font-size="13">'
            f"{'- - ' if index == 0 else '—— '}{html.escape(name)}</text>"
        )
    for value in (low + margin, high - margin):
        drawn.append(
            f'<text x="0" y="{float(at(left, value).split(",")[1]) + 4:.1f}" fill="currentColor" font-size="12">'
            f"{value:.2f}</text>"
        )
    for anchor, x, step in (("start", 50, left), ("end", WIDTH - 10, right)):
        drawn.append(
            f'<text x="{x}" y="{HEIGHT - 18}" fill="currentColor" font-size="12" text-anchor="{anchor}">'
            f"step {step}</text>"
        )
    label = f"mean reward by step, steps {left} to {right}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" width="100%">{"".join(drawn)}</svg>'
