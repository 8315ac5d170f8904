"""Does a run of two processes survive as one of one process does, to the same bits, whichever of them is struck?"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncurve.run_errors import LostProcess

if TYPE_CHECKING:
    from nursery import Child, Nursery

VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {"policy": {"parallel": "ddp"}},
    "ddp, several updates, dynamic sampling, a curriculum, a reference that moves": {
        "policy": {"parallel": "ddp"},
        "data": {"retire_above": 0.9, "prefer_half_solved": True},
        "algorithm": {"kl_coef": 0.05, "reference": "average", "reference_share": 0.5, "entropy_target": 0.5},
        "run": {"completions_per_update": 6, "refill_rounds": 2, "save_every_steps": 3},
    },
    "ddp, an adapter with dropout": {
        "policy": {"parallel": "ddp", "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.2}},
        "algorithm": {"kl_coef": 0.05},
        "run": {"completions_per_update": 6},
    },
    "fsdp, several updates, dynamic sampling, a reference that moves": {
        "policy": {"parallel": "fsdp"},
        "algorithm": {"kl_coef": 0.05, "reference": "average", "reference_share": 0.5},
        "run": {"completions_per_update": 6, "refill_rounds": 2},
    },
    "fsdp, an adapter": {"policy": {"parallel": "fsdp", "lora": {"rank": 2, "alpha": 4.0}}},
}
KILL, TERM, USR1, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
BLOWS: dict[str, tuple[tuple[int, str, int, signal.Signals], ...]] = {
    "ddp": ((0, "measure", 1, KILL), (2, "sample", 0, KILL), (4, "train", 1, KILL), (8, "measure", 1, KILL)),
    "ddp, several updates, dynamic sampling, a curriculum, a reference that moves": (
        (1, "refill", 1, KILL),
        (1, "sample", 1, TERM),
        (4, "train", 0, KILL),
        (4, "train", 0, USR1),
        (6, "evaluate", 1, INT),
    ),
    "ddp, an adapter with dropout": ((4, "save", 0, KILL),),
    "fsdp, several updates, dynamic sampling, a reference that moves": (
        (1, "refill", 0, KILL),
        (1, "sample", 1, TERM),
        (3, "train", 0, USR1),
        (4, "train", 1, KILL),
        (6, "evaluate", 1, INT),
    ),
    "fsdp, an adapter": ((3, "train", 0, KILL),),
}
"""Steps done, phase and number of the process that is struck, and the signal; the run is resumed after each."""


def start(
    nursery: Nursery, *words: object, file_limit: int | None = None, own: tuple[str, str] = ("", "")
) -> list[Child]:
    """Two processes of one run, as a launcher starts them; ``own`` is a word for each alone."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    children = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        more = [own[rank]] if own[rank] else []
        children.append(nursery.start(*words, *more, env=place, file_limit=file_limit))
    return children


def finish(children: list[Child]) -> None:
    assert [child.wait() for child in children] == [0] * len(children), "\n".join(c.output for c in children)


def assert_the_other_notices(children: list[Child], rank: int) -> None:
    codes = [child.wait() for child in children]
    other = children[1 - rank]
    assert codes[rank] == -9
    assert codes[1 - rank] == LostProcess.exit_code, other.output
    assert f"process {rank} is gone" in other.output
    assert "Traceback" not in other.output


def assert_both_save(children: list[Child], number: signal.Signals, run: Path) -> None:
    """A signal to either process stops both, after saving."""
    assert [child.wait() for child in children] == [130 if number == INT else 143] * 2, [c.output for c in children]
    assert not any("Traceback" in child.output for child in children)
    saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert saved in (rows[-1], rows[-1] + 1), "nothing that was done is lost"


@pytest.mark.nightly
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_processes_that_are_killed_and_stopped_again_and_again_end_with_the_same_bits(
    variant: str,
    nursery: Nursery,
    recipe: Callable[..., Path],
    kill_at: Callable[..., bool],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    changes = VARIANTS[variant]
    finish(start(nursery, "train", recipe(tmp_path / "clean", **changes)))
    run = tmp_path / "killed" / "run"
    children = start(nursery, "train", recipe(tmp_path / "killed", **changes))
    for step, phase, rank, number in BLOWS[variant]:
        was_struck = kill_at(children[0], run, step=step, phase=phase, instead=children[rank], number=number)
        assert was_struck, "\n".join(child.output for child in children)
        if number == KILL:
            assert_the_other_notices(children, rank)
        else:
            assert_both_save(children, number, run)
        children = start(nursery, "resume", run)
    finish(children)
    assert_same(run, tmp_path / "clean" / "run")
    assert [path.name for path in (run / "checkpoints").glob(".*")] == [], "nothing half written stays"


def test_another_number_of_processes_is_shown_and_refused(nursery: Nursery, stopped: Path) -> None:
    children = start(nursery, "resume", stopped)
    assert [child.wait() for child in children] == [2, 2]
    assert "the number of processes: 1 -> 2" in children[0].output
    assert children[1].output == "", "it is said once"
    children = start(nursery, "resume", stopped, "--allow-change")
    finish(children)
    rows = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(9))


def test_a_disk_without_room_ends_both_with_the_message_of_one(
    nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    children = start(nursery, "train", recipe(tmp_path, policy={"parallel": "ddp"}), file_limit=60_000)
    assert [child.wait() for child in children] == [6, 6]
    assert "the checkpoint cannot be written" in children[0].output
    assert children[1].output == ""


def test_a_port_that_is_taken_is_named(nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        child = nursery.start("train", recipe(tmp_path), env=place)
        assert child.wait() == 7
    assert f"did not find each other at 127.0.0.1:{port}" in child.output
    assert "Traceback" not in child.output
    assert not (tmp_path / "run").exists()


def test_data_that_differ_between_processes_are_refused(
    nursery: Nursery, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [json.dumps({"question": f"{number} words", "answer": "1"}) for number in range(20)]
    for name, kept in (("a", rows), ("b", rows[:-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(kept))
    own = (f"data.path={tmp_path / 'a.jsonl'}", f"data.path={tmp_path / 'b.jsonl'}")
    children = start(nursery, "train", recipe(tmp_path), own=own)
    assert [child.wait() for child in children] == [2, 2]
    assert "process 1 has another" in children[0].output
    assert not (tmp_path / "run").exists()
