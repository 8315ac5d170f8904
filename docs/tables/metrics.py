"""The page of metrics, from the glossary."""

from __future__ import annotations

from oncurve.observe.metrics import GLOSSARY, Metric


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
    return "\n".join(lines) + "\n"
