"""Environments that nobody here wrote, unmodified: each trains two steps on a small random model.

    python benchmarks/foreign_environments.py FOLDER --output benchmarks/results/foreign_environments.json

FOLDER holds what is not ours and not in this repository, and an index.json: a list of {"source": "where it is from",
"module": "an importable module, or a file in FOLDER", "name": "what makes an environment", "arguments": [...], "row":
columns of every row}. Modules beside them stand in for clients of networks. The packages must be installed. For each,
the result says how many steps were trained, how many turns its episodes had, and how many of them failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from episode_soak import STOPS, small_model

CONTEXT = 8192
"""Tokens of the model's context: some of them say a lot."""


def maker(entry: dict[str, Any]) -> Callable[[], Any]:
    """What makes an environment of an entry."""
    found: Any = importlib.import_module(entry["module"].removesuffix(".py"))
    for part in entry["name"].split("."):
        found = vars(found)[part]
    return partial(found, *entry.get("arguments", []))


def two_steps(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with an environment; the random model ends its turns soon."""
    import oncurve
    from oncurve.rollouts.episodes.environments import Kind

    factory = maker(entry)
    kind = Kind.of("foreign", factory)
    rows = [{"question": f"Episode {number}.", **entry.get("row", {})} for number in range(8)]
    options: dict[str, Any] = (
        {} if kind.gives_reward else {"rewards": lambda completion, **row: float(len(completion) % 2)}
    )
    trainer = oncurve.Trainer(
        str(small_model(folder / "model", max_tokens=CONTEXT)),
        rows,
        environments=factory,
        rollouts={
            "max_completion_tokens": 48,
            "stop": STOPS,
            "episodes": {"max_turns": 4, "max_answer_tokens": 48, "environment_seconds": 120},
        },
        algorithm={"group_size": 4},
        evaluation={"num_prompts": 1, "every_steps": 0},
        run={"steps": 2, "prompts_per_step": 2, "folder": str(folder), "name": "run"},
        **options,
    )
    seen = [step.metrics for step in trainer.steps()]
    return {
        "steps": len(seen),
        "form": "steps" if kind.has_steps else f"tools: {', '.join(kind.tools)}",
        "turns": round(sum(one["episode/turns"] for one in seen) / len(seen), 2),
        "failed_fraction": max(one["episode/failed_fraction"] for one in seen),
        "reward_mean": round(sum(one["reward/mean"] for one in seen) / len(seen), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    from oncurve.errors import OncurveError

    sys.path.insert(0, str(arguments.folder.resolve()))
    results = []
    for entry in json.loads((arguments.folder / "index.json").read_text(encoding="utf-8")):
        with tempfile.TemporaryDirectory() as place:
            try:
                found = two_steps(entry, Path(place))
            except (OncurveError, ImportError) as error:
                found = {"steps": 0, "problem": str(error)[:500]}
        results.append({"source": entry["source"], **found})
        sys.stdout.write(json.dumps(results[-1]) + "\n")
        sys.stdout.flush()
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
