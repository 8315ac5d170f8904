"""The fault suite: runs that are killed, stopped or given a broken checkpoint, and their bits after it.

A clean run of each variant is made first; then each scenario breaks a fresh run through the command line, resumes it,
and compares the final weights, optimizer state, records, evaluations and rollouts with the clean ones, byte for byte.
Processes that are killed at random die inside of a function that is drawn, after a time that is drawn, and say what
they were doing; nothing in the product knows of this program.

    python benchmarks/faults/faults.py                            the embedded task, small: everything, half an hour
    python benchmarks/faults/faults.py my/recipe.yaml run.steps=20 --kills 40 --output faults.json
    python benchmarks/faults/faults.py --part soak --steps 300    kills for hours
    python benchmarks/faults/faults.py --part overhead            what a checkpoint after every step costs

Every scenario reports: seconds until the fault is noticed, seconds from the start of `oncurve resume` until the run
works again, steps done again, completions sampled again, processes left over, whether everything is bitwise equal, and
whether it passed. With ``--output``, what the file holds already is not done again, and ``--seconds`` ends the program
(exit code 3) before the first scenario that begins later, so that it can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fault_bench import SMALL, Bench, Scenario
from fault_damage import damage_scenarios
from fault_grading import grading_scenarios
from fault_kills import kill_scenarios, signal_scenarios
from fault_soak import TINY, overhead, soak
from fault_surroundings import surroundings_scenarios

from oncurve.observe.manifest import describe_run


def scenarios(bench: Bench, kills: int) -> Iterator[Scenario]:
    yield from kill_scenarios(bench, kills)
    yield from signal_scenarios(bench)
    yield from damage_scenarios(bench)
    yield from surroundings_scenarios(bench)
    yield from grading_scenarios(bench)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="word_problems")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--part", choices=("scenarios", "soak", "overhead"), default="scenarios")
    parser.add_argument("--kills", type=int, default=40, help="kills at random moments, in turn through the variants")
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    parser.add_argument("--steps", type=int, default=None, help="of a soak (300) or of each run of --part overhead (8)")
    parser.add_argument("--pairs", type=int, default=5, help="of runs in --part overhead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs go, to keep the clean ones for the next piece")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no scenario after so long")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_intermixed_args()
    began = time.perf_counter()
    output: Path | None = asked.output
    found: dict[str, Any] = json.loads(output.read_text()) if output and output.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        small = TINY if asked.part == "soak" else SMALL
        overrides = [*(small if asked.recipe == "word_problems" else []), *asked.overrides]
        bench = Bench(asked.recipe, overrides, folder, seed=asked.seed)
        found |= {"recipe": asked.recipe, "overrides": overrides, "run": describe_run()}
        is_done = True
        if asked.part == "soak":
            found["soak"] = soak(bench, asked.steps or 300, 20.0)
        elif asked.part == "overhead":
            found["overhead"] = overhead(bench, asked.pairs, asked.steps or 8)
        else:
            reports: list[dict[str, Any]] = found.setdefault("scenarios", [])
            known = {report["scenario"] for report in reports}
            for name, scenario in scenarios(bench, asked.kills):
                if name in known or asked.only not in name:
                    continue
                if time.perf_counter() - began > asked.seconds:
                    is_done = False
                    break
                reports.append(asdict(scenario()))
                print(json.dumps(reports[-1]), flush=True)
                write(found, output)
        write(found, output)
    passed = all(report["has_passed"] for report in found.get("scenarios", []))
    passed &= all(found[part]["has_passed"] for part in ("soak", "overhead") if part in found)
    if asked.part != "scenarios":
        print(json.dumps(found[asked.part], indent=1))
    raise SystemExit(3 if not is_done else 0 if passed else 1)


def write(found: dict[str, Any], output: Path | None) -> None:
    """Everything so far, with what it adds up to."""
    reports = found.get("scenarios", [])
    compared = [report["is_bitwise_equal"] for report in reports if report["is_bitwise_equal"] is not None]
    recovered = [report["recover_seconds"] for report in reports if report["recover_seconds"] is not None]
    detected = [r["detect_seconds"] for r in reports if r["detect_seconds"] is not None and "two proc" in r["variant"]]
    found["all_bitwise_equal"] = all(compared)
    found["num_compared"] = len(compared)
    found["num_passed"] = sum(report["has_passed"] for report in reports)
    found["median_recover_seconds"] = statistics.median(recovered) if recovered else None
    found["longest_detect_seconds_of_two_processes"] = max(detected, default=None)
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
