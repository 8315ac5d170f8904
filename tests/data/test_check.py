"""Does the check find rows that a run could not learn from or be measured by?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers_for_tests import byte_tokenizer

from oncurve.core.records import Completion, Prompt, Reward
from oncurve.data.check import GradeMeaning, check_data, find_refused_gold, find_repeats, find_shared
from oncurve.data.data_finding import DataFinding
from oncurve.data.prompts import TEMPLATES, render_prompts, write_gold
from oncurve.data.settings import DataSection

ROWS: list[dict[str, Any]] = [
    {"question": f"What is {number} and 1?", "answer": str(number + 1), "solution": f"It is {number + 1}."}
    for number in range(10)
]


def exact(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
    """1 if the answer tag holds the reference, letter by letter."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        is_formed = "<answer>" in completion.text
        is_correct = is_formed and f"<answer> {prompt.row['answer']} </answer>" in completion.text
        parts = {"correct": float(is_correct), "format": float(is_formed)}
        rewards.append(Reward(float(is_correct), parts, detail="compared"))
    return rewards


def check(rows: Sequence[dict[str, Any]] = ROWS, **options: Any) -> list[DataFinding]:
    keys = {name: options.pop(name) for name in DataSection.model_fields.keys() - {"few_shot"} & options.keys()}
    section = DataSection(**{"template": "r1_zero", "chat": False} | keys)
    meaning = GradeMeaning(**{name: options.pop(name) for name in vars(GradeMeaning)["__slots__"] if name in options})
    return check_data(rows, byte_tokenizer(), section=section, meaning=meaning, **({"grade": exact} | options))


def test_sound_data_give_no_finding() -> None:
    assert (
        check(evaluation_rows=[{"question": "Another?", "answer": "1"}], few_shot=[{"question": "x", "answer": "1"}])
        == []
    )


def test_rows_whose_gold_answer_is_refused_are_listed_with_the_reason() -> None:
    findings = check(gold=lambda row: f"<answer> {row['answer'].replace('3', 'three')} </answer>")
    assert [(finding.severity, finding.rows) for finding in findings] == [("error", (2,))]
    assert findings[0].what == "the reward calls the row's own reference answer wrong"
    assert "row 2: answer '3'" in findings[0].example
    assert findings[0].example.endswith("compared")
    lenient = check(
        gold=lambda row: f"<answer> {row['answer'].replace('3', 'three')} </answer>", max_refused_fraction=0.1
    )
    assert [finding.severity for finding in lenient] == ["warning"]


@pytest.mark.proves("D28")
def test_a_template_that_asks_for_another_form_than_the_reward_is_found() -> None:
    findings = check(template="boxed")
    assert findings[0].what == "the reward does not accept the format of the reference completion"
    assert findings[0].rows == tuple(range(10))
    assert "data.template" in findings[0].remedy


def test_the_template_is_named_in_whose_form_the_reward_accepts_the_answer() -> None:
    def alone(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        pairs = zip(prompts, completions, strict=True)
        return [Reward(float(completion.text == prompt.row["answer"])) for prompt, completion in pairs]

    [finding] = check(grade=alone, template="question_only", decided_by_value=True)
    assert "form of data.template=plain" in finding.remedy
    assert check(grade=alone, template="plain", decided_by_value=True) == []


def test_a_grader_that_fails_is_not_a_wrong_answer() -> None:
    def failing(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        first = {0: Reward(None, error="timeout", detail="3 s"), 1: Reward(None, error="not_applicable")}
        rewards = exact(prompts, completions)
        return [first.get(prompt.index, reward) for prompt, reward in zip(prompts, rewards, strict=True)]

    findings = check(grade=failing)
    assert [(finding.what, finding.rows) for finding in findings] == [
        ("grading the row's own reference answer failed (timeout)", (0,)),
        ("no reward grades the row's own reference answer, so nothing is learned from the row", (1,)),
    ]
    assert findings[1].severity == "warning"


def test_a_grader_that_fails_on_every_row_is_not_asked_about_all_of_them() -> None:
    graded: list[int] = []

    def hog(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        graded.extend(prompt.index for prompt in prompts)
        return [Reward(None, error="memory", detail="more than 512 MiB") for _ in completions]

    [finding] = check(grade=hog)
    assert (finding.severity, finding.rows) == ("error", tuple(range(4)))
    assert graded == list(range(4))


def test_answers_that_nothing_grades_are_an_error_unless_an_environment_will() -> None:
    def forgotten(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [Reward(None, error="not_applicable", detail="f: the function returned None") for _ in completions]

    [finding] = check(grade=forgotten)
    assert finding.severity == "error"
    assert "f: the function returned None" in finding.example
    assert check(grade=forgotten, needs_grades=False) == []


@pytest.mark.parametrize(("value", "num_findings"), [(0.0, 1), (-1.0, 1), (0.1, 0)])
def test_a_reward_without_a_correct_part_must_pay_something(value: float, num_findings: int) -> None:
    def flat(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [Reward(value) for _ in completions]

    assert len(check(grade=flat)) == num_findings


def test_golds_are_graded_as_completions_of_their_own_prompts() -> None:
    prompts, _ = render_prompts(ROWS, byte_tokenizer())

    def inspect(rows: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        assert [completion.prompt_ids for completion in completions] == [prompt.prompt_ids for prompt in rows]
        assert {completion.finish_reason for completion in completions} == {"stop"}
        return [Reward(1.0) for _ in completions]

    assert find_refused_gold(prompts, inspect, lambda row: write_gold(row, TEMPLATES["r1_zero"])) == []


def test_prompts_that_hold_their_solution_are_errors() -> None:
    rows = [
        *ROWS,
        {"question": "What is 4*5? It is 20, since 4*5 = 20.", "answer": "20", "solution": "It is 20, since 4*5 = 20."},
    ]
    findings = check(rows)
    assert [(finding.severity, finding.what, finding.rows) for finding in findings] == [
        ("error", "the prompt contains its own solution", (10,))
    ]


def test_prompts_that_do_not_fit_are_listed() -> None:
    rows = [*ROWS, {"question": "x" * 500, "answer": "1"}]
    findings = check(rows, template="think_answer", max_prompt_tokens=100)
    assert [(finding.severity, finding.rows) for finding in findings] == [("warning", (10,))]
    assert "longer than 100 tokens" in findings[0].what


def test_repeated_questions_are_told_from_contradictions() -> None:
    rows = [*ROWS, dict(ROWS[3]), ROWS[4] | {"question": "what is  4 and 1?", "answer": "6"}]
    same, other = sorted(find_repeats(rows), key=lambda finding: finding.rows)
    assert (same.what, same.rows) == ("the question came before", (10,))
    assert (other.what, other.rows) == ("the question occurs twice with different answers", (11,))
    assert "rows 4 and 11" in other.example
    assert "'5' and '6'" in other.example


@pytest.mark.proves("F145", "D20")
def test_questions_that_are_trained_on_and_evaluated_are_errors() -> None:
    findings = find_shared(ROWS, [{"question": "new"}, {"question": "WHAT is 7 and 1?"}])
    assert [(finding.severity, finding.rows) for finding in findings] == [("error", (7,))]
    assert "row 7 = evaluation row 1" in findings[0].example


def test_a_finding_reads_well_on_the_console() -> None:
    finding = DataFinding("warning", "the question came before", tuple(range(20)), "row 0: x", "Drop repeats.")
    assert finding.describe() == (
        "warning: the question came before: 20 rows (0, 1, 2, 3, 4, 5, 6, 7, ...)\n  row 0: x\n  Drop repeats."
    )
