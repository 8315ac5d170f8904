"""Do all places that name the version name the same one, and does the changelog keep its rule?"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import yaml

import oncurve

ROOT = Path(__file__).resolve().parents[2]
HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?(?: \[YANKED\])?$")


def headings() -> list[tuple[str, str | None]]:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    found = [HEADING.match(line) for line in lines if line.startswith("## ")]
    assert all(found), "a heading of the changelog is not of the form '## [1.2.3] - 2026-01-31'"
    return [(match.group(1), match.group(2)) for match in found if match]


def numbers(version: str) -> tuple[int, ...]:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version), version
    return tuple(int(part) for part in version.split("."))


def test_the_version_is_a_semantic_one_and_stands_in_one_place() -> None:
    numbers(oncurve.__version__)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert 'version = { attr = "oncurve.__version__" }' in project


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == oncurve.__version__


def test_the_changelog_begins_with_what_is_unreleased() -> None:
    assert headings()[0] == ("Unreleased", None)


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    """Before the first release everything is unreleased."""
    released = headings()[1:]
    if released:
        assert released[0][0] == oncurve.__version__
    versions = [numbers(version) for version, _ in released]
    assert versions == sorted(set(versions), reverse=True)
    dates = [date.fromisoformat(day or "") for _, day in released]
    assert dates == sorted(dates, reverse=True)
