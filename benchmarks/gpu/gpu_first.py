"""The first hour on a GPU: does oncurve work there (A), how fast is it (B), and which choices are better (C)?

Needs no `make` and no network. Every item runs in a process of its own with a time limit; a failure stops nothing.
A stage is one call, and a second call goes on with what has not passed:

    python benchmarks/gpu/gpu_wheels.py                                # before, where there is a network
    python3 benchmarks/gpu/gpu_first.py A --wheels build/gpu_wheels    # on the machine: stage_A.json and .md
    python3 benchmarks/gpu/gpu_first.py B --items B0 B2.1.5B B3.1.5B   # some items, or all that begin with a name
    python3 benchmarks/gpu/gpu_first.py rows results/stage_*.json --write  # into docs/status.md and plan/devices.yaml

Results go to --output, or to $OUT where that is set. What items need later (models, records, packages) stays in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import gpu_first_rows
from gpu_first_items import ITEMS, STAGES, chosen
from gpu_first_run import ROOT, Place, read, run_all, summary, table


def main() -> None:
    """Run a stage, list the items, or write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, about in STAGES.items():
        add_arguments(stages.add_parser(name, help=about))
    stages.add_parser("list", help="say what each item does and proves")
    gpu_first_rows.add_arguments(stages.add_parser("rows", help="rows of docs/status.md and plan/devices.yaml"))
    arguments = parser.parse_args()
    match arguments.stage:
        case "list":
            for item in ITEMS.values():
                print(f"{item.name:18s} {item.what}\n{'':18s} {item.proves} (at most {item.seconds} s)")
        case "rows":
            gpu_first_rows.main(arguments)
        case _:
            sys.exit(run_stage(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a stage is told."""
    here = Path(os.environ.get("OUT") or "build/gpu_first")
    parser.add_argument("--items", nargs="+", default=[], metavar="NAME", help="these, or all that begin so")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; they are unpacked into --work, nothing else")
    parser.add_argument("--output", type=Path, default=here, help="for stage_X.json and stage_X.md")
    parser.add_argument("--work", type=Path, default=Path("/tmp/oncurve_gpu_first"), help="kept between calls")
    parser.add_argument("--seconds", type=float, default=570, help="the whole call may take so long")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="items may take so many times as long, on a busy CPU"
    )
    parser.add_argument("--jobs", type=int, help="items at one time: 3 in stage A, 1 where times are measured")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    parser.add_argument("--pretend", action="store_true", help="tiny models on the tests' pretended GPU")


def run_stage(arguments: argparse.Namespace) -> int:
    """Run the items, write the record and the table; 0 if nothing failed."""
    items = chosen(arguments.stage, arguments.items)
    place = Place(
        work=arguments.work.resolve(),
        device=arguments.device,
        tiny=arguments.tiny or arguments.pretend,
        patience=arguments.patience,
        packages=unpack(arguments.wheels, arguments.work.resolve()),
        variables=pretended() if arguments.pretend else {},
    )
    jobs = arguments.jobs or (3 if arguments.stage == "A" and not place.tiny else 1)
    done = run_all(items, place, jobs=jobs, seconds=arguments.seconds, again=arguments.again)
    known = {result.name: result for result in done}
    items = [item for item in chosen(arguments.stage, []) if item.name in known or place.result(item).is_file()]
    results = [known.get(item.name) or read(place.result(item)) for item in items]
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = {
        "stage": arguments.stage,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "pretended" if arguments.pretend else arguments.device,
        "tiny": place.tiny,
        "items": [asdict(result) for result in results],
    }
    kept = arguments.output / f"stage_{arguments.stage}.json"
    kept.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = table(items, results)
    kept.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{summary(results)}. Written: {kept} and {kept.with_suffix('.md').name}")
    return int(any(result.outcome in ("failed", "timed out") for result in results))


def unpack(wheels: Path | None, work: Path) -> str | None:
    """A folder for the path of every process: the wheels unpacked, or what an earlier call unpacked."""
    target = work / "packages"
    if wheels is not None:
        found = sorted(map(str, wheels.glob("*.whl")))
        if not found:
            raise SystemExit(f"{wheels} holds no wheels. With a network, fetch some: benchmarks/gpu/gpu_wheels.py")
        quiet = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", str(target), *found], check=True)
    return str(target) if target.is_dir() else None


def pretended() -> dict[str, str]:
    """Variables that let a process, and those that it starts, find the tests' pretended GPU."""
    tests = ROOT / "tests"
    return {"PRETEND_GPU": str(tests), "PYTHONPATH": str(tests / "pretend" / "site")}


if __name__ == "__main__":
    main()
