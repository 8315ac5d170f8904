"""Are the processes of one machine started, told, ended and started again as one?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncurve.fleet.launch import local
from oncurve.fleet.launch.local import ProcessSupervisor, run_processes
from oncurve.run.checkpoint_manifest import clear_unbegun, progress_of
from oncurve.run_errors import LostProcess

if TYPE_CHECKING:
    from nursery import Nursery

SCRIPT = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1:]
mark = what.pop(0)
attempt = 0
while os.path.exists(f"{mark}.{rank}.{attempt}"):
    attempt += 1
open(f"{mark}.{rank}.{attempt}", "w").write(" ".join(what) + " " + os.environ["MASTER_PORT"])
"""


@pytest.fixture
def crew_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that run a script of the test instead of oncurve; gives the file that it is written to."""
    script = tmp_path / "script.py"
    monkeypatch.setattr(local, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(local, "GRACE_SECONDS", 1.0)
    return script


def run(script: Path, body: str, *, processes: int = 2, restarts: int = 0) -> tuple[int, list[str]]:
    script.write_text(SCRIPT + body)
    said: list[str] = []
    mark = str(script.parent / "mark")
    code = run_processes(
        [mark, "first"], [mark, "again"], processes=processes, restarts=restarts, stop_seconds=2.0, notify=said.append
    )
    return code, said


def test_every_process_knows_its_place_and_the_same_port(crew_of: Path) -> None:
    assert run(crew_of, "", processes=3) == (0, [])
    texts = [(crew_of.parent / f"mark.{rank}.0").read_text() for rank in range(3)]
    assert len(set(texts)) == 1
    assert texts[0].startswith("first ")


def test_a_process_that_was_killed_is_named_and_the_run_goes_on_with_the_other_words(crew_of: Path) -> None:
    dying = "if rank == 1 and attempt < 2: os.kill(os.getpid(), 9)\nif attempt < 2: time.sleep(0.3); sys.exit(75)"
    code, said = run(crew_of, dying, restarts=3)
    assert code == 0
    assert said[0] == "process 1 of 2 was killed by SIGKILL"
    assert "1. time of 3" in said[1]
    assert (crew_of.parent / "mark.0.1").read_text().startswith("again")
    assert not (crew_of.parent / "mark.0.3").exists()


def test_the_trying_ends_after_the_last_restart(crew_of: Path) -> None:
    code, said = run(crew_of, "os.kill(os.getpid(), 11)", restarts=2)
    assert code == LostProcess.exit_code
    assert sum("starting the processes again" in line for line in said) == 2


@pytest.mark.parametrize("status", [2, 6, 7])
def test_a_message_for_the_user_is_not_tried_again(status: int, crew_of: Path) -> None:
    code, said = run(crew_of, f"sys.exit({status} if rank == 0 else 75)", restarts=5)
    assert code == status
    assert said == []


def test_who_does_not_notice_that_another_failed_is_killed(crew_of: Path) -> None:
    started = time.monotonic()
    code, said = run(crew_of, "sys.exit(7) if rank == 0 else time.sleep(60)")
    assert code == 7
    assert time.monotonic() - started < 10
    assert said == ["process 1 of 2 does not end by itself and is killed", "process 1 of 2 was killed by SIGKILL"]


def test_a_signal_reaches_all_and_ends_the_trying(crew_of: Path) -> None:
    crew_of.write_text(
        SCRIPT
        + "signal.signal(15, lambda *_: (time.sleep(0.2), os._exit(143)))\n"
        + "if rank == 0: os.kill(os.getppid(), 15)\ntime.sleep(60)"
    )
    mark = str(crew_of.parent / "mark")
    supervisor = ProcessSupervisor([mark], 2, stop_seconds=5.0, notify=print)
    assert supervisor.run() == (143, True)


def test_processes_die_with_the_one_that_started_them(crew_of: Path, tmp_path: Path) -> None:
    crew_of.write_text(SCRIPT + "open(f'{mark}.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    code = (
        "from oncurve.fleet.launch import local\n"
        f"local.COMMAND = ({sys.executable!r}, {str(crew_of)!r})\n"
        f"local.ProcessSupervisor([{str(tmp_path / 'mark')!r}], 1, stop_seconds=5, notify=print).run()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    note = tmp_path / "mark.pid"
    while not (note.exists() and note.read_text()):
        assert parent.poll() is None, "it ended before its process began"
        time.sleep(0.01)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    pid = int(note.read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if " Z " in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_text()


def test_the_progress_of_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    assert progress_of(run_folder) == "absent"
    run_folder.mkdir()
    for name in ("metrics.jsonl", "log.txt"):
        (run_folder / name).touch()
    assert progress_of(run_folder) == "unbegun"
    clear_unbegun(run_folder)
    assert progress_of(run_folder) == "absent"
    (run_folder / "metrics.jsonl").write_text('{"step": 0}\n')
    assert progress_of(run_folder) == "begun"
    (run_folder / "checkpoints" / "step_000004").mkdir(parents=True)
    (run_folder / "config.yaml").write_text("run: {steps: 4}\n")
    assert progress_of(run_folder) == "begun"
    (run_folder / "model").mkdir()
    (run_folder / "evaluations").mkdir()
    (run_folder / "evaluations" / "trained.json").write_text("{}")
    assert progress_of(run_folder) == "finished"
    (run_folder / "config.yaml").write_text("run: {steps: 9}\n")
    assert progress_of(run_folder) == "begun"
    (run_folder / "config.yaml").write_text("run: [")
    assert progress_of(run_folder) == "begun", "`resume` says what is wrong with the recipe"


SHORT = (
    "data.limit=64",
    "run.steps=6",
    "run.prompts_per_step=4",
    "run.save_every_steps=1",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=32",
    "evaluation.data=null",
    "evaluation.num_prompts=8",
    "evaluation.every_steps=0",
)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_of_two_processes_starts_again_by_itself(nursery: Nursery, tmp_path: Path) -> None:
    def words(name: str, *more: str) -> list[str]:
        own = [f"run.folder={tmp_path}", f"run.name={name}", "--processes", "2", *more]
        return ["train", "word_problems", *SHORT, *own]

    struck = nursery.start(*words("struck", "--restarts", "2"))
    rows = tmp_path / "struck" / "metrics.jsonl"
    while struck.is_running() and not (rows.exists() and '"step": 3' in rows.read_text()):
        time.sleep(0.01)
    children = Path(f"/proc/{struck.pid}/task/{struck.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert struck.wait() == 0, struck.output
    said = struck.output
    assert "process 1 of 2 was killed by SIGKILL" in said
    assert "1. time of 2" in said
    status, told = nursery.run(*words("clean"))
    assert status == 0, told
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("struck", "clean")]
    assert weights[0] == weights[1]
    status, told = nursery.run(*words("clean", "--resume"))
    assert status == 0, "what is finished needs nothing"
    assert "run finished" in told
