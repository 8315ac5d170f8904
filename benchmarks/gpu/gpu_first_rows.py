"""Findings of a first hour on a GPU, as rows of docs/status.md and entries of oncurve/plan/devices.yaml."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_first_items import ITEMS

ROOT = Path(__file__).resolve().parents[2]
STATUS, DEVICES = ROOT / "docs" / "status.md", ROOT / "oncurve" / "plan" / "devices.yaml"
GPU_COLUMN = 3
"""Of the table of docs/status.md: path, CPU, pretend GPU, one CUDA GPU, several GPUs."""
SHARES: Mapping[str, tuple[str, ...]] = {"train_utilization": ("B2.1.5B.shared", "B2.1.5B.packed", "B2.0.5B.shared")}
"""Which item has each of the planner's shares among its figures; the first that passed counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``gpu_first.py rows`` is told."""
    parser.add_argument("results", nargs="+", type=Path, metavar="stage_X.json", help="what stages wrote, oldest first")
    parser.add_argument("--write", action="store_true", help="change the files; otherwise the changes are printed")


def main(arguments: argparse.Namespace) -> None:
    """Print the changes as a patch, or make them."""
    results = joined(arguments.results)
    for path, change in ((STATUS, status_with), (DEVICES, devices_with)):
        before = path.read_text(encoding="utf-8")
        after = change(before, results)
        if arguments.write:
            path.write_text(after, encoding="utf-8")
            print(f"{'changed' if before != after else 'nothing new for'} {path.relative_to(ROOT)}")
            continue
        name = str(path.relative_to(ROOT))
        lines = (text.splitlines(keepends=True) for text in (before, after))
        print("".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}", n=0)), end="")


def joined(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The result of every item, the newest where there are several; what had no time counts as none.

    Ends with a message where a record is not of hardware: its figures would be wrong.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["tiny"] or record["device"] != "cuda":
            raise SystemExit(f"{path} was made with tiny models on {record['device']}: it says nothing about a GPU")
        day = record["finished"][:10]
        found |= {item["name"]: {**item, "day": day} for item in record["items"] if item["outcome"] != "left"}
    if "gpu" not in found.get("A1", {}).get("figures", {}):
        raise SystemExit("no record has A1, which says what device it was: give stage_A.json as well")
    return found


def status_with(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with what was found in its rows, in the column of one GPU."""
    said: dict[str, list[str]] = {}
    for name, result in results.items():
        for row in ITEMS[name].rows if name in ITEMS else ():
            said.setdefault(row, []).append(f"{result['outcome']} ({name})")
    machine = results["A1"]["figures"]
    torch = machine["packages"]["torch"]
    lines = []
    for line in page.splitlines():
        beginning = next((row for row in said if line.startswith(f"| {row}")), None)
        if beginning is not None:
            cells = line.split(" | ")
            cells[GPU_COLUMN] = f"{machine['gpu']}, torch {torch}, {results['A1']['day']}: {', '.join(said[beginning])}"
            line = " | ".join(cells)
        lines.append(line)
    return "\n".join(lines) + "\n"


def devices_with(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The list of devices with the shares that were measured, in the entry whose name the device's name contains."""
    shares = {}
    for key, names in SHARES.items():
        passed = [
            results[name]["figures"].get(key) for name in names if results.get(name, {}).get("outcome") == "passed"
        ]
        if found := [share for share in passed if share is not None]:
            shares[key] = round(found[0], 3)
    gpu, memory = results["A1"]["figures"]["gpu"], results["A1"]["figures"]["memory_gib"]
    entry = entry_of(gpu, memory, text)
    if not shares or entry is None:
        return text
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{entry}: {{"))
    kept = re.sub(rf", (?:{'|'.join(shares)}): [\d.]+", "", lines[place]).rstrip("}")
    lines[place] = kept + "".join(f", {key}: {share}" for key, share in shares.items()) + "}"
    return "\n".join(lines) + "\n"


def entry_of(gpu: str, memory: float, text: str) -> str | None:
    """The entry of a device: its model is in the name that the driver gives, its memory the nearest."""
    found = re.findall(r"^([\w-]+): \{memory_gib: ([\d.]+)", text, flags=re.MULTILINE)
    words = re.split(r"[\s-]+", gpu)
    fitting = [(abs(float(size) - memory), name) for name, size in found
               if set(re.sub(r"-\d+GB$", "", name).split("-")) <= set(words)]  # fmt: skip
    return min(fitting)[1] if fitting else None
