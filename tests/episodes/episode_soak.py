"""Thousands of episodes in environments that crash, hang, die and leak: what is left of them, and how they are counted.

A small random model is trained through the Python interface. Each row says how its environments misbehave; they note
when they do, and the kept completions must hold exactly as many failures of each kind, none of them with a reward.
Memory, threads, child processes and open files are those of this process before and after.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

FINE = ("fine", "leaks", "leaks_memory", "long")
KINDS = {
    "reset_crashes": "environment_crashed",
    "step_crashes": "environment_crashed",
    "step_lies": "environment_crashed",
    "reward_is_none": "not_applicable",
    "dies": "environment_died",
    "hangs": "environment_timeout",
}
"""What a behaviour is counted as."""
GROUP, PROMPTS = 8, 32
STOPS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?-<>/=()"]
"""A random model ends its turns soon."""


class Misbehaving:
    """A Gymnasium environment that does what its row says."""

    struck: ClassVar[Counter[str]] = Counter()
    release: ClassVar[threading.Event] = threading.Event()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.held: list[Any] = []

    def reset(self, behaviour: str = "fine", seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin."""
        self.behaviour, self.turns = behaviour, 0
        if behaviour == "reset_crashes":
            self.strike()
            raise OSError("no room")
        if behaviour in ("leaks", "dies", "step_crashes"):
            self.held.append(os.fdopen(os.open(os.devnull, os.O_RDONLY)))
            self.held.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))
        if behaviour == "leaks_memory":
            self.held += [bytearray(2**20), self]
        return " begin", {}

    def step(self, action: str) -> tuple[Any, ...]:
        """Answer a turn."""
        self.turns += 1
        match self.behaviour:
            case "step_crashes":
                self.strike()
                raise ValueError("a bug")
            case "step_lies":
                self.strike()
                return ("only an observation",)
            case "dies":
                self.strike()
                raise ConnectionResetError("gone")
            case "hangs":
                self.strike()
                self.release.wait()
            case "reward_is_none":
                self.strike()
                return "none", None, True, False, {}
            case "long":
                return "x" * 1_000_000, 0.5, self.turns == 2, False, {}
        return "heard", float(len(action) % 2), self.turns == 2, False, {}

    def strike(self) -> None:
        """Note that it misbehaves now."""
        with self.lock:
            self.struck[self.behaviour] += 1

    def close(self) -> None:
        """Give back what is held."""
        for one in self.held:
            if isinstance(one, subprocess.Popen):
                one.kill()
                one.communicate()
            elif one is not self and not isinstance(one, bytearray):
                one.close()
        self.held = []


def held_now() -> dict[str, int]:
    """Threads, child processes, open files and MiB of memory of this process."""
    gc.collect()
    children = 0
    for task in Path("/proc/self/task").iterdir():
        children += len((task / "children").read_text().split())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threading.active_count(),
        "children": children,
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "mib": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
    }


def small_model(folder: Path, *, max_tokens: int = 512) -> Path:
    """A random model of two small layers."""
    from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
    from oncurve.policy.model_folder import save_model

    tokenizer = tiny_tokenizer(["a few words to begin with"], num_merges=8)
    made = tiny_model(tokenizer, seed=0, hidden_size=32, num_layers=2, mlp_size=64, max_tokens=max_tokens)
    save_model(made, tokenizer, folder)
    return folder


def rows_of(episodes: int, *, every: int) -> list[dict[str, Any]]:
    """As many rows as groups are needed; one in ``every`` misbehaves, each way in turn."""
    ways, fine = list(KINDS), list(FINE)
    rows = []
    for number in range(-(-episodes // GROUP)):
        turn = number // every
        behaviour = ways[turn % len(ways)] if number % every == 0 else fine[number % len(fine)]
        rows.append({"question": f"Episode {number}.", "behaviour": behaviour})
    return rows


def soak(
    episodes: int, folder: Path, *, prompts: int = PROMPTS, every: int = 8, seconds: float = 5.0
) -> dict[str, Any]:
    """Train through so many episodes; what was counted, and what is held before and after."""
    import oncurve

    Misbehaving.struck.clear()
    Misbehaving.release.clear()
    rows = rows_of(episodes, every=every)
    steps = -(-len(rows) // prompts)
    trainer = oncurve.Trainer(
        str(small_model(folder / "model")),
        rows,
        environments=Misbehaving,
        rollouts={
            "type": "engine",
            "max_completion_tokens": 24,
            "stop": STOPS,
            "episodes": {"max_answer_tokens": 8, "environment_seconds": seconds},
        },
        algorithm={"group_size": GROUP},
        evaluation={"num_prompts": 1},
        evaluation_data=[{"question": "Before.", "behaviour": next(iter(FINE))}],
        run={
            "steps": steps,
            "prompts_per_step": prompts,
            "folder": str(folder),
            "name": "soak",
            "rollouts_every_steps": 1,
            "max_error_fraction": 0.9,
        },
    )
    before = held_now()
    mib = [held_now()["mib"] for _ in trainer.steps()]
    Misbehaving.release.set()
    found = counted(folder / "soak") | {"held_before": before, "held_at_the_end": settled()}
    return {"steps": steps, **found, "mib_by_step": mib}


def settled() -> dict[str, int]:
    """What is held when threads that hung have had a moment to end."""
    import time

    for _ in range(100):
        if not any(thread.name.startswith("oncurve-tools") for thread in threading.enumerate()):
            break
        time.sleep(0.1)
    return held_now()


def counted(run: Path) -> dict[str, Any]:
    """Failures in the kept completions, beside what the environments noted."""
    kept: Counter[str] = Counter()
    episodes = with_reward = 0
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():  # of bytes: a completion may hold a line separator of Unicode
            for one in json.loads(line)["completions"]:
                episodes += 1
                if one["error"]:
                    kept[one["error"]] += 1
                    with_reward += one["reward"] is not None
    noted: Counter[str] = Counter()
    for behaviour, count in Misbehaving.struck.items():
        noted[KINDS[behaviour]] += count
    return {
        "episodes": episodes,
        "failures_kept": dict(sorted(kept.items())),
        "failures_noted": dict(sorted(noted.items())),
        "failures_by_behaviour": dict(sorted(Misbehaving.struck.items())),
        "failures_with_a_reward": with_reward,
    }
