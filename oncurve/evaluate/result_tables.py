"""Text tables of evaluation results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Results = Mapping[str, Any]
"""The content of ``results.json``; ``docs/evaluation.md`` explains every key."""

HEADER = (
    "benchmark",
    "problems",
    "avg@k [95 %]",
    "pass@k",
    "maj@k",
    "any format",
    "cut off",
    "not gradable",
    "seen in training",
)


def results_markdown(results: Results) -> str:
    """All benchmarks of one model: a table, how they were asked and decoded, and breakdowns."""
    lines = [f"# {results['model']['label']}", "", *table_lines(results), ""]
    for name, entry in results["benchmarks"].items():
        lines += [f"## {entry['title']}", "", *describe(entry), ""]
        for column, groups in entry["numbers"]["by_category"].items():
            lines += [f"| {column} | problems | avg@k [95 %] |", "|---|---:|---:|"]
            lines += [f"| {_safe(value)} | {one['num_prompts']} | {share(one)} |" for value, one in groups.items()]
            lines.append("")
        lines += _length_lines(entry["numbers"]["by_length"])
        if not entry["is_whole"]:
            lines += [f"{name} was not run on all of its problems: do not compare this with published numbers.", ""]
    return "\n".join(lines)


def table_lines(results: Results) -> list[str]:
    """A row for each benchmark, as Markdown."""
    rows = [_row(entry) for entry in results["benchmarks"].values()]
    head = ["| " + " | ".join(HEADER) + " |", "|---|" + "---:|" * (len(HEADER) - 1)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = entry["numbers"]
    contamination = entry["contamination"]
    seen = f"{contamination['num_contaminated']}" if contamination["checked"] else "not checked"
    total = numbers["num_completions"]
    return (
        _safe(entry["title"]),
        f"{numbers['num_prompts']} x {numbers['samples_per_prompt']}",
        f"{numbers['avg']['k']}: {share(numbers['avg'])}",
        _largest(numbers["pass"]),
        _largest(numbers["majority"] or {}),
        share(numbers["any_format"]) if numbers["any_format"] else "-",
        f"{numbers['num_truncated']} ({numbers['num_truncated'] / total:.1%})",
        f"{numbers['num_errors']}",
        seen,
    )


def summary_line(entry: Mapping[str, Any]) -> str:
    """One benchmark in one line, for the console."""
    row = dict(zip(HEADER, _row(entry), strict=True))
    named = [(key.partition("@")[0] + "@", row[key]) for key in ("avg@k [95 %]", "pass@k", "maj@k") if row[key] != "-"]
    said = [f"{name}{value}" for name, value in named]
    said += [f"{key} {row[key]}" for key in ("any format", "cut off", "not gradable", "seen in training")]
    return f"{entry['title']}, {row['problems']}: " + ", ".join(said)


def share(estimate: Mapping[str, Any]) -> str:
    """A share with its interval over prompts, in percent."""
    if estimate["value"] is None:
        return "nothing graded"
    low, high = estimate["over_prompts"]
    return f"{100 * estimate['value']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _largest(by_size: Mapping[str, Mapping[str, Any]]) -> str:
    sizes = [int(size) for size in by_size if int(size) > 1]
    if not sizes:
        return "-"
    return f"{max(sizes)}: {share(by_size[str(max(sizes))])}"


def describe(entry: Mapping[str, Any]) -> list[str]:
    """How a benchmark was asked, decoded and graded, in a few lines."""
    params, source, numbers = entry["decoding"], entry["source"], entry["numbers"]
    warmth = params["temperature"]
    drawn = "greedy" if warmth == 0 else f"temperature {warmth}, top-p {params['top_p']}"
    samples = numbers["samples_per_prompt"]
    each = "1 completion each" if samples == 1 else f"{samples} completions each"
    lines = [
        f"{source['path'] or 'made on the spot'}, {source['split']}, part {source['chosen']}: "
        f"{numbers['num_prompts']} problems, {each}, {drawn}, at most {params['max_completion_tokens']} tokens, "
        f"seed {params['seed']}. Prompt: {entry['prompt']['template']['name']}"
        f"{', chat template' if entry['prompt']['chat'] else ''}. Grader: {entry['grader']}."
    ]
    if entry["num_excluded"]:
        lines.append(f"{entry['num_excluded']} problems were left out because their prompt is too long for the model.")
    if bounds := numbers["avg_if_errors_were"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in numbers["errors"].items())
        lines.append(
            f"{numbers['num_errors']} completions could not be graded ({kinds}) and count neither way; "
            f"the average would be {100 * bounds['wrong']:.1f} if they were wrong, "
            f"{100 * bounds['right']:.1f} if they were right."
        )
    return lines


def _length_lines(groups: list[Mapping[str, Any]]) -> list[str]:
    if not groups:
        return []
    rows = [
        f"| {one['min_tokens']} to {one['max_tokens']} | {one['num_completions']} | {one['correct_fraction']:.1%} "
        f"| {one['truncated_fraction']:.1%} |"
        for one in groups
    ]
    return ["| tokens | completions | right | cut off |", "|---|---:|---:|---:|", *rows, ""]


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
