"""Do the documents say what the code does?"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import oncurve
from oncurve.config.load import load_config
from oncurve.recipes.find import shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
MODULES = [module.name for module in pkgutil.walk_packages(oncurve.__path__, "oncurve.")]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_generated_page_is_out_of_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.stale() == [], "run `make docs`"


@pytest.mark.parametrize("name", [name for name in MODULES if "inside" not in name])
def test_examples_in_docstrings_are_right(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("path", shipped_recipes().values(), ids=lambda path: path.parent.name)
def test_every_recipe_loads_and_says_what_it_is_for(path: Path) -> None:
    load_config(path)
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
