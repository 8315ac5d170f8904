"""Does the glossary explain every key once, and nothing else?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from offenders import assert_none, at, line_of
from tables.metrics import glossary_markdown

from oncurve.observe import metrics
from oncurve.observe.metrics import GLOSSARY, Metric, explain, unknown_keys


def test_no_key_is_listed_twice() -> None:
    keys = [metric.key for metric in GLOSSARY]
    assert len(keys) == len(set(keys))


def flaws(metric: Metric) -> Iterator[str]:
    """What an entry lacks, and what is wrong with its key."""
    if not re.fullmatch(r"[a-z]+/(held_out/|ended/)?([a-z_]+|<[a-z]+>)(_gpu<number>_[a-z]+)?(_gib)?", metric.key):
        yield "its key is not well formed"
    if not metric.unit:
        yield "no unit"
    if len(metric.meaning) <= 10:
        yield "no meaning"
    if not metric.healthy:
        yield "not said what is healthy"
    if metric.key.endswith("_fraction") and metric.unit != "fraction":
        yield f"a fraction in {metric.unit}"


def test_every_entry_is_complete_and_its_key_well_formed() -> None:
    source = Path(metrics.__file__)
    text = source.read_text(encoding="utf-8")
    assert_none(
        f"{at(source, line_of(text, text.find(repr(metric.key)[1:-1])))} {metric.key}: {flaw}"
        for metric in GLOSSARY
        for flaw in flaws(metric)
    )


@pytest.mark.parametrize(
    ("ending", "unit"), [("_tokens", "tokens"), ("_seconds", "seconds"), ("_gib", "GiB"), ("_fraction", "fraction")]
)
def test_the_ending_of_a_key_is_its_unit(ending: str, unit: str) -> None:
    assert {metric.unit for metric in GLOSSARY if metric.key.endswith(ending)} == {unit}


def test_an_exact_entry_is_found_before_the_pattern_that_also_matches() -> None:
    for metric in GLOSSARY:
        if not metric.is_pattern:
            assert explain(metric.key) is metric


def test_a_part_of_the_reward_is_explained_by_its_pattern() -> None:
    part = explain("reward/tag_format.think")
    assert part is not None
    assert part.key == "reward/<part>"


def test_keys_that_nobody_explained_are_named_in_order() -> None:
    assert unknown_keys(["step", "reward/mean", "policy/magic", "loss"]) == ["loss", "policy/magic"]


def test_a_pattern_does_not_reach_across_a_slash() -> None:
    assert explain("reward/a/b") is None


def test_the_document_has_a_row_for_every_key() -> None:
    text = glossary_markdown()
    for metric in GLOSSARY:
        assert f"| `{metric.key}` |" in text
    assert all(line.count(" | ") == 2 for line in text.splitlines() if line.startswith("| `"))
