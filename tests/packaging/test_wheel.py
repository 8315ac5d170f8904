"""Does the package work where only its wheel is?"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import oncurve

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "py.typed",
    "assets/base_model/model.safetensors",
    "assets/base_model/tokenizer.json",
    "trl/options.yaml",
    "evaluate/benchmarks/gsm8k.yaml",
    "plan/devices.yaml",
    "plan/models.yaml",
    "recipes/word_problems/recipe.yaml",
    "report/pages/page.html",
    "report/pages/charts.js",
    "model/native/decode.cpp",
    "model/native/token.h",
)
ONE_AFTER_THE_OTHER = """
import json, sys
from oncurve.cli.app import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["oncurve", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""
WITHOUT_ONCURVE = """
import sys
sys.modules["oncurve"] = None  # importing it would fail
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("runs/short/model")
tokenizer = AutoTokenizer.from_pretrained("runs/short/model")
prompt = tokenizer(sys.argv[1], return_tensors="pt")
ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0][prompt["input_ids"].shape[1]:]
print("completion:", tokenizer.decode(ids, skip_special_tokens=True))
"""
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
PROMPT = f"User: {QUESTION}\nAssistant: <think>"
pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77: pip install setuptools")


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder stays in the project, with the setuptools of this environment."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "oncurve", source / "oncurve", ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(target)!r}))"
    done = run(sys.executable, "-c", build, cwd=source)
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as an installer does it; what it depends on comes from this environment."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


@pytest.fixture
def command(site: Path, tmp_path: Path):
    """A command of the wheel in an empty folder; gives back what was printed."""

    def start(*words: str, code: str = "from oncurve.cli.app import main; main()") -> str:
        own = {"PYTHONPATH": str(site), "TERM": "dumb", "COLUMNS": "200"}
        done = run(sys.executable, "-P", "-c", code, *words, cwd=tmp_path, **own)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return start


def test_the_wheel_holds_what_the_package_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert {f"oncurve/{name}" for name in NEEDED} <= names
    suffixes = (".yaml", ".md", ".jsonl", ".json", ".py", ".js", ".css", ".html", ".cpp", ".h", ".safetensors")
    ours = [
        path for path in (ROOT / "oncurve").rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts
    ]
    assert {str(path.relative_to(ROOT)) for path in ours} <= names
    strange = {name.split("/")[0] for name in names} - {"oncurve", f"oncurve-{oncurve.__version__}.dist-info"}
    assert not strange, "tests and benchmarks do not belong into a wheel"


def test_what_is_run_is_what_was_installed(command, site: Path) -> None:
    place = command(code="import oncurve; print(oncurve.__file__)").strip()
    assert Path(place).is_relative_to(site)


def test_the_command_says_its_version(command) -> None:
    assert command("--version") == f"oncurve {oncurve.__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("recipe", "list"), "word_problems"),
        (("recipe", "show", "word_problems"), "group_size"),
        (("plan", "word_problems", "--gpu", "cpu"), "GiB"),
        (("trl", "--help"), "GRPOTrainer"),
        (("--version",), "oncurve"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_needs_no_tensors_starts_without_torch(command, words: tuple[str, ...], expected: str) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('heavy:', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules))))\n"
        "from oncurve.cli.app import main\nmain()"
    )
    printed = command(*words, code=code)
    assert expected in printed
    assert printed.endswith("heavy: []\n")


@pytest.mark.nightly
def test_the_wheel_checks_and_trains_a_model_that_needs_nothing_of_it(command, tmp_path: Path) -> None:
    rows = ["data.limit=40", "evaluation.num_prompts=4", "evaluation.every_steps=0"]
    short = ["run.steps=1", "run.prompts_per_step=2", "algorithm.group_size=2", "run.name=short"]
    asked = ["sample", "runs/short/model", QUESTION, "--max-tokens", "12"]
    commands = [["check", "word_problems", *rows], ["demo", *rows, *short], asked]
    ours = command(json.dumps(commands), code=ONE_AFTER_THE_OTHER)
    assert (tmp_path / "runs" / "short" / "model" / "model.safetensors").is_file()
    said = command(PROMPT, code=WITHOUT_ONCURVE).split("completion:")[1].strip()
    assert said
    assert said in ours


def test_extras_have_the_names_that_messages_and_pages_use() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert {"vllm", "deepspeed", "quant", "track", "docs", "dev"} <= extras
    texts = [*(ROOT / "oncurve").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        name.strip()
        for path in texts
        for found in re.findall(r"oncurve\[([a-z, ]+)\]", path.read_text(encoding="utf-8"))
        for name in found.split(",")
    }
    assert named <= extras
    inside = re.findall(r"oncurve\[([a-z,]+)\]", str(project["optional-dependencies"]))
    assert {name for found in inside for name in found.split(",")} <= extras
