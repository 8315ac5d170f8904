"""What do the committed records of dying servers say? The tables of docs/evidence.md.

python benchmarks/chaos_tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import filled

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "evidence.md", ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def faults_text() -> str:
    """For each kind of server what all faults together did, and what each took."""
    parts = []
    for name in ("chaos.json", "chaos_vllm.json"):
        found = read(name)
        lost, difference = found["attempts"].get("lost", 0), found["largest_logprob_difference"]
        parts.append(
            f"**{found['servers']}**, load average {found['machine']['load_average']:.0f}, `silent_seconds` "
            f"{found['silent_seconds']:g}: {found['steps']} steps, {found['completions']} completions, "
            f"{found['tokens']:,} tokens, {lost} attempts lost; none missing, {found['wrong_completions']} of wrong "
            f"weights; largest difference of a log-probability {difference:.0e}.\n\n"
            "| fault | seconds until it is noticed | until the step that it met is complete "
            "| from the repair until the server samples again |\n|---|---|---|---|\n"
            + "".join(
                f"| {one['what']} | {seconds(one['detect_seconds'])} | {seconds(one['step_seconds'] or None)} "
                f"| {seconds(one['ready_seconds'])} |\n"
                for one in found["faults"]
            )
        )
    return "\n".join(parts)


def run_text() -> str:
    """A disturbed run beside an undisturbed one."""
    path = RESULTS / "chaos_run_vllm.json"
    if not path.is_file():
        return "Not measured yet.\n"
    found = read(path.name)
    lines = [
        "| run | completions | lost | of wrong weights | reward of the last 5 steps | correct of 200 held-out |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("undisturbed", "disturbed"):
        one = found[name]
        share, low, high = (f"{one['correct'][key]:.1%}" for key in ("fraction", "low", "high"))
        lines.append(
            f"| {name} | {one['completions']} | {one['completions_lost']} | {one['wrong_versions']} "
            f"| {one['reward_of_last_steps']:.2f} | {share} [{low}, {high}] |"
        )
    done = "; ".join(f"{fault['what']} at step {fault['step']}" for fault in found["faults"])
    return "\n".join(lines) + f"\n\nWhat happened: {done}.\n"


def page() -> str:
    """The page with the tables between their markers."""
    return filled(PAGE, {"chaos": faults_text(), "chaos-run": run_text()})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
