"""Does the manifest say which code ran where, without importing it?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import oncurve
from oncurve.observe.manifest import describe_code, describe_run


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed: sudo apt-get install git")
    folder = tmp_path / "repository" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    git(tmp_path / "repository", "init")
    return folder


def test_a_committed_package_has_a_commit_and_is_clean(package: Path) -> None:
    git(package, "add", ".")
    git(package, "commit", "-m", "first")
    found = describe_code(package)
    assert len(found["commit"]) == 40
    assert found["dirty"] is False


def test_a_change_or_a_new_module_makes_it_dirty(package: Path) -> None:
    git(package, "add", ".")
    git(package, "commit", "-m", "first")
    (package / "new.py").write_text("")
    assert describe_code(package)["dirty"] is True


def test_a_copy_inside_someone_elses_repository_has_no_commit(package: Path) -> None:
    assert describe_code(package) == {"commit": None, "dirty": None}


def test_the_manifest_names_code_versions_hardware_and_command() -> None:
    found = describe_run(["oncurve", "train", "my recipe.yaml"], seed=3)
    assert found["oncurve"] == oncurve.__version__
    assert "numpy" in found["packages"]
    assert found["command"] == "oncurve train 'my recipe.yaml'"
    assert found["hardware"]["cpu_cores"] >= 1
    assert found["started"].endswith("+00:00")
    assert found["seed"] == 3
    json.dumps(found, allow_nan=False)


def test_observing_imports_neither_torch_nor_matplotlib() -> None:
    modules = ("manifest", "measure", "metrics", "progress", "record", "summary")
    code = "".join(f"import oncurve.observe.{name}\n" for name in modules)
    code += "import sys\nprint([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
