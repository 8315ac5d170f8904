"""The generated page of the doctor, from the checks and from runs with planted faults."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oncurve.doctor import grading, hacking, policy_health, rollouts, throughput
from oncurve.doctor.diagnose import CHECKS, MIN_STEPS, QUIET_STEPS, Check
from oncurve.doctor.hacking import DETECTORS, disagreement, follows_length, same_for_all

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
"""
_SECTIONS = (
    ("Reward and grader", grading),
    ("Reward hacking", hacking),
    ("Groups, lengths, tools and environments", rollouts),
    ("Policy", policy_health),
    ("Time and memory", throughput),
)


def doctor_markdown(results: Mapping[str, Any] | None = None, holes: Mapping[str, Any] | None = None) -> str:
    """The page on the doctor, with the results of ``doctor_runs.json`` and ``reward_holes.json`` where they are there."""
    counts: Mapping[str, Mapping[str, int]] = results["checks"] if results is not None else {}
    lines = [_HEAD]
    if results is not None:
        lines += ["## Is it right?", "", _results(results), ""]
    lines += ["## The checks", ""]
    for title, module in _SECTIONS:
        lines += [f"### {title}", "", "| check | looks for | found | false alarms |", "|---|---|---|---|"]
        lines += [_row(check, counts) for check in CHECKS if check.function.__module__ == module.__name__]
        lines.append("")
    if holes is not None:
        lines += ["## How well it sees reward hacking", "", *_holes(holes), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(check: Check, counts: Mapping[str, Mapping[str, int]]) -> str:
    row = counts.get(check.name, {"planted": 0, "found": 0, "false_alarms": 0})
    found = f"{row['found']} of {row['planted']}" if row["planted"] else ""
    cells = (f"`{check.name}`", check.symptom, found, str(row["false_alarms"] or ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _results(results: Mapping[str, Any]) -> str:
    runs: Sequence[Mapping[str, Any]] = results["runs"]
    sick, healthy = [run for run in runs if run["planted"]], [run for run in runs if not run["planted"]]
    alarms = sum(bool(run["false_alarms"]) for run in healthy)
    return textwrap.fill(
        f"{len(runs)} short runs of the embedded model were looked at: {len(healthy)} healthy ones over algorithms, rewards "
        f"and settings, and {len(sick)} with one planted fault. The first finding named the fault in "
        f"{sum(run['is_found'] for run in sick)} of {len(sick)}. A warning or worse was wrong in {alarms} of the healthy runs "
        f"and in {sum(bool(run['false_alarms']) for run in sick)} of the others. The tables count, for each check, the runs "
        "with its fault in which it spoke, and its false alarms over all runs; an empty cell means that no run had the "
        "fault. `python benchmarks/bench.py doctor_runs` repeats them; every run is in "
        "`benchmarks/results/doctor_runs.json`.",
        width=139,
    )


def _holes(results: Mapping[str, Any]) -> Iterator[str]:
    """Every sign that ``reward_exploited`` knows, and what it found in recorded runs."""
    yield "`reward_exploited` compares the rewarded completions of the last recorded step with all of the first. It looks for:"
    yield ""
    yield f"- {_first_line(disagreement)}"
    yield from (f"- {_first_line(detector.shows)}" for detector in DETECTORS)
    yield from (f"- {_first_line(function)}" for function in (same_for_all, follows_length))
    yield ""
    yield "Where most rewarded completions state the reference answer, only `touches_tests` speaks: to copy, to repeat or to be brief may be the task."
    runs: Sequence[Mapping[str, Any]] = results["rows"]
    yield ""
    yield (
        f"Measured on runs of {results['facts']['steps']} steps of the demo's recipe with rewards that have a hole, and with honest tasks of "
        "other kinds, a game among them. Bounds were chosen with runs of another seed in view "
        "(`python benchmarks/bench.py reward_holes --seeds 0`)."
    )
    yield ""
    yield "| run | reward, start and end | right answers, start and end | the doctor says that they | first alarm |"
    yield "|---|---|---|---|---|"
    for kind in ("hole", "task", "clean"):
        for run in (run for run in runs if run["kind"] == kind):
            pairs = [f"{first:.2f}, {last:.2f}" for first, last in (run["reward"], run["right"])]
            alarm = f"step {run['first_alarm']['step']}: {_alarm(run)}" if run["first_alarm"] else "none"
            yield f"| {_KINDS[kind]} `{run['name']}` | {' | '.join(pairs)} | {run['signs'] or 'nothing'} | {alarm} |"
    yield ""
    yield (
        "A hole is not used where right answers rise, or where hardly anything is rewarded: most rewards with a hole reward right answers, too. "
        "In the first rows of a run, what is rewarded without a right answer is no sign, since a task may be to copy or to name."
    )


_KINDS = {"hole": "hole", "task": "honest task", "clean": "honest reward"}


def _alarm(run: Mapping[str, Any]) -> str:
    return str(run["first_alarm"]["says"]).partition(": ")[2].partition(": ")[0].lower()


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]
