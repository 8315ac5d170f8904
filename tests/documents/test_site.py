"""Is the site whole: built without a warning, every link and anchor of it right, nothing fetched from elsewhere?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import headless
from offenders import assert_none, at, line_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
FETCHED = ("src", "srcset", "poster", "data")


class Links(HTMLParser):
    """Where a page leads, what it fetches, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: set[str] = set()
        self.fetches: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif value and (name in FETCHED or (tag == "link" and name == "href")):
                self.fetches.add(value)
            elif value and tag == "a" and name == "href":
                self.leads.add(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'oncurve[docs]'")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert (place / "search" / "search_index.json").is_file()
    return place


@pytest.fixture(scope="module")
def site(built: Path) -> dict[str, Links]:
    """Every page of the site by its path."""
    return {str(page.relative_to(built)): Links(page.read_text(encoding="utf-8")) for page in built.rglob("*.html")}


@pytest.mark.nightly
def test_every_link_inside_the_site_leads_to_a_page_and_an_anchor(site: dict[str, Links]) -> None:
    assert {"index.html", "contributing.html", "grpo.html", "repository/CHANGELOG.html"} <= set(site)
    links = [(name, link) for name, page in site.items() if name != "404.html" for link in sorted(page.leads)]
    assert len(links) > 1000
    assert_none(f"{name} links to {link}" for name, link in links if not leads_somewhere(site, name, link))


def leads_somewhere(site: dict[str, Links], name: str, link: str) -> bool:
    """Whether a link of a page is one to the outside, or to a page and an anchor of the site."""
    target = urlsplit(link)
    if target.scheme or target.netloc:
        return True
    path = os.path.normpath(os.path.join(os.path.dirname(name), unquote(target.path))) if target.path else name
    path = "index.html" if path == "." else path
    return path in site and target.fragment in {"", "__skip", *site[path].anchors}


@pytest.mark.nightly
def test_nothing_is_fetched_from_elsewhere(site: dict[str, Links]) -> None:
    fetched = [(name, link) for name, page in site.items() for link in sorted(page.fetches)]
    assert_none(f"{name} fetches {link}" for name, link in fetched if urlsplit(link).netloc)


@pytest.mark.nightly
def test_pages_opened_from_disk_can_be_searched(built: Path) -> None:
    with headless() as browser:
        page = browser.new_context(offline=True).new_page()
        page.set_default_timeout(60_000)
        page.goto((built / "repository" / "CHANGELOG.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("clip_high")
        page.wait_for_selector(".md-search-result__link")
        assert page.get_attribute(".md-search-result__link", "href").startswith("file:")


@pytest.mark.nightly
def test_links_to_the_outside_are_well_formed(site: dict[str, Links]) -> None:
    links = [(name, link) for name, page in site.items() for link in sorted(page.leads)]
    assert_none(f"{name} links to {link}" for name, link in links if not is_well_formed(link))


def is_well_formed(link: str) -> bool:
    target = urlsplit(link)
    if target.scheme in ("http", "https") and target.hostname not in ("localhost", "127.0.0.1"):
        return re.fullmatch(r"(?:[\w-]+\.)+[a-z]{2,}", target.hostname or "") is not None
    return target.scheme in ("", "http", "https", "mailto")


def test_a_link_that_names_a_function_leads_to_a_file_that_has_it() -> None:
    wrong: list[str] = []
    links = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.finditer(r"\[`([A-Za-z_]\w*)(?:\(\))?`\]\(([^)#:]+\.py)\)", text):
            links += 1
            name, target = link.groups()
            code = page.parent / target
            if not code.is_file() or not defines(code, name):
                wrong.append(f"{at(page, line_of(text, link.start()))} no {name} in {target}")
    assert links > 10
    assert_none(wrong)


def defines(file: Path, name: str) -> bool:
    code = file.read_text(encoding="utf-8")
    return re.search(rf"^ *(?:async )?(?:def|class) {name}\b", code, re.MULTILINE) is not None
