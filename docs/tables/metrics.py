"""The page of metrics, from the glossary."""

from __future__ import annotations

from oncurve.observe.metric import Metric
from oncurve.observe.metrics import GLOSSARY
from oncurve.observe.sinks import ALIASES


def glossary_markdown() -> str:
    """The glossary as one Markdown page, a table per group of keys."""
    lines = [
        "# Metrics",
        "",
        "Every key of `metrics.jsonl`, which has one JSON object per step. Fractions are in [0, 1]. What could not be",
        "measured is missing, and what is not finite is `null`.",
    ]
    groups: dict[str, list[Metric]] = {}
    for metric in GLOSSARY:
        groups.setdefault(metric.key.split("/")[0], []).append(metric)
    for group, metrics in groups.items():
        lines += ["", f"## {group}", "", "| key | meaning | healthy |", "|---|---|---|"]
        for metric in metrics:
            unit = "" if metric.unit in ("1", "fraction", "count") else f" ({metric.unit})"
            healthy = "" if metric.healthy == "-" else metric.healthy
            cells = (f"`{metric.key}`", f"{metric.meaning}{unit}", healthy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", *_alias_lines()]) + "\n"


def _alias_lines() -> list[str]:
    """The table of other trainers' names."""
    sets = list(ALIASES)
    lines = [
        "## Names of other trainers",
        "",
        "`run.track_aliases: [trl]` also logs these names to trackers; `oncurve report RUN --names trl` shows them. A",
        "part of the reward, `reward/<part>`, is `rewards/<part>/mean` in TRL. Quantities that differ have no row.",
        "",
        "| oncurve | " + " | ".join(sets) + " |",
        "|---|" + "---|" * len(sets),
    ]
    for metric in GLOSSARY:
        named = [ALIASES[chosen].get(metric.key, "") for chosen in sets]
        if any(named):
            cells = [f"`{name}`" if name else "" for name in (metric.key, *named)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines
