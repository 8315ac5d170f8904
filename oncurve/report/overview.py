"""Everything in a page besides curves and completions, as plain data."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncurve.doctor.case import Case
from oncurve.doctor.diagnose import CHECKS, diagnose
from oncurve.doctor.read import read_case
from oncurve.observe.columns import Columns
from oncurve.observe.lock import writer_lives
from oncurve.observe.manifest import commit_text, gpu_names
from oncurve.observe.record import METRICS, json_if_there, read_json
from oncurve.observe.summary import batch_arithmetic
from oncurve.report.blocks import finite
from oncurve.report.lineage import stages
from oncurve.report.usage import phases, spending

_LOG_LINES = 40


def overview(run: Path, case: Case | None = None, *, usd_per_hour: float | None = None) -> dict[str, Any]:
    """The run as its folder tells it, finished or not; ``case`` if it has been read already.

    Raises DataError if there is no run, or a file of it is broken.
    """
    case = read_case(run) if case is None else case
    metrics = case.columns
    manifest = json_if_there(run / "manifest.json")
    return {
        "name": run.name or run.resolve().name,
        "steps_done": max(metrics.steps, default=0),
        "steps_planned": finite(case.number("run.steps")),
        "state": state(run),
        "facts": [*_facts(manifest, case.config), *_weights(metrics)],
        "arithmetic": _arithmetic(case.config, manifest),
        "spent": _spent(metrics, manifest, usd_per_hour),
        "stages": stages(run, case.config),
        "evaluation": evaluation(run),
        "num_checks": len(CHECKS),
        "findings": [
            {**finding.as_json(), "shown": [str(item) for item in finding.evidence]} for finding in diagnose(case)
        ],
        "recipe": _text_if_there(run / "config.yaml"),
        "log": _text_if_there(run / "log.txt").splitlines()[-_LOG_LINES:],
    }


def state(run: Path) -> dict[str, Any]:
    """The run's state: "running", "finished", "stopped" or "died", its phase, when it last wrote, why it ended.

    A writer that died left the folder locked; `oncurve resume` takes it over.
    """
    status = json_if_there(run / "status.json")
    phase = str(status.get("phase") or "")
    seen = max((modified(run / name) for name in (METRICS, "status.json", ".lock")), default=0.0)
    age = max(0.0, time.time() - seen) if seen else math.inf
    lives = writer_lives(run)
    if lives is None:
        name = "finished" if phase == "finished" or (run / "comparison.json").is_file() else "stopped"
    else:
        name = "running" if lives else "died"
    return {
        "name": name,
        "phase": phase,
        "age_seconds": finite(age),
        "step": status.get("step"),
        "reason": _why(run, name),
    }


def _why(run: Path, name: str) -> str:
    """The reason why a run ended before its last step; empty for one that did not, or where its log does not say."""
    if name == "died":
        return f"its process is gone without a word; continue with `oncurve resume {run}`"
    if name != "stopped":
        return ""
    lines = [line.partition("  ")[2] for line in _text_if_there(run / "log.txt").splitlines()]
    return next((line for line in reversed(lines) if line.startswith("stopped")), "")[:300]


def evaluation(run: Path) -> dict[str, Any]:
    """The measurements of a run with their intervals, and the paired comparison of before and after if it is there."""
    evaluations = [_measured(read_json(path)) for path in sorted((run / "evaluations").glob("*.json"))]
    compared = json_if_there(run / "comparison.json")
    return {
        "measured": sorted(evaluations, key=lambda entry: (entry["step"] or 0, entry["name"])),
        "compared": {
            key: compared.get(key) for key in ("names", "problems", "num_prompts", "rows", "reward", "is_binary")
        }
        if compared
        else None,
    }


def _measured(summary: Mapping[str, Any]) -> dict[str, Any]:
    shares = {key: summary[key] for key in ("correct", "any_format") if isinstance(summary.get(key), dict)}
    params = summary.get("params") or {}
    return {
        "name": str(summary.get("name", "evaluation")),
        "step": summary.get("step"),
        "num_examples": summary.get("num_examples"),
        "num_prompts": summary.get("num_prompts"),
        "counts": summary.get("counts") or {},
        "intervals": summary.get("intervals"),
        "pass_at_k": summary.get("pass_at_k") or {},
        "mean_reward": None if summary.get("is_binary", True) else summary["mean_reward"],
        "temperature": params.get("temperature"),
        "shares": {
            key: {end: finite(share.get(end)) for end in ("fraction", "low", "high")} for key, share in shares.items()
        },
    }


def _facts(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> list[list[str]]:
    """Facts of the run: program, code, machine, start."""
    hardware = manifest.get("hardware") or {}
    sections = {name: config.get(name) or {} for name in ("data", "algorithm", "rollouts")}
    versions = manifest.get("packages") or {}
    rows = [
        ("model", config.get("model")),
        ("data", sections["data"].get("type")),
        ("algorithm", sections["algorithm"].get("type")),
        ("sampler", sections["rollouts"].get("type")),
        ("started", manifest.get("started")),
        ("command", manifest.get("command")),
        ("oncurve", manifest.get("oncurve")),
        ("commit", commit_text(manifest)),
        ("device", ", ".join(gpu_names(manifest)) or hardware.get("cpu")),
        ("processes", manifest.get("processes")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [[name, str(value)] for name, value in rows if value]


def _weights(metrics: Columns) -> list[list[str]]:
    """Facts on the transfer of weights to rollout servers, where differences were sent."""
    sent = {step for step, changed in zip(*metrics.finite("weights/changed_fraction"), strict=True) if changed < 1}
    if not sent:
        return []
    share, size, seconds = (
        statistics.median(value for step, value in zip(*metrics.finite(key), strict=True) if step in sent)
        for key in ("weights/sent_fraction", "weights/sent_mb", "weights/sync_seconds")
    )
    text = f"{size:.3g} MB per step, {share:.2%} of all; servers sampled from them {seconds:.2g} s later"
    return [["weights sent", text]]


def _arithmetic(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[list[str]]:
    prompts = manifest.get("prompts")
    try:
        return [list(row) for row in batch_arithmetic(config, prompts if isinstance(prompts, dict) else {})]
    except (KeyError, TypeError):  # a folder without its recipe, or of another version
        return []


def _spent(metrics: Columns, manifest: Mapping[str, Any], usd_per_hour: float | None) -> dict[str, Any]:
    money = spending(metrics, manifest, usd_per_hour=usd_per_hour)
    steps = len(metrics.values("time/step_seconds"))
    return {
        "elapsed_seconds": metrics.elapsed_seconds(),
        "phases": [[phase.name, phase.seconds, phase.tokens] for phase in phases(metrics)],
        "sampled_tokens": metrics.total("tokens/sampled"),
        "trained_tokens": metrics.total("tokens/trained"),
        "seconds_per_step": metrics.total("time/step_seconds") / steps if steps else None,
        "device": money.device,
        "devices": money.count,
        "hours": money.hours,
        "usd": money.usd,
        "basis": money.basis,
    }


def _text_if_there(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def modified(path: Path) -> float:
    """When a file was written last, in seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
