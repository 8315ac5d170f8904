"""Does the page on performance say what the measurements say?"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "benchmarks" / "speed" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, **record: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


STEP = {
    "arguments": {
        "model": "S", "case": "ragged", "prompt_tokens": 48, "training": "lora", "kl": 0.04, "updates": 2,
        "compute": "bfloat16", "kernels": "off",
    },
    "run": {"hardware": {"cpu": "Intel(R) Xeon(R) Processor"}},
    "trl_setting": "fp32:32",
    "measured": {
        "trl_seconds": {
            "step": 6.0, "train": 3.5, "generate": 2.4, "grade": 0.1, "old_reference": 0.5, "forward": 1.0,
            "backward": 1.5,
        },
        "oncurve_seconds": {"step": 1.5, "sample": 0.5, "old_reference": 0.25, "train": 1.0},
        "speedup": 4.125,
        "speedup_range": [3.5, 4.75],
        "sample_speedup": 4.875,
        "train_speedup": 3.375,
    },
}  # fmt: skip


def cells(table: str, row: int = 0) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2 + row].strip("|").split("|")]


def memory_of(*figures: tuple[str, float, float]) -> dict[str, Any]:
    return {
        name: {"step_above_baseline": mib * 2**20, "step_seconds": [9.0, seconds]} for name, mib, seconds in figures
    }


@pytest.mark.proves("F155")
def test_the_page_shows_what_the_committed_measurements_say(chart: ModuleType) -> None:
    assert chart.PAGE.read_text(encoding="utf-8") == chart.page(), "run `python benchmarks/bench.py chart`"


def test_a_step_is_shown_with_its_setting_its_ratio_and_the_range(chart: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "vs_trl-S-ragged-48-lora", **STEP)
    shown = cells(chart.steps_table(tmp_path))
    assert shown[:5] == ["S", "ragged", "48", "LoRA, KL 0.04, 2 updates", "Intel Xeon"]
    assert shown[5] == "fp32:32 (not tried against others)"
    assert shown[6:] == ["6.00 s", "bfloat16, torch alone", "1.50 s", "**4.12**", "3.50, 4.75", "4.88", "3.38"]


def test_the_phases_of_a_training_step_sum_to_its_training_time(chart: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "vs_trl-S-ragged-48-lora", **STEP)
    theirs = [float(cell) for cell in cells(chart.phases_table(tmp_path))[5:]]
    assert theirs == [2.4, 0.5, 1.0, 1.5, 0.5]
    assert sum(theirs[1:]) == STEP["measured"]["trl_seconds"]["train"]  # type: ignore[index]
    assert "0.75 in all" in chart.phases_table(tmp_path)


def test_records_of_another_kind_are_left_out(chart: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "vs_trl-S-full-48", measured={"trl_step_seconds": 5.0})
    assert chart.steps_table(tmp_path) == chart.NOTHING


def test_the_fastest_of_a_sweep_is_marked(chart: ModuleType, tmp_path: Path) -> None:
    sweep = {"step_seconds": {"fp32:8": 3.0, "fp32:32": 2.0}, "fastest": "fp32:32"}
    write(tmp_path, "vs_trl-sweep-S", arguments=STEP["arguments"], run=STEP["run"], sweep=sweep)
    assert cells(chart.sweep_table(tmp_path))[4:] == ["Intel Xeon", "3.00", "**2.00**"]


@pytest.mark.parametrize(
    ("fastest", "seconds", "cpu", "said"),
    [
        ("fp32:32", 2.0, "Intel(R) Xeon(R) Processor", "(fastest of 2)"),
        ("fp32:8", 2.0, "Intel(R) Xeon(R) Processor", "(1.50 times slower than fp32:8)"),
        ("fp32:8", 2.99, "Intel(R) Xeon(R) Processor", "(as fast as fp32:8)"),
        ("fp32:8", 2.0, "AMD EPYC", "(not tried against others)"),
    ],
)
def test_a_step_says_how_its_setting_did_in_the_sweep_of_its_machine(
    chart: ModuleType, tmp_path: Path, fastest: str, seconds: float, cpu: str, said: str
) -> None:
    sweep = {"step_seconds": {"fp32:8": 3.0, "fp32:32": 3.0} | {fastest: seconds}, "fastest": fastest}
    write(tmp_path, "vs_trl-S-ragged-48-lora", **STEP)
    write(tmp_path, "vs_trl-sweep-S", arguments=STEP["arguments"], run={"hardware": {"cpu": cpu}}, sweep=sweep)
    assert cells(chart.steps_table(tmp_path))[5] == f"fp32:32 {said}"


def test_memory_is_compared_with_the_fastest_and_the_smallest_setting_that_is_nearly_as_fast(chart: ModuleType) -> None:
    theirs = memory_of(("a", 900, 1.0), ("b", 500, 1.29), ("c", 100, 1.31))
    assert chart.trl_memory_settings(theirs) == ("a", "b")


def test_memory_is_shown_in_mebibytes_above_the_baseline(chart: ModuleType, tmp_path: Path) -> None:
    measured = {"oncurve": memory_of(("float32:1024", 75, 0.5)), "trl": memory_of(("fp32:8", 300, 1.0))}
    write(tmp_path, "memory-S", arguments=STEP["arguments"], measured=measured)
    shown = chart.memory_table(tmp_path)
    assert cells(shown)[4:8] == ["oncurve", "float32:1024", "75", "0.50"]
    assert cells(shown, 1)[4:8] == ["TRL", "fp32:8", "300", "1.00"]
    assert "TRL's fastest" in cells(shown, 1)[8]


def test_a_run_that_never_reached_the_accuracy_is_said_to_have_not(chart: ModuleType, tmp_path: Path) -> None:
    def run(system: str, seed: int, seconds: float | None) -> dict[str, Any]:
        points = [{"correct_fraction": 0.25}, {"correct_fraction": 0.625}]
        reached = seconds is not None
        steps = 8 if reached else None
        trained = {"trained_seconds": 99.0, "points": points}
        return {"system": system, "seed": seed, "reached": reached, "seconds": seconds, "steps": steps, **trained}

    runs = [run("oncurve", 0, 10.0), run("TRL", 0, 45.0), run("oncurve", 1, 20.0), run("TRL", 1, None)]
    write(tmp_path, "time_to_accuracy", trl_setting="fp32:32", runs=runs)
    table = chart.accuracy_table(tmp_path)
    assert cells(table) == ["0", "10.0 s, 8 steps", "45.0 s, 8 steps", "fp32:32", "4.50"]
    assert cells(table, 1) == ["1", "20.0 s, 8 steps", "never in 99.0 s (best 62%)", "fp32:32", "–"]
    assert "median" not in table


def test_sampling_shows_shares_of_the_machine(chart: ModuleType, tmp_path: Path) -> None:
    row = {"tokens_per_second": 12345.0, "speedup": 2.5, "gemm_fraction": 0.125, "bandwidth_fraction": 0.5}
    arguments = STEP["arguments"] | {"device": "cpu"}  # type: ignore[operator]
    write(tmp_path, "sampling-S", arguments=arguments, measured={"engine float32": row}, run={"gpu": None})
    shown = cells(chart.sampling_table(tmp_path))
    assert shown == ["S", "ragged", "48", "CPU", "engine float32, torch alone", "12,345", "2.50", "12.5%", "50.0%"]


def test_training_shows_every_way_with_its_ratio(chart: ModuleType, tmp_path: Path) -> None:
    measured = {
        "TRL-like fp32:8": {"seconds": 2.0, "speedup": 1.0},
        "oncurve shared float32": {"seconds": 0.5, "speedup": 4.0},
    }
    arguments = STEP["arguments"] | {"checkpointing": True, "kernels": "on"}  # type: ignore[operator]
    write(tmp_path, "training-S", arguments=arguments, measured=measured)
    shown = chart.training_table(tmp_path)
    assert cells(shown)[4:] == ["TRL-like fp32:8", "2.000", "1.00"]
    assert cells(shown, 1)[4:] == ["oncurve shared float32, checkpointing", "0.500", "4.00"]


def test_the_machine_is_named_with_its_files(chart: ModuleType, tmp_path: Path) -> None:
    run = {
        "gpu": None, "flags": ["amx_bf16"], "threads": 2, "libraries": {"trl": "1.16.0"},
        "hardware": {"cpu": "Some CPU", "cpu_cores": 2, "memory_gib": 24.0},
        "code": {"commit": "0123456789abcdef", "dirty": False},
    }  # fmt: skip
    write(tmp_path, "memory-S", run=run)
    assert chart.machines(tmp_path) == (
        "- Some CPU, 2 threads on 2 cores, 24.0 GiB (amx_bf16); trl 1.16.0; commit 0123456789ab: `memory-S.json`\n"
    )


def test_the_picture_is_drawn_from_the_records(chart: ModuleType, tmp_path: Path) -> None:
    assert not chart.draw(tmp_path, tmp_path / "performance.png")
    write(tmp_path, "vs_trl-S-ragged-48-lora", **STEP)
    measured = {"oncurve": memory_of(("float32:1024", 75, 0.5)), "trl": memory_of(("fp32:8", 300, 1.0))}
    write(tmp_path, "memory-S", arguments=STEP["arguments"], run=STEP["run"], measured=measured)
    assert chart.draw(tmp_path, tmp_path / "performance.png")
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG")
