"""Command `doctor`: the findings on a run, as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from oncurve.cli.arguments import AsJson
from oncurve.core.errors import ConfigError

if TYPE_CHECKING:
    from oncurve.doctor.case import Finding


def doctor(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run, finished or not, or its metrics.jsonl.")] = None,
    as_json: AsJson = False,
    machine: Annotated[
        bool,
        typer.Option("--machine", help="List your processes that hold GPU memory and offer to end each."),
    ] = False,
) -> None:
    """Diagnose a run: problems, the numbers that show them, and what to do. Exit code 1 if one is severe.

    Example: `oncurve doctor runs/demo`
    """
    if machine and (run is not None or as_json):
        raise ConfigError("doctor: --machine lists processes and reads no run. Give it alone, or leave it out.")
    if machine:
        import torch  # lazy

        from oncurve.observe.machine import MachineError, offer_to_end, unseen_gpu  # lazy

        if not torch.cuda.is_available() and (wrong := unseen_gpu(torch.__version__, torch.version.cuda)):
            raise MachineError(wrong)
        offer_to_end(typer.echo, typer.confirm)
        return
    if run is None:
        raise ConfigError("doctor: name the folder of a run, such as `oncurve doctor runs/demo`.")
    if not examine_run(run, sys.stdout, as_json=as_json):
        raise typer.Exit(1)


def examine_run(run: Path, out: TextIO, *, as_json: bool) -> bool:
    """Write the findings on a run; whether none of them is severe.

    Raises DataError if the folder holds no run, or files that are broken.
    """
    from oncurve.doctor.case import read_case  # lazy
    from oncurve.doctor.diagnose import CHECKS, diagnose  # lazy

    case = read_case(run)
    findings = diagnose(case)
    if as_json:
        steps = case.columns.steps
        whole = {
            "run": str(run),
            "steps": max(steps, default=0),
            "findings": [finding.as_json() for finding in findings],
        }
        out.write(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    else:
        title = f"{run}: no training step is finished yet"
        if steps := [step for step in case.columns.steps if step > 0]:
            title = f"{run}: {len(CHECKS)} checks on steps {min(steps)} to {max(steps)}"
        out.write(findings_text(findings, title=title))
    return all(finding.severity != "severe" for finding in findings)


def findings_text(findings: Sequence[Finding], *, title: str) -> str:
    """Findings for people to read: what, the numbers that show it, what to do."""
    lines = [title, ""]
    for finding in findings:
        lines.append(f"{finding.severity.upper()}  {finding.what}.")
        lines += [f"    {item}" for item in finding.evidence]
        if finding.follows is not None:
            lines.append(f"    probably follows from {finding.follows}")
        lines += [f"    -> {finding.do}", ""]
    if not findings:
        lines += ["Nothing to report.", ""]
    return "\n".join(lines)
