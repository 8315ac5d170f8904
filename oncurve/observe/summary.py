"""Text summary of a run, from metrics.jsonl alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from oncurve.core.errors import DataError
from oncurve.observe.columns import Columns
from oncurve.observe.manifest import commit_text, gpu_names, processor_text
from oncurve.observe.metrics import PHASES, metric
from oncurve.observe.progress import sparkline
from oncurve.wording import counted, decimals, duration, percent, signed_decimals, signed_points

_TRAINING = (
    "reward/mean", "reward/correct", "reward/format", "group/zero_signal_fraction", "group/std_mean",
    "completion/mean_tokens", "completion/truncated_fraction", "policy/entropy", "policy/kl", "policy/clip_fraction",
    "policy/gradient_norm", "mismatch/kl", "sft/loss", "episode/turns", "episode/calls", "episode/tool_errors",
    "time/tools_seconds",
)  # fmt: skip
_MEAN, _CORRECT = "evaluation/mean_reward", "evaluation/correct_fraction"
_HELD_OUT = (_MEAN, _CORRECT, "evaluation/any_format_fraction", "evaluation/bad_format_fraction")


def summarize(
    metrics: Columns,
    *,
    manifest: Mapping[str, Any] | None = None,
    comparison: Mapping[str, Any] | None = None,
    title: str = "",
    mfu: str | None = None,
) -> str:
    """A run as text: what was held out, how training went, where the time went, what failed.

    ``comparison`` is what ``comparison.json`` holds. "start" and "end" are means over the first and last tenth of the
    steps. A metric that was not recorded has no line; the loss has none on purpose, as it measures no progress.

    Raises DataError without a step.
    """
    if not metrics.steps:
        raise DataError("there are no metrics to summarize; the run has not finished a step.")
    parts = [
        _head(metrics, manifest or {}, title),
        _compared(comparison) if comparison else [],
        _held_out(metrics),
        _training(metrics),
        _time(metrics, mfu),
        _trouble(metrics),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _head(metrics: Columns, manifest: Mapping[str, Any], title: str) -> list[str]:
    trained = sorted({step for key in ("reward/mean", "policy/loss") for step in metrics.measured(key)})
    steps = f"training steps: {len(trained)}" + (f" ({trained[0]} to {trained[-1]})" if trained else "")
    tokens = metrics.total("tokens/sampled")
    lines = [title or "Training run", steps + (f", {tokens:,.0f} tokens sampled" if tokens else "")]
    if manifest:
        commit = commit_text(manifest) or "unknown"
        device = ", ".join(gpu_names(manifest)) or processor_text(manifest)
        lines.append(f"oncurve {manifest.get('oncurve', '?')}, commit {commit}, on {device}")
    return lines


def _compared(comparison: Mapping[str, Any]) -> list[str]:
    """Before and after on the test problems, each share with the change that they agree on."""
    before, after = comparison["names"]
    lines = [f"Test problems, {comparison['num_prompts']:,}: {before} and {after}, with 95% intervals of the change"]
    if not comparison.get("is_binary", True):
        row = comparison["reward"]
        start, end = (decimals(row[side]["value"]) for side in ("before", "after"))
        change, low, high = (signed_decimals(row[name]) for name in ("change", "low", "high"))
        lines.append(f"  {metric(_MEAN).label:<26}{start:>8} to {end} ({change}, {low} to {high})")
    for row in comparison["rows"]:
        start, end = (share["successes"] / max(share["total"], 1) for share in (row["before"], row["after"]))
        change, low, high = (signed_points(row[name]) for name in ("change", "low", "high"))
        lines.append(f"  {row['name']:<26}{percent(start):>8} to {percent(end)} ({change} points, {low} to {high})")
    return lines


def _held_out(metrics: Columns) -> list[str]:
    lines: list[str] = []
    for entry in map(metric, _HELD_OUT):
        measured = list(zip(*metrics.finite(entry.key), strict=True))
        if not measured:
            continue
        (first_step, first), (last_step, last) = measured[0], measured[-1]
        change = f"{last - first:+.3g}" if entry.key == _MEAN else f"{signed_points(last - first)} points"
        text = f"  {entry.label:<26}{entry.text(first):>8} at step {first_step}"
        if len(measured) > 1:
            text += f"  to {entry.text(last)} at step {last_step} ({change})"
        if entry.key == _CORRECT and len(measured) > 2:
            best_step, best = max(measured, key=lambda pair: pair[1])
            text += f", best {percent(best)} at step {best_step}"
        lines.append(text)
    if not lines:
        return ["During the run: not evaluated"]
    last = max(step for key in _HELD_OUT for step in metrics.measured(key))
    keys = ("num_examples", "correct_low_fraction", "correct_high_fraction")
    columns = (dict(zip(*metrics.finite(f"evaluation/{key}"), strict=True)) for key in keys)
    count, low, high = (values.get(last, math.nan) for values in columns)
    details = [f"{count:.0f} examples"] if math.isfinite(count) else []
    if math.isfinite(low + high):
        details.append(f"last 95% interval of correct {percent(low)} to {percent(high)}")
    return [f"Validation problems, during the run{': ' if details else ''}{', '.join(details)}", *lines]


def _training(metrics: Columns) -> list[str]:
    lines: list[str] = []
    for entry in map(metric, _TRAINING):
        values = metrics.values(entry.key)
        if values:
            tenth = max(1, len(values) // 10)
            start, end = fmean(values[:tenth]), fmean(values[-tenth:])
            ends = f"{entry.text(start):>11}{entry.text(end):>11}"
            lines.append(f"  {entry.label:<26}{ends}   {sparkline(values, width=30)}".rstrip())
    return [f"{'Training prompts':<28}{'start':>11}{'end':>11}", *lines] if lines else []


def _time(metrics: Columns, mfu: str | None) -> list[str]:
    steps = metrics.values("time/step_seconds")
    phases = {name: metrics.total(f"time/{name}_seconds") for name in PHASES}
    spent = {name: seconds for name, seconds in phases.items() if seconds > 0}
    elapsed = metrics.elapsed_seconds()
    if not (steps or spent or elapsed):
        return []
    lines = ["Time" + (f": {duration(elapsed)} in all" if elapsed else "")]
    if steps:
        lines.append(f"  {fmean(steps):.3g} seconds per step, evaluation and saving left out")
    if spent:
        whole = sum(spent.values())
        lines.append("  " + ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in spent.items()))
    speeds = (("sampled", "speed/sampled_tokens_per_second"), ("trained", "speed/trained_tokens_per_second"))
    rates = [f"{fmean(values):,.0f} {name}" for name, key in speeds if (values := metrics.values(key))]
    if rates:
        lines.append(f"  completion tokens per second: {', '.join(rates)}")
    if mfu:
        lines.append(f"  training: {mfu}")
    memory = [(name, max(v)) for name in ("process", "gpu") if (v := metrics.values(f"memory/{name}_gib"))]
    if memory:
        lines.append("  most memory: " + ", ".join(f"{name} {gib:.2f} GiB" for name, gib in memory))
    return lines


def _trouble(metrics: Columns) -> list[str]:
    """Counts of what did not go as it should; empty when all went well."""
    lines: list[str] = []
    if errors := [value for value in metrics.values("reward/error_fraction") if value > 0]:
        steps = counted(len(errors), "step")
        lines.append(f"  completions that could not be graded in {steps}, at most {percent(max(errors))} of one")
    not_finite = dict(zip(*metrics.finite("policy/nonfinite_updates"), strict=True))
    if count := sum(value > 0 for value in not_finite.values()):
        lines.append(f"  updates left out because the gradient was not finite, in {counted(count, 'step')}")
    skipped = zip(*metrics.finite("policy/skipped_updates"), strict=True)
    if count := sum(value > not_finite.get(step, 0.0) for step, value in skipped):
        lines.append(f"  updates left out because none of their groups had a signal, in {counted(count, 'step')}")
    if broken := sorted(key for key in metrics.keys if metrics.broken(key)):
        lines.append(f"  not finite at some step: {', '.join(broken)}")
    silent = metrics.values("group/zero_signal_fraction")
    if silent and (share := sum(value == 1.0 for value in silent) / len(silent)):
        lines.append(f"  no group carried a signal in {share:.0%} of the steps")
    return ["To look at", *lines] if lines else []


def batch_arithmetic(config: Mapping[str, Any], prompts: Mapping[str, int]) -> list[tuple[str, str]]:
    """The derived numbers of a run with their units, as pairs of name and value.

    ``config`` is the resolved recipe as plain data; ``prompts`` counts those for "training", "test" and
    "validation" and those left out as "too_long"; what is not counted there has no line.

    Raises KeyError for a recipe without the sections run, algorithm, rollouts and policy.
    """
    run, group_size = config["run"], config["algorithm"]["group_size"]
    per_step = run["prompts_per_step"] * group_size
    per_update = run.get("completions_per_update") or per_step
    passes = run.get("passes_per_step") or 1
    per_loss = run.get("save_every_steps") or run["steps"]
    sampled = [
        ("prompts per step", f"{run['prompts_per_step']}"),
        ("x completions per prompt (group size)", f"{group_size}"),
        ("= completions per step", f"{per_step}"),
    ]
    demonstrated = [("demonstrations per step", f"{per_step}")]
    rows = [
        *(sampled if config.get("sft") is None else demonstrated),
        ("/ completions per update", f"{per_update}"),
        *([("x passes over the completions of a step", f"{passes}")] if passes > 1 else []),
        ("= updates per step", f"{per_step // per_update * passes}"),
        ("steps x updates per step", f"{run['steps'] * (per_step // per_update) * passes} updates"),
    ]
    if training := prompts.get("training"):
        rows += [
            ("training prompts", f"{training}"),
            ("passes over them", f"{run['steps'] * run['prompts_per_step'] / training:.2f}"),
        ]
    rows += [
        ("steps lost by a failure, at most", f"{per_loss}"),
        *([("= completions sampled again", f"{per_loss * per_step}")] if config.get("sft") is None else []),
        ("most tokens in a completion", f"{config['rollouts']['max_completion_tokens']}"),
        ("tokens in a microbatch, at most", f"{config['policy']['tokens_per_microbatch']}"),
    ]
    counted = (
        ("test prompts (before and after)", "test"),
        ("validation prompts (during)", "validation"),
        ("validation prompts (during)", "held_out"),  # of older manifests
        ("prompts left out as too long", "too_long"),
    )
    return rows + [(name, f"{prompts[key]}") for name, key in counted if key in prompts]
