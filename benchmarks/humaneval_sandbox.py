"""Are right programs paid and wrong ones not, and how many programs does a core grade per second?

    python benchmarks/humaneval_sandbox.py ../shared/data/humaneval.jsonl

Grades the 164 reference solutions of HumanEval, then the same with one operator wrong. Fails unless every solution
earns 1.0 and at least 95 % of the mutants earn less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutants import mutate

from oncurve.records import Completion, Prompt, Reward
from oncurve.rewards.programs import Programs
from oncurve.sandbox import SandboxPool, choose_isolation

RESULTS = Path(__file__).resolve().parent / "results"
MIN_KILLED_FRACTION = 0.95


def grade(reward: Programs, rows: Sequence[dict[str, Any]], programs: Sequence[str]) -> list[Reward]:
    """One reward per program; each comes as a completion would, in a fenced block."""
    prompts = [Prompt(row["prompt"], (), number, row) for number, row in enumerate(rows)]
    texts = [f"Here is the function.\n```python\n{program}\n```\n" for program in programs]
    return reward(prompts, [Completion((), (), text, (), "stop", 0, 0) for text in texts])


def main() -> None:
    """Runs the benchmark and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="humaneval.jsonl")
    parser.add_argument("--tier", choices=("bubblewrap", "landlock"), default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="timed passes over the solutions")
    parser.add_argument("--workers", type=int, default=None)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    solutions = [row["prompt"] + row["canonical_solution"] for row in rows]
    mutants = [
        mutate(solution, row["entry_point"], seed=f"{options.seed} {row['task_id']}")
        for solution, row in zip(solutions, rows, strict=True)
    ]
    num_cores = len(os.sched_getaffinity(0))
    with SandboxPool(tier=options.tier or choose_isolation(), num_workers=options.workers) as pool:
        reward = Programs(pool=pool)
        grade(reward, rows, solutions)  # starts the sandboxes
        seconds = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            paid = grade(reward, rows, solutions)
            seconds.append(time.perf_counter() - start)
        mutated = grade(reward, rows, [program for program, _ in mutants])
        tier, num_workers = pool.tier, pool.num_workers
    unpaid = [row["task_id"] for row, one in zip(rows, paid, strict=True) if one.value != 1.0]
    survivors = [
        {"task": row["task_id"], "mutation": what}
        for row, one, (_, what) in zip(rows, mutated, mutants, strict=True)
        if one.value is None or one.value >= 1.0
    ]
    killed_fraction = 1 - len(survivors) / len(rows)
    result = {
        "solutions": len(rows),
        "solutions_paid": len(rows) - len(unpaid),
        "solutions_unpaid": unpaid,
        "mutants_killed_fraction": round(killed_fraction, 4),
        "survivors": survivors,
        "programs_per_second": round(len(rows) / min(seconds), 1),
        "programs_per_second_per_core": round(len(rows) / min(seconds) / num_cores, 1),
        "tests_per_second": round(sum(_num_tests(one) for one in paid) / min(seconds), 1),
        "tier": tier,
        "workers": num_workers,
        "cores": num_cores,
        "seed": options.seed,
        "machine": f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}",
    }
    report(result)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"humaneval_sandbox_{tier}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(unpaid) or killed_fraction < MIN_KILLED_FRACTION)


def _num_tests(reward: Reward) -> int:
    return int(reward.detail.split(" of ")[1].split()[0])


def report(result: dict[str, Any]) -> None:
    """Prints a result."""
    print(f"isolation              {result['tier']}, {result['workers']} workers on {result['cores']} cores")
    print(f"reference solutions    {result['solutions_paid']} of {result['solutions']} earn 1.0")
    for task in result["solutions_unpaid"]:
        print(f"  not paid: {task}")
    print(f"mutants earning < 1    {result['mutants_killed_fraction']:.1%}")
    for survivor in result["survivors"]:
        print(f"  survived: {survivor['task']}: {survivor['mutation']}")
    print(f"speed                  {result['programs_per_second_per_core']} programs per second per core, "
          f"{result['tests_per_second']} tests per second in all")  # fmt: skip


if __name__ == "__main__":
    main()
