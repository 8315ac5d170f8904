"""Tools of the fault suite: commands in processes of their own that die at a given place, and their judgement.

The program imports everything once and forks a child for every command, which runs it as a user types it. A child that
is armed counts the calls of one function of the product and dies in the middle of a given one; nothing in the product
knows of it.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncurve.fleet.launch.local import free_port
from oncurve.run.checkpoint_manifest import checkpoints_in

MARK = "ONCURVE_FAULTS"
"""In the environment of everything that is started here, by which what is left over is found."""
PLACES: dict[str, tuple[str, str]] = {
    "sampling": ("oncurve.sample.engine", "InProcessEngine.sample"),
    "grading": ("oncurve.core.loop", "score"),
    "refilling": ("oncurve.core.loop", "refill"),
    "forward": ("oncurve.core.policy", "TrainedPolicy.logprobs"),
    "backward": ("oncurve.core.policy", "TrainedPolicy.backward"),
    "optimizer": ("oncurve.core.policy", "TrainedPolicy.update"),
    "between optimizer and log": ("oncurve.run.services", "Run.end_step"),
    "logging": ("oncurve.observe.record", "RunFolder.write_metrics"),
    "writing a checkpoint": ("oncurve.run.checkpointer", "write"),
    "before the data of a checkpoint": ("oncurve.run.state", "_write_share"),
    "before the manifest of a checkpoint": ("oncurve.run.state", "write_checkpoint_manifest"),
    "before the rename of a checkpoint": ("oncurve.run.state", "publish"),
}
ONLY_MAIN = ("logging", "writing a checkpoint")
"""Places that only process 0 passes, like those inside a checkpoint."""


@dataclass(frozen=True)
class Arm:
    """Where a process dies."""

    place: str
    call: int
    """Which call of the place, from 1."""
    delay_seconds: float
    """How long after the call began; at its end at the latest. 0: before it does anything."""
    note: Path
    """What the process was doing is written there just before."""


@dataclass
class Child:
    """One command in one process."""

    pid: int
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.002)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Started:
    """A command with all of its processes."""

    children: list[Child]
    began: float = field(default_factory=time.perf_counter)

    @property
    def main(self) -> Child:
        return self.children[0]

    def is_running(self) -> bool:
        return None in [child.poll() for child in self.children]

    def wait(self) -> list[int]:
        return [child.wait() for child in self.children]


def start(
    words: Sequence[str],
    log: Path,
    *,
    processes: int = 1,
    arms: dict[int, Arm] | None = None,
    counts: Path | None = None,
    file_limit: int | None = None,
    poison: int = 0,
) -> Started:
    """``oncurve`` with these words in some processes, each with what it is armed with."""
    place: dict[str, str] = {}
    if processes > 1:
        place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = []
    for rank in range(processes):
        own = place | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if place else {})
        path = log if rank == 0 else log.with_suffix(f".{rank}{log.suffix}")
        pid = os.fork()
        if pid == 0:
            _become(words, path, own, (arms or {}).get(rank), counts if rank == 0 else None, file_limit, poison)
        children.append(Child(pid, path))
    return Started(children)


def _become(
    words: Sequence[str],
    log: Path,
    environment: dict[str, str],
    arm: Arm | None,
    counts: Path | None,
    file_limit: int | None,
    poison: int,
) -> None:
    """In the child: the command line, as the console script runs it. Never returns."""
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target, number in ((os.open(os.devnull, os.O_RDONLY), 0), (descriptor, 1), (descriptor, 2)):
            os.dup2(target, number)
        os.environ.update(environment)
        if file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        if arm is not None:
            wrap(arm.place, lambda number, call: strike(arm, number, call))
        if poison:
            poison_logprobs(poison)
        calls = count_calls() if counts is not None else {}
        sys.argv = ["oncurve", *words]
        code = run_main()
        if counts is not None:
            counts.write_text(json.dumps(calls))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_main() -> int:
    from oncurve.cli.app import main

    try:
        main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0


def wrap(place: str, around: Callable[[int, Callable[[], Any]], Any]) -> None:
    """Have every call of a place go through a function that knows its number."""
    module_name, path = PLACES[place]
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, numbers = getattr(owner, name), iter(range(1, 10**9))

    def wrapped(*args: Any, **options: Any) -> Any:
        return around(next(numbers), lambda: original(*args, **options))

    setattr(owner, name, wrapped)


def strike(arm: Arm, number: int, call: Callable[[], Any]) -> Any:
    """Die in the middle of the call that is armed."""
    if number != arm.call:
        return call()
    victim, once = threading.get_ident(), threading.Lock()

    def die(where: str) -> None:
        once.acquire()
        arm.note.write_text(where)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_later() -> None:
        time.sleep(arm.delay_seconds)
        die(doing(victim))

    if arm.delay_seconds == 0:
        die(f"before {arm.place.removeprefix('before ')}")
    threading.Thread(target=die_later, daemon=True).start()
    result = call()
    die(f"after {arm.place}")
    return result


def doing(thread: int) -> str:
    """The function of the product that a thread is in, and the innermost function of all."""
    frame, names = sys._current_frames().get(thread), []
    while frame is not None:
        names.append((frame.f_globals.get("__name__", "?"), frame.f_code.co_name))
        frame = frame.f_back
    ours = [f"{module.removeprefix('oncurve.')}.{name}" for module, name in names if module.startswith("oncurve.")]
    inner = ".".join(names[0]) if names else "?"
    return f"{ours[0] if ours else '?'}, in {inner}"


def count_calls() -> dict[str, tuple[int, float]]:
    """From now on: calls and seconds of each place."""
    calls: dict[str, tuple[int, float]] = dict.fromkeys(PLACES, (0, 0.0))
    for place in PLACES:

        def around(number: int, call: Callable[[], Any], place: str = place) -> Any:
            started = time.perf_counter()
            try:
                return call()
            finally:
                calls[place] = (number, calls[place][1] + time.perf_counter() - started)

        wrap(place, around)
    return calls


def poison_logprobs(times: int) -> None:
    """The first so many training passes give no number."""

    def around(number: int, call: Callable[[], Any]) -> Any:
        logprobs, entropy = call()
        return (logprobs * float("nan"), entropy) if number <= times else (logprobs, entropy)

    wrap("forward", around)


def leftovers(mark: str, *, patience_seconds: float = 5.0) -> list[int]:
    """Processes that this program started, directly or not, and that should be gone."""
    deadline = time.monotonic() + patience_seconds
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
                is_dead = ") Z " in (entry / "stat").read_text()
            except OSError:
                continue
            if is_ours and not is_dead and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def status(run: Path, pid: int) -> tuple[int, str] | None:
    """Steps done and phase, as a process of the run tells them."""
    try:
        told = json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return (told["step"], told["phase"]) if told["pid"] == pid else None


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def recorded_steps(run: Path) -> int:
    """The last step with a record."""
    return max((row["step"] for row in rows_of(run)), default=0)


def newest(run: Path) -> Path:
    return checkpoints_in(run / "checkpoints")[-1][1]


def everything(folder: Path) -> dict[str, Any]:
    """What must not depend on how often a run was killed: all but times and memory."""
    free = ("time/", "memory/", "speed/")
    files = [
        *(folder / "model").glob("*.safetensors"),
        *newest(folder).glob("*.safetensors"),
        newest(folder) / "state.json",
        *(folder / "rollouts").iterdir(),
        folder / "evaluations" / "base.jsonl",
        folder / "evaluations" / "trained.jsonl",
    ]
    rows = [{k: v for k, v in row.items() if not k.startswith(free)} for row in rows_of(folder)]
    return {"rows": rows, **{str(path.relative_to(folder)): path.read_bytes() for path in files}}


def differences(run: Path, clean: Path) -> list[str]:
    """Names of what is otherwise in two finished runs."""
    one, other = everything(run), everything(clean)
    found = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    if half_written := list((run / "checkpoints").glob(".*")):
        found += [path.name for path in half_written]
    return sorted(found)


def copy_broken_off(clean: Path, run: Path) -> Path:
    """A copy of a finished run as if it had died after its last step but one."""
    shutil.copytree(clean, run)
    shutil.rmtree(run / "model")
    shutil.rmtree(newest(run))
    for path in (run / "evaluations").glob("trained*"):
        path.unlink()
    return run
