"""Can every benchmark be read from rows as the hub has them, and does its grader accept their gold answers?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oncurve.data.datasets import question_key
from oncurve.data.prompts import write_gold
from oncurve.errors import ConfigError, DataError, OncurveError
from oncurve.evaluate.benchmarks import (
    Benchmark,
    find_benchmark,
    known_benchmarks,
    load_problems,
    make_grader,
    template_named,
)
from oncurve.records import Completion, Prompt

SHARED = Path(__file__).parents[3] / "shared" / "data"
HUB_ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Tom has 2,000 and 3?", "answer": "2000 + 3 = <<2000+3=2003>>2003\n#### 2,003"},
    "math500": {
        "problem": "Half of $x = 1$?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}",
        "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json",
    },
    "aime24": {
        "id": 60, "problem": "Find the number.", "solution": "204", "answer": "204",
        "url": "https://artofproblemsolving.com/wiki", "year": "2024",
    },
    "aime25": {"problem": "Find the base.", "answer": "70", "id": "0"},
    "amc23": {"id": 0, "answer": 27.0, "url": "https://artofproblemsolving.com/wiki", "question": "How far?"},
    "minerva": {"question": "The luminosity?", "answer": "33"},
    "olympiadbench": {
        "id": 1606, "question": "Both roots?", "solution": ["..."], "final_answer": ["$2$", "3"], "context": None,
        "is_multiple_answer": True, "unit": None, "answer_type": "Numerical", "subfield": "Algebra",
    },
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": 'def two() -> int:\n    """Two."""\n', "entry_point": "two",
        "canonical_solution": "    return 2\n", "test": "def check(candidate):\n    assert candidate() == 2\n",
    },
    "jsonl": {"question": "2+3?", "answer": 5},
}  # fmt: skip
"""One row of each as the hub shows it, down to the types of the columns."""
ANSWERS = {
    "gsm8k": "2003", "math500": r"\frac{1}{2}", "aime24": "204", "aime25": "70", "amc23": "27", "minerva": "33",
    "olympiadbench": "$2$, 3", "humaneval": "    return 2\n", "jsonl": "5",
}  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip("the public data sets are not at ../shared/data beside the project")
    return path


def says(text: str, row: dict[str, Any]) -> tuple[Prompt, Completion]:
    return Prompt("", (1,), 0, row), Completion((1,), (2,), text, (-1.0,), "stop", 0, 0)


def test_every_benchmark_says_where_it_is_and_how_it_is_asked() -> None:
    known = known_benchmarks()
    assert {"gsm8k", "math500", "aime24", "aime25", "amc23", "minerva", "olympiadbench", "humaneval"} <= set(known)
    for benchmark in known.values():
        assert "{question}" in benchmark.template.user
        assert benchmark.decoding.samples == 1 or benchmark.decoding.temperature > 0
    assert set(HUB_ROWS) == set(known) - {"word_problems"}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_rows_of_the_hub_become_questions_with_answers(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [HUB_ROWS[name]])
    problems = load_problems(find_benchmark(name), data=path)
    [row] = problems.rows
    assert row["answer"] == ANSWERS[name]
    assert row["question"]
    assert all(column in row for column in find_benchmark(name).categories)
    assert problems.source["rows_found"] == 1


@pytest.mark.parametrize("name", [name for name in HUB_ROWS if find_benchmark(name).grader == "mathematics"])
def test_a_gold_completion_is_right_and_another_answer_is_not(name: str, tmp_path: Path) -> None:
    benchmark = find_benchmark(name)
    [row] = load_problems(benchmark, data=write_rows(tmp_path / "rows.jsonl", [HUB_ROWS[name]])).rows
    grader = make_grader(benchmark.grader, benchmark.template)
    try:
        right, wrong = (says(write_gold({**row, **new}, benchmark.template), row) for new in ({}, {"answer": "77/78"}))
        rewards = grader.strict([right[0], wrong[0]], [right[1], wrong[1]])
        assert [reward.value for reward in rewards] == [1.0, 0.0]
        assert grader.extract is not None
        assert grader.extract(right[1].text) != grader.extract(wrong[1].text)
    finally:
        grader.close()


def test_the_datasets_library_reads_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "math500.parquet"
    datasets.Dataset.from_list([HUB_ROWS["math500"]]).to_parquet(str(path))
    assert load_problems(find_benchmark("math500"), data=tmp_path).rows[0]["answer"] == r"\frac{1}{2}"
    assert load_problems(find_benchmark("math500"), data=path).rows[0]["level"] == 2


def test_without_a_network_the_hub_is_a_message() -> None:
    with pytest.raises(DataError, match=r"benchmark math500: HuggingFaceH4/MATH-500.*cannot be loaded"):
        load_problems(find_benchmark("math500"))


@pytest.mark.parametrize(("name", "file"), [("gsm8k", "gsm8k_test.jsonl"), ("math500", "math500.jsonl")])
def test_published_rows_are_all_there_and_their_gold_answers_pay(name: str, file: str) -> None:
    benchmark = find_benchmark(name)
    shared(file)
    rows = load_problems(benchmark, data=SHARED).rows
    assert len(rows) == benchmark.rows
    grader = make_grader(benchmark.grader, benchmark.template)
    pairs = [says(write_gold(row, benchmark.template), row) for row in rows[:60]]
    rewards = grader.strict([prompt for prompt, _ in pairs], [completion for _, completion in pairs])
    grader.close()
    assert sum(reward.value == 1.0 for reward in rewards) == 60


def test_humaneval_is_graded_in_the_sandbox_whole_or_continued() -> None:
    from oncurve.sandbox import SandboxUnavailable, choose_isolation

    shared("humaneval.jsonl")
    try:
        choose_isolation()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox here: {error}")
    benchmark = find_benchmark("humaneval")
    row = load_problems(benchmark, data=SHARED).rows[0]
    assert len(load_problems(benchmark, data=SHARED).rows) == benchmark.rows
    texts = [
        f"```python\n{row['prompt']}{row['canonical_solution']}\n```",
        f"```python\n{row['canonical_solution']}```",
        f"```python\n{row['prompt']}    return True\n```",
        "I do not know.",
    ]
    grader = make_grader(benchmark.grader, benchmark.template)
    pairs = [says(text, row) for text in texts]
    rewards = grader.strict([prompt for prompt, _ in pairs], [completion for _, completion in pairs])
    grader.close()
    assert [reward.value for reward in rewards] == [1.0, 1.0, 0.0, 0.0]
    assert grader.extract is None


def test_validation_and_remainder_share_no_problem_and_leave_none_out(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(200)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    parts = {
        split: {
            question_key(row["question"]) for row in load_problems(find_benchmark("jsonl"), data=path, split=split).rows
        }
        for split in ("test", "validation", "remainder")
    }
    assert parts["validation"] | parts["remainder"] == parts["test"]
    assert not parts["validation"] & parts["remainder"]
    assert 20 <= len(parts["validation"]) <= 60


def test_a_benchmark_of_ones_own_is_a_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"q": "2+3?", "a": 5, "kind": "sum"}])
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"path: {tmp_path / 'rows.jsonl'}\ncolumns: {{question: q, answer: a}}\ncategories: [kind]\n"
        "prompt: think_answer\ndecoding: {temperature: 0.7, samples: 2}\n"
    )
    mine = find_benchmark(str(path))
    assert (mine.name, mine.title, mine.decoding.samples) == ("mine", "mine", 2)
    assert load_problems(mine).rows[0]["answer"] == "5"
    assert make_grader(mine.grader, mine.template).description == "mathematics, answer in answer_tag"


def test_a_grader_of_ones_own_says_what_is_right(tmp_path: Path) -> None:
    (tmp_path / "graders.py").write_text("def even(completion, answer):\n    return float(len(completion) % 2 == 0)\n")
    grader = make_grader(f"{tmp_path / 'graders.py'}:even", find_benchmark("jsonl").template)
    rewards = [grader.strict(*map(list, zip(says(text, {"answer": "1"}), strict=True)))[0] for text in ("ab", "abc")]
    assert [reward.parts["correct"] for reward in rewards] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [("gsm8", "Did you mean 'gsm8k'"), ("no/such.yaml", "cannot be read"), ("mmlu", "Use one of")],
)
def test_an_unknown_benchmark_is_a_message(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_benchmark(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("patth: x.jsonl", "Did you mean 'path'"),
        ("- a list", "not the keys of a benchmark"),
        ("decoding: {temperatur: 1}", "Did you mean 'temperature'"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_a_message(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        find_benchmark(str(path))


def test_wrong_data_are_messages(tmp_path: Path) -> None:
    jsonl = find_benchmark("jsonl")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": tmp_path / "none.jsonl"}, "does not exist"),
        ({"data": tmp_path}, "neither jsonl.jsonl"),
        ({}, "needs --data"),
        ({"split": "train"}, "--split"),
        ({"data": write_rows(tmp_path / "bad.jsonl", [{"text": "2+3?"}])}, "no question in"),
    ]
    for options, said in cases:
        with pytest.raises(OncurveError, match=said):
            load_problems(jsonl, **options)
    with pytest.raises(ConfigError, match="use mathematics, programs"):
        make_grader("guess", jsonl.template)
    with pytest.raises(ConfigError, match="there is no 'boxd'"):
        template_named("boxd", Benchmark(name="x", title="x"))
