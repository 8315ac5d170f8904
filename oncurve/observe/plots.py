"""Plots of metrics.jsonl, as PNG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncurve.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, RED, INK, GREY = (
    "#2563eb", "#e8710a", "#0a8f63", "#7c3aed", "#d0313d", "#1f2937", "#8a94a6",
)  # fmt: skip
_DPI = 160
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#c3cad5",
    "axes.labelcolor": "#4b5563",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.color": "#e9edf2",
    "grid.linewidth": 0.8,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps at which it was measured; a step without a finite value is a gap, never a 0."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]], key: str) -> Series:
        """The rows that have the key; a null is kept as NaN."""
        rows = [(row["step"], float(row[key])) for row in metrics if key in row]
        return cls(key, tuple(step for step, _ in rows), tuple(value for _, value in rows))

    def __bool__(self) -> bool:
        return any(math.isfinite(value) for value in self.values)

    def finite(self) -> Series:
        """Without the gaps, for what is measured only now and then."""
        kept = [pair for pair in zip(self.steps, self.values, strict=True) if math.isfinite(pair[1])]
        return Series(self.key, tuple(step for step, _ in kept), tuple(value for _, value in kept))

    def smoothed(self, window: int) -> tuple[float, ...]:
        """Centred mean over up to ``window`` measurements, gaps left out and left open."""
        half = window // 2
        means: list[float] = []
        for place, value in enumerate(self.values):
            near = [v for v in self.values[max(0, place - half) : place + half + 1] if math.isfinite(v)]
            means.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
        return tuple(means)


def plot_run(metrics: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "", subtitle: str = "") -> Path:
    """The whole run on one picture, from the rows of ``read_metrics``.

    Form against answer, training against held-out accuracy, the loss (as what it is), rewards inside and between
    groups with the share of groups that carry no signal; below them length, entropy and KL. Thin lines are single
    steps, thick ones running means. A metric that was not recorded is named in its panel instead of being drawn.

    Raises DataError without a row.
    """
    if not metrics:
        raise DataError("there are no metrics to draw; the run has not finished a step.")
    with _figure(10.0, 10.6) as figure:
        grid = figure.add_gridspec(
            3, 6, height_ratios=(1, 1, 0.78), hspace=0.52, wspace=0.95, left=0.078, right=0.945, top=0.875, bottom=0.05
        )
        smooth = running_window(len(metrics))
        lines = f"thick: mean of {smooth} steps, thin: single steps" if smooth > 1 else ""
        _titles(figure, title or "Training run", "   ".join(part for part in (subtitle, lines) if part))
        _format_and_answer(figure.add_subplot(grid[0, :3]), metrics, smooth)
        _train_and_held_out(figure.add_subplot(grid[0, 3:]), metrics, smooth)
        _loss(figure.add_subplot(grid[1, :3]), metrics, smooth)
        _reward_range(figure.add_subplot(grid[1, 3:]), metrics, smooth)
        _completion_length(figure.add_subplot(grid[2, :2]), metrics, smooth)
        _single(figure.add_subplot(grid[2, 2:4]), metrics, "policy/entropy", "Entropy in nats per token", GREEN, smooth)
        _single(figure.add_subplot(grid[2, 4:]), metrics, "policy/kl", "KL to the reference in nats", RED, smooth)
        _same_steps(figure, metrics)
        return _save(figure, path)


def running_window(num_rows: int) -> int:
    """Measurements in a running mean: an odd number, about a twentieth of the run, 1 for a short one.

    >>> running_window(8), running_window(100), running_window(1000)
    (1, 5, 51)
    """
    return 2 * (num_rows // 40) + 1


def _format_and_answer(axes: Axes, metrics: Sequence[Mapping[str, Any]], smooth: int) -> None:
    _title(axes, "Form and answer, training prompts")
    keys = {"reward/format": ("in the required format", ORANGE), "reward/correct": ("correct", BLUE)}
    _lines(axes, metrics, keys, smooth)
    _percent(axes)
    _note_missing(axes, metrics, tuple(keys))
    _legend(axes)


def _train_and_held_out(axes: Axes, metrics: Sequence[Mapping[str, Any]], smooth: int) -> None:
    _title(axes, "Accuracy, training and held-out prompts")
    _lines(axes, metrics, {"reward/correct": ("training, sampled", BLUE)}, smooth)
    held_out = {
        "evaluation/correct_fraction": ("held-out (95%)", "-"),
        "evaluation/any_format_fraction": ("held-out, any format", ":"),
    }
    for key, (label, line) in held_out.items():
        if points := Series.of(metrics, key).finite():
            axes.plot(points.steps, points.values, line, color=GREEN, marker="o", markersize=4.5, lw=2, label=label)
    _interval_bars(axes, metrics, GREEN)
    _percent(axes)
    _note_missing(axes, metrics, ("reward/correct", *held_out))
    _legend(axes)


def _loss(axes: Axes, metrics: Sequence[Mapping[str, Any]], smooth: int) -> None:
    _title(axes, "Surrogate loss: not a measure of progress", legend_rows=2)
    loss = Series.of(metrics, "policy/loss")
    if loss:
        axes.axhline(0.0, color=GREY, linewidth=0.9)
    _lines(axes, metrics, {loss.key: ("on policy it stays near the KL term, whatever is learned", PURPLE)}, smooth)
    reach = max(map(abs, loss.finite().values), default=0.0)
    axes.set_ylim(*(side * max(1.15 * reach, 0.001) for side in (-1, 1)))  # rounding errors are not magnified
    axes.yaxis.set_major_formatter("{x:.3g}")
    broken = len(loss.steps) - len(loss.finite().steps)
    _note_missing(axes, metrics, (loss.key,), more=f"steps without a finite loss: {broken}" if broken else "")
    _legend(axes)


def _reward_range(axes: Axes, metrics: Sequence[Mapping[str, Any]], smooth: int) -> None:
    _title(axes, "Reward between and inside groups", legend_rows=2)
    _band(axes, metrics, ("group/mean_min", "group/mean_max"), "group means, lowest to highest", smooth)
    keys = {"reward/mean": ("mean", BLUE), "group/std_mean": ("deviation inside a group", ORANGE)}
    _lines(axes, metrics, keys, smooth, single_steps=False)
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.03, 1.03)  # the same scale as that of the share on the right
    silent = Series.of(metrics, "group/zero_signal_fraction")
    if silent:
        axes.plot([], [], color=RED, linewidth=1.6, linestyle=(0, (3, 2)), label="groups without signal (right)")
        right = axes.twinx()
        right.grid(visible=False)
        right.plot(silent.steps, silent.smoothed(smooth), color=RED, linewidth=1.6, linestyle=(0, (3, 2)))
        _percent(right)
        right.tick_params(axis="y", colors=RED)
    _note_missing(axes, metrics, ("group/mean_min", "group/mean_max", "group/zero_signal_fraction", *keys))
    _legend(axes, columns=2)


def _completion_length(axes: Axes, metrics: Sequence[Mapping[str, Any]], smooth: int) -> None:
    _title(axes, "Completion length in tokens")
    ends = ("completion/min_tokens", "completion/max_tokens")
    _band(axes, metrics, ends, "shortest to longest", smooth)
    _lines(axes, metrics, {"completion/mean_tokens": ("mean", BLUE)}, smooth)
    _from_zero(axes)
    _note_missing(axes, metrics, (*ends, "completion/mean_tokens"))
    _legend(axes)


def _single(axes: Axes, metrics: Sequence[Mapping[str, Any]], key: str, title: str, colour: str, smooth: int) -> None:
    _title(axes, title)
    _lines(axes, metrics, {key: ("", colour)}, smooth)
    _from_zero(axes)
    _note_missing(axes, metrics, (key,))


def _lines(
    axes: Axes,
    metrics: Sequence[Mapping[str, Any]],
    keys: Mapping[str, tuple[str, str]],
    smooth: int,
    *,
    single_steps: bool = True,
) -> None:
    """Draws each metric that was recorded as a running mean over its single steps."""
    for key, (label, colour) in keys.items():
        if not (series := Series.of(metrics, key)):
            continue
        if single_steps and smooth > 1:
            axes.plot(series.steps, series.values, color=colour, linewidth=0.9, alpha=0.28)
        marker = "o" if len(series.finite().steps) == 1 else ""
        axes.plot(series.steps, series.smoothed(smooth), color=colour, linewidth=2.0, label=label, marker=marker)


def _band(axes: Axes, metrics: Sequence[Mapping[str, Any]], keys: tuple[str, str], label: str, smooth: int) -> None:
    both = [row for row in metrics if keys[0] in row and keys[1] in row]
    low, high = Series.of(both, keys[0]), Series.of(both, keys[1])
    if low and high:
        edges = low.smoothed(smooth), high.smoothed(smooth)
        axes.fill_between(low.steps, *edges, color=BLUE, alpha=0.13, linewidth=0, label=label)


def _interval_bars(axes: Axes, metrics: Sequence[Mapping[str, Any]], colour: str) -> None:
    low_key, high_key = "evaluation/correct_low_fraction", "evaluation/correct_high_fraction"
    rows = [row for row in metrics if math.isfinite(row.get(low_key, math.nan) + row.get(high_key, math.nan))]
    low, high = [row[low_key] for row in rows], [row[high_key] for row in rows]
    axes.vlines([row["step"] for row in rows], low, high, color=colour, linewidth=1.3, alpha=0.55)


def _percent(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter("{x:.0%}")


def _from_zero(axes: Axes) -> None:
    """The axis from 0 upwards, or from the lowest value where that is below 0 by more than rounding."""
    if not axes.has_data():
        return
    lowest, highest = axes.dataLim.intervaly
    below = lowest if lowest < -1e-3 * abs(highest) else 0.0
    axes.set_ylim(1.08 * below, 1.08 * highest if highest > below else below + 1.0)
    axes.yaxis.set_major_formatter("{x:.3g}")


def _title(axes: Axes, text: str, *, legend_rows: int = 1) -> None:
    """A title with room for the legend below it: as much for every panel of a row, so that titles line up."""
    axes.set_title(text, pad=8 + 13 * legend_rows)


def _legend(axes: Axes, *, columns: int = 3) -> None:
    """The names of the lines between title and panel, where they cover nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, handlelength=1.5,
            columnspacing=1.3, handletextpad=0.5, borderaxespad=0.15, borderpad=0.1, labelspacing=0.25,
        )  # fmt: skip


def _note_missing(axes: Axes, metrics: Sequence[Mapping[str, Any]], keys: Sequence[str], more: str = "") -> None:
    """Names what was not recorded: below the panel, or in the middle of one that stays empty."""
    missing = [key for key in keys if not Series.of(metrics, key)]
    lines = [f"not recorded: {', '.join(missing)}"] if missing else []
    if len(missing) == len(keys):
        axes.set_yticks([])
        where = {"x": 0.5, "y": 0.5, "ha": "center", "va": "center"}
        lines = ["not recorded:", *missing]
    else:
        where = {"x": 1.0, "y": -0.1, "ha": "right", "va": "top", "fontsize": 7.5}
    text = "\n".join(wrapped for line in [*lines, more] for wrapped in textwrap.wrap(line, width=52))
    axes.text(s=text, transform=axes.transAxes, color=GREY, **where)


def _same_steps(figure: Figure, metrics: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    first, last = metrics[0]["step"], metrics[-1]["step"]
    margin = max(0.5, 0.02 * (last - first))
    for axes in figure.axes:
        axes.set_xlim(first - margin, last + margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        axes.set_xlabel("step", loc="left")


def _titles(figure: Figure, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.03, 1 - 0.32 / height, title, fontsize=15, fontweight="bold", va="center")
    figure.text(0.03, 1 - 0.62 / height, subtitle, fontsize=9.5, color="#4b5563", va="center")


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in inches with the house's look; neither the look nor the figure stays in the process."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]  (its keys are literals there)
        yield Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def _save(figure: Figure, path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        figure.savefig(unfinished, format="png")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target
