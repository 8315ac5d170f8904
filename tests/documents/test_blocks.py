"""Does every code block of the documents run, or at least name commands and keys that exist?"""

from __future__ import annotations

import doctest
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from lanes import gate

if TYPE_CHECKING:
    from nursery import Nursery

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
Run = Callable[[Path, Path], "subprocess.CompletedProcess[str]"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


blocks = load("blocks")


@pytest.fixture(scope="module")
def run_page(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a page in a folder, with `oncurve` and `python` answered by forks."""
    place = tmp_path_factory.mktemp("forked")
    nursery.stand_in(place / "oncurve", "-m", "oncurve")
    nursery.stand_in(place / "python")
    environment = os.environ | {
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "COLUMNS": "120",
    }  # fmt: skip

    def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [str(place / "python"), str(ROOT / "docs" / "blocks.py"), str(page), str(folder)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    return run


NIGHTLY = {"episodes", "python", "replay", "sft"}
"""Pages whose blocks train what tests of the gate train too: episodes, programs, history, stages and teachers."""
IN_THE_GATE = [page for page in PAGES if page.stem not in NIGHTLY]


@pytest.mark.proves("F20", "F79", "F111", "F136", "F150", "F151", "F152", "F153", "F154", "F157")
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", gate(PAGES, *IN_THE_GATE), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_does_what_it_says(page: Path, run_page: Run, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```bash\nfalse\n```", "line 1: the block ends with 1"),
        ("```python\na = 1\n```\n\n```python\nassert a == 2\n```", "line 5: the block fails"),
        ("```\noncurve demo\n```", "has no language"),
        ("<!-- not run: slow -->\n```bash\noncurve trian x\n```", "there is no such command"),
        ("<!-- not run: slow -->\n```bash\noncurve train word_problems --processs 2\n```", "--processs"),
        ("<!-- not run: slow -->\n```bash\ntorchrun -m oncurve train mine.yaml run.step=2\n```", "no recipe has a key"),
        ("<!-- not run: slow -->\n```bash\noncurve train gsm8k algorithm.loss=none\n```", "algorithm"),
        ("<!-- not run: slow -->\n```bash\nmake demos\n```", "no target 'demos'"),
        ("```yaml\nrun: {step: 2}\n```", "Did you mean 'run.steps'?"),
        ('```yaml title="mine.yaml"\na: 1\n```\n```bash\ncat mine.yaml >&2; false\n```', "a: 1"),
        ("```python\nprint('2 of 3')\n```\n```text\n2 of 4\n```", "the block prints\n2 of 3"),
        ("```python\nprint(0.531)\n```\n```text\n0.566\n```", "the block prints\n0.531"),
    ],
)
def test_a_block_that_is_wrong_is_found(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text + "\n")
    with pytest.raises(blocks.BlockError) as found:
        blocks.Page(tmp_path / "page.md", tmp_path).run()
    assert said in str(found.value)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("```bash\necho 1\n```\n```text\n1\n```", None),
        ("```bash\necho 1\n```\n```text\n2\n```", "the page shows\n2"),
        ("```bash\necho 3\n```", "does not run it"),
        ("```bash\nfalse\n```", "does not run it"),
    ],
)
def test_a_block_that_another_page_runs_is_the_one_of_that_page(block: str, said: str | None, tmp_path: Path) -> None:
    other = "```bash\necho 0\necho 1\n```\n```text\n1\n```\n<!-- not run: no -->\n```bash\nfalse\n```\n"
    (tmp_path / "other.md").write_text(other)
    (tmp_path / "page.md").write_text(f"<!-- not run: as in other.md -->\n{block}\n")
    page = blocks.Page(tmp_path / "page.md", tmp_path)
    if said is None:
        page.run()
    else:
        with pytest.raises(blocks.BlockError, match=said):
            page.run()


def test_examples_in_the_machinery_are_right() -> None:
    assert doctest.testmod(blocks).failed == 0


def test_blocks_share_files_and_names_and_outputs_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nopen('made', 'w').write('5')\na = 2\n```\n```bash\ncat made\n```\n"
        "```python\nprint(a, 1.251)\n```\n```text\n3 1.250\n```\nend\n"
    )
    done = [sys.executable, str(ROOT / "docs" / "blocks.py"), str(page), str(tmp_path)]
    subprocess.run([*done, "--write"], check=True, cwd=tmp_path)
    assert page.read_text().endswith("```text\n2 1.251\n```\nend\n")
    subprocess.run(done, check=True, cwd=tmp_path)
