"""Runs that sample ahead, in flight, on two servers and through kills: does their record give the same bits again?

A run is four steps ahead of its trainer, with weights that change under rows. One of its two servers is killed, later
the trainer (SIGKILL both), which is resumed. Then random steps are replayed: what the servers sampled is sampled
again, trained on again, and compared with the record: tokens, log-probabilities, rewards, metrics (the gradient's norm
among them) and weights. The same recipe run twice gives other completions, by the clock; each is replayed.

    python benchmarks/faults/ahead_replay.py      # two runs, ten steps of each; some minutes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

from ahead_kills import GROUP, PROMPTS, RECIPE, STALENESS, STEPS, command, servers_of

from oncurve.core.records import Completion
from oncurve.history.past import PastRun, open_run
from oncurve.history.replay import replay
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import read_metrics

RESULTS = Path(__file__).resolve().parents[1] / "results" / "ahead_replay.json"
SERVER_DIES, TRAINER_DIES = STEPS // 3, 2 * STEPS // 3
"""After which steps."""
SETTINGS = ("rollouts.max_rows=4", "rollouts.temperature=1", "rollouts.max_completion_tokens=96")
STANDS_SECONDS, GOES_SECONDS = 0.2, 0.1
"""Servers stand still for most of the time, so that training is faster and weights change under rows."""


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run that may not have begun."""
    return read_metrics(run) if (run / "metrics.jsonl").is_file() else []


def wait_for(run: Path, step: int, trainer: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError for a trainer that ends before so many steps are done."""
    while all(row["step"] < step for row in rows_of(run)):
        if trainer.poll() is not None:
            raise RuntimeError(f"{run}: the trainer ended before step {step}")
        time.sleep(0.05)


def slow_down(trainer: subprocess.Popen[bytes], run: Path) -> None:
    """Stop the servers of a trainer for moments, once it has done another step, as long as it lives."""
    known = len(rows_of(run))
    while trainer.poll() is None:
        for number, seconds in ((signal.SIGSTOP, STANDS_SECONDS), (signal.SIGCONT, GOES_SECONDS)):
            for server in servers_of(trainer.pid) if len(rows_of(run)) > known else ():
                with suppress(ProcessLookupError):
                    os.kill(server, number)
            time.sleep(seconds)


def started(words: list[str], run: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
    """A trainer whose servers are slow."""
    trainer = subprocess.Popen(command(*words), stdout=log, stderr=log)
    Thread(target=slow_down, args=(trainer, run), daemon=True).start()
    return trainer


def killed_run(folder: Path) -> PastRun:
    """A run that loses a server, then its trainer, and is resumed."""
    folder.mkdir()
    recipe, run = folder / "recipe.yaml", folder / "run"
    recipe.write_text(RECIPE, encoding="utf-8")
    words = ["train", str(recipe), f"run.folder={folder}", "run.name=run", "rollouts.in_flight=true"]
    words += ["run.save_every_steps=1", "run.keep_every_steps=1", *SETTINGS]
    with (folder / "said.txt").open("ab") as log:
        trainer = started(words, run, log)
        wait_for(run, SERVER_DIES, trainer)
        os.kill(servers_of(trainer.pid)[0], signal.SIGKILL)
        wait_for(run, TRAINER_DIES, trainer)
        trainer.kill()
        trainer.wait()
        if status := started(["resume", str(run)], run, log).wait():
            raise RuntimeError(f"{run}: resume ended with {status}")
    return open_run(run)


def is_mixed(one: Completion) -> bool:
    """Weights changed under it."""
    return bool(one.versions)


def sampled_in(run: PastRun) -> dict[tuple[int, int, int], Completion]:
    """What was sampled, by step, prompt and place in its group."""
    return {
        (step, group.prompt.index, one.index): one
        for step in run.steps
        for group in run.step(step).groups
        for one in group.completions
    }


def replayed(run: PastRun, step: int) -> dict[str, Any]:
    """A step done again, compared with the record."""
    completions = [one for group in run.step(step).groups for one in group.completions]
    found = replay(run.path, step)
    return {
        "step": step,
        "is_same": found.is_same and found.is_sampled,
        "from_checkpoint": found.checkpoint,
        "completions": len(completions),
        "sampled_again": sum(one.policy_version >= found.checkpoint for one in completions),
        "of_several_versions": sum(map(is_mixed, completions)),
        "gradient_norm": run.step(step).metrics["policy/gradient_norm"],
        "oldest_token_steps": max(step - 1 - one.policy_version for one in completions),
        "compared": found.compared,
        "differences": found.differences,
    }


def main() -> None:
    """Two runs, some random steps of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="to replay of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    draw, runs = random.Random(chosen.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="oncurve-ahead-") as place:
        past = [killed_run(Path(place) / name) for name in ("one", "two")]
        one, two = map(sampled_in, past)
        mixed = [sum(map(is_mixed, sampled.values())) for sampled in (one, two)]
        print(mixed, flush=True)
        for run in past:
            steps = sorted(draw.sample(range(1, STEPS + 1), chosen.steps))
            runs.append({"steps": []})
            for step in steps:
                runs[-1]["steps"].append(replayed(run, step))
                print(json.dumps(runs[-1]["steps"][-1]), flush=True)
        found = {
            "command": "python benchmarks/faults/ahead_replay.py",
            "staleness": STALENESS,
            "kills": {"server": SERVER_DIES, "trainer": TRAINER_DIES},
            "completions": STEPS * PROMPTS * GROUP,
            "completions_that_differ_between_runs": {
                "in_tokens": sum(one[key].token_ids != two[key].token_ids for key in one),
                "in_log_probabilities": sum(one[key].sampler_logprobs != two[key].sampler_logprobs for key in one),
            },
            "completions_of_several_versions": mixed,
            "steps_replayed": sum(len(run["steps"]) for run in runs),
            "steps_with_the_same_bits": sum(step["is_same"] for run in runs for step in run["steps"]),
        }
    chosen.out.write_text(json.dumps({**found, "runs": runs, "run": describe_run()}, indent=1) + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
