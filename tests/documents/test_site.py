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
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Links]:
    """Every page of the site by its path."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'oncurve[docs]'")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert (place / "search" / "search_index.json").is_file()
    return {str(page.relative_to(place)): Links(page.read_text(encoding="utf-8")) for page in place.rglob("*.html")}


def test_every_link_inside_the_site_leads_to_a_page_and_an_anchor(site: dict[str, Links]) -> None:
    assert {"index.html", "tour.html", "repository/CHANGELOG.html"} <= set(site)
    for name, page in site.items():
        for link in page.leads if name != "404.html" else ():
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            path = os.path.normpath(os.path.join(os.path.dirname(name), unquote(target.path))) if target.path else name
            path = "index.html" if path == "." else path
            assert path in site, f"{name} links to {link}"
            assert target.fragment in {"", "__skip", *site[path].anchors}, f"{name} links to {link}"


def test_nothing_is_fetched_from_elsewhere(site: dict[str, Links]) -> None:
    for name, page in site.items():
        assert [link for link in page.fetches if urlsplit(link).netloc] == [], name


def test_links_to_the_outside_are_well_formed(site: dict[str, Links]) -> None:
    for name, page in site.items():
        for link in page.leads:
            target = urlsplit(link)
            if target.scheme in ("http", "https") and target.hostname not in ("localhost", "127.0.0.1"):
                assert re.fullmatch(r"(?:[\w-]+\.)+[a-z]{2,}", target.hostname or ""), f"{name} links to {link}"
            else:
                assert target.scheme in ("", "http", "https", "mailto"), f"{name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_that_names_a_function_leads_to_a_file_that_has_it(page: Path) -> None:
    for name, target in re.findall(r"\[`([A-Za-z_]\w*)(?:\(\))?`\]\(([^)#:]+\.py)\)", page.read_text(encoding="utf-8")):
        code = (page.parent / target).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:async )?(?:def|class) {name}\b", code, re.MULTILINE), f"no {name} in {target}"
