"""Do given rows and rewards work with servers and several processes, and is nobody left when all of it is gone?"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from lanes import gate
from processes import run_programs
from safetensors.torch import load_file

if TYPE_CHECKING:
    from nursery import Nursery

START = """
import gc, os, random, sys, threading
import oncurve

folder, case = sys.argv[1:3]
rows = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
run = {"steps": 2, "prompts_per_step": 2, "folder": folder, "name": case}
sizes = {"max_completion_tokens": 24}
small = dict(evaluation={"num_prompts": 4}, algorithm={"group_size": 4})


def children():
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(name)
    return found
"""
TRAIN = (
    START
    + """
if case == "own rows":
    random.seed(int(os.environ["RANK"]))
    random.shuffle(rows)
weight = 1.0 + (int(os.environ["RANK"]) if case == "own weight" else 0)
rollouts = {**sizes, "type": "servers", "own_servers": 1} if case == "served" else sizes
try:
    oncurve.train("embedded", rows, lambda completion, answer: weight * (len(completion) % 5), run=run,
                  rollouts=rollouts, **small)
except oncurve.OncurveError as error:
    print("REFUSED", " ".join(str(error).split()))
    raise SystemExit(1)
print("LEFT", len(children()))
"""
)
SERVED = (
    START
    + """
import subprocess
words = [sys.executable, "-u", "-m", "oncurve", "serve", "embedded", "--port", "0"]
server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
try:
    while "http://" not in (line := server.stdout.readline()):
        assert line, "the server ended"
    address = "http://" + line.split("http://")[1].split()[0].rstrip(".,")
    seen = []

    class Counting:
        def __call__(self, completion, answer):
            seen.append(completion)
            return float(len(completion) % 5)

    rollouts = {**sizes, "type": "servers", "servers": [address]}
    oncurve.train("embedded", rows, Counting(), run=run, rollouts=rollouts, **small)
    print("SEEN", len(seen))
finally:
    server.terminate()
    server.wait()
"""
)
GARBAGE = (
    START
    + """
answers = [{"question": f"{a}?", "answer": f"x + \\\\sqrt{{{a}}}"} for a in range(2, 40)]
rollouts = {**sizes, "type": "servers", "own_servers": 1}
trainer = oncurve.Trainer("embedded", answers, "mathematics", run=run, rollouts=rollouts, **small)
walk = trainer.steps()
next(walk)
assert children(), "the server is one"
del walk, trainer
gc.collect()
threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
print("LEFT", len(children()), threads)
again = oncurve.Trainer("embedded", answers, "mathematics", run={**run, "name": "again"}, rollouts=sizes, **small)
again.train()
again.evaluate()
print("LEFT", len(children()))
"""
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def model(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "model" / "model.safetensors")


@pytest.mark.nightly
@linux
def test_servers_of_its_own_and_two_processes_end_where_one_process_does(nursery: Nursery, tmp_path: Path) -> None:
    path = program(tmp_path, TRAIN)
    for case, count in (("alone", 1), ("served", 1), ("two", 2)):
        ended = run_programs(nursery, [path, tmp_path, case], count=count)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert set(re.findall(r"LEFT (\d+)", ended.stdout)) == {"0"}
    alone = model(tmp_path, "alone")
    for case in ("served", "two"):
        other = model(tmp_path, case)
        assert all(torch.allclose(alone[name], other[name], atol=1e-4) for name in alone)


@linux
@pytest.mark.parametrize("case", gate(["own rows", "own weight"], "own rows"))
def test_processes_that_were_given_other_things_are_told(case: str, nursery: Nursery, tmp_path: Path) -> None:
    ended = run_programs(nursery, [program(tmp_path, TRAIN), tmp_path, case], count=2)
    assert ended.returncode != 0
    assert "REFUSED" in ended.stdout
    assert re.search(r"process \d has another (training prompts|rows or rewards) than process \d", ended.stdout)


@linux
def test_a_server_of_another_process_samples_for_a_program_with_objects(nursery: Nursery, tmp_path: Path) -> None:
    ended = run_programs(nursery, [program(tmp_path, SERVED), tmp_path, "apart"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "SEEN 24" in ended.stdout  # four before, two steps of eight, four after


@linux
def test_nobody_is_left_when_a_trainer_is_garbage(nursery: Nursery, tmp_path: Path) -> None:
    ended = run_programs(nursery, [program(tmp_path, GARBAGE), tmp_path, "garbage"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.findall("LEFT .*", ended.stdout) == ["LEFT 0 ['MainThread']", "LEFT 0"]
