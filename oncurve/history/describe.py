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

MOST_PAIRS = 12
"""Pairs of verdicts in the table of agreement, the most frequent ones."""
MAX_ROWS = 20


def replay_text(found: Replay) -> Lines:
    """A replay as text: how it compares with the record, and the step."""
    lines: list[Text | Table] = [Text(line) for line in _verdict(found)]
    lines += [Text(line) for line in _gradient(found.step)]
    lines += [_groups(found.step), _tokens("tokens that weigh most in the gradient", found.step, found.step.by_weight)]
    if any(abs(token.ratio - 1) > 1e-3 for token in found.step.by_ratio):
        lines.append(_tokens("tokens on which trainer and sampler differ most", found.step, found.step.by_ratio))
    if found.change is not None:
        now, was = found.change.step, found.step
        lines += [
            Text(f"with {found.change.described}, on the same completions:", style="bold"),
            Text(f"  {found.change.flipped} advantages change their sign; {_signal(found)}"),
            Text(
                f"  cosine of the gradients {number_text(found.change.cosine)}; norm {was.norm:.4g} -> {now.norm:.4g}, "
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


def _groups(step: OpenedStep) -> Table:
    rows: list[tuple[str, ...]] = []
    order = sorted(range(len(step.groups)), key=lambda place: -step.group_shares[place])
    for place in order[:MAX_ROWS]:
        rewards = " ".join("-" if one.value is None else f"{one.value:g}" for one in step.rewards[place])
        weights = step.advantages[place]
        span = f"{float(weights.min()):+.2f} to {float(weights.max()):+.2f}"
        rows.append((str(step.groups[place].prompt.index), rewards, span, f"{100 * step.group_shares[place]:.1f}%"))
    return tables.terminal("groups by their share", ("prompt", "rewards", "advantages", "of the gradient"), rows)


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
            f"of the two rewards inside groups {number_text(found.correlation)}"
        ),
    ]
    lines.append(_agreement(found))
    lines.append(_curve(found))
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


def _agreement(found: Regrade) -> Table:
    ordered = sorted(found.agreement.items(), key=lambda pair: -pair[1])
    rows = [(key, f"{count:,}") for key, count in ordered[:MOST_PAIRS]]
    if rest := ordered[MOST_PAIRS:]:
        rows.append((f"{len(rest)} other pairs", f"{sum(count for _, count in rest):,}"))
    return tables.terminal("agreement", ("then, now", "completions"), rows)


def _curve(found: Regrade) -> Table:
    rows: list[tuple[str, ...]] = []
    every = max(1, math.ceil(len(found.steps) / MAX_ROWS))
    for place, step in enumerate(found.steps):
        if place % every and step.step not in found.cosines:
            continue
        means = number_text(step.mean_was), number_text(step.mean_now)
        cosine = number_text(found.cosines[step.step]) if step.step in found.cosines else ""
        rows.append((str(step.step), *means, str(step.flipped), *([cosine] if found.cosines else [])))
    heads = ("step", "mean reward then", "now", "signs changed", *(["cosine"] if found.cosines else []))
    return tables.terminal("by step" if every == 1 else f"by step, every {every}", heads, rows)


def number_text(value: float) -> str:
    """Three decimals, or a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def value_text(value: float | None) -> str:
    """A reward, or that there is none."""
    return "error" if value is None else f"{value:g}"


def _short(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
