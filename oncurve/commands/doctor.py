"""`oncurve doctor`: the findings on a run, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from oncurve.doctor.case import Case
from oncurve.doctor.diagnose import CHECKS, diagnose
from oncurve.doctor.findings import Finding
from oncurve.doctor.read import read_case


def examine_run(run: Path, out: TextIO, *, as_json: bool = False) -> bool:
    """Write the findings on a run; whether none of them is severe.

    Raises DataError if the folder holds no run, or files that are broken.
    """
    case = read_case(run)
    findings = diagnose(case)
    if as_json:
        steps = [step for step, _ in case.rows]
        whole = {"run": str(run), "steps": max(steps, default=0), "findings": [found.as_json() for found in findings]}
        out.write(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    else:
        out.write(findings_text(findings, title=_title(run, case)))
    return all(found.severity != "severe" for found in findings)


def findings_text(findings: Sequence[Finding], *, title: str) -> str:
    """Findings for people to read: what, the numbers that show it, what to do."""
    lines = [title, ""]
    for found in findings:
        lines.append(f"{found.severity.upper()}  {found.what}.")
        lines += [f"    {item}" for item in found.evidence]
        if found.follows is not None:
            lines.append(f"    probably follows from {found.follows}")
        lines += [f"    -> {found.do}", ""]
    if not findings:
        lines += ["Nothing to report.", ""]
    return "\n".join(lines)


def _title(run: Path, case: Case) -> str:
    steps = [step for step, _ in case.rows if step > 0]
    if not steps:
        return f"{run}: no training step is finished yet"
    return f"{run}: {len(CHECKS)} checks on steps {min(steps)} to {max(steps)}"
