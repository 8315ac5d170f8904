"""The commands of SLURM that a batch script calls, for one machine: `srun` starts real processes.

Called by the name that it is linked under. What it does beyond starting is what SLURM's documentation says: the
variables of a task, the highest exit code, and that a signal to a step reaches its tasks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def srun(words: list[str]) -> int:
    options: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    tasks, nodes = int(options["--ntasks"]), options["--nodelist"].split(",")
    assert len(nodes) == int(options["--nodes"])
    each = tasks // len(nodes)
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        for task in started:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    for rank in range(tasks):
        place = {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank % each,
            "SLURM_STEP_NUM_TASKS": tasks,
            "SLURM_STEP_NODELIST": options["--nodelist"],
            "SLURM_STEP_ID": 0,
        }
        started.append(subprocess.Popen(words, env=os.environ | {key: str(value) for key, value in place.items()}))
    codes = [task.wait() for task in started]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        sys.stdout.write(words[2].replace(",", "\n") + "\n")
        return 0
    assert words[0] == "requeue"
    with (Path(__file__).parent / "requeued").open("a") as file:
        file.write(words[1] + "\n")
    return 0


def sbatch(words: list[str]) -> int:
    sys.stdout.write(f"Submitted batch job 77 from {words[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol, "sbatch": sbatch}[Path(sys.argv[0]).name](sys.argv[1:]))
