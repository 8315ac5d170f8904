"""Rows of large files are read, and their prompts written, when a step asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lanes import gate
from safetensors.torch import load_file

import oncurve
from oncurve.core import order
from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Prompt
from oncurve.data import sources
from oncurve.data.datasets import hold_out, load_rows
from oncurve.data.from_settings import make_rows
from oncurve.data.prompts_on_demand import DemonstrationsOnDemand, PromptsOnDemand
from oncurve.data.sources import StoredRows
from oncurve.policy.model_folder import load_tokenizer
from oncurve.recipe.load import parse_config
from oncurve.run.rendered import make_prompts

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "extra": "ä" * (n % 3)} for n in range(200)]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MANY_ROWS", 100)
    monkeypatch.setattr(order, "LONG_ORDER", 100)


def lines_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    path.write_text("\ufeff" + text[:500].replace("\n", "\n\n", 1) + text[500:], encoding="utf-8")
    return path


def table_file(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    path = folder / "rows.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


@pytest.mark.parametrize(("make", "type"), [(lines_file, "jsonl"), (table_file, "huggingface")])
def test_rows_are_the_same_as_those_that_are_read_at_once(
    tmp_path: Path, make: Any, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)
    waiting = load_rows(type, path=path, columns={"label": "answer"}, limit=150)
    monkeypatch.setattr(sources, "MANY_ROWS", 1000)
    assert isinstance(waiting, StoredRows)
    assert list(waiting) == load_rows(type, path=path, columns={"label": "answer"}, limit=150)
    assert len(waiting) == 150
    with pytest.raises(IndexError):
        waiting[150]


def test_rows_that_are_held_out_are_drawn_by_the_seed_and_leave_the_others(tmp_path: Path) -> None:
    rows = load_rows("jsonl", path=lines_file(tmp_path))
    train, held_out = hold_out(rows, count=90, seed=3)  # so many that one drawn twice would show
    again, _ = hold_out(rows, count=90, seed=3)
    assert len(held_out) == 90
    assert list(train) == list(again)
    assert sorted(row["question"] for row in [*train, *held_out]) == sorted(row["question"] for row in ROWS)


def test_a_line_that_cannot_be_read_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join([*good[:150], "{nothing", *good[150:]]), encoding="utf-8")
    rows = load_rows("jsonl", path=path)
    assert rows[149] == ROWS[149]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 151: not JSON"):
        rows[150]
    path.write_text("\n".join(good[:120]), encoding="utf-8")
    with pytest.raises(DataError, match="has become shorter"):
        rows[180]


def test_in_the_place_of_a_long_prompt_comes_the_next_one(tmp_path: Path) -> None:
    rows = load_rows("jsonl", path=lines_file(tmp_path))
    assert isinstance(rows, StoredRows)

    def write(some: Any) -> list[Prompt]:
        return [Prompt(row["question"], (0,) * (9 if row["answer"] in ("11", "12", "200") else 3), 0) for row in some]

    prompts = PromptsOnDemand(rows, write, limit=5)
    assert [prompt.index for prompt in prompts.at([10, 5, 12, 199])] == [13, 5, 12, 0]
    with pytest.raises(DataError, match="longer than 2 tokens"):
        PromptsOnDemand(rows, write, limit=2).at([0])


def test_a_run_takes_such_rows_and_resumes_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def trainer(name: str) -> oncurve.Trainer:
        return oncurve.Trainer(
            "embedded",
            {"type": "jsonl", "path": str(lines), "template": "boxed"},
            "mathematics",
            run={"steps": 3, "prompts_per_step": 3, "folder": str(tmp_path), "name": name, "rollouts_every_steps": 1},
            rollouts={"max_completion_tokens": 4},
            evaluation={"num_prompts": 4, "every_steps": 2, "num_prompts_during": 2},
            algorithm={"group_size": 2},
        )

    lines = lines_file(tmp_path)
    trainer("whole").train()
    assert "each is read when a step takes it" in capsys.readouterr().out
    cut = trainer("cut")
    for step in cut.steps():
        if step.number == 1:
            break
    text = lines.read_text(encoding="utf-8")
    lines.write_text(text.replace("What is 7", "What was 7"), encoding="utf-8")
    with pytest.raises(ConfigError, match="the training prompts"):
        cut.resume()
    lines.write_text(text, encoding="utf-8")
    cut.resume()
    whole, resumed = (oncurve.open_run(tmp_path / name).step(3).groups for name in ("whole", "cut"))
    assert [group.prompt.text for group in whole] == [group.prompt.text for group in resumed]
    assert all("extra" in group.prompt.row for group in whole)


def test_a_dataset_of_a_program_stays_where_it_is_and_a_hint_is_written_for_the_prompts_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"problem": row["question"], "label": row["answer"]} for row in ROWS])
    read_rows: list[int] = []
    read = sources.StoredTable.__call__

    def counted(self: Any, index: int) -> Any:
        read_rows.append(index)
        return read(self, index)

    monkeypatch.setattr(sources.StoredTable, "__call__", counted)
    monkeypatch.setattr("oncurve.data.from_settings.FIRST_ROWS", 5)

    def trainer(name: str, rows: Any) -> oncurve.Trainer:
        return oncurve.Trainer(
            "embedded",
            rows,
            "mathematics",
            run={"steps": 2, "prompts_per_step": 3, "folder": str(tmp_path), "name": name},
            rollouts={"max_completion_tokens": 4},
            evaluation={"num_prompts": 4, "num_prompts_during": 4},
            algorithm={"type": "distil", "reference": "frozen", "teacher_hint": "It is {answer}.", "group_size": 2},
        )

    result = trainer("hinted", rows).train()
    assert "each is read when a step takes it" in capsys.readouterr().out
    assert len(read_rows) < 50
    assert all(row["distillation/reverse_kl"] > 0.01 for row in oncurve.open_run(result.folder).metrics if row["step"])
    for _ in (cut := trainer("cut", rows)).steps():
        break
    with pytest.raises(ConfigError, match="the rows"):
        trainer("cut", rows.select(range(150))).resume()
    assert cut.resume().folder.name == "cut"


DEMONSTRATIONS = [
    {"prompt": f"What is {n} + 1?", "completion": f" It is {n + 1}." + " Yes." * (n == 7)} for n in range(200)
]


@pytest.mark.parametrize("form", gate(["lines", "dataset"], "lines"))
def test_a_supervised_stage_reads_rows_when_a_step_takes_them_and_learns_the_same(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, DEMONSTRATIONS)), encoding="utf-8")
    data: Any = {"type": "jsonl", "path": str(path)}
    if form == "dataset":
        data = pytest.importorskip("datasets").Dataset.from_list(DEMONSTRATIONS)

    def stage(name: str) -> oncurve.Result:
        return oncurve.sft(
            "embedded",
            data,
            evaluation_data=DEMONSTRATIONS[:3],
            run={"steps": 3, "prompts_per_step": 8, "folder": str(tmp_path), "name": name, "record": "all"},
            rollouts={"max_completion_tokens": 2},
            evaluation={"num_prompts": 3, "every_steps": 0},
        )

    monkeypatch.setattr("oncurve.data.prompts_on_demand.NUM_CACHED", 4)
    waiting = stage("waiting")
    assert "each is read when a step takes it" in capsys.readouterr().out
    monkeypatch.setattr(sources, "MANY_ROWS", 1000)
    at_once = stage("at once")
    assert "each is read when a step takes it" not in capsys.readouterr().out
    weights, others = (load_file(run.folder / "model" / "model.safetensors") for run in (waiting, at_once))
    assert all(weights[name].equal(others[name]) for name in others)


def test_a_demonstration_that_cannot_be_learned_is_named_by_its_row_and_a_long_one_gives_way(tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer("embedded")[1]
    end = tokenizer.eos_token
    rows = [*DEMONSTRATIONS]
    rows[150] = {"prompt": "What?", "completion": f"This{end} and more"}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = parse_config(f"{{model: embedded, data: {{type: jsonl, path: '{path}'}}, sft: {{max_tokens: 20}}}}")
    waiting = make_rows(config.data, seed=0, demonstrated=True)
    made = make_prompts(config, tokenizer, context_tokens=None, rows=(waiting, [], [], []))
    assert isinstance(made.train, DemonstrationsOnDemand)
    assert [prompt.index for prompt in made.train.at([6, 7])] == [6, 8], "the seventh is too long"
    with pytest.raises(DataError, match="row 150: its completion goes on behind"):
        made.train.at([150])
