"""How many rollout servers keep a trainer busy? Picture and tables of docs/evidence.md, from the simulation alone.

python benchmarks/simulate_chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleet import FleetQuestion, fleet
from pages import filled

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "evidence.md", ROOT / "docs" / "pictures" / "servers.png"
MEASURED = ROOT / "benchmarks" / "results" / "simulate.json"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
RECIPE = (
    "model=Qwen/Qwen2.5-7B",
    "run.prompts_per_step=256",
    "rollouts.max_completion_tokens=2048",
)
KINDS = {"all weights": (), "LoRA, rank 32": ("policy.lora.rank=32",)}
COLOURS = {"all weights": "#c2410c", "LoRA, rank 32": "#2563eb"}


def planned(more: tuple[str, ...], *, losses: float = 0.0, spread: float = 0.6) -> list[dict[str, Any]]:
    """What `python benchmarks/fleet.py gsm8k --servers 1..64` says."""
    question = FleetQuestion(counts=COUNTS, losses_per_hour=losses, spread=spread)
    text = fleet("gsm8k", [*RECIPE, *more], question, network_gbit=400.0, as_json=True, gpus=8, mean_tokens=700.0)
    return json.loads(text)


def measured_table() -> str:
    """Measured and simulated runs beside each other."""
    lines = [
        "| servers | staleness | step, measured | simulated | error | waiting, measured | simulated |",
        "|" + "---|" * 7,
    ]
    for run in json.loads(MEASURED.read_text(encoding="utf-8"))["runs"]:
        real, said = run["measured"], run["simulated"]
        lines.append(
            f"| {run['servers']} | {run['staleness']}{' (gives the time of training)' * run['gives_train_seconds']} "
            f"| {real['step_seconds']:.2f} s | {said['step_seconds']:.2f} s | {run['step_error']:+.0%} "
            f"| {real['sample_seconds']:.2f} s | {said['sample_seconds']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


def planned_table() -> str:
    """Steps and waiting for all numbers of servers; the last column with servers that are lost."""
    columns = {
        (kind, late): [row[f"staleness_{late}"] for row in planned(more)]
        for kind, more in KINDS.items()
        for late in (0, 1)
    }
    lost = [row["staleness_1"] for row in planned(KINDS["LoRA, rank 32"], losses=1.0)]
    even = [row["staleness_1"] for row in planned(KINDS["LoRA, rank 32"], spread=0.0)]
    names = [f"{kind}, staleness {late}" for kind, late in columns]
    lines = [
        f"| servers | {' | '.join(names)} | the last, equal lengths | the last, each lost once an hour |",
        "|" + "---|" * (len(names) + 3),
    ]
    for place, count in enumerate(COUNTS):
        cells = [_cell(rows[place]) for rows in [*columns.values(), even, lost]]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    """Seconds of a step; how idle the trainer and the servers are."""
    return f"{row['step_seconds']:.0f} s; {row['trainer_idle_fraction']:.0%}, {row['server_idle_fraction']:.0%}"


def draw(path: Path) -> None:
    """Three panels over the number of servers: seconds of a step, idle trainer, idle servers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6))
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for kind, more in KINDS.items():
        rows = planned(more)
        for late, style in ((0, "--"), (1, "-")):
            found = [row[f"staleness_{late}"] for row in rows]
            line = {"color": COLOURS[kind], "linestyle": style, "marker": "o", "markersize": 3.5}
            label = f"{kind}, staleness {late}"
            panels[0].plot(COUNTS, [one["step_seconds"] for one in found], label=label, **line)
            panels[1].plot(COUNTS, [100 * one["trainer_idle_fraction"] for one in found], **line)
            panels[2].plot(COUNTS, [100 * one["server_idle_fraction"] for one in found], **line)
    titles = ("Seconds of a step", "Trainer idle, %", "Servers idle, %")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(COUNTS, [str(count) for count in COUNTS])
        panel.set_xlabel("rollout servers of one H100", fontsize=9)
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def page() -> str:
    """The page with the tables between their markers."""
    return filled(PAGE, {"simulated-measured": measured_table(), "simulated": planned_table()})


if __name__ == "__main__":
    draw(PICTURE)
    PAGE.write_text(page(), encoding="utf-8")
