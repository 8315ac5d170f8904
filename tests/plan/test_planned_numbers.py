"""Are the numbers of a plan what they were? A change of one is a visible decision.

    python tests/plan/test_planned_numbers.py        writes tests/golden/plans.jsonl anew, a run a line

The formulas behind them are held by the tests beside this one; here is every number that comes of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from planned_runs import KL, LORA, SERVER, planned_run

from oncurve.plan.cost import compare_trainers, cost_of_failure, disk_use, method_memory
from oncurve.plan.find_shape import find_shape
from oncurve.plan.hardware import Device
from oncurve.plan.memory import Need, plan_memory, rows_that_fit
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.report import as_data, as_text, make_plan
from oncurve.plan.step_time import flops_per_token, step_time

NUMBERS = Path(__file__).resolve().parents[1] / "golden" / "plans.jsonl"
GPU = Device(name="a GPU", memory_gib=80.0, bandwidth=3000.0, bf16=900.0, link=300.0, on_demand=3.0, spot=1.0)
MEASURED = GPU.model_copy(update={"train_utilization": 0.4, "sample_utilization": 0.6, "spot": None})
SMALL = GPU.model_copy(
    update={"name": "a small one", "memory_gib": 24.0, "source": "a list", "priced": date(2026, 1, 1)}
)
CPU = Device(name="cpu", memory_gib=64.0, bandwidth=100.0, bf16=1.0)
MANY = ("run.prompts_per_step=64", "rollouts.max_completion_tokens=4096", "run.completions_per_update=64")
AHEAD = ("rollouts.staleness=4", "algorithm.correction=truncate")
TOOLS = ("rollouts.tools=[calculator]", "rollouts.episodes={max_turns: 4, max_answer_tokens: 100}")
APART: dict[str, Any] = {"placement": "disaggregated", "sampler_devices": 2}
RUNS: dict[str, tuple[PlannedRun, Device]] = {
    "one GPU": (planned_run(), GPU),
    "measured": (planned_run("policy.gradient_checkpointing=true", *MANY), MEASURED),
    "few rows at a time": (planned_run("rollouts.max_rows=32", "rollouts.cuda_graphs=false", *MANY), GPU),
    "adapter": (planned_run(LORA, KL, "policy.packing=false"), GPU),
    "four bits": (planned_run(LORA, "policy.quantization=nf4", "optimizer.type=adamw_8bit"), GPU),
    "full width": (planned_run("policy.compute_type=float32", KL, "optimizer.type=muon"), GPU),
    "offloaded": (planned_run(*MANY, offloads_optimizer=True), GPU),
    "CPU": (planned_run(is_gpu=False), CPU),
    "adapter on a CPU": (planned_run(LORA, *MANY, is_gpu=False), CPU),
    "modules on a CPU": (planned_run("policy.packing=false", *TOOLS, is_gpu=False), CPU),
    "several": (planned_run(*MANY, KL, shape=find_shape("Qwen/Qwen2.5-7B"), ranks=8, shard="zero3"), GPU),
    "rows of eight": (planned_run(*MANY, "policy.shard_degree=8", ranks=16, shard="zero3"), GPU),
    "gradients in parts": (planned_run(*MANY, ranks=4, shard="zero2"), GPU),
    "servers": (planned_run(*SERVER, *AHEAD, "rollouts.in_flight=true", *MANY, **APART), GPU),
    "blocks ahead": (planned_run(*SERVER, *AHEAD, "rollouts.deltas={}", *MANY, ranks=2, shard="zero3", **APART), GPU),
    "tools": (planned_run(*TOOLS), GPU),
    "tools in flight": (planned_run(*SERVER, *AHEAD, *TOOLS, "rollouts.in_flight=true", **APART), GPU),
    "kept on the machine": (planned_run("policy.offload_activations=true", "policy.packing=false", LORA), GPU),
    "checkpoints on a CPU": (planned_run("policy.gradient_checkpointing=true", *MANY, is_gpu=False), CPU),
    "many passes": (planned_run("run.passes_per_step=2", "policy.compute_type=float32", *MANY, mean_tokens=9), GPU),
    "too large": (planned_run(*MANY, shape=find_shape("Qwen/Qwen2.5-3B")), SMALL),
    "saved often": (planned_run("run.save_every_steps=3", "run.keep_checkpoints=2", "run.record=all"), GPU),
}  # fmt: skip


def numbers_of(run: PlannedRun, device: Device) -> dict[str, Any]:
    """Everything that a plan computes of a run."""
    memory, time = plan_memory(run), step_time(run, device, network_gbit=100.0)
    plan = make_plan(run, device, devices={"a GPU": GPU, "a small one": SMALL}, network_gbit=100.0)
    data = as_data(plan)
    trainers = compare_trainers(run, device, network_gbit=100.0)
    return {
        "page": as_text(plan).splitlines(),
        "data": {key: data[key] for key in ("work", "setup", "advice", "devices", "mfu", "steps_per_hour", "usd")},
        "memory": {f"{need.devices} {need.role}": dict(parts_of(need)) for need in memory.needs},
        "host": memory.host_bytes,
        "load": memory.load_bytes,
        "rows": rows_that_fit(run, memory_bytes=device.memory_bytes),
        "flops": flops_per_token(run),
        "time": asdict(time) | {"total": time.total},
        "disk": asdict(disk_use(run)),
        "failure": asdict(cost_of_failure(run, time, device)),
        "trainers": {
            f"{'' if one.fits else 'too large: '}{one.run.layout.ranks} {one.name} {one.run.layout.sampler_devices}": [
                one.step_seconds, one.per_hour.spot, one.per_run.on_demand, method_memory(one.run).trainer.peak_bytes,
            ]
            for one in trainers
        },
    }  # fmt: skip


def parts_of(need: Need) -> Iterator[tuple[str, float]]:
    """Bytes of each component, by its name and what it is."""
    for place, part in enumerate(need.components):
        kind = " buffer" * part.is_buffer + " allowance" * part.is_allowance
        yield f"{place} {part.name}, {' '.join(part.phases)}{kind}", part.bytes


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested lists and mappings, by their place."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(inner, f"{at}.{key}")
    else:
        yield at, value


def lines() -> Iterator[str]:
    for name, (run, device) in RUNS.items():
        numbers = dict(flat(numbers_of(run, device)))
        rounded = {key: float(f"{value:.7g}") if isinstance(value, float) else value for key, value in numbers.items()}
        yield json.dumps({"run": name, **rounded})


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_of_a_plan_are_what_they_were(name: str) -> None:
    known = {row.pop("run"): row for row in map(json.loads, NUMBERS.read_text(encoding="utf-8").splitlines())}
    found = dict(flat(numbers_of(*RUNS[name])))
    assert found.keys() == known[name].keys()
    changed = {
        key: (value, known[name][key])
        for key, value in found.items()
        if value != known[name][key]
        and not (isinstance(value, float) and math.isclose(value, known[name][key], rel_tol=1e-6))
    }
    assert changed == {}, "if they are meant to: python tests/plan/test_planned_numbers.py"


if __name__ == "__main__":
    NUMBERS.write_text("\n".join(lines()) + "\n", encoding="utf-8")
