"""Replays and regrades in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from oncurve import tables
from oncurve.history.opened import OpenedStep, TokenView
from oncurve.history.regrade import Regrade
from oncurve.history.replay import Replay
from oncurve.wording import decimals, percent

MOST_PAIRS = 12
"""Pairs of verdicts in the table of agreement, the most frequent ones."""
MAX_ROWS = 20


def replay_text(found: Replay) -> Lines:
    """A replay as text: how it compares with the record, and the step."""
    lines: list[Text | Table] = [Text(line) for line in _verdict(found)]
    lines += [Text(line) for line in _gradient(found.step)]
    lines += [
        tables.terminal("groups by their share", GROUP_HEADS, group_rows(found.step, most=MAX_ROWS)),
        _tokens("tokens that weigh most in the gradient", found.step, found.step.by_weight),
    ]
    if any(abs(token.ratio - 1) > 1e-3 for token in found.step.by_ratio):
        lines.append(_tokens("tokens on which trainer and sampler differ most", found.step, found.step.by_ratio))
    if found.change is not None:
        now, was = found.change.step, found.step
        lines += [
            Text(f"with {found.change.described}, on the same completions:", style="bold"),
            Text(f"  {found.change.flipped} advantages change their sign; {_signal(found)}"),
            Text(
                f"  cosine of the gradients {decimals(found.change.cosine)}; norm {was.norm:.4g} -> {now.norm:.4g}, "
                f"clipped {was.clipped_norm:.4g} -> {now.clipped_norm:.4g}"
            ),
        ]
    return Lines(*lines)


def _signal(found: Replay) -> str:
    assert found.change is not None
    return f"{found.change.gained_signal} groups gain a signal, {found.change.lost_signal} lose it"


def _verdict(found: Replay) -> Iterator[str]:
    begun = f"begun from the checkpoint of step {found.checkpoint}" if found.checkpoint else "begun from the start"
    how = begun if found.is_sampled else f"{begun}, with the recorded completions"
    if found.is_same:
        first = found.checkpoint + 1
        steps = f"of steps {first} to {found.number}: " if first < found.number else ""
        yield f"step {found.number}: same bits as the record ({steps}{', '.join(found.compared)}); {how}"
    else:
        yield f"step {found.number}: not as recorded; {how}"
        yield f"  first difference: {found.differences[0]}"
    if found.causes:
        yield "  otherwise than when it was recorded:" if found.is_same else "  likely cause:"
        yield from (f"    {cause}" for cause in found.causes)
    elif not found.is_same:
        yield "  recipe, data, base, versions, threads and device are as they were: the code or the record has changed"


def _gradient(step: OpenedStep) -> Iterator[str]:
    limit = f", clipped to {step.clipped_norm:.4g}" if step.clipped_norm < step.norm else ", not clipped"
    trained = int(step.batch.mask.sum())
    silent = sum(1 for row in step.advantages if not row.any())
    yield f"gradient: norm {step.norm:.4g}{limit}; {silent} of {len(step.groups)} groups have no signal"
    yield f"tokens: {trained:,} trained on, {step.num_without_weight:,} of them weigh nothing (clipped or masked)"


GROUP_HEADS = ("prompt", "rewards", "advantages", "of the gradient")


def group_rows(step: OpenedStep, *, most: int | None = None, in_full: bool = False) -> list[tuple[str, ...]]:
    """The groups by their share of the gradient: rewards, advantages as a span or ``in_full``, and that share."""
    rows: list[tuple[str, ...]] = []
    order = sorted(range(len(step.groups)), key=lambda place: -step.group_shares[place])
    for place in order[:most]:
        weights = step.advantages[place].tolist()
        ends = weights if in_full else (min(weights), max(weights))
        advantages = (" " if in_full else " to ").join(f"{weight:+.2f}" for weight in ends)
        rewards = " ".join(value_text(one.value) for one in step.rewards[place])
        share = percent(step.group_shares[place])
        rows.append((str(step.groups[place].prompt.index), rewards, advantages, share))
    return rows


def _tokens(title: str, step: OpenedStep, tokens: tuple[TokenView, ...]) -> Table:
    rows = ((repr(one.text), *token_cells(step, one)) for one in tokens[:10])
    return tables.terminal(title, ("token", *TOKEN_HEADS), rows)


TOKEN_HEADS = ("prompt", "row", "place", "probability", "ratio", "weight", "becomes")


def token_cells(step: OpenedStep, one: TokenView) -> tuple[str, ...]:
    """A token's place and numbers; ``weight`` is the derivative of the loss by its log-probability."""
    becomes = "less likely" if one.weight > 0 else "likelier" if one.weight < 0 else ""
    return (
        str(step.groups[one.group].prompt.index), str(one.completion), str(one.place), f"{math.exp(one.logprob):.3g}",
        f"{one.ratio:.3f}", f"{one.weight:+.2e}", becomes,
    )  # fmt: skip


def regrade_text(found: Regrade) -> Lines:
    """A regrading as text."""
    total = found.total("num_completions")
    sides = f"{found.total('became_right'):,} become right, {found.total('became_wrong'):,} become wrong; "
    if not found.total("num_judged"):
        sides = ""
    lines: list[Text | Table] = [
        Text(f"{found.run}: {total:,} completions of {len(found.steps)} steps, graded again by {found.reward}"),
        Text(
            f"{found.total('changed'):,} get another reward; {sides}{found.total('num_errors_now'):,} cannot be graded "
            f"now ({found.total('num_errors_was'):,} then)"
        ),
        Text(
            f"{found.total('flipped'):,} advantages change their sign; of {found.total('num_groups'):,} groups "
            f"{found.total('gained_signal'):,} gain a signal and {found.total('lost_signal'):,} lose it; correlation "
            f"of the two rewards inside groups {decimals(found.correlation)}"
        ),
    ]
    lines.append(tables.terminal("agreement", AGREEMENT_HEADS, agreement_rows(found, most=MOST_PAIRS)))
    rows = step_rows(found, most=MAX_ROWS)
    title = "by step" if len(rows) == len(found.steps) else "by step, in part"
    lines.append(tables.terminal(title, step_heads(found), rows))
    if found.worst_prompts:
        rows = [(str(n), f"{damage:.2f}", _short(found.prompts[n], 90)) for n, damage in found.worst_prompts[:10]]
        heads = ("prompt", "advantages move by", "text")
        lines.append(tables.terminal("prompts by damage", heads, rows, right=False))
    for place, one in enumerate(found.examples[:3]):
        lines.append(
            Text(
                f"\n[{place + 1}] step {one.step}, prompt {one.prompt_index}: reward {value_text(one.was.value)} -> "
                f"{value_text(one.now.value)}, advantage {one.advantage_was:+.2f} -> {one.advantage_now:+.2f}"
            )
        )
        lines.append(Text(f"    {_short(one.text, 400)}"))
        if one.now.detail:
            lines.append(Text(f"    now: {one.now.detail}"))
    lines += [Text(note) for note in found.notes]
    return Lines(*lines)


AGREEMENT_HEADS = ("then, now", "completions")


def agreement_rows(found: Regrade, *, most: int) -> list[tuple[str, str]]:
    """Pairs of verdicts, then and now, with their completions: the most frequent ones, and the rest in one row."""
    ordered = sorted(found.agreement.items(), key=lambda pair: -pair[1])
    rows = [(key, f"{count:,}") for key, count in ordered[:most]]
    if rest := ordered[most:]:
        rows.append((f"{len(rest)} other pairs", f"{sum(count for _, count in rest):,}"))
    return rows


def step_heads(found: Regrade) -> tuple[str, ...]:
    """The columns of ``step_rows``."""
    cosine = ("cosine of the gradients",) if found.cosines else ()
    return ("step", "reward then", "now", "changed", "signs changed", *cosine)


def step_rows(found: Regrade, *, most: int) -> list[tuple[str, ...]]:
    """Mean rewards by step and what changed; of many steps an even choice, and all with a cosine."""
    every = max(1, math.ceil(len(found.steps) / most))
    rows: list[tuple[str, ...]] = []
    for place, step in enumerate(found.steps):
        if place % every and step.step not in found.cosines:
            continue
        means = decimals(step.mean_was), decimals(step.mean_now)
        cosine = decimals(found.cosines[step.step]) if step.step in found.cosines else ""
        counts = f"{step.changed}", f"{step.flipped}"
        rows.append((str(step.step), *means, *counts, *([cosine] if found.cosines else [])))
    return rows


def value_text(value: float | None) -> str:
    """A reward, or that there is none."""
    return "error" if value is None else f"{value:g}"


def _short(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
