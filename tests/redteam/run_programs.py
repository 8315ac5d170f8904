"""Runs the hostile programs and says which of them got anything they should not; needs pydantic.

    python tests/redteam/run_programs.py [--tier landlock] [--only ID ...]

It may be run as any user: as root, the sandboxes give up root themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from oncurve.core.records import Completion, Prompt, Reward  # noqa: E402
from oncurve.rewards.late_graders import ProgramsReward  # noqa: E402
from oncurve.rewards.programs import Programs  # noqa: E402
from oncurve.sandbox.limits import Limits  # noqa: E402
from oncurve.sandbox.pool import SandboxPool  # noqa: E402

STYLES: dict[str, dict[str, Any]] = {
    "call": {"entry_point": "double", "tests": [{"input": [3], "output": 6}, {"input": [5], "output": 10}]},
    "script": {"tests": [{"input": "3\n", "output": "6\n"}, {"input": "5\n", "output": "10\n"}]},
    "check": {
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert abs(candidate(5) - 10) < 1e-6\n",
    },
    "asserts": {"test_list": ["assert double(3) == 6", "assert double(5) in (10, 10.0)"]},
    "unittest": {
        "test": "import unittest\nfrom solution import double\nclass TestDouble(unittest.TestCase):\n"
        "    def test_three(self):\n        self.assertEqual(double(3), 6)\n"
        "    def test_five(self):\n        self.assertAlmostEqual(double(5), 10)\n"
    },
}
LIMITS = Limits(cpu_seconds=1, wall_seconds=6.0, program_seconds=30.0, memory_mib=256, max_exhausted_tests=1)


class World:
    """Everything that a program should not reach, with a way to see whether it did."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(12)
        os.environ["ONCURVE_CANARY"] = self.secret
        self._folder = tempfile.TemporaryDirectory(prefix="oncurve-redteam-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o777)
        self.canary = self.folder / "canary"
        self.canary.write_text(self.secret)
        self.canary.chmod(0o644)
        self._state = self._state_of_canary()
        self.abstract = f"oncurve-{secrets.token_hex(6)}"
        self.listeners = [
            _listener(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            _listener(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            _listener(socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self.abstract}"),
            _listener(socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{self.abstract}d"),
        ]

    def fill_in(self, text: str) -> str:
        """A program or test with the names of the things of this run."""
        names = {
            "CANARY_FILE": self.canary,
            "CANARY_FOLDER": self.folder,
            "SOURCE_FILE": Path(__file__).resolve(),
            "SECRET": self.secret,
            "SECRET_IF": self.secret,
            "TCP_PORT": self.listeners[0].getsockname()[1],
            "UDP_PORT": self.listeners[1].getsockname()[1],
            "ABSTRACT": self.abstract,
        }
        return re.sub(r"%([A-Z_]+)%", lambda match: str(names[match[1]]), text)

    def damage(self) -> list[str]:
        """What was reached."""
        found = []
        for listener, name in zip(self.listeners, ("TCP", "UDP", "abstract", "abstract datagram"), strict=True):
            try:
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(100)
                found.append(f"the {name} listener was reached")
            except BlockingIOError:
                pass
        if sorted(path.name for path in self.folder.iterdir()) != ["canary"]:
            found.append("the canary's folder was changed")
        elif self._state_of_canary() != self._state or self.canary.read_text() != self.secret:
            found.append("the canary was changed")
        return found

    def _state_of_canary(self) -> tuple[int, ...]:
        state = self.canary.stat()
        return state.st_mode, state.st_mtime_ns, state.st_size, state.st_uid

    def close(self) -> None:
        """Removes it all."""
        for listener in self.listeners:
            listener.close()
        self._folder.cleanup()


def _listener(family: int, kind: int, address: Any) -> socket.socket:
    listener = socket.socket(family, kind)
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
        listener.listen(16)
    listener.setblocking(False)
    return listener


def cases_of(
    path: Path, world: World, only: list[str], once: bool
) -> Iterator[tuple[dict[str, Any], str, Prompt, Completion]]:
    """Every program with every style of tests that it is meant for, or ``once`` with the first of them."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, case in enumerate(lines):
        if only and case["id"] not in only:
            continue
        own = {"own": json.loads(world.fill_in(json.dumps(case["tests"])))} if "tests" in case else {}
        rows = own or {style: STYLES[style] for style in case["styles"][: 1 if once else None]}
        text = f"```python\n{world.fill_in(case['program'])}\n```"
        for style, row in rows.items():
            prompt = Prompt(text="", prompt_ids=(), index=number, row=row)
            yield case, style, prompt, Completion((), (), text, (), "stop", 0, 0)


def problem_with(case: dict[str, Any], reward: Reward) -> str | None:
    """What is wrong with a reward; None if it is as it should be."""
    if reward.error is not None:
        return f"error {reward.error} instead of {case['value']}: {reward.detail}"
    if reward.value != case["value"]:
        return f"earned {reward.value} instead of {case['value']}: {reward.detail}"
    kind = re.search(r"; test \d+: (\w+)", reward.detail)
    if case.get("kinds") and (kind is None or kind[1] not in case["kinds"]):
        return f"counted as {reward.detail!r} instead of {case['kinds']}"
    return None


def processes() -> dict[int, tuple[int, str, int]]:
    """Every process that can be seen: parent, state, user."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal():
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                found[int(name)] = (int(fields[1]), fields[0], os.stat(f"/proc/{name}").st_uid)
        except OSError:
            continue
    return found


@contextmanager
def no_strays(problems: list[str]) -> Iterator[None]:
    """Notes every process that the block leaves behind.

    One that has ended and waits for the first process of the machine to collect it is none: that may take its time.
    """
    before = processes()
    yield
    for _ in range(20):
        now = processes()
        ours = {pid for pid, (parent, _, _) in now.items() if parent == os.getpid()}
        adopted = {
            pid
            for pid, (parent, state, user) in now.items()
            if parent == 1 and state != "Z" and user in _sandbox_users()
        }
        strays = (ours | adopted) - set(before)
        if not strays:
            return
        time.sleep(0.1)
    problems.append(f"processes were left: {[(pid, now[pid]) for pid in strays]}")


def _sandbox_users() -> range | tuple[int]:
    return range(64900, 65000) if os.geteuid() == 0 else (os.geteuid(),)


def run(*, tier: str | None, workers: int, only: list[str], once: bool, file: Path) -> dict[str, Any]:
    """The report of one run."""
    world, problems, started = World(), [], time.monotonic()
    with no_strays(problems):
        pool = SandboxPool(limits=LIMITS, tier=tier, num_workers=workers)  # type: ignore[arg-type]
        programs = Programs(ProgramsReward(scale="pass_rate"), pool=pool)
        programs._limits = LIMITS
        cases = list(cases_of(file, world, only, once))
        rewards = programs([case[2] for case in cases], [case[3] for case in cases])
        for (case, style, _, _), reward in zip(cases, rewards, strict=True):
            problem = problem_with(case, reward)
            if problem:
                problems.append(f"{case['id']}/{style}: {problem}")
        pool.close()
    problems += world.damage()
    world.close()
    return {
        "tier": pool.tier,
        "user": os.geteuid(),
        "programs": len({case[0]["id"] for case in cases}),
        "gradings": len(cases),
        "kinds": dict(programs.kinds),
        "sandbox_starts": pool.num_starts,
        "seconds": round(time.monotonic() - started, 1),
        "problems": problems,
    }


def main() -> None:
    """Prints the report as JSON; ends with 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("bubblewrap", "landlock"), default=None)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--once", action="store_true", help="each program with one style of tests")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name("programs.jsonl"))
    options = parser.parse_args()
    report = run(tier=options.tier, workers=options.workers, only=options.only, once=options.once, file=options.file)
    print(json.dumps(report, indent=1))
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
