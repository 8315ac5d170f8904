"""Do the documents say what the code does?"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from typing import Any

from offenders import assert_none, at, line_of

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.recipe.files import shipped_recipes
from oncurve.recipe.load import load_config

ROOT = Path(__file__).resolve().parents[2]
NAMES = (module.name for module in pkgutil.walk_packages(oncurve.__path__, "oncurve."))
MODULES = [name for name in NAMES if "inside" not in name]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_generated_page_is_out_of_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.stale() == [], "run `make docs`"


class Listing(doctest.DocTestRunner):
    """Runs examples and keeps what is wrong with them."""

    def __init__(self) -> None:
        super().__init__(verbose=False)
        self.wrong: list[str] = []

    def report_failure(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        self.wrong.append(f"{self.where(test, example)} expected {example.want!r}, got {got!r}")

    def report_unexpected_exception(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, error: Any
    ) -> None:
        self.wrong.append(f"{self.where(test, example)} raised {error[1]!r}")

    @staticmethod
    def where(test: doctest.DocTest, example: doctest.Example) -> str:
        return f"{at(Path(str(test.filename)), (test.lineno or 0) + example.lineno + 1)} {example.source.strip()!r}"


def test_examples_in_docstrings_are_right() -> None:
    runner = Listing()
    for name in MODULES:
        for examples in doctest.DocTestFinder().find(importlib.import_module(name), name):
            runner.run(examples)
    assert runner.tries > 50
    assert_none(runner.wrong)


def test_every_recipe_loads_and_says_what_it_is_for() -> None:
    recipes = list(shipped_recipes().values())
    assert len(recipes) > 20
    wrong = [f"{at(path)} does not begin with what it is for" for path in recipes if not begins_with_a_line(path)]
    for path in recipes:
        try:
            load_config(path)
        except ConfigError as error:
            wrong.append(f"{at(path)} does not load: {error}")
    assert_none(wrong)


def begins_with_a_line(path: Path) -> bool:
    return path.read_text(encoding="utf-8").startswith("# ")


def test_links_inside_the_project_lead_somewhere() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    links = [
        (page, line_of(text, link.start()), link[1])
        for page, text in texts.items()
        for link in re.finditer(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    ]
    assert len(links) > 100
    assert_none(
        f"{at(page, line)} links to {target}" for page, line, target in links if not (page.parent / target).exists()
    )


def test_the_readme_begins_with_one_command_that_shows_it_and_one_that_tests_it() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert blocks[:2] == ["make demo\n", "make test\n"]


def test_the_first_picture_of_the_readme_is_that_of_the_run_in_its_text() -> None:
    """``python benchmarks/bench.py pictures`` writes the command of the run into the picture."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [picture] = re.findall(r"\]\((docs/pictures/[^)]+)\)", text)[:1]
    image = (ROOT / picture).read_bytes()
    start = image.index(b"tEXtcommand\0")
    told = image[start + 12 : start + 4 + int.from_bytes(image[start - 4 : start])].decode()
    assert told in " ".join(text.replace("\\\n", " ").split())
    assert f"run finished: runs/{told.partition('run.name=')[2].split()[0]}\n" in text
