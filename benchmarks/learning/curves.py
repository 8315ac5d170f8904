"""Pictures and table of docs/watching.md: curves of healthy and of sick runs, from results/curves.json.

python benchmarks/bench.py curves
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "curves.json"
PAGE = ROOT / "docs" / "watching.md"
PICTURES = ROOT / "docs" / "pictures"

CHOSEN = (
    "healthy_grpo_1", "healthy_kl", "rate_tiny", "rate_x100", "entropy_bonus", "cold", "too_hard", "cut_off",
    "length_bonus", "tiny_clip", "kl_runs_away", "kl_too_strong",
)  # fmt: skip
KEYS = (
    "reward/mean", "evaluation/any_format_fraction", "group/zero_signal_fraction", "group/std_mean",
    "completion/mean_tokens", "policy/entropy", "policy/loss", "policy/kl",
)  # fmt: skip
HELD_OUT = "evaluation/any_format_fraction"
"""Right answers in whatever form: an accuracy in which the chosen runs' own rewards have no part."""
LABELS = {
    "healthy_grpo_1": "healthy",
    "healthy_kl": "healthy, KL 0.01",
    "rate_tiny": "learning rate 1e-9",
    "rate_x100": "learning rate x 100",
    "entropy_bonus": "entropy bonus of 1",
    "cold": "temperature 0.05",
    "too_hard": "prompts too hard",
    "cut_off": "at most 12 tokens",
    "length_bonus": "longer is better",
    "tiny_clip": "clipped at 0.0001",
    "kl_runs_away": "learning rate x 10, KL 1e-4",
    "kl_too_strong": "KL 10",
}
SHAPES = {
    "curves-learning.png": ("healthy_grpo_1", "rate_tiny", "rate_x100", "entropy_bonus"),
    "curves-signal.png": ("cold", "too_hard", "cut_off", "length_bonus"),
}
"""Pictures of small panels, one column a run."""
ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward and accuracy", (("reward/mean", "reward in training"), (HELD_OUT, "right answers, held out"))),
    ("groups", (("group/zero_signal_fraction", "groups without a signal"), ("group/std_mean", "deviation in a group"))),
    ("entropy, nats", (("policy/entropy", "entropy"),)),
    ("tokens", (("completion/mean_tokens", "mean length"),)),
)


def draw(results: dict[str, Any], pictures: Path) -> list[Path]:
    """Every picture of the page, from the collected metrics."""
    runs = results["runs"]
    drawn = [draw_shapes(runs, names, pictures / file) for file, names in SHAPES.items()]
    drawn.append(
        draw_lines(runs, ("healthy_grpo_1", "healthy_kl", "rate_tiny", "rate_x100", "kl_runs_away"), "policy/loss",
                   "The loss of five runs", pictures / "curves-loss.png")
    )  # fmt: skip
    drawn.append(
        draw_lines(runs, ("healthy_kl", "kl_runs_away", "kl_too_strong"), "policy/kl",
                   "KL to the reference, nats", pictures / "curves-kl.png")
    )  # fmt: skip
    return drawn


def draw_shapes(runs: dict[str, Any], names: tuple[str, ...], path: Path) -> Path:
    """One column for each run, one row for each kind of metric; rows share their axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 8.2), dpi=110, layout="constrained", facecolor="white")
    panels = figure.subplots(len(ROWS), len(names), sharex=True, sharey="row", squeeze=False)
    for row, (title, keys) in enumerate(ROWS):
        top = max(max(series(runs[name], key)[1], default=0.0) for name in names for key, _ in keys)
        for column, name in enumerate(names):
            axes = panels[row][column]
            for place, (key, label) in enumerate(keys):
                steps, values = series(runs[name], key)
                marker = "o" if key == HELD_OUT else ""
                axes.plot(
                    steps,
                    values,
                    color=("#2563eb", "#e8710a")[place],
                    lw=1.8,
                    marker=marker,
                    ms=4,
                    label=label,
                    clip_on=False,
                )
            axes.grid(color="#e9edf2")
            axes.spines[["top", "right"]].set_visible(False)
            if row == 0:
                axes.set_title(LABELS[name], fontsize=11, fontweight="bold")
            if column == 0:
                axes.set_ylabel(title)
                axes.legend(frameon=False, fontsize=8, loc="upper left")
            axes.set_ylim(0, 1.45 * top)
    for axes in panels[-1]:
        axes.set_xlabel("step")
    figure.savefig(path)
    return path


def draw_lines(runs: dict[str, Any], names: tuple[str, ...], key: str, title: str, path: Path) -> Path:
    """One metric of several runs, each named with its held-out accuracy before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name in names:
        before, after = held_out(runs[name])
        axes.plot(
            *series(runs[name], key), lw=1.8, label=f"{LABELS[name]}: {before:.0%} to {after:.0%} of the answers right"
        )
    axes.grid(color="#e9edf2")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step")
    if key == "policy/kl":
        axes.set_yscale("log")
        axes.set_ylim(1e-5, 1e2)
        axes.axhline(0.1, color="#8a94a6", lw=1, ls="--")
    else:
        axes.set_ylim(-0.02, 0.02)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8.5, ncols=2)
    figure.savefig(path)
    return path


def series(run: dict[str, Any], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric where it was measured and finite."""
    pairs = zip(run["step"], run["metrics"][key], strict=True)
    kept = [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]


def held_out(run: dict[str, Any]) -> tuple[float, float]:
    """Held-out accuracy of the first and the last measurement."""
    _, values = series(run, HELD_OUT)
    return values[0], values[-1]


def table(runs: dict[str, Any]) -> str:
    """First and last value of what tells the runs apart."""
    lines = [
        "| run | right answers, test | reward | groups without a signal | entropy | tokens | loss, least, most |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CHOSEN:
        run = runs[name]
        before, after = held_out(run)
        cells = [LABELS[name], f"{before:.0%}, {after:.0%}"]
        for key, form in (("reward/mean", ".2f"), ("group/zero_signal_fraction", ".0%"), ("policy/entropy", ".2f"),
                          ("completion/mean_tokens", ".0f")):  # fmt: skip
            _, values = series(run, key)
            cells.append(f"{values[0]:{form}}, {values[-1]:{form}}" if values else "-")
        _, losses = series(run, "policy/loss")
        cells.append(f"{min(losses):.3f}, {max(losses):.3f}" if losses else "-")
        lines.append(f"| {' | '.join(cells)} |".replace("-0.000", "0.000"))
    return "\n".join(lines)


def page() -> str:
    """The page with its table as the results have it."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    pattern = re.compile(r"(<!-- curves:begin -->\n).*?(<!-- curves:end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{table(runs)}\n{found[2]}", PAGE.read_text(encoding="utf-8"))


def main() -> None:
    """Draw, and write the table into the page."""
    draw(json.loads(RESULTS.read_text(encoding="utf-8")), PICTURES)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
