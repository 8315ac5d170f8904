"""SLURM batch script for a recipe: it stops in time and resumes by itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.fleet.launch.placement import serve_settings
from oncurve.observe.record import write_text
from oncurve.recipe.load import load_config, run_folder_path
from oncurve.recipe.schema import Config
from oncurve.run_errors import LostProcess

SAVED, LOST = 143, LostProcess.exit_code
SLACK_SECONDS = 30
"""Between the end of the run's time to save and that of the job."""


@dataclass(frozen=True)
class Allocation:
    """The resources that a job asks for."""

    nodes: int = 1
    """Machines that train."""
    gpus_per_node: int = 8
    """Also the processes that train on each; 0 asks for none and starts one process."""
    rollout_nodes: int = 0
    """Machines that only sample."""
    time: str = "24:00:00"
    grace_seconds: int = 300
    """Time between the signal to save and the end of the job, or its preemption."""
    options: tuple[str, ...] = ()
    """Further lines for sbatch, such as --partition=gpu or --account=mine."""
    cpus_per_task: int = 0
    """Cores of each process; 0 asks for whole machines."""
    max_requeues: int = 100


def render_slurm(
    recipe: Path,
    overrides: Sequence[str],
    *,
    config: Config,
    allocation: Allocation,
    python: str,
) -> str:
    """The script for ``sbatch``. One task is started for each process; ``oncurve train`` reads its place from srun.

    A job that is told to go saves, ends with 143 and puts itself into the queue again; so does one that lost a process
    (75). Every start goes on where the run is.

    Raises ConfigError for an allocation that cannot be.
    """
    _check(config, allocation)
    tasks = trainers_per_node(config, allocation)
    folder = run_folder_path(config).absolute()
    arguments = [python, "-m", "oncurve", "train", str(recipe.absolute())]
    arguments += [f"run.grace_seconds={allocation.grace_seconds - SLACK_SECONDS}", *overrides]
    arguments += [f"run.folder={folder.parent}"]
    arguments += server_arguments(config, allocation)
    return "\n".join(
        [
            *_header(folder, allocation, tasks),
            *_meeting(allocation),
            *(_servers(config, folder, allocation, python) if allocation.rollout_nodes else ()),
            *_training(arguments, tasks, allocation),
            *_ending(folder, allocation),
            "",
        ]
    )


def trainers_per_node(config: Config, allocation: Allocation) -> int:
    """Processes that train on a machine, one per GPU that no vLLM server of the run takes. Raises ConfigError."""
    server_gpus = (
        config.rollouts.vllm_servers * config.rollouts.tensor_parallel if config.rollouts.type == "servers" else 0
    )
    if config.rollouts.sleep or not allocation.gpus_per_node:
        return max(allocation.gpus_per_node, 1)
    if allocation.gpus_per_node <= server_gpus:
        raise ConfigError(
            f"rollouts.vllm_servers takes {server_gpus} GPUs and a node has {allocation.gpus_per_node}: none is left "
            f"to train. Ask for more with --gpus-per-node, or for nodes that only sample with --rollout-nodes"
        )
    if server_gpus and allocation.nodes > 1:
        raise ConfigError(
            "rollouts.vllm_servers are started by the first process alone, on its machine. With several --nodes, "
            "sample on nodes of their own: `rollouts.vllm_servers=0` and --rollout-nodes"
        )
    return allocation.gpus_per_node - server_gpus


def server_arguments(config: Config, allocation: Allocation) -> list[str]:
    """Settings that name the machines that only sample, if there are any."""
    folder = run_folder_path(config).absolute()
    return ["rollouts.type=servers", f"rollouts.registry={folder}.servers"] if allocation.rollout_nodes else []


def submit(script: str, config: Config) -> str:
    """Write the script beside the run's folder and give it to sbatch; what that says.

    Raises ConfigError if there is no sbatch, or if it refuses.
    """
    folder = run_folder_path(config).absolute()
    path = folder.with_name(f"{folder.name}.sbatch")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, script)
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"sbatch is not on this machine. The script is {path}; submit it where it is") from None
    if done.returncode:
        raise ConfigError(f"sbatch refused {path}: {' '.join(done.stderr.split())[:600]}")
    return f"{path}\n{done.stdout}"


def _check(config: Config, allocation: Allocation) -> None:
    if config.run.name is None:
        raise ConfigError("run.name is not set, and every start of a job must find the same run. Give run.name=...")
    if config.policy.parallel == "none" and allocation.nodes * allocation.gpus_per_node > 1:
        raise ConfigError("policy.parallel is none, but several processes would train. Set it to ddp or fsdp")
    if allocation.grace_seconds < 60:
        raise ConfigError(
            f"--grace is {allocation.grace_seconds} s. SLURM may send the signal up to 60 s late, so give it more"
        )
    for option in allocation.options:
        if not option.startswith("--") or any(sign in option for sign in "\n\r\"'`$\\"):
            raise ConfigError(f"--sbatch {option!r} is no option of sbatch. Write one such as --sbatch --partition=gpu")


def _header(folder: Path, allocation: Allocation, tasks: int) -> list[str]:
    gpus = [f"#SBATCH --gpus-per-node={allocation.gpus_per_node}"] if allocation.gpus_per_node else []
    if any(sign in str(folder) for sign in " \n\"'`$\\%"):
        raise ConfigError(f"run.folder is {str(folder)!r}, and sbatch takes no such path. Choose one without {' %$'!r}")
    return [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={folder.name}",
        f"#SBATCH --nodes={allocation.nodes + allocation.rollout_nodes}",
        *gpus,
        f"#SBATCH --ntasks-per-node={max(tasks, allocation.gpus_per_node if allocation.rollout_nodes else 1)}",
        *_share(allocation),
        f"#SBATCH --time={allocation.time}",
        "#SBATCH --requeue",
        f"#SBATCH --signal=TERM@{allocation.grace_seconds}",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={folder}.slurm.txt",
        *(f"#SBATCH {option}" for option in allocation.options),
        "",
        "# Written by `oncurve launch --slurm`. Submit it with sbatch; every start goes on where the run is.",
        "set -uo pipefail",
        "# Every task gets its part of the cores; without a word srun gives one core to each.",
        f'cores="${{SLURM_CPUS_PER_TASK:-$((${{SLURM_CPUS_ON_NODE:-0}} / {tasks}))}}"',
        '[ "$cores" -lt 1 ] || export SRUN_CPUS_PER_TASK="$cores"',
        "",
    ]


def _share(allocation: Allocation) -> list[str]:
    """Cores and memory: those that are asked for, else all of each machine."""
    if allocation.cpus_per_task:
        return [f"#SBATCH --cpus-per-task={allocation.cpus_per_task}", "#SBATCH --mem=0"]
    return ["#SBATCH --exclusive", "#SBATCH --mem=0"]


def _meeting(allocation: Allocation) -> list[str]:
    lines = [
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'trainers=("${{hosts[@]:0:{allocation.nodes}}}")',
        "# The processes of the run meet on the first machine, at a port of the job's own.",
        'export MASTER_ADDR="${trainers[0]}"',
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        'together() { local IFS=,; printf "%s" "$*"; }',
        "",
    ]
    return lines


def _servers(config: Config, folder: Path, allocation: Allocation, python: str) -> list[str]:
    """Each GPU of a machine that samples gets a server, which leaves its address where the trainer looks."""
    registry, tasks = shlex.quote(f"{folder}.servers"), max(allocation.gpus_per_node, 1)
    settings = [word for setting in serve_settings(config) for word in ("--set", setting)]
    serve = shlex.join([python, "-m", "oncurve", "serve", config.model, *settings])
    return [
        f'samplers=("${{hosts[@]:{allocation.nodes}}}")',
        f"rm -rf -- {registry} && mkdir -p -- {registry}",
        "# Whoever knows this word may hand weights to the servers.",
        'ONCURVE_SERVER_TOKEN="${ONCURVE_SERVER_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d " \\n")}"',
        "export ONCURVE_SERVER_TOKEN",
        "serving=()",
        'for host in "${samplers[@]}"; do',
        f'  srun --nodes=1 --ntasks={tasks} --nodelist="$host" --kill-on-bad-exit=0 --overlap \\',
        f'    {serve} --host "$host" --port 0 --registry {registry} &',
        '  serving+=("$!")',
        "done",
        "",
    ]


def _training(arguments: Sequence[str], tasks: int, allocation: Allocation) -> list[str]:
    total = allocation.nodes * tasks
    return [
        "# A task that is lost leaves the others two minutes to say so; SLURM would end them at once.",
        f"srun --nodes={allocation.nodes} --ntasks={total} --ntasks-per-node={tasks} \\",
        '  --nodelist="$(together "${trainers[@]}")" --kill-on-bad-exit=0 --wait=120 --overlap \\',
        f"  {shlex.join([*arguments, '--resume'])} &",
        "training=$!",
        "# Told to go, the script waits for the run, which has been told as well and saves.",
        "trap ':' TERM USR1",
        "code=0",
        'while kill -0 "$training" 2>/dev/null; do',
        '  wait "$training"',
        "  code=$?",
        "done",
        "",
    ]


def _ending(folder: Path, allocation: Allocation) -> list[str]:
    stop = ['kill "${serving[@]}" 2>/dev/null', 'wait "${serving[@]}"', ""] if allocation.rollout_nodes else []
    return [
        *stop,
        f"# {SAVED}: saved after a signal. {LOST}: a process was lost. Above 128: killed. The queue may try again.",
        f'if [ "$code" -eq {LOST} ] || [ "$code" -gt 128 ]; then',
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {allocation.max_requeues} ]; then',
        '    echo "ended with $code: back into the queue, to go on from the last checkpoint"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "  else",
        f'    echo "ended with $code after {allocation.max_requeues} requeues: see {folder}"',
        "  fi",
        "fi",
        'exit "$code"',
    ]


def submit_run(recipe: Path, overrides: Sequence[str], *allocation: Any, dry_run: bool) -> str:
    """Submit a recipe, once it is known to load as the job will load it; the answer, or the script of a dry run.

    ``allocation`` holds the fields of ``Allocation`` in their order.
    """
    config, requested = load_config(recipe, overrides), Allocation(*allocation)
    load_config(recipe, [*overrides, *server_arguments(config, requested)])
    script = render_slurm(recipe, overrides, config=config, allocation=requested, python=sys.executable)
    return script if dry_run else submit(script, config)
