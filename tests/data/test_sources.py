"""Are files, folders and hub data sets read row by row, with errors that name the file and the line?"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from oncurve.core.errors import ConfigError, DataError
from oncurve.data import sources
from oncurve.data.datasets import load_rows
from oncurve.data.sources import read_json_lines, read_stored


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def numbered_rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(count)]


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the files of the ``datasets`` library inside the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("content", "location", "problem"),
    [
        (b'{"question": "a", "answer": "b"}\n{"question": \n', "line 2", "not JSON"),
        (b'\n\n{"question": "a" "answer": "b"}\n', "line 3", "column 18"),
        (b'{"question": "a", "answer": "b"}\n["a"]\n', "line 2", "a list, not an object"),
        (b"5\n", "line 1", "the value 5, not an object"),
        (b'{"question": "\xff"}\n', "line 1", "not UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1", "JSON"),
        (b'[{"question": "a", "answer": "b"},\n {"question": }]', "line 2", "begins as one JSON array"),
        (b"", "a.jsonl", "empty"),
        (b"\n \n", "a.jsonl", "empty"),
        (b'{"question": "a", "answer": null}\n', "line 1", "'answer' is None"),
        (b'{"question": " ", "answer": "b"}\n', "line 1", "'question' is ' '"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: bytes, location: str, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_rows("jsonl", path=path)
    message = str(caught.value)
    assert str(path) in message
    assert location in message
    assert problem in message
    assert "\n" not in message


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "b"}\r\n')
    assert read_json_lines(path) == [(f"{path}, line 1", {"question": "a", "answer": "b"})]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf \n"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_large", [False, True])
def test_one_array_of_rows_is_read_as_rows(
    tmp_path: Path, mark: bytes, indent: int | None, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{k}?", "answer": str(k)} for k in range(20)]
    path = tmp_path / "a.json"
    path.write_bytes(mark + json.dumps(rows, indent=indent).encode())
    monkeypatch.setattr("oncurve.data.sources.MANY_ROWS", 5 if is_large else 1_000_000)
    assert list(load_rows("jsonl", path=path)) == rows
    path.write_bytes(mark + json.dumps([*rows, 5], indent=indent).encode())
    with pytest.raises(DataError, match=r"a\.json, row 21: the value 5, not an object"):
        load_rows("jsonl", path=path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read .* Correct data\.path"):
        load_rows("jsonl", path=tmp_path / "nowhere.jsonl")


def test_a_type_without_a_path_says_that_it_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"data\.path is missing: 'jsonl'"):
        load_rows("jsonl")


def test_a_folder_holds_one_file_per_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"question": "a", "answer": "1"})
    write_lines(tmp_path / "mine-test.jsonl", {"question": "b", "answer": "2"})
    assert load_rows("jsonl", path=tmp_path)[0]["question"] == "a"
    assert load_rows("jsonl", path=tmp_path, split="test")[0]["question"] == "b"
    with pytest.raises(DataError, match=r"no dev\.jsonl, it has 'mine-test\.jsonl', 'train\.jsonl'"):
        load_rows("jsonl", path=tmp_path, split="dev")
    with pytest.raises(DataError, match=r"no t\*\.jsonl"):
        load_rows("jsonl", path=tmp_path, split="t*")
    write_lines(tmp_path / "yours_test.jsonl", {"question": "c", "answer": "3"})
    with pytest.raises(DataError, match="several files could be the split 'test'"):
        load_rows("jsonl", path=tmp_path, split="test")


@pytest.mark.usefixtures("_own_cache")
def test_folders_that_the_datasets_library_saved_are_read(tmp_path: Path) -> None:
    import datasets

    rows = numbered_rows(5)
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "dev": table.select(range(2))}).save_to_disk(str(tmp_path / "two"))
    assert load_rows("huggingface", path=tmp_path / "one") == rows
    assert load_rows("huggingface", path=tmp_path / "two", split="dev") == rows[:2]
    with pytest.raises(DataError, match=r"no split 'tran'\. Did you mean 'train'\? It has 'train', 'dev'"):
        load_rows("huggingface", path=tmp_path / "two", split="tran")


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_single_files_are_read_by_their_suffix(tmp_path: Path, suffix: str) -> None:
    import datasets

    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(3)]
    path = tmp_path / f"rows.{suffix}"
    getattr(datasets.Dataset.from_list(rows), f"to_{suffix}")(str(path))
    assert load_rows("huggingface", path=path) == rows


@pytest.mark.usefixtures("_own_cache")
def test_a_folder_of_parquet_files_has_splits(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "set"
    folder.mkdir()
    for split, count in (("train", 4), ("test", 2)):
        datasets.Dataset.from_list(numbered_rows(count)).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    assert len(load_rows("huggingface", path=folder, split="test")) == 2
    with pytest.raises(DataError, match="the split 'dev' cannot be loaded"):
        load_rows("huggingface", path=folder, split="dev")


@pytest.mark.usefixtures("_own_cache")
def test_a_named_data_set_can_lie_in_parquet_files(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "gsm.parquet"
    datasets.Dataset.from_list([{"question": "q", "answer": "so\n#### 1,200"}]).to_parquet(str(path))
    assert load_rows("gsm8k", path=path)[0]["answer"] == "1200"


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.xlsx"
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"rows\.xlsx: not a file of a known kind"):
        load_rows("huggingface", path=path)


@pytest.mark.parametrize(
    ("type", "name", "subset"), [("gsm8k", "openai/gsm8k", "main"), ("math", "nlile/hendrycks-MATH-benchmark", None)]
)
def test_named_data_sets_are_fetched_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, type: str, name: str, subset: str | None
) -> None:
    import datasets

    requests: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        requests.append((arguments, options))
        return datasets.Dataset.from_list([{"question": "q", "problem": "q", "answer": "s\n#### 5"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read_stored(type, None, split="test", revision="abc")
    load_rows(type, subset="socratic")
    assert requests == [
        ((name, subset), {"split": "test", "revision": "abc"}),
        ((name, "socratic"), {"split": "train", "revision": None}),
    ]


def test_a_hub_that_cannot_be_reached_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub\n(offline)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"nobody/nothing: the split 'train' cannot be loaded: it is not on this machine.* network"
    ):
        load_rows("huggingface", path="nobody/nothing")


def test_an_empty_hub_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([]))
    with pytest.raises(DataError, match="the split 'train' has no rows"):
        load_rows("huggingface", path="nobody/nothing")


def test_reading_json_lines_does_not_import_the_datasets_library() -> None:
    assert "datasets" not in vars(sources)


def test_csv_is_read_with_its_first_line_as_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        '﻿question,answer,level\r\n"How much is 2, 3 and 4 added?",9,1\r\n\r\n"Two\nlines?","x ""y""",2\r\n'.encode()
    )
    rows = load_rows("csv", path=path)
    assert [row["question"] for row in rows] == ["How much is 2, 3 and 4 added?", "Two\nlines?"]
    assert [row["answer"] for row in rows] == ["9", 'x "y"']
    assert rows[1]["level"] == "2"
    path.write_text('question;answer\n"1; then, 2?";3,5\n')
    assert [(row["question"], row["answer"]) for row in load_rows("csv", path=path)] == [("1; then, 2?", "3,5")]
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("problem\tlabel\n1+1?\t2\n")
    assert load_rows("jsonl", path=tabs, columns={"question": "problem", "answer": "label"})[0]["answer"] == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\n1, 2 and 3?,6\n", r"line 2: 3 values for 2 columns.*quotation marks"),
        ("question,answer\n", "there are no rows"),
        ("", "there are no rows"),
        ("question|answer\n1+1?|2\n", r"every line has '\|' equally often"),
        ("1+1,2\n1+2,3\n", "must name the columns, and looks like a row: it has '2'"),
        (
            "A fine film,good\nA dull film,bad\nA long film,good\n",
            "If that line is a row, write a line of names above it",
        ),
        ("Who was it?,Ada\nWhat was it?,An engine\n", "it has 'Who was it\\?'. Write a line with 2 names"),
        ("0,1\nWho?,Ada\nWhat?,An engine\n", "there is no column 'answer'.*If that line is a row"),
        ("question,answer\n1+1?,2\nquestion,answer\n", "line 3: names the columns once more"),
        ("problem,label\n1+1?,2\n", r"there is no column 'answer'"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_said_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows("csv", path=path)


@pytest.mark.timeout(60)
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text('{"question": "1 + 1?", "answer": "2"}\n'), daemon=True).start()
    assert [row["answer"] for _, row in read_json_lines(pipe)] == ["2"]
