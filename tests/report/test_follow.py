"""Does a reader of a growing file get every row once, and notice when the past was rewritten?"""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.errors import ConfigError, DataError
from oncurve.report.follow import find_runs, read_news


def lines(*steps: int, value: float = 0.5) -> str:
    return "".join(f'{{"step": {step}, "reward/mean": {value}}}\n' for step in steps)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(1, 2))
    is_reset, first = read_news(tmp_path, [])
    assert is_reset
    assert [row["step"] for row in first] == [1, 2]
    assert read_news(tmp_path, first) == (False, [])
    file.write_text(lines(1, 2, 3))
    is_reset, second = read_news(tmp_path, first)
    assert not is_reset
    assert [row["step"] for row in second] == [3]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(1) + '{"step": 2, "rew')
    _, first = read_news(tmp_path, [])
    assert [row["step"] for row in first] == [1]
    file.write_text(lines(1, 2))
    assert [row["step"] for row in read_news(tmp_path, first)[1]] == [2]


@pytest.mark.parametrize("again", [lines(1), lines(1, 2, value=0.9), lines(1, 2, 3, 4, 5, value=0.9), ""])
def test_a_file_that_was_rewritten_is_read_anew(tmp_path: Path, again: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(1, 2, 3))
    _, sent = read_news(tmp_path, [])
    file.write_text(again)
    is_reset, rows = read_news(tmp_path, sent)
    assert is_reset
    assert len(rows) == again.count("\n")


def test_numbers_that_are_not_finite_are_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a/b": null, "a/c": NaN}\n')
    assert read_news(tmp_path, [])[1] == [{"step": 1, "a/b": None, "a/c": None}]


@pytest.mark.parametrize("broken", ["nothing\n", "[1]\n", '{"reward/mean": 1}\n'])
def test_a_broken_line_is_told(tmp_path: Path, broken: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines(1) + broken)
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        read_news(tmp_path, [])


def test_runs_are_found_by_name_and_inside_folders(tmp_path: Path) -> None:
    for name in ("here/one", "there/one", "there/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "there" / "notes").mkdir()
    found = find_runs([tmp_path / "here" / "one", tmp_path / "there"])
    assert set(found) == {"one", "one-2", "two"}
    assert found["one"] == tmp_path / "here" / "one"
    with pytest.raises(ConfigError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])
