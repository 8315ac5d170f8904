"""The generated page of the doctor, from the checks and from runs made sick on purpose."""

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
oncurve doctor runs/demo           # what is wrong, which numbers show it, what helps; also while the run goes on
oncurve doctor runs/demo --json    # the same for programs
```

It reads `metrics.jsonl`, `config.yaml`, the graded completions of the evaluations and of the first and last step that
were kept, and answers in a moment: it needs neither the model nor torch. The exit code is 1 if something is severe. The
same checks run after every step of a run as alarms: each is reported once when it begins, again when it gets worse, and
again when it comes back after {QUIET_STEPS} quiet steps. The first {MIN_STEPS - 1} steps are left alone.

## How to read it

- **The first finding is the one to act on.** Causes are before what follows from them, and a finding that another one
  explains says so. A run whose learning rate ruined it also has dead groups, odd lengths and skipped updates: they go
  away with their cause.
- **Severe** spoils the run, a **warning** costs something, a **note** is worth knowing.
- Evidence is a mean over the first or last fifth of the steps (at least 3, at most 20) or over all of them, with the
  steps it covers. A change counts when it is larger than what the choice of prompts explains.
- **The loss is no diagnosis.** On policy it is about 0 and moves with the KL term; a run that learns and one that does
  not have the same loss. Only a loss that is not a finite number means something.
- **Spread of the batch is not spread of the groups.** `reward/std` and the range of rewards can be wide while every
  group is uniform. Learning comes from `group/std_mean` and dies with `group/zero_signal_fraction`.
- **A growing KL asks for a larger `algorithm.kl_coef`**, or a smaller learning rate; never for a smaller coefficient.
- Held-out accuracy above that of training is no leak by itself: greedy decoding beats sampling. Only the same decoding
  can be compared.
- A check whose metrics or settings are missing says nothing. No finding is no proof of health.

## The checks

In the order in which they are told. "Explained by" lists the findings that make this one a consequence.
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
    """The page on the doctor; ``results`` are those of ``benchmarks/doctor_runs.py``, if they are there."""
    lines = [_HEAD]
    for title, module in _SECTIONS:
        lines += [f"### {title}", "", "| check | looks for | says | do | explained by |", "|---|---|---|---|---|"]
        lines += [_row(check) for check in CHECKS if check.function.__module__ == module.__name__]
        lines.append("")
    if results is not None:
        lines += ["## Runs made sick on purpose", "", *_results(results), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(check: Check) -> str:
    says = " / ".join(_texts(check, "what"))
    remedy = " / ".join(_texts(check, "do"))
    follows = ", ".join(f"`{name}`" for name in check.follows) or "-"
    cells = (f"`{check.name}`", check.symptom, says, remedy, follows)
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


def _results(results: Mapping[str, Any]) -> list[str]:
    runs: Sequence[Mapping[str, Any]] = results["runs"]
    sick, healthy = [run for run in runs if run["expected"]], [run for run in runs if not run["expected"]]
    named = sum(run["is_right"] for run in sick)
    calm = sum(run["is_right"] for run in healthy)
    hardware, code = results["run"]["hardware"], results["run"]["code"]
    lines = [
        f"The recipe of the demo, 12 steps of 8 prompts and 8 completions, changed in one respect each. The first "
        f"finding names the planted cause on **{named} of {len(sick)}** sick runs; nothing severe is found on "
        f"**{calm} of {len(healthy)}** healthy ones. Command: `python benchmarks/doctor_runs.py`; raw data: "
        f"`benchmarks/results/doctor_runs.json`; {hardware['cpu_cores']} cores of {hardware['cpu']}, commit "
        f"{str(code['commit'])[:12]}.",
        "",
        "| run | planted | changed | first finding | named | held-out correct, before and after |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [_result(run) for run in (*sick, *healthy)]


def _result(run: Mapping[str, Any]) -> str:
    told = [finding for finding in run["findings"] if finding["severity"] != "note"]
    first = f"{told[0]['severity']}: `{told[0]['check']}`" if told else "nothing"
    changed = ", ".join(f"`{override}`" for override in run["overrides"])
    shares = ", ".join(f"{share:.0%}" for share in run["correct_before_and_after"]) or "-"
    cells = (run["run"], run["planted"] or "healthy", changed, first, "yes" if run["is_right"] else "**no**", shares)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
