"""Do the graders keep their speed and their memory over thousands of programs, some of which crash, hang or eat memory?

    python benchmarks/rewards_soak.py --count 20000

Grades programs and mathematical answers twice: all harmless, then with one in a hundred hostile. Fails if the host's
memory grows, a process is left, a failure is counted under another kind than its own, or the second run is more than
1.3 times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.records import Completion, Prompt
from oncurve.rewards.mathematics import Mathematics
from oncurve.rewards.programs import Programs
from oncurve.sandbox import Limits, SandboxPool, choose_isolation

RESULTS = Path(__file__).resolve().parent / "results"
MAX_SLOWDOWN = 1.3
MAX_GROWTH_MIB = 32.0
STREAMS = 2
"""Batches graded at the same time, as when the next rollouts are graded while one program of the last ones hangs."""

ROWS: tuple[dict[str, Any], ...] = (
    {"entry_point": "f", "tests": [{"input": [n], "output": n * n} for n in (0, 3, 10)]},
    {
        "entry_point": "f",
        "test": "def check(candidate):\n    for n in (0, 3, 10):\n        assert candidate(n) == n * n\n",
    },
    {"test_list": ["assert f(0) == 0", "assert f(3) == 9", "assert f(10) == 100"]},
)
HARMLESS = {
    "passed": ("def f(n):\n    return n * n", "def f(n):\n    return sum(n for _ in range(n))"),
    "wrong": ("def f(n):\n    return n + n",),
    "raised": ("def f(n):\n    return m",),
}
HOSTILE = {
    "crashed": ("import ctypes\ndef f(n):\n    ctypes.string_at(0)", "import os\ndef f(n):\n    os.abort()"),
    "timeout": ("def f(n):\n    while True: pass", "import time\ndef f(n):\n    time.sleep(3600)"),
    "memory": (
        "def f(n):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))",
        "def f(n):\n    return 'x' * 10**12",
    ),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to grade, and the kind of verdict that it should come to."""

    prompt: Prompt
    completion: Completion
    kind: str


def programs(count: int, *, hostile_fraction: float, seed: int) -> list[Work]:
    """Programs of all kinds in random order; the texts differ, so that none is graded by looking it up."""
    draw = random.Random(seed)
    num_hostile = round(count * hostile_fraction)
    hostile = [(kind, text) for kind, texts in HOSTILE.items() for text in texts]
    chosen = [hostile[number % len(hostile)] for number in range(num_hostile)]
    harmless = [(kind, text) for kind, texts in HARMLESS.items() for text in texts]
    chosen += [draw.choice(harmless) for _ in range(count - num_hostile)]
    draw.shuffle(chosen)
    work = []
    for number, (kind, text) in enumerate(chosen):
        prompt = Prompt("", (), number, ROWS[number % len(ROWS)])
        body = f"```python\n# {number}\n{text}\n```"
        work.append(Work(prompt, Completion((), (), body, (), "stop", 0, 0), kind))
    return work


def answers(count: int, *, seed: int) -> list[Work]:
    """Mathematical answers, every second one right; some need the symbolic grader."""
    draw = random.Random(seed)
    forms = ((r"{n}", "{n}"), (r"\frac{{{n}}}{{7}}", "{n}/7"), (r"{n}\sqrt{{2}}", r"\sqrt{{2}}\cdot {n}"))
    work = []
    for number in range(count):
        gold, given = forms[number % len(forms)]
        n = draw.randint(2, 10_000)
        text = given.format(n=n if number % 2 else n + 1)
        prompt = Prompt("", (), number, {"answer": gold.format(n=n)})
        completion = Completion((), (), rf"So it is \boxed{{{text}}}.", (), "stop", 0, 0)
        work.append(Work(prompt, completion, "right" if number % 2 else "not right"))
    return work


def resident_mib(pid: int) -> float:
    """Memory of a process, a page that several share counted in equal parts; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def descendants() -> dict[int, str]:
    """The state of every process below this one."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = (int(fields[1]), fields[0])
    found: dict[int, str] = {}
    new = {os.getpid()}
    while new:
        new = {pid for pid, (parent, _) in parents.items() if parent in new and pid not in found}
        found.update({pid: parents[pid][1] for pid in new})
    return found


def soak(work: Sequence[Work], math_work: Sequence[Work], *, batch: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Grades everything in batches and watches the host meanwhile."""
    samples: list[dict[str, float]] = []
    wrong_kinds: list[str] = []
    limits_of_pool = Limits(**{**limits, "max_exhausted_tests": 1})
    with SandboxPool(limits=limits_of_pool) as pool, ThreadPoolExecutor(STREAMS) as streams:
        graders = [Programs(pool=pool, max_exhausted_tests=1, **limits) for _ in range(STREAMS)]
        mathematics = Mathematics(workers=1)
        share = max(len(math_work) * batch // max(len(work), 1), 1)

        def grade(stream: int) -> None:
            for start in range(stream * batch, len(work), STREAMS * batch):
                part = work[start : start + batch]
                rewards = graders[stream]([one.prompt for one in part], [one.completion for one in part])
                for one, reward in zip(part, rewards, strict=True):
                    seen = reward.error or ("passed" if reward.value == 1.0 else reward.detail.split(": ")[1])
                    if seen != one.kind:
                        wrong_kinds.append(f"{one.kind} counted as {seen}: {reward.detail}")
                if stream == 0:
                    observe(start)

        def observe(start: int) -> None:
            part = math_work[start * len(math_work) // max(len(work), 1) :][: STREAMS * share]
            rewards = mathematics([one.prompt for one in part], [one.completion for one in part])
            for one, reward in zip(part, rewards, strict=True):
                if (reward.value == 1.0) != (one.kind == "right"):
                    wrong_kinds.append(f"{one.prompt.row} {one.completion.text}: {reward}")
            below = descendants()
            samples.append(
                {
                    "graded": start + batch,
                    "trainer_mib": resident_mib(os.getpid()),
                    "sandboxes_mib": sum(map(resident_mib, below)),
                    "processes": len(below),
                    "zombies": lasting_zombies(),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                }
            )

        graders[0]([one.prompt for one in work[:64]], [one.completion for one in work[:64]])
        graders[0].kinds.clear()
        mathematics([one.prompt for one in math_work[:64]], [one.completion for one in math_work[:64]])
        before = memory_at_rest()
        started = time.perf_counter()
        list(streams.map(grade, range(STREAMS)))
        seconds = time.perf_counter() - started
        after = memory_at_rest()
        mathematics.close()
        starts = pool.num_starts
    kinds: Counter[str] = sum((grader.kinds for grader in graders), Counter())
    return {
        "programs": len(work),
        "answers": len(math_work),
        "seconds": round(seconds, 1),
        "gradings_per_second": round((len(work) + len(math_work)) / seconds, 1),
        "kinds": dict(kinds),
        "expected_kinds": dict(Counter(one.kind for one in work)),
        "wrong_kinds": wrong_kinds[:20],
        "sandbox_starts": starts,
        "growth_mib": {key: round(after[key] - before[key], 1) for key in before},
        "most_zombies": max(sample["zombies"] for sample in samples),
        "samples": samples[:: max(len(samples) // 20, 1)],
        "left_processes": len(descendants()),
    }


def memory_at_rest() -> dict[str, float]:
    """Memory of this process and of all processes below it, taken while nothing is graded."""
    time.sleep(1.0)
    return {"trainer_mib": resident_mib(os.getpid()), "sandboxes_mib": sum(map(resident_mib, descendants()))}


def lasting_zombies() -> int:
    """Processes that ended and that nobody waits for; one that ended just now is no such case."""
    zombies = {pid for pid, state in descendants().items() if state == "Z"}
    if zombies:
        time.sleep(0.5)
        zombies &= {pid for pid, state in descendants().items() if state == "Z"}
    return len(zombies)


def problems(clean: dict[str, Any], soaked: dict[str, Any]) -> list[str]:
    """What should not be."""
    found = []
    for name, run in (("clean", clean), ("hostile", soaked)):
        found += [f"{name}: {line}" for line in run["wrong_kinds"]]
        if run["kinds"] != run["expected_kinds"]:
            found.append(f"{name}: counted {run['kinds']} instead of {run['expected_kinds']}")
        if run["most_zombies"] or run["left_processes"]:
            found.append(f"{name}: {run['most_zombies']} zombies, {run['left_processes']} processes left")
        if max(run["growth_mib"].values()) > MAX_GROWTH_MIB:
            found.append(f"{name}: memory grew by {run['growth_mib']}")
    slowdown = clean["gradings_per_second"] / soaked["gradings_per_second"]
    if slowdown > MAX_SLOWDOWN:
        found.append(f"the hostile run was {slowdown:.2f} times slower")
    return found


def main() -> None:
    """Runs the benchmark and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="gradings per run; a quarter are answers")
    parser.add_argument("--hostile-fraction", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=256, help="programs per call")
    parser.add_argument("--cpu-seconds", type=int, default=1)
    parser.add_argument("--wall-seconds", type=float, default=3.0)
    parser.add_argument(
        "--memory-mib",
        type=int,
        default=256,
        help="small enough to be eaten within the processor time, also where fresh memory is slow",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_answers = options.count // 4
    limits = {
        "cpu_seconds": options.cpu_seconds,
        "wall_seconds": options.wall_seconds,
        "memory_mib": options.memory_mib,
    }
    runs = []
    for fraction in (0.0, options.hostile_fraction):
        work = programs(options.count - num_answers, hostile_fraction=fraction, seed=options.seed)
        runs.append(soak(work, answers(num_answers, seed=options.seed), batch=options.batch, limits=limits))
        print({key: value for key, value in runs[-1].items() if key != "samples"}, flush=True)
    clean, soaked = runs
    found = problems(clean, soaked)
    slowdown = round(clean["gradings_per_second"] / soaked["gradings_per_second"], 3)
    result = {"slowdown": slowdown, "tier": choose_isolation(), "cores": len(os.sched_getaffinity(0)), "limits": limits}
    result |= {"machine": f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"}
    result |= {"problems": found, "clean": clean, "hostile": soaked}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rewards_soak.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"hostile run {slowdown} times slower than the clean one; problems: {found or 'none'}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
