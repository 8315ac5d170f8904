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


def replay_text(replayed: Replay) -> Lines:
    """A replay as text: how it compares with the record, and the step."""
    lines: list[Text | Table] = [Text(line) for line in _verdict(replayed)]
    lines += [Text(line) for line in _gradient(replayed.step)]
    lines += [
        tables.terminal("groups by their share", GROUP_HEADS, group_rows(replayed.step, most=MAX_ROWS)),
        _tokens("tokens that weigh most in the gradient", replayed.step, replayed.step.by_weight),
    ]
    if any(abs(token.ratio - 1) > 1e-3 for token in replayed.step.by_ratio):
        lines.append(_tokens("tokens on which trainer and sampler differ most", replayed.step, replayed.step.by_ratio))
    if replayed.change is not None:
        now, was = replayed.change.step, replayed.step
        lines += [
            Text(f"with {replayed.change.described}, on the same completions:", style="bold"),
            Text(f"  {replayed.change.flipped} advantages change their sign; {_signal(replayed)}"),
            Text(
                f"  cosine of the gradients {decimals(replayed.change.cosine)}; norm {was.norm:.4g} -> {now.norm:.4g}, "
                f"clipped {was.clipped_norm:.4g} -> {now.clipped_norm:.4g}"
            ),
        ]
    return Lines(*lines)


def _signal(replayed: Replay) -> str:
    assert replayed.change is not None
    return f"{replayed.change.gained_signal} groups gain a signal, {replayed.change.lost_signal} lose it"


def _verdict(replayed: Replay) -> Iterator[str]:
    begun = (
        f"begun from the checkpoint of step {replayed.checkpoint}" if replayed.checkpoint else "begun from the start"
    )
    how = begun if replayed.is_sampled else f"{begun}, with the recorded completions"
    if replayed.is_same:
        first = replayed.checkpoint + 1
        steps = f"of steps {first} to {replayed.number}: " if first < replayed.number else ""
        yield f"step {replayed.number}: same bits as the record ({steps}{', '.join(replayed.compared)}); {how}"
    else:
        yield f"step {replayed.number}: not as recorded; {how}"
        yield f"  first difference: {replayed.differences[0]}"
    if replayed.causes:
        yield "  otherwise than when it was recorded:" if replayed.is_same else "  likely cause:"
        yield from (f"    {cause}" for cause in replayed.causes)
    elif not replayed.is_same:
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
    order = sorted(range(len(step.groups)), key=lambda index: -step.group_shares[index])
    for index in order[:most]:
        weights = step.advantages[index].tolist()
        ends = weights if in_full else (min(weights), max(weights))
        advantages = (" " if in_full else " to ").join(f"{weight:+.2f}" for weight in ends)
        rewards = " ".join(value_text(reward.value) for reward in step.rewards[index])
        share = percent(step.group_shares[index])
        rows.append((str(step.groups[index].prompt.index), rewards, advantages, share))
    return rows


def _tokens(title: str, step: OpenedStep, tokens: tuple[TokenView, ...]) -> Table:
    rows = ((repr(token.text), *token_cells(step, token)) for token in tokens[:10])
    return tables.terminal(title, ("token", *TOKEN_HEADS), rows)


TOKEN_HEADS = ("prompt", "row", "place", "probability", "ratio", "weight", "becomes")


def token_cells(step: OpenedStep, token: TokenView) -> tuple[str, ...]:
    """A token's place and numbers; ``weight`` is the derivative of the loss by its log-probability."""
    becomes = "less likely" if token.weight > 0 else "likelier" if token.weight < 0 else ""
    return (
        str(step.groups[token.group].prompt.index), str(token.completion), str(token.place),
        f"{math.exp(token.logprob):.3g}", f"{token.ratio:.3f}", f"{token.weight:+.2e}", becomes,
    )  # fmt: skip


def regrade_text(regraded: Regrade) -> Lines:
    """A regrading as text."""
    total = regraded.total("num_completions")
    sides = f"{regraded.total('became_right'):,} become right, {regraded.total('became_wrong'):,} become wrong; "
    if not regraded.total("num_judged"):
        sides = ""
    lines: list[Text | Table] = [
        Text(
            f"{regraded.run}: {total:,} completions of {len(regraded.steps)} steps, graded again by {regraded.reward}"
        ),
        Text(
            f"{regraded.total('changed'):,} get another reward; {sides}{regraded.total('num_errors_now'):,} cannot be "
            f"graded now ({regraded.total('num_errors_was'):,} then)"
        ),
        Text(
            f"{regraded.total('flipped'):,} advantages change their sign; of {regraded.total('num_groups'):,} groups "
            f"{regraded.total('gained_signal'):,} gain a signal and {regraded.total('lost_signal'):,} lose it; "
            f"correlation of the two rewards inside groups {decimals(regraded.correlation)}"
        ),
    ]
    lines.append(tables.terminal("agreement", AGREEMENT_HEADS, agreement_rows(regraded, most=MOST_PAIRS)))
    rows = step_rows(regraded, most=MAX_ROWS)
    title = "by step" if len(rows) == len(regraded.steps) else "by step, in part"
    lines.append(tables.terminal(title, step_heads(regraded), rows))
    if regraded.worst_prompts:
        rows = [(str(n), f"{damage:.2f}", _short(regraded.prompts[n], 90)) for n, damage in regraded.worst_prompts[:10]]
        heads = ("prompt", "advantages move by", "text")
        lines.append(tables.terminal("prompts by damage", heads, rows, right=False))
    for index, example in enumerate(regraded.examples[:3]):
        lines.append(
            Text(
                f"\n[{index + 1}] step {example.step}, prompt {example.prompt_index}: reward "
                f"{value_text(example.was.value)} -> {value_text(example.now.value)}, advantage "
                f"{example.advantage_was:+.2f} -> {example.advantage_now:+.2f}"
            )
        )
        lines.append(Text(f"    {_short(example.text, 400)}"))
        if example.now.detail:
            lines.append(Text(f"    now: {example.now.detail}"))
    lines += [Text(note) for note in regraded.notes]
    return Lines(*lines)


AGREEMENT_HEADS = ("then, now", "completions")


def agreement_rows(regraded: Regrade, *, most: int) -> list[tuple[str, str]]:
    """Pairs of verdicts, then and now, with their completions: the most frequent ones, and the rest in one row."""
    ordered = sorted(regraded.agreement.items(), key=lambda pair: -pair[1])
    rows = [(key, f"{count:,}") for key, count in ordered[:most]]
    if rest := ordered[most:]:
        rows.append((f"{len(rest)} other pairs", f"{sum(count for _, count in rest):,}"))
    return rows


def step_heads(regraded: Regrade) -> tuple[str, ...]:
    """The columns of ``step_rows``."""
    cosine = ("cosine of the gradients",) if regraded.cosines else ()
    return ("step", "reward then", "now", "changed", "signs changed", *cosine)


def step_rows(regraded: Regrade, *, most: int) -> list[tuple[str, ...]]:
    """Mean rewards by step and what changed; of many steps an even choice, and all with a cosine."""
    every = max(1, math.ceil(len(regraded.steps) / most))
    rows: list[tuple[str, ...]] = []
    for index, step in enumerate(regraded.steps):
        if index % every and step.step not in regraded.cosines:
            continue
        means = decimals(step.mean_was), decimals(step.mean_now)
        cosine = decimals(regraded.cosines[step.step]) if step.step in regraded.cosines else ""
        counts = f"{step.changed}", f"{step.flipped}"
        rows.append((str(step.step), *means, *counts, *([cosine] if regraded.cosines else [])))
    return rows


def value_text(value: float | None) -> str:
    """A reward, or that there is none."""
    return "error" if value is None else f"{value:g}"


def _short(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
