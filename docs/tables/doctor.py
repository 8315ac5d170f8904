"""The generated page of the doctor, from the checks and from runs with planted faults."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oncurve.doctor import grading, groups, lengths, policy_health, throughput, tool_use
from oncurve.doctor.diagnose import CHECKS, Check
from oncurve.doctor.live import MIN_STEPS, QUIET_STEPS

_HEAD = f"""# The doctor

<!-- not run: needs a run; the README makes one -->
```bash
oncurve doctor runs/demo           # what is wrong, which numbers show it, what to do; works during a run
oncurve doctor runs/demo --json    # for programs
```

It reads the files of a run, needs neither the model nor torch, and exits with 1 if something is severe. The same checks run
after every step as alarms. An alarm is shown when it first fires, when it worsens, and when it returns after {QUIET_STEPS} quiet
steps; none fires in the first {MIN_STEPS - 1} steps.

- **Act on the first finding.** Findings that follow from another one come after it and name it.
- **Severe** spoils the run, a **warning** costs something, a **note** is worth knowing.
- Numbers are means over the first or last fifth of the steps, or over all of them; the finding says which.
- **The loss is no diagnosis**: on policy it is about 0, whether the run learns or not.
- A check whose metrics are missing is skipped. No finding does not prove that all is well.

## The checks
"""
_SECTIONS = (
    ("Reward and grader", grading),
    ("Groups", groups),
    ("Lengths", lengths),
    ("Policy", policy_health),
    ("Tools and environments", tool_use),
    ("Time and memory", throughput),
)


def doctor_markdown(results: Mapping[str, Any] | None = None) -> str:
    """The page on the doctor; ``results`` are those of ``benchmarks/results/doctor_runs.json``, if they are there."""
    lines = [_HEAD]
    for title, module in _SECTIONS:
        lines += [f"### {title}", "", "| check | looks for | what to do |", "|---|---|---|"]
        lines += [_row(check) for check in CHECKS if check.function.__module__ == module.__name__]
        lines.append("")
    if results is not None:
        lines += ["## How well it finds causes", "", _results(results), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(check: Check) -> str:
    remedy = " / ".join(_texts(check, "do"))
    cells = (f"`{check.name}`", check.symptom, remedy)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _texts(check: Check, name: str) -> Iterator[str]:
    """The texts that a check may give as ``what`` or ``do``, as they are in its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(check.function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == name:
            yield from _constants(node.value)


def _constants(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _constants(node.body)
        yield from _constants(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _results(results: Mapping[str, Any]) -> str:
    runs: Sequence[Mapping[str, Any]] = results["runs"]
    sick, healthy = [run for run in runs if run["expected"]], [run for run in runs if not run["expected"]]
    named = sum(run["is_right"] for run in sick)
    calm = sum(run["is_right"] for run in healthy)
    return (
        f"The demo's recipe was run for 12 steps with one planted fault. The first finding named the fault in {named} of "
        f"{len(sick)} such runs; nothing severe was found in {calm} of {len(healthy)} healthy ones "
        f"(every run in `benchmarks/results/doctor_runs.json`)."
    )
