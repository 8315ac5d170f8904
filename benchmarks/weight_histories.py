"""Do servers ever sample from weights that are no published version? Random histories of a trainer and its servers.

    python benchmarks/weight_histories.py --histories 10000

The histories are those of ``tests/rollouts/weight_histories.py``, of which the test suite plays 150.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from machine import RESULTS, describe_machine

from oncurve.rollouts.servers.store import memory_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rollouts"))
from weight_histories import Outcome, play  # type: ignore[import-not-found]

AT_ONCE = 500
"""Histories between two writings of the result."""


def main() -> None:
    """Play, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_histories.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    total = Outcome()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as place:
        for begin in range(asked.first, asked.first + asked.histories, AT_ONCE):
            seeds = range(begin, min(begin + AT_ONCE, asked.first + asked.histories))
            found = play(seeds, Path(place))
            total = Outcome(
                total.events + found.events,
                total.samples + found.samples,
                total.wrong + found.wrong,
                total.repairs + found.repairs,
                total.stuck + found.stuck,
            )
            record = asdict(total) | {"events": dict(Counter(total.events))}
            said = {"histories": seeds.stop - asked.first, "first_seed": asked.first, **record}
            asked.output.write_text(json.dumps({"machine": describe_machine(), **said}, indent=2) + "\n")
            done = seeds.stop - asked.first
            print(f"{done} histories: {total.samples} looks, {total.wrong} wrong, {total.stuck} stuck", flush=True)


if __name__ == "__main__":
    main()
