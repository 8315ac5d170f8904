"""Do workflows, containers and the citation say what the project does, in a form that their readers accept?"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from oncurve.cli.serve import serve
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}")


def steps(workflow: Path) -> list[dict[str, object]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def tool(name: str) -> str:
    """A program of this environment or of the machine; the test is skipped where it is not installed."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: it comes with the extra dev")
    return found


def accepts(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_runs_what_reads_the_code_and_what_decides_here_and_nothing_else() -> None:
    commands = [step["run"] for step in steps(ROOT / ".github" / "workflows" / "ci.yml") if "run" in step]
    assert commands == ["make check", ".ci/run"]


def test_the_release_runs_the_tests_before_it_builds() -> None:
    commands = [str(step["run"]) for step in steps(ROOT / ".github" / "workflows" / "release.yml") if "run" in step]
    assert commands.index(".ci/run") < next(place for place, word in enumerate(commands) if "-m build" in word)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read_and_use_actions_of_one_commit(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    used = [str(step["uses"]) for step in steps(workflow) if "uses" in step]
    assert [name for name in used if not PINNED.fullmatch(name)] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "containers/README.md"])
def test_links_of_pages_outside_the_documents_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def test_workflows_fit_their_schema() -> None:
    command = tool("check-jsonschema")
    accepts(command, "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))


def test_the_citation_fits_its_schema() -> None:
    accepts(tool("check-jsonschema"), "--builtin-schema", "vendor.citation-file-format", "CITATION.cff")


def instructions(path: Path) -> list[tuple[str, str]]:
    """Keyword and rest of every instruction, continued lines joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_container_has_pinned_bases_constraints_a_sandbox_and_no_root(path: Path) -> None:
    found = instructions(path)
    bases = [rest.split(" AS ")[0] for word, rest in found if word == "FROM"]
    assert all(re.fullmatch(r"[\w./-]+:\d[\w.-]+", base) for base in bases), bases
    last = max(place for place, (word, _) in enumerate(found) if word == "FROM")
    final = found[last:]
    assert [rest for word, rest in final if word == "USER"] == ["1000"]
    installs = [rest for word, rest in final if word == "RUN"]
    assert any("bubblewrap" in rest for rest in installs)
    pips = [part for rest in installs for part in rest.split("&&") if "pip install" in part]
    assert pips
    assert all("--constraint" in part for part in pips)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_a_container_copies_is_there_and_sent_to_the_builder(path: Path) -> None:
    ignored = path.with_name(path.name + ".dockerignore").read_text(encoding="utf-8").splitlines()
    for word, rest in instructions(path):
        if word == "COPY" and not rest.startswith("--from"):
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignored


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    accepts(tool("hadolint"), str(path))


def test_what_installs_oncurve_takes_it_from_a_checkout_while_no_registry_has_it() -> None:
    told = ("*.md", "docs/*.md", "docs/decisions/*.md", "containers/*", "notebooks/*.ipynb", "oncurve/recipes/**/*.md")
    named = re.compile(r"pip install\b(?:(?!&&|#).)*?(?<![\w/.-])['\"]?oncurve(?:\[|['\"\s`]|$)", re.MULTILINE)
    assert named.search("pip install -U 'oncurve[servers]'")
    files = [path for pattern in told for path in ROOT.glob(pattern) if path.is_file()]
    assert not [str(path) for path in files if named.search(path.read_text(encoding="utf-8"))]


def test_spot_machines_serve_the_model_of_their_recipe() -> None:
    path = ROOT / "containers" / "spot_samplers.sky.yaml"
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    told = re.findall(r"rollouts\.\S+=\S+", path.read_text(encoding="utf-8"))
    assert len(told) == 2
    config = load_config(find_recipe("spot_32b"), told)
    assert task["envs"]["MODEL"] == config.model
    assert config.rollouts.registry in task["run"]
    assert config.rollouts.registry.startswith(next(iter(task["file_mounts"])))
    assert set(re.findall(r" --([a-z-]+)", task["run"])) <= set(inspect.signature(serve).parameters)
    subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, check=True)
