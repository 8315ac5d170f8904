"""Is every feature still where its page says, and is the test that proves it still there?"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from oncurve.cli import app
from oncurve.config.load import load_config, parse_config
from oncurve.doctor.diagnose import check_names
from oncurve.observe.metrics import explain
from oncurve.recipes.find import find_recipe

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = yaml.safe_load((ROOT / "docs" / "features.yaml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for section in SECTIONS for row in section["rows"]]
COUNT = 157
BASE = "{model: embedded, data: {type: word_problems}}"
TOGETHER = (
    ("algorithm.reference=", ["algorithm.kl_coef=0.04"]),
    ("policy.deepspeed=", ["policy.parallel=deepspeed"]),
    ("rollouts.vllm_servers=", ["rollouts.type=servers"]),
    ("rollouts.servers=", ["rollouts.type=servers"]),
)
"""Keys that a recipe takes only beside others."""


def numbered(rows: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=[str(row["number"]) for row in rows])


def places(kind: str) -> list[str]:
    found = (place.partition(" ") for row in ROWS for place in row["where"])
    return sorted({what for name, _, what in found if name == kind})


def test_every_feature_has_its_row_and_every_row_a_place_and_a_test() -> None:
    assert [row["number"] for row in ROWS] == list(range(1, COUNT + 1))
    for row in ROWS:
        assert set(row) <= {"number", "feature", "where", "tests", "note", "is_page"}
        assert row["feature"].strip()
        assert row["where"]
        assert row["tests"]
    kinds = {place.partition(" ")[0] for row in ROWS for place in row["where"]}
    assert kinds <= {"key", "reward", "command", "recipe", "metric", "doctor", "page", "file", "python"}


@numbered(ROWS)
def test_a_row_is_marked_as_a_page_if_a_document_is_all_that_proves_it(row: dict[str, Any]) -> None:
    only_documents = all(test.startswith("documents/") for test in row["tests"])
    assert row.get("is_page", False) == only_documents
    if only_documents:
        assert all(place.split()[0] in ("page", "file") for place in row["where"])


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@numbered(ROWS)
def test_every_test_is_there(row: dict[str, Any]) -> None:
    for test in row["tests"]:
        file, _, name = test.partition("::")
        assert (ROOT / "tests" / file).is_file(), test
        assert name.startswith("test_"), test
        assert name in functions(file), test


@pytest.mark.parametrize("override", places("key"))
def test_every_key_takes_its_value(override: str) -> None:
    with_it = next((words for start, words in TOGETHER if override.startswith(start)), [])
    parse_config(BASE, [override, *(word for word in with_it if not word.startswith(override))])


@pytest.mark.parametrize("words", places("reward"))
def test_every_reward_takes_its_keys(words: str) -> None:
    kind, *pairs = re.split(r" (?=\w+=)", words)
    reward = {"type": kind, **{name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in pairs)}}
    beside = [{"type": "r1_zero"}] if reward.get("held_out") else []
    if "rotate_every_steps" in reward:
        beside = [reward | {"name": "other", "answer_from": "boxed"}]
    parse_config(BASE, [f"rewards={json.dumps([reward, *beside])}"])


@pytest.mark.parametrize("words", places("command"))
def test_every_command_has_its_options(words: str) -> None:
    command: Any = typer.main.get_command(app)
    for word in words.split():
        if word.startswith("--"):
            assert word in {name for parameter in command.params for name in parameter.opts}, words
        else:
            command = command.commands[word]


@pytest.mark.parametrize("name", places("recipe"))
def test_every_recipe_loads(name: str) -> None:
    load_config(find_recipe(name))


@pytest.mark.parametrize("name", places("metric"))
def test_every_metric_is_in_the_glossary(name: str) -> None:
    assert explain(name) is not None


@pytest.mark.parametrize("name", places("doctor"))
def test_every_check_is_one_of_the_doctors(name: str) -> None:
    assert name in check_names()


@pytest.mark.parametrize("name", places("python"))
def test_every_function_can_be_imported(name: str) -> None:
    module, _, function = name.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def anchors(page: Path) -> Iterator[str]:
    """What links to the titles of a page end in."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("name", [*places("page"), *places("file")])
def test_every_page_has_its_section(name: str) -> None:
    path, _, anchor = name.partition("#")
    assert (ROOT / path).is_file()
    assert not anchor or anchor in set(anchors(ROOT / path))


def test_the_notebook_is_python_that_uses_what_is_there() -> None:
    cells = json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sources
    commands = [line for source in sources for line in source.splitlines() if re.match(r"\s*[!%]", line)]
    for source in sources:
        ast.parse("\n".join("pass" if re.match(r"\s*[!%]", line) else line for line in source.splitlines()))
    used = {word for line in commands for word in re.findall(r"\boncurve ([a-z]+)\b", line)}
    assert used <= known
