"""Are the variables of every launcher read alike, and wrong ones told?"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lanes import gate

from oncurve.core.errors import ConfigError
from oncurve.policy.environment import ALONE, RankInfo, first_host, read_rank_info

if TYPE_CHECKING:
    from nursery import Nursery

STANDARD = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
}


def test_the_place_is_read_from_the_variables_of_torchrun_and_of_srun() -> None:
    assert read_rank_info({}) == ALONE
    assert read_rank_info({"WORLD_SIZE": "1"}) == ALONE
    assert read_rank_info(STANDARD) == RankInfo(5, 8, 1, "node1", 29500)
    assert read_rank_info(SLURM) == RankInfo(9, 16, 1, "gpu03", 20_000 + (1234567 + 2) % 10_000)
    assert read_rank_info(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "7777"}) == RankInfo(9, 16, 1, "head", 7777)
    assert read_rank_info(SLURM | STANDARD) == RankInfo(5, 8, 1, "node1", 29500), "torchrun inside of srun"
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}
    assert read_rank_info(batch_script) == ALONE, "started by a batch script, and not by srun"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "8"}, "number 8 of 8"),
        ({"RANK": "-1"}, "RANK is '-1'"),
    ],
)
def test_variables_that_make_no_sense_are_told(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_rank_info(STANDARD | changes)


def test_the_first_machine_of_a_list() -> None:
    assert first_host("node1") == "node1"
    assert first_host("node1,node2") == "node1"
    assert first_host("a-[7,9-11]-x,b") == "a-7-x"
    with pytest.raises(ConfigError, match="names no machine"):
        first_host("")


WORDS = [
    "train",
    "word_problems",
    "data.limit=64",
    "run.steps=1",
    "run.prompts_per_step=2",
    "algorithm.group_size=2",
    "policy.device=cpu",
    "rollouts.max_completion_tokens=16",
    "evaluation.data=null",
    "evaluation.num_prompts=4",
    "evaluation.every_steps=0",
]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "oncurve"],
    "accelerate": [
        "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2", "-m", "oncurve",
    ],
}  # fmt: skip


DEEPSPEED_PYTHON = os.environ.get("ONCURVE_DEEPSPEED_PYTHON") or (
    sys.executable if importlib.util.find_spec("deepspeed") else None
)


@pytest.mark.proves("F74")
@pytest.mark.timeout(1000)  # DeepSpeed may have to compile first
@pytest.mark.slow
@pytest.mark.skipif(
    DEEPSPEED_PYTHON is None,
    reason="DeepSpeed is not installed: pip install 'oncurve[deepspeed]', or ONCURVE_DEEPSPEED_PYTHON",
)
def test_the_launcher_of_deepspeed_starts_a_run_under_zero_that_is_resumed(
    deepspeed_nursery: Nursery, tmp_path: Path
) -> None:
    file = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(file))
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank", "--module", "oncurve"]
    zero = ["policy.parallel=deepspeed", f"policy.deepspeed={tmp_path / 'zero.json'}"]
    words = [*WORDS, *zero, f"run.folder={tmp_path}", "run.name=run", "run.save_every_steps=1"]
    resume = ["resume", str(tmp_path / "run"), "run.steps=2", "--allow-change"]
    for command in (words, resume):
        done = deepspeed_nursery.run_python(*launcher, *command)
        assert done.returncode == 0, done.stdout[-2500:] + done.stderr[-3000:]
        assert done.stdout.count("run finished") == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]


@pytest.mark.proves("F75", "F77")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", gate(LAUNCHERS, "torchrun"))
def test_a_launcher_starts_a_run_of_two_processes(launcher: str, nursery: Nursery, tmp_path: Path) -> None:
    if launcher == "accelerate" and shutil.which("accelerate", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("accelerate is not installed: pip install accelerate")
    words = [*WORDS, f"run.folder={tmp_path}", "run.name=run"]
    done = nursery.run_python(*LAUNCHERS[launcher], *words)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert done.stdout.count("run finished") == 1, "process 0 speaks for both"
    manifest = next((tmp_path / "run" / "checkpoints").glob("step_*/manifest.json")).read_text()
    assert '"world_size": 2' in manifest
