"""Everything in a page besides curves and completions, as plain data: state, use of time and money, earlier stages."""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncurve.core.errors import ConfigError, DataError
from oncurve.doctor.case import Case, read_case, read_config
from oncurve.doctor.diagnose import CHECKS, diagnose
from oncurve.observe.columns import Columns, read_columns
from oncurve.observe.lock import writer_lives
from oncurve.observe.manifest import commit_text, gpu_names, processor_text
from oncurve.observe.metrics import PHASES
from oncurve.observe.record import METRICS, json_if_there, read_json
from oncurve.observe.run_model import MODEL
from oncurve.observe.summary import batch_arithmetic
from oncurve.report.page import finite
from oncurve.run_errors import CheckpointError
from oncurve.wording import percent

if TYPE_CHECKING:
    from oncurve.plan.hardware import Device


@dataclass(frozen=True, slots=True)
class Phase:
    """The total of one phase of the steps."""

    name: str
    seconds: float
    tokens: float | None
    """Sampled or trained tokens; None for a phase that moves none."""


def phases(metrics: Columns) -> list[Phase]:
    """Time and tokens by phase, and the rest of the steps as "other"; phases that took no time are left out."""
    spent: list[Phase] = []
    for name in PHASES:
        seconds = metrics.total(f"time/{name}_seconds")
        moved = {"sample": "tokens/sampled", "train": "tokens/trained"}.get(name)
        if seconds > 0:
            spent.append(Phase(name, seconds, metrics.total(moved) if moved else None))
    inside = sum(phase.seconds for phase in spent if phase.name not in ("evaluate", "save"))
    if (other := metrics.total("time/step_seconds") - inside) > 0.01:
        spent.append(Phase("other", other, None))
    return spent


@dataclass(frozen=True, slots=True)
class Spending:
    """Money, as far as it is known."""

    device: str
    """The run's hardware, in words."""
    count: int
    """Devices."""
    hours: float
    usd_per_hour: float | None
    """Price of all devices together; None: no price is known."""
    basis: str
    """Origin of the price, or the reason why there is none."""

    @property
    def usd(self) -> float | None:
        """So far."""
        return None if self.usd_per_hour is None else self.hours * self.usd_per_hour


def spending(metrics: Columns, manifest: Mapping[str, Any], *, usd_per_hour: float | None = None) -> Spending:
    """Hours times the price of the planner's table, or ``usd_per_hour`` for all devices together.

    A run of several processes has one device each. Steps that a crash lost, and the measurement after training, are not
    in the metrics and not in the sum.
    """
    gpus = gpu_names(manifest)
    hours = metrics.elapsed_seconds() / 3600
    device = gpus[0] if gpus else processor_text(manifest)
    count = int(manifest.get("processes") or 1) if gpus else 1
    if usd_per_hour is not None:
        return Spending(device, count, hours, usd_per_hour, f"{usd_per_hour:g} USD per hour, as given")
    priced = None
    if gpus:
        from oncurve.plan.hardware import load_devices  # lazy

        priced = priced_device(gpus[0], load_devices())
    if priced is None or priced.on_demand is None:
        return Spending(device, count, hours, None, "no price of this device is known; give it with --usd-per-hour")
    dated = f", {priced.priced}" if priced.priced else ""
    basis = f"{count} x {priced.on_demand:g} USD per hour on demand ({priced.source or 'unnamed source'}{dated})"
    return Spending(device, count, hours, count * priced.on_demand, basis)


def priced_device(name: str, devices: Mapping[str, Device]) -> Device | None:
    """The row of the table for what a driver calls its GPU: the longest row whose every word is in the name.

    >>> from oncurve.plan.hardware import load_devices
    >>> priced_device("NVIDIA A100-SXM4-80GB", load_devices()).name
    'A100-80GB'
    """
    words = set(_words(name))
    fitting = [device for device in devices.values() if device.is_gpu and set(_words(device.name)) <= words]
    return max(fitting, key=lambda device: len(_words(device.name)), default=None)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def run_mfu(case: Case, manifest: Mapping[str, Any]) -> str | None:
    """MFU of the run's training on GPUs; None where the model's shape or the GPU's rate is not known here."""
    gpus, metrics = gpu_names(manifest), case.columns
    seconds, trained = metrics.total("time/train_seconds"), metrics.total("tokens/trained")
    prompts, lengths = metrics.values("prompt/mean_tokens"), metrics.values("completion/mean_tokens")
    if not (gpus and seconds and trained and prompts and lengths):
        return None

    from oncurve.plan.find_shape import find_shape  # lazy
    from oncurve.plan.hardware import load_devices  # lazy
    from oncurve.plan.utilization import training_mfu  # lazy

    if (device := priced_device(gpus[0], load_devices())) is None:
        return None
    try:
        shape = find_shape(str(case.setting("model")), fetches=False)
    except (CheckpointError, ConfigError):
        return None
    prompt, completion = statistics.fmean(prompts), statistics.fmean(lengths)
    supervised = case.setting("sft") is not None
    mfu = training_mfu(
        shape,
        completion_tokens=trained,
        prompt_tokens=trained * prompt / completion,
        group_size=1 if supervised else int(case.number("algorithm.group_size")),
        row_tokens=prompt + completion,
        trains_adapter=case.setting("policy.lora") is not None,
        peak_operations=seconds * int(manifest.get("processes") or 1) * device.matrix_rate,
    )
    return str(mfu)


MAX_STAGES = 8
"""Runs that are followed back, at most."""


def stages(run: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs before this one, the earliest first, and the run itself; empty where its model is not that of a run.

    Each with its accuracy before and after, on the test problems of its own.
    """
    earlier: list[Path] = []
    here = run
    while len(earlier) < MAX_STAGES and (before := _run_behind(here, config)) is not None and before not in earlier:
        earlier.append(before)
        here = before
        try:
            config = read_config(before)
        except DataError:
            break
    return [_stage(stage, run) for stage in (*reversed(earlier), run)] if earlier else []


def stage_lines(stages_of_run: list[dict[str, Any]]) -> list[str]:
    """The same as lines of text."""
    if not stages_of_run:
        return []
    width = max(len(stage["name"]) for stage in stages_of_run)
    return [
        "Stages",
        *(f"  {stage['name']:<{width}}  {stage['what']:<12} {_change(stage)}".rstrip() for stage in stages_of_run),
    ]


def _change(stage: Mapping[str, Any]) -> str:
    shares = [stage[key]["fraction"] for key in ("before", "after") if stage[key]]
    return " to ".join(map(percent, shares)) + (" correct" if shares else "")


def _run_behind(run: Path, config: Mapping[str, Any]) -> Path | None:
    """The folder of the run whose final model or checkpoint this one began with."""
    named = str(config.get("model") or "")
    if not named or named == "embedded":
        return None
    model = Path(named).expanduser()
    for root in (Path(), *run.resolve().parents):
        path = root / model
        # the run itself, its folder "model", or one of its checkpoints, runs/a/checkpoints/step_000010
        for folder in (path, *list(path.parents)[:2]):
            holds = folder == path or path.name == MODEL or path.parent.name == "checkpoints"
            if holds and os.path.isfile(folder / METRICS) and folder.resolve() != run.resolve():
                return folder
    return None


def _stage(run: Path, page_folder: Path) -> dict[str, Any]:
    """A run in a few facts."""
    try:
        config, status = read_config(run), json_if_there(run / "status.json")
        done = status.get("step") if status else max(read_columns(run).steps, default=0)
    except DataError:
        config, done = {}, 0
    kind = "supervised" if config.get("sft") is not None else str((config.get("algorithm") or {}).get("type") or "-")
    is_own = run.resolve() == page_folder.resolve()
    page = run / "report.html"
    return {
        "name": run.name or run.resolve().name,
        "what": kind,
        "steps": done,
        "is_own": is_own,
        "path": str(run.resolve()),
        "href": os.path.relpath(page.resolve(), page_folder.resolve()) if page.is_file() and not is_own else None,
        "before": _accuracy(run, "base"),
        "after": _accuracy(run, "trained"),
    }


def _accuracy(run: Path, name: str) -> dict[str, Any] | None:
    """Correct test problems with their interval; None where they were not measured."""
    measured = json_if_there(run / "evaluations" / f"{name}.json")
    share = measured.get("correct")
    if not isinstance(share, dict):
        return None
    return {**{key: share.get(key) for key in ("fraction", "low", "high")}, "num_prompts": measured.get("num_prompts")}


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
        "spent": _spent(metrics, manifest, usd_per_hour) | {"mfu": run_mfu(case, manifest)},
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
    except (FileNotFoundError, NotADirectoryError):
        return ""


def modified(path: Path) -> float:
    """When a file was written last, in seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
