"""The wheels that a GPU machine without a network lacks: fetched here, carried there.

Such a machine has an image with torch, transformers, peft and accelerate and nothing that only this project needs. The
wheels go into a folder that git ignores, for `benchmarks/gpu/gpu_first.py --wheels`.

    python benchmarks/gpu/gpu_wheels.py                          # into build/gpu_wheels
    python benchmarks/gpu/gpu_wheels.py --also pyarrow==25.0.0   # where the image has one below 24
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu_wheels"
PYTHON = "3.12"
NEEDED = (
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "datasets",
    "dill",
    "multiprocess",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "beartype",
)
PINS = {"dill": "0.4.1", "multiprocess": "0.70.19"}
"""Beside those of constraints.txt; pydantic names the pydantic-core that it takes, to the last digit."""
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
THERE = """
    torch triton transformers tokenizers safetensors huggingface-hub peft accelerate numpy pandas pyarrow matplotlib
    pyyaml typer rich click jaxtyping wadler-lindig aiohttp attrs typing-extensions fsspec httpx requests tqdm xxhash
    filelock packaging sympy mpmath regex psutil pytest pytest-timeout pytest-xdist hypothesis setuptools
"""
"""What such an image has; a wheel may need it without bringing it."""


def main() -> None:
    """Fetch the wheels, check that nothing is missing, print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME==VERSION", help="further wheels")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in arguments.output.glob("*.whl"):  # one version of each: two would stop the installation
        old.unlink()
    fetch([*pinned(), *arguments.also], arguments.output)
    wheels = sorted(arguments.output.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:7.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 1e6:7.2f} MB in {len(wheels)} wheels: {arguments.output}")
    if missing := sorted(needs(wheels) - {name_of(wheel) for wheel in wheels} - set(THERE.split())):
        sys.exit(f"these wheels also need {', '.join(missing)}: name them with --also")


def pinned() -> list[str]:
    """The wheels with their versions; pydantic-core in the one that pydantic asks for."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line) | PINS
    return [f"{name}=={versions[name]}" if name in versions else name for name in NEEDED if name != "pydantic-core"]


def fetch(names: list[str], folder: Path) -> None:
    """Download wheels for the other machine's Python; pydantic's core after it, as it is told there."""
    choices = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        PYTHON,
        *choices,
        "-d",
        str(folder),
    ]
    subprocess.run([*command, *names], check=True)
    [core] = [text for text in requirements(next(folder.glob("pydantic-*.whl"))) if text.startswith("pydantic-core")]
    subprocess.run([*command, core.replace(" ", "")], check=True)


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs, without extras and what only other Pythons need."""
    with zipfile.ZipFile(wheel) as packed:
        metadata = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        listed = HeaderParser().parsestr(packed.read(metadata).decode("utf-8")).get_all("Requires-Dist") or []
    return [text for text in listed if not re.search(r"extra ==|python_version *<|sys_platform *==|platform_", text)]


def needs(wheels: list[Path]) -> set[str]:
    """The names of what some wheels need."""
    return {normal(re.split(r"[ ;<>=!~\[(]", text)[0]) for wheel in wheels for text in requirements(wheel)}


def name_of(wheel: Path) -> str:
    """The package in a wheel."""
    return normal(wheel.name.split("-")[0])


def normal(name: str) -> str:
    """A name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
