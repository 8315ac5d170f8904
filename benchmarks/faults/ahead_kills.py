"""Random kills of runs that sample ahead of their trainer: nothing is lost, repeated, or older than allowed.

A run with two servers of its own, four steps ahead, every second one with weights in flight, is killed at random
moments: the trainer (SIGKILL), a server (SIGKILL), both, or a server stands still for seconds, as behind a cut network
(SIGSTOP). After each kill of the trainer it is resumed; when it is done, its record is counted.

    python benchmarks/faults/ahead_kills.py --kills 40      # some fifteen minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from oncurve.history.past import open_run
from oncurve.observe.record import read_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "ahead_kills.json"
STALENESS, STEPS, PROMPTS, GROUP = 4, 24, 4, 4
KINDS = ("trainer", "server", "both", "still")
RECIPE = f"""
model: embedded
data: {{type: word_problems, limit: 64}}
algorithm: {{group_size: {GROUP}, correction: truncate}}
rollouts:
  type: servers
  own_servers: 2
  staleness: {STALENESS}
  max_completion_tokens: 60
  temperature: 1.3
  deadlines: {{silent_seconds: 4}}
evaluation: {{every_steps: 0, num_prompts: 4}}
run: {{steps: {STEPS}, prompts_per_step: {PROMPTS}, save_every_steps: 3, record: all}}
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from oncurve.__main__ import main; main()", *words]


def servers_of(trainer: int) -> list[int]:
    """The servers of a trainer: children of the processes that it starts to watch over them."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"serve" in (path / "cmdline").read_bytes().split(b"\0"):
                parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    return sorted(server for server, watcher in parents.items() if parents.get(watcher) == trainer)


def disturb(kind: str, trainer: subprocess.Popen[bytes], draw: random.Random) -> None:
    """One loss, somewhere in the middle of whatever happens."""
    servers = servers_of(trainer.pid)
    if kind != "trainer" and servers:
        one = draw.choice(servers)
        os.kill(one, signal.SIGSTOP if kind == "still" else signal.SIGKILL)
        if kind == "still":
            time.sleep(draw.uniform(1, 8))
            os.kill(one, signal.SIGCONT)
    if kind in ("trainer", "both"):
        trainer.kill()
        trainer.wait()


def one_run(folder: Path, *, in_flight: bool, kills: int, draw: random.Random) -> dict[str, object]:
    """A run from beginning to end with some kills, and what its record says."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    words = [
        "train",
        str(recipe),
        f"run.folder={folder}",
        "run.name=run",
        f"rollouts.in_flight={str(in_flight).lower()}",
    ]
    log = (folder / "said.txt").open("ab")
    trainer = subprocess.Popen(command(*words), stdout=log, stderr=log)
    made: Counter[str] = Counter()
    while sum(made.values()) < kills and trainer.poll() is None:
        time.sleep(draw.uniform(3, 14))
        if trainer.poll() is not None:
            break
        kind = draw.choice(KINDS)
        has_begun = (folder / "run" / "checkpoints").is_dir() and any((folder / "run" / "checkpoints").glob("step_*"))
        if kind in ("trainer", "both") and not has_begun:
            continue
        disturb(kind, trainer, draw)
        made[kind] += 1
        if is_finished(folder / "run"):  # there is nothing to resume
            break
        if trainer.poll() is not None and kind in ("trainer", "both"):
            trainer = subprocess.Popen(command("resume", str(folder / "run")), stdout=log, stderr=log)
    status = trainer.wait()
    ended = 0 if is_finished(folder / "run") else status or 1
    return {"in_flight": in_flight, "kills": dict(made), "status": ended, **counted(folder / "run")}


def is_finished(run: Path) -> bool:
    """The run says that all of it is done, whatever became of its process afterwards."""
    return (run / "status.json").is_file() and read_json(run / "status.json")["phase"] == "finished"


def counted(run: Path) -> dict[str, int]:
    """Completions that the record lacks, that are there twice, and that are older than allowed."""
    past, lost, twice, old, total = open_run(run), 0, 0, 0, 0
    planned = {int(row["step"]) for row in past.metrics}
    for step in range(1, STEPS + 1):
        if step not in past.steps or step not in planned:
            lost += PROMPTS * GROUP
            continue
        groups = past.step(step).groups
        keys = Counter((group.prompt.index, one.index) for group in groups for one in group.completions)
        total += sum(keys.values())
        lost += max(0, PROMPTS * GROUP - sum(keys.values()))
        twice += sum(count - 1 for count in keys.values())
        old += sum(
            not 0 <= step - 1 - version <= STALENESS
            for group in groups
            for one in group.completions
            for version in one.tokens_by_version()
        )
    steps = [int(row["step"]) for row in past.metrics]
    twice += PROMPTS * GROUP * (len(steps) - len(set(steps)))
    return {"completions": total, "lost": lost, "trained_twice": twice, "too_old": old}


def main() -> None:
    """All runs, until there were enough kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    draw, runs, done = random.Random(chosen.seed), list[dict[str, object]](), 0
    while done < chosen.kills:
        with tempfile.TemporaryDirectory(prefix="oncurve-ahead-") as place:
            found = one_run(Path(place), in_flight=len(runs) % 2 == 0, kills=min(8, chosen.kills - done), draw=draw)
        runs.append(found)
        done += sum(found["kills"].values())  # type: ignore[attr-defined]
        print(json.dumps(found), flush=True)
    total = {
        key: sum(int(str(run[key])) for run in runs) for key in ("completions", "lost", "trained_twice", "too_old")
    }
    failed = sum(run["status"] != 0 for run in runs)
    chosen.out.write_text(
        json.dumps({"command": f"python benchmarks/faults/ahead_kills.py --kills {chosen.kills}", "kills": done,
                    "runs_that_failed": failed, **total, "runs": runs}, indent=1) + "\n", encoding="utf-8"
    )  # fmt: skip
    print({"kills": done, "runs_that_failed": failed, **total})


if __name__ == "__main__":
    main()
