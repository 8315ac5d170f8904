"""Does a run folder hold what happened, also after a crash, and does it refuse to lose an older run?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.observe.columns import read_columns
from oncurve.observe.record import RunFolder, read_json, read_metrics, read_rollouts, to_json, write_lines
from oncurve.observe.tokens import TokenRecord


def rollouts() -> tuple[list[Group], list[list[Reward]]]:
    prompt = Prompt("2+3?", (1, 2), 12, {"answer": "5"})
    completions = (
        Completion((1, 2), (7, 8), "5 ✓", (-0.1, -0.2), "stop", 3, 0),
        Completion((1, 2), (7,), "…", (-0.1,), "length", 3, 1),
    )
    rewards = [Reward(1.0, {"correct": 1.0}), Reward(None, error="timeout", detail="3 s")]
    return [Group(prompt, completions)], [rewards]


def test_tokens_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    groups, rewards = rollouts()
    with RunFolder(tmp_path) as run:
        run.write_rollouts(1, groups * 2, rewards * 2, tokens=TokenRecord(None, num_groups=1))
        run.write_rollouts(2, groups, rewards)
    first, second = read_rollouts(tmp_path, 1)
    assert first["completions"][0]["logprobs"] == [-0.1, -0.2]
    assert "logprobs" not in second["completions"][0]
    assert "logprobs" not in read_rollouts(tmp_path, 2)[0]["completions"][0]


@pytest.mark.proves("F120")
def test_metrics_come_back_as_they_were_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.write_metrics(1, {"reward/mean": 0.25, "policy/loss": math.nan})
        run.write_metrics(2, {"reward/mean": float(np.float32(0.5)), "policy/gradient_norm": math.inf})
        rows = read_metrics(run.path)  # readable while the run goes on
    assert rows[0]["reward/mean"] == 0.25
    assert math.isnan(rows[0]["policy/loss"])
    assert math.isnan(rows[1]["policy/gradient_norm"])
    assert [row["step"] for row in rows] == [1, 2]


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | st.floats() | st.integers()), max_size=12), st.data()
)
def test_columns_say_what_the_rows_say_whatever_their_order(values: list[dict[str, Any]], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values)))
    written = [{"step": step, **row} for step, row in zip(steps, values, strict=True)]
    with TemporaryDirectory() as folder:
        (Path(folder) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written) + '{"step"')
        rows, found = read_metrics(folder), read_columns(folder)
    assert found.steps == [row["step"] for row in rows]
    for key in "abc":
        is_there = {row["step"]: abs(row[key]) <= 1e100 for row in rows if key in row}
        assert found.broken(key) == [step for step, is_finite in is_there.items() if not is_finite]
        assert found.finite(key) == (
            [step for step, is_finite in is_there.items() if is_finite],
            [float(row[key]) for row in rows if is_there.get(row["step"])],
        )


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.write_metrics(1, {"a/b": math.nan, "a/c": -math.inf})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a/b": None, "a/c": None}


def test_numpy_numbers_become_json_numbers() -> None:
    assert (
        to_json({"a": np.float32(0.5), "b": np.int64(3), "c": (True, None)})
        == '{"a": 0.5, "b": 3.0, "c": [true, null]}'
    )


def test_rows_of_one_step_are_merged_and_sorted(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.write_metrics(2, {"reward/mean": 0.5})
        run.write_metrics(0, {"evaluation/correct_fraction": 0.1})
        run.write_metrics(2, {"evaluation/correct_fraction": 0.4})
    assert read_metrics(tmp_path) == [
        {"step": 0, "evaluation/correct_fraction": 0.1},
        {"step": 2, "reward/mean": 0.5, "evaluation/correct_fraction": 0.4},
    ]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a/b": 1.0}\n{"step": 2, "a/')
    assert read_metrics(path) == [{"step": 1, "a/b": 1.0}]


@pytest.mark.parametrize("broken", ['{"step": 2, "a/', "[1]", "not json"])
def test_a_broken_line_elsewhere_is_an_error_with_its_number(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 2 is not a JSON object"):
        read_metrics(path)


def test_a_broken_last_line_that_was_finished_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)


def test_a_missing_file_and_a_row_without_step_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text('{"reward/mean": 1.0}\n')
    with pytest.raises(DataError, match="row 1 has no step"):
        read_metrics(tmp_path)


@pytest.mark.proves("D41")
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(tmp_path / "run")


def test_an_empty_folder_and_one_with_foreign_files_are_fine(tmp_path: Path) -> None:
    (tmp_path / "nohup.out").write_text("mine")
    RunFolder(tmp_path).close()
    assert (tmp_path / "nohup.out").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        RunFolder(tmp_path / "run" / "below")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with (
        RunFolder(tmp_path) as run,
        pytest.raises(ConfigError, match="another process is writing this run: process"),
    ):
        RunFolder(run.path, resume_step=0)


@pytest.mark.proves("F125")
def test_resuming_keeps_what_was_done_and_drops_what_is_done_again(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in (1, 2, 3):
            run.write_metrics(step, {"reward/mean": float(step)})
            run.write_rollouts(step, *rollouts())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # killed while writing
    with RunFolder(tmp_path, resume_step=2) as run:
        run.write_metrics(3, {"reward/mean": 30.0})
    assert [row["reward/mean"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_resuming_where_no_run_is_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunFolder(tmp_path / "typo", resume_step=1)
    assert not (tmp_path / "typo").exists()


@pytest.mark.proves("F137")
def test_rollouts_keep_texts_rewards_advantages_and_errors(tmp_path: Path) -> None:
    groups, rewards = rollouts()
    with RunFolder(tmp_path) as run:
        path = run.write_rollouts(120, groups, rewards, [[0.5, -0.5]])
    assert path.name == "step_000120.jsonl"
    (row,) = read_rollouts(tmp_path, 120)
    assert (row["step"], row["index"], row["prompt"], row["answer"]) == (120, 12, "2+3?", "5")
    first, second = row["completions"]
    assert first["text"] == "5 ✓"
    assert (first["num_tokens"], first["finish_reason"], first["policy_version"]) == (2, "stop", 3)
    assert (first["reward"], first["parts"], first["advantage"]) == (1.0, {"correct": 1.0}, 0.5)
    assert (second["reward"], second["error"], second["detail"]) == (None, "timeout", "3 s")


def test_rewards_of_another_shape_leave_no_file(tmp_path: Path) -> None:
    groups, rewards = rollouts()
    with RunFolder(tmp_path) as run:
        with pytest.raises(ValueError, match="zip"):
            run.write_rollouts(1, groups, [rewards[0][:1]])
        assert list((tmp_path / "rollouts").iterdir()) == []


def test_the_start_of_a_run_is_recorded(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.write_start(
            "model: tiny  # mine\n", {"model": "tiny", "steps": 3, "nested": {"a": [1, "ü"]}}, {"oncurve": "1"}
        )
        run.log("first\nsecond")
    assert (tmp_path / "recipe.yaml").read_text() == "model: tiny  # mine\n"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {
        "model": "tiny",
        "steps": 3,
        "nested": {"a": [1, "ü"]},
    }
    assert read_json(tmp_path / "manifest.json") == {"oncurve": "1"}
    assert [line.split("  ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "second"]


def test_an_evaluation_gets_rows_and_a_summary(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        path = run.write_evaluation("base", [{"index": 1}, {"index": 2}], {"correct": 1})
    assert path.read_text() == '{"index": 1}\n{"index": 2}\n'
    assert read_json(tmp_path / "evaluations" / "base.json") == {"correct": 1}


def test_a_file_that_could_not_be_finished_does_not_appear(tmp_path: Path) -> None:
    def rows() -> object:
        yield {"a": 1}
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_lines(tmp_path / "rows.jsonl", rows())  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def test_a_broken_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match=r"manifest\.json: holds a list"):
        read_json(tmp_path / "manifest.json")
