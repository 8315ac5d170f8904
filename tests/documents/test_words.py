"""Is what a user reads in the words of the field? The glossary's banned words are held out of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer
from offenders import assert_none, at, line_of

from oncurve.cli.app import app
from oncurve.doctor import grading, policy_health, rollouts, throughput
from oncurve.recipe.schema import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "oncurve" / "recipes").rglob("*.md")),
]
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|<[^>]+>", re.DOTALL)
BANNED = {
    r"gold (?:answer|completion)s?": "reference answer",
    r"(?:go|goes|going|went) on\b": "continue, resume",
    r"half[- ]width": "16-bit",
    r"(?<!standard )(?<!std )deviations?\b": "standard deviation",
    r"shares? of (?:the|a|all|its|their)\b": "fraction of",
    r"taken away": "preempted",
    r"told to (?:go|stop)": "terminated",
    r"learnt": "learned",
    r"by heart": "memorized",
    r"held against": "compared with",
    r"set-ups?\b": "setup",
    r"(?<!Face )hub names?\b": "Hugging Face Hub name",
    r"(?:of|on|from|to) the hub\b": "on the Hugging Face Hub",
    r"(?:of|in) peace\b": "say what does not happen",
    r"unless said": "by default",
    r"mended": "fixed",
    r"pays? (?:for|nothing|less|more|full)\b": "earns reward",
    r"(?:is|are|was|be) paid\b": "is rewarded",
    r"(?:was|were) begun\b": "exists",
    r"stands? (?:in|at|on|beside|behind|before|below|above|there)\b": "is",
    r"reckon(?:s|ed)?": "estimate",
    r"[Ww]hom is\b": "who is",
}
"""What is not written, as an expression, and what is written in its place."""


def prose(text: str) -> str:
    """The text with code, links and markers blanked out, at the same places."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group(0)), text)


def banned(text: str) -> Iterator[tuple[int, str]]:
    """Where a banned word is, and what to write instead."""
    plain = prose(text)
    for words, instead in BANNED.items():
        for found in re.finditer(rf"(?<![\w-]){words}", plain, re.IGNORECASE):
            yield found.start(), f"{found.group(0)!r}: write {instead}"


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """Every help text of a command and of those below it."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", "") or ""
    for below in getattr(command, "commands", {}).values():
        yield from helps(below, f"{name} {below.name}")


def test_pages_are_written_in_the_words_of_the_field() -> None:
    assert_none(
        f"{at(page, line_of(text, place))} {said}"
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for place, said in banned(text)
    )


def test_help_is_written_in_the_words_of_the_field() -> None:
    found = dict(helps(typer.main.get_command(app), "oncurve"))
    assert len(found) > 100
    assert_none(f"{name}: {said}" for name, text in found.items() for _, said in banned(text))


def test_descriptions_of_keys_are_written_in_the_words_of_the_field() -> None:
    text = "\n".join(described(Config.model_json_schema()))
    assert text.count("\n") > 100
    assert_none(said for _, said in banned(text))


def described(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("description"), str):
            yield node["description"]
        for below in node.values():
            yield from described(below)
    elif isinstance(node, list):
        for below in node:
            yield from described(below)


def test_findings_are_written_in_the_words_of_the_field() -> None:
    for module in (grading, policy_health, rollouts, throughput):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        said = re.findall(r'(?:what|do)="([^"]+)"', source)
        assert said
        assert_none(f"{module.__name__}: {word}" for text in said for _, word in banned(text))


def test_a_banned_word_is_found() -> None:
    assert [said for _, said in banned("It goes on, as `go on` says, with the gold answers of the hub.")] == [
        "'gold answers': write reference answer",
        "'goes on': write continue, resume",
        "'of the hub': write on the Hugging Face Hub",
    ]
