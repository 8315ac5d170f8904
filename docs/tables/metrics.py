"""The page of metrics, from the glossary."""

from __future__ import annotations

from oncurve.observe.metrics import GLOSSARY
from oncurve.observe.sinks import ALIASES


def glossary_markdown() -> str:
    """The glossary as one Markdown page, a table per group of keys."""
    lines = [
        "# Metrics",
        "",
        "Every key of `metrics.jsonl`, one JSON object per step. A share ends in `_fraction` and lies in [0, 1]; a",
        "value that could not be measured is missing, and one that is not finite is `null`. This page is made from",
        "`oncurve/observe/metrics.py`.",
    ]
    group = ""
    for metric in GLOSSARY:
        if metric.key.split("/")[0] != group:
            group = metric.key.split("/")[0]
            lines += ["", f"## {group}", "", "| key | unit | meaning | healthy |", "|---|---|---|---|"]
        cells = (f"`{metric.key}`", metric.unit, metric.meaning, metric.healthy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", *_alias_lines()]) + "\n"


def _alias_lines() -> list[str]:
    """The table of other trainers' names."""
    sets = list(ALIASES)
    lines = [
        "## Names of other trainers",
        "",
        "The same quantities under the names that TRL and tutorials give them, for people who compare:",
        "`run.track_aliases: [trl]` logs them in TensorBoard, Weights & Biases and trackio as well, and",
        "`oncurve report RUN --names trl` opens a report with them. A part of the reward, `reward/<part>`, is",
        "`rewards/<part>/mean` for TRL. Names of quantities that differ in what they measure have no row.",
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
