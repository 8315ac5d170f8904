"""Do rows arrive whole, in one form, with errors that say where and what to do?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oncurve.core.errors import ConfigError, DataError
from oncurve.data.datasets import (
    canonical_number,
    drop_repeats,
    hold_out,
    load_rows,
    question_key,
    save_rows,
    statistics,
)
from oncurve.data.sources import read_json_lines

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the public data sets are not at ../shared/data beside the project"
)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def numbered_rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(count)]


@pytest.mark.proves("F86")
def test_json_lines_keep_every_column_and_the_order(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"question": "2+3?", "answer": "5", "tests": [1, 2]},
        "",
        {"question": "é\u2028?", "answer": " 7 "},
    )
    assert load_rows("jsonl", path=path) == [
        {"question": "2+3?", "answer": "5", "tests": [1, 2]},
        {"question": "é\u2028?", "answer": "7"},
    ]


def test_answers_that_are_numbers_or_lists_become_text(tmp_path: Path) -> None:
    answers = [5, 5.0, 0.5, True, ["a", 1], {"x": "é"}]
    path = write_lines(tmp_path / "a.jsonl", *({"question": "q", "answer": answer} for answer in answers))
    assert [row["answer"] for row in load_rows("jsonl", path=path)] == [
        "5",
        "5",
        "0.5",
        "true",
        '["a", 1]',
        '{"x": "é"}',
    ]


def test_columns_are_renamed_and_the_old_names_stay(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"problem_text": "2+3?", "label": 5})
    rows = load_rows("jsonl", path=path, columns={"question": "problem_text", "answer": "label"})
    assert rows == [{"problem_text": "2+3?", "label": 5, "question": "2+3?", "answer": "5"}]


def test_two_columns_can_change_places(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "5", "answer": "2+3?"})
    rows = load_rows("jsonl", path=path, columns={"question": "answer", "answer": "question"})
    assert rows == [{"question": "2+3?", "answer": "5"}]


@pytest.mark.parametrize(
    ("row", "columns", "hint"),
    [
        ({"question": "q", "answr": "5"}, {}, "Nearest: 'answr'. Set data.columns: {answer: answr}"),
        ({"question": "q", "label": "5"}, {}, "Nearest: 'label'. Set data.columns: {answer: label}"),
        ({"query": "q", "answer": "5"}, {}, "Nearest: 'query'. Set data.columns: {question: query}"),
        ({"question": "q", "zzz": "5"}, {}, "Set data.columns: {answer: <its name>}"),
        (
            {"question": "q", "labels": "5"},
            {"answer": "label"},
            "no column 'label'. Columns: 'question', 'labels'. Nearest: 'labels'",
        ),
        (
            {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]},
            {},
            "'messages' ends with an answer: write it and the question into columns of their own",
        ),
        (
            {"conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]},
            {},
            "'conversations' ends with an answer",
        ),
        ({"question": [{"role": "user", "content": "2+3?"}]}, {}, "Set data.columns: {answer: <its name>}"),
    ],
)
def test_a_missing_column_is_answered_with_the_nearest(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], hint: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as caught:
        load_rows("jsonl", path=path, columns=columns)
    assert f"{path}, line 1: there is no column" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.proves("F91")
def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = save_rows(numbered_rows(50), tmp_path / "a.jsonl")
    assert load_rows("jsonl", path=path, limit=3) == numbered_rows(3)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.limit is 0"):
        load_rows("jsonl", path="any", limit=0)


def test_an_unknown_type_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no 'gms8k'\. Did you mean 'gsm8k'\?"):
        load_rows("gms8k")


@pytest.mark.proves("F84")
def test_gsm8k_answers_are_canonical_and_the_solution_is_what_stands_before(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "answer": "500+500 = <<500+500=1000>>1000\n#### 1,000"})
    assert load_rows("gsm8k", path=path) == [
        {"question": "q", "answer": "1000", "solution": "500+500 = <<500+500=1000>>1000"}
    ]


def test_the_last_mark_of_a_gsm8k_answer_counts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "answer": "#### Step 1\n2+3=5\n#### 5"})
    assert load_rows("gsm8k", path=path)[0]["answer"] == "5"


def test_gsm8k_without_a_marked_answer_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "answer": "1000"})
    with pytest.raises(DataError, match=r"line 1: the answer does not end in '#### number'.*data\.type: jsonl"):
        load_rows("gsm8k", path=path)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"solution": r"So \boxed{3}, no, $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
        ({"solution": r"So $x = \boxed 7$."}, "7"),
        ({"solution": r"\boxed{3}", "answer": "4"}, "4"),
        ({"solution": r"\boxed{3}", "answer": None}, "3"),
    ],
)
def test_math_answers_come_from_their_column_or_the_last_box(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"problem": "p"} | row)
    loaded = load_rows("math", path=path)[0]
    assert (loaded["question"], loaded["answer"], loaded["solution"]) == ("p", answer, row["solution"])


def test_math_without_a_box_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"problem": "p", "solution": r"so \boxed{3"})
    with pytest.raises(DataError, match=r"line 1: the solution has no \\boxed"):
        load_rows("math", path=path)


@pytest.mark.proves("D31")
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1,000", "1000"),
        ("$1,450,000.", "1450000"),
        ("-$5", "-5"),
        ("$-5.50", "-5.5"),
        ("−3", "-3"),
        ("+3", "3"),
        ("-0.0", "0"),
        ("007", "7"),
        (".5", "0.5"),
        ("18.00", "18"),
        ("1,00", "1,00"),
        ("3/4", "3/4"),
        ("50%", "50%"),
        (".", "."),
        ("$", "$"),
        ("", ""),
        ("x = 5", "x = 5"),
    ],
)
def test_numbers_have_one_canonical_form(text: str, canonical: str) -> None:
    assert canonical_number(text) == canonical
    assert canonical_number(canonical) == canonical


def test_word_problems_are_rows_with_their_level() -> None:
    rows = load_rows("word_problems", limit=20, levels=(1,), seed=3)
    assert len(rows) == 20
    assert {row["level"] for row in rows} == {1}
    assert all(row["question"] and row["answer"] and row["solution"] for row in rows)
    assert rows == load_rows("word_problems", limit=20, levels=(1,), seed=3)


def test_word_problems_without_a_number_of_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.limit: .* for example limit: 2000"):
        load_rows("word_problems")


def test_a_function_makes_rows(tmp_path: Path) -> None:
    path = tmp_path / "sums.py"
    path.write_text(
        "def sums(split, count, seed=0):\n"
        "    for number in range(count): yield {'question': f'{split} {number}+{seed}', 'answer': number + seed}\n"
        "def wrong(split, count, seed=0): return [3]\n"
        "def broken(split, count, seed=0): return 1 / 0\n"
    )
    rows = load_rows("generated", function=f"{path}:sums", split="test", limit=2, seed=1)
    assert [(row["question"], row["answer"]) for row in rows] == [("test 0+1", "1"), ("test 1+1", "2")]
    with pytest.raises(DataError, match="gave 3, which is no row"):
        load_rows("generated", function=f"{path}:wrong", limit=2)
    with pytest.raises(DataError, match=r"broken failed: ZeroDivisionError"):
        load_rows("generated", function=f"{path}:broken", limit=2)
    with pytest.raises(ConfigError, match=r"data\.function"):
        load_rows("generated", function=f"{path}:missing", limit=2)


def test_repeats_are_dropped_whatever_their_case_and_white_space() -> None:
    rows = [
        {"question": "How  many?", "answer": "1"},
        {"question": "how many?\n", "answer": "2"},
        {"question": "x", "answer": "3"},
    ]
    assert drop_repeats(rows) == ([rows[0], rows[2]], 1)


@pytest.mark.parametrize("size", [{"count": 30}, {"fraction": 0.3}])
def test_the_held_out_split_does_not_depend_on_the_order_of_rows(size: dict[str, Any]) -> None:
    rows = numbered_rows(100)
    train, held_out = hold_out(rows, **size, seed=5)
    _, held_out_backwards = hold_out(rows[::-1], **size, seed=5)
    assert held_out_backwards == held_out[::-1]
    assert sorted(train + held_out, key=rows.index) == rows
    assert train == [row for row in rows if row in train]
    assert hold_out(rows, **size, seed=6)[1] != held_out


@pytest.mark.proves("F91")
def test_a_held_out_count_is_exact_and_a_fraction_is_close() -> None:
    rows = numbered_rows(1000)
    assert len(hold_out(rows, count=37)[1]) == 37
    assert len(hold_out(rows, count=999)[1]) == 999
    assert len(hold_out(rows, fraction=0.2)[1]) == pytest.approx(200, abs=50)


def test_a_fraction_holds_out_the_same_questions_when_rows_are_added() -> None:
    few, many = numbered_rows(100), numbered_rows(200)
    assert hold_out(few, fraction=0.3)[1] == [row for row in hold_out(many, fraction=0.3)[1] if row in few]


@pytest.mark.parametrize("size", [{"count": 20}, {"fraction": 0.5}])
def test_the_same_question_is_never_on_both_sides(size: dict[str, Any]) -> None:
    rows = numbered_rows(40) + [{"question": f"  what IS {n} + 1?", "answer": "?"} for n in range(40)]
    train, held_out = hold_out(rows, **size)
    sides = [{question_key(row["question"]) for row in side} for side in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(train) + len(held_out) == 80


def test_a_held_out_count_with_repeated_questions_is_rounded_up() -> None:
    rows = numbered_rows(10) * 2
    assert [len(hold_out(rows, count=count)[1]) for count in range(1, 19)] == [2 * ((n + 1) // 2) for n in range(1, 19)]


@pytest.mark.parametrize("size", [{"count": 10}, {"count": 0}, {"count": -1}, {"fraction": 0.0}, {"fraction": 1.0}])
def test_a_side_without_rows_is_refused(size: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"set evaluation\.num_prompts to fewer problems"):
        hold_out(numbered_rows(10), **size)


@pytest.mark.parametrize("size", [{}, {"count": 1, "fraction": 0.5}])
def test_the_held_out_size_is_given_in_one_way(size: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        hold_out(numbered_rows(10), **size)


def test_saved_rows_are_read_back_and_not_overwritten_by_accident(tmp_path: Path) -> None:
    path = save_rows(numbered_rows(3), tmp_path / "new" / "a.jsonl")
    with pytest.raises(DataError, match="exists already"):
        save_rows(numbered_rows(1), path)
    assert load_rows("jsonl", path=path) == numbered_rows(3)
    save_rows(numbered_rows(1), path, overwrite=True)
    assert load_rows("jsonl", path=path) == numbered_rows(1)
    assert [file.name for file in path.parent.iterdir()] == ["a.jsonl"]


def test_rows_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save_rows([{"question": "a"}, {"question": object()}], tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proves("F84")
def test_statistics_count_rows_repeats_kinds_and_lengths() -> None:
    rows = [
        {"question": "abc", "answer": "5", "solution": "x"},
        {"question": "ABC", "answer": "1.5", "extra": 1},
        {"question": "abcdefg", "answer": r"\pi", "solution": "xyz"},
    ]
    numbers = statistics(rows)
    assert (numbers.num_rows, numbers.num_repeated) == (3, 1)
    assert numbers.columns == ("question", "answer", "solution", "extra")
    assert numbers.question_characters == (3, 3, 7)
    assert numbers.solution_characters == (1, 2.0, 3)
    assert numbers.answer_kinds == {"integer": 1, "decimal": 1, "text": 1}
    assert "3 rows, 1 repeated question" in numbers.describe()
    with pytest.raises(DataError, match="no rows"):
        statistics([])


@needs_shared_data
@pytest.mark.parametrize(("split", "count", "with_commas"), [("train", 7473, 79), ("test", 1319, 14)])
def test_all_of_gsm8k_loads_with_canonical_answers(split: str, count: int, with_commas: int) -> None:
    rows = load_rows("gsm8k", path=SHARED, split=split)
    raw = [row for _, row in read_json_lines(SHARED / f"gsm8k_{split}.jsonl")]
    assert len(rows) == count
    assert all(str(int(row["answer"])) == row["answer"] for row in rows)
    changed = [
        row for row, source in zip(rows, raw, strict=True) if not source["answer"].endswith(f"#### {row['answer']}")
    ]
    assert len(changed) == with_commas
    assert all("####" not in row["solution"] for row in rows)
    assert drop_repeats(rows)[1] == 0


@needs_shared_data
def test_all_of_math_500_loads_and_its_answers_are_the_last_boxes(tmp_path: Path) -> None:
    rows = load_rows("math", path=SHARED / "math500.jsonl")
    without_answers = [{k: v for k, v in row.items() if k in ("problem", "solution")} for row in rows]
    boxed = load_rows("math", path=save_rows(without_answers, tmp_path / "math.jsonl"))
    assert len(rows) == 500
    assert [row["answer"] for row in boxed] == [row["answer"] for row in rows]
    assert {row["subject"] for row in rows} >= {"Algebra", "Geometry"}
