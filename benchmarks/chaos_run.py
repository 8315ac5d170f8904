"""Does a whole training run end where it would have, if its rollout servers die all the time?

Two runs of the same recipe through two servers, one undisturbed, one in which servers are killed, stopped, replaced and
joined while it trains. Compared: completions of every step and the version of the weights that each came from, the
reward of the last steps, and the accuracy on held-out problems. With ``--mbit`` the disturbed run is behind a slow link
as well, and gets what changed of the weights.

    python benchmarks/chaos_run.py --output benchmarks/results/chaos_run.json
    python benchmarks/chaos_run.py --vllm vllm-env/bin/python --output benchmarks/results/chaos_run_vllm.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from chaos import COMMAND, Servers, VllmProcesses
from machine import RESULTS, describe_machine

PROMPTS, GROUP, LAST = 16, 8, 5


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except OSError:
        return False


class Trainer:
    """A run, and what it is doing."""

    started: ClassVar[list[Trainer]] = []

    def __init__(self, folder: Path, name: str, urls: list[str], asked: argparse.Namespace, more: list[str]) -> None:
        self.run, self.log = folder / name, folder / f"{name}.txt"
        words = ["train", "word_problems", f"run.steps={asked.steps}", f"run.folder={folder}", f"run.name={name}"]
        words += [f"run.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}", "run.rollouts_every_steps=1"]
        words += ["rollouts.type=servers", f"rollouts.servers=[{','.join(urls)}]", "algorithm.correction=truncate"]
        words += [f"rollouts.registry={folder / 'registry'}", "policy.compute_type=float32", "run.save_every_steps=0"]
        words += [
            "evaluation.every_steps=0",
            "evaluation.num_prompts=200",
            f"rollouts.deadlines.silent_seconds={asked.silent}",
        ]
        words += more
        with self.log.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen([*COMMAND, *words], stdout=file, stderr=file, env=environment)
        Trainer.started.append(self)

    @property
    def step(self) -> int:
        try:
            return json.loads((self.run / "status.json").read_text())["step"]
        except (OSError, ValueError):
            return -1

    def until(self, is_so: Callable[[], bool]) -> bool:
        """Wait; whether it came to that before the end of the run."""
        while not is_so():
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)
        return True

    def found(self) -> dict[str, Any]:
        """What the run left."""
        if self.process.wait() != 0:
            raise SystemExit(self.log.read_text())
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        versions, counts = [], []
        for path in sorted((self.run / "rollouts").glob("*.jsonl")):
            completions = [one for line in path.read_text().splitlines() for one in json.loads(line)["completions"]]
            counts.append(len(completions))
            versions.append(sum(one["policy_version"] != int(path.stem.split("_")[1]) - 1 for one in completions))
        sent = [row["weights/sent_fraction"] for row in rows if row.get("weights/sent_fraction", 1.0) < 1.0]
        trained = json.loads((self.run / "evaluations" / "trained.json").read_text())
        return {
            "steps": len(counts),
            "completions_lost": sum(PROMPTS * GROUP - count for count in counts),
            "completions": sum(counts),
            "wrong_versions": sum(versions),
            "reward_of_last_steps": statistics.fmean(row["reward/mean"] for row in rows[-LAST:]),
            "correct": trained["correct"],
            "seconds": rows[-1]["time/elapsed_seconds"],
            "steps_sent_as_differences": len(sent),
            "sent_fraction": statistics.fmean(sent) if sent else None,
            "largest_ratio": max(row["mismatch/max_ratio"] for row in rows if "mismatch/max_ratio" in row),
        }


def disturb(
    trainer: Trainer, servers: Servers | VllmProcesses, urls: list[str], stopped: float, refused: float
) -> list[dict[str, Any]]:
    """One fault after another, each when the servers of the one before are back; what was done, and at which step."""
    done: list[dict[str, Any]] = []
    first, second = urls

    def note(what: str) -> None:
        done.append({"what": what, "step": trainer.step})
        print(json.dumps(done[-1]), flush=True)

    def kill(*victims: str, away: float = 0.0) -> None:
        for url in victims:
            servers.signal(url, signal.SIGKILL)
        time.sleep(away)
        for url in victims:
            time.sleep(2.0)
            servers.again(url)

    def wait(steps: int) -> bool:
        then = trainer.step + steps
        return trainer.until(lambda: trainer.step >= then and is_up(first) and is_up(second))

    def stop() -> None:
        servers.signal(second, signal.SIGSTOP)
        time.sleep(stopped)
        servers.signal(second, signal.SIGCONT)

    def join() -> None:
        urls.append(servers.start())
        trainer.until(lambda: is_up(urls[-1]))

    faults: list[tuple[str, Callable[[], None]]] = [
        ("one killed", lambda: kill(first)),
        ("the other killed", lambda: kill(second)),
        (f"all killed, connections refused for {refused:g} s", lambda: kill(*urls, away=refused)),
        ("a third one joins", join),
        (f"one stopped for {stopped:g} s", stop),
    ]
    for what, do in faults:
        if not wait(3):
            break
        note(what)
        began = time.perf_counter()
        do()
        trainer.until(lambda: any(map(is_up, urls)))
        done[-1]["seconds"] = round(time.perf_counter() - began, 1)  # until one server at least can be reached again
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="python of an environment with vLLM")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--silent", type=float, default=6.0)
    parser.add_argument("--stopped", type=float, default=60.0, help="seconds for which one is stopped")
    parser.add_argument("--refused", type=float, default=30.0, help="seconds for which none takes a connection")
    parser.add_argument("--mbit", type=float, help="send what changed of the weights, over a link of so many Mbit/s")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        servers = VllmProcesses(folder, asked.vllm) if asked.vllm else Servers(folder)
        try:
            if isinstance(servers, VllmProcesses):
                servers.start(2)
                urls = list(servers.urls)
            else:
                urls = [servers.start(), servers.start()]
            while not all(map(is_up, urls)):
                time.sleep(0.2)
            calm = Trainer(folder, "calm", urls, asked, []).found()
            print(json.dumps(calm), flush=True)
            slow = [f"rollouts.deltas={{mbit: {asked.mbit}}}", "rollouts.weights_address=127.0.0.1:0"]
            trainer = Trainer(folder, "disturbed", urls, asked, slow if asked.mbit else [])
            faults = disturb(trainer, servers, list(urls), asked.stopped, asked.refused)
            disturbed = trainer.found()
        finally:
            for one in Trainer.started:
                one.process.kill()
            servers.close()
    found = {
        "servers": "vllm" if asked.vllm else "oncurve serve",
        "machine": describe_machine(),
        "undisturbed": calm,
        "disturbed": disturbed,
        "faults": faults,
        "mbit": asked.mbit,
    }
    print(json.dumps({key: found[key] for key in found if key != "machine"}))
    if asked.output:
        (asked.output if asked.output.is_absolute() else RESULTS / asked.output.name).write_text(
            json.dumps(found, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
