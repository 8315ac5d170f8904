"""Is a solution found inside a prompt, and is an ordinary prompt left in peace?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import byte_tokenizer

from oncurve.core.records import Prompt
from oncurve.data.datasets import load_rows
from oncurve.data.leaks import copied_answers, leaked_excerpt
from oncurve.data.prompts import TEMPLATES, render_prompts

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

SOLUTION = "Anna has 3 boxes of 4 shells, which is 3*4 = <<3*4=12>>12 shells.\nShe finds 5 more, so she has 17 shells."
ROW = {"question": "Anna has 3 boxes of 4 shells and finds 5 more. How many?", "answer": "17", "solution": SOLUTION}


def prompt_of(text: str) -> Prompt:
    return Prompt(text=text, prompt_ids=(), index=0)


@pytest.mark.proves("D5")
@pytest.mark.parametrize(
    "text",
    [
        f"{ROW['question']} {SOLUTION}",
        f"{ROW['question']}\nHINT: she  FINDS 5 more, so\nshe has 17 shells.",
        f"{ROW['question']} Anna has 3 boxes of 4 shells, which is 3*4 = 12 shells.",
        f"{ROW['question']} \\boxed{{17}}",
        f"{ROW['question']}\n#### 17",
        f"{ROW['question']} <answer>\n17 </answer>",
    ],
)
def test_a_solution_inside_a_prompt_is_found(text: str) -> None:
    assert leaked_excerpt(prompt_of(text), ROW) is not None


@pytest.mark.parametrize(
    "text",
    [
        ROW["question"],
        f"User: {ROW['question']}\nAssistant: <think>",
        f"There are 17 of them. {ROW['question']}",
        f"{ROW['question']} Write <answer> your answer </answer>, \\boxed{{}} or #### 170",
        f"{ROW['question']} #### 17.5 and #### 17/2",
    ],
)
def test_an_ordinary_prompt_is_left_in_peace(text: str) -> None:
    assert leaked_excerpt(prompt_of(text), ROW) is None


def test_a_question_column_that_holds_the_chain_of_thought_is_found() -> None:
    row = ROW | {"question": f"{ROW['question']}\n{SOLUTION}"}
    assert leaked_excerpt(prompt_of(row["question"]), row) is not None


def test_a_sentence_that_a_solution_repeats_from_its_question_is_no_leak() -> None:
    row = {"question": "The train leaves the station at nine. When?", "answer": "9"}
    row["solution"] = "The train leaves the station at nine. Therefore the answer is nine. That is all there is to say."
    assert leaked_excerpt(prompt_of(row["question"]), row) is None


def test_a_long_answer_outside_the_question_is_found() -> None:
    row = {"question": "Which point?", "answer": r"\left( 3, \frac{\pi}{2} \right)"}
    assert leaked_excerpt(prompt_of(r"Which point? \left( 3, \frac{\pi}{2} \right)"), row) is not None
    inside = row | {"question": f"Is it {row['answer']} or not?"}
    assert leaked_excerpt(prompt_of(inside["question"]), inside) is None


def test_an_example_with_the_same_long_answer_is_no_leak() -> None:
    row = {"question": "Which point is it now?", "answer": r"\left( 3, \frac{\pi}{2} \right)"}
    example = {"question": "Which point was it?", "answer": row["answer"]}
    text = f"{example['question']} {row['answer']}\n{row['question']}"
    assert leaked_excerpt(prompt_of(text), row, few_shot=[example]) is None
    assert leaked_excerpt(prompt_of(text), row) is not None


def test_a_few_sentences_shared_by_question_and_solution_are_no_leak() -> None:
    shared = ["There are seven rows of trees.", "Every one of them has nine trees."]
    own = [
        "So we have to multiply seven by nine.",
        "Seven times nine is sixty-three.",
        "The answer is therefore sixty-three.",
    ]
    row = {
        "question": f"{' '.join(shared)} How many trees?",
        "answer": "63",
        "solution": "\n".join([shared[0], own[0], shared[1], *own[1:]]),
    }
    assert leaked_excerpt(prompt_of(row["question"]), row) is None
    row["solution"] = "\n".join([shared[0], own[0], shared[1], own[1]])
    assert leaked_excerpt(prompt_of(row["question"]), row) is not None


def test_drawing_code_shared_by_question_and_solution_is_no_leak() -> None:
    drawing = "[asy]\ndraw((0,0)--(10,0),black+linewidth(1));\ndraw((0,0)--(10,9),black+linewidth(1));\n[/asy]"
    row = {
        "question": f"How long?\n{drawing}",
        "answer": "10",
        "solution": f"{drawing}\nIt is ten units long, as one sees.",
    }
    assert leaked_excerpt(prompt_of(row["question"]), row) is None


def test_an_example_that_is_the_row_itself_is_found() -> None:
    row = ROW | {"question": f" {str(ROW['question']).upper()}"}
    assert leaked_excerpt(prompt_of(ROW["question"]), ROW, few_shot=[row]) is not None


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_examples_may_have_the_same_answer(template: str) -> None:
    example = {
        "question": "10 + 7?",
        "answer": "17",
        "solution": "Ten and seven are \\boxed{17} in total, as one can see.",
    }
    prompts, _ = render_prompts([ROW], byte_tokenizer(), template=template, few_shot=[example, EXAMPLE_TWO])
    assert leaked_excerpt(prompts[0], ROW, few_shot=[example, EXAMPLE_TWO]) is None
    leaky = Prompt(
        text=f"{prompts[0].text} \\boxed{{17}} <answer>17</answer> #### 17 \\boxed{{17}}", prompt_ids=(), index=0
    )
    assert leaked_excerpt(leaky, ROW, few_shot=[example, EXAMPLE_TWO]) is not None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("How much is {a} + {b}? (Solution: {sum})", "(solution:"),
        ("[{sum}] How much is {a} + {b}?", "["),
        ("{a} + {b} is what? Hint, {sum} - and no more", "hint,"),
    ],
)
def test_answers_that_stand_in_their_questions_are_told_over_all_rows(form: str, words: str) -> None:
    rows = [
        {"question": form.format(a=a, b=b, sum=a + b), "answer": str(a + b)}
        for a in range(11, 18)
        for b in range(21, 25)
    ]
    found = copied_answers(rows)
    assert found is not None
    share, chance, before, first = found
    assert (share, first) == (1.0, 0)
    assert chance < 0.3
    assert words in before
    assert copied_answers([{**row, "question": row["question"].replace(row["answer"], "")} for row in rows]) is None


@pytest.mark.parametrize(("every", "num_rows", "is_said"), [(5, 200, True), (5, 15, True), (20, 200, False)])
def test_answers_in_a_part_of_the_questions_are_told_beyond_chance(every: int, num_rows: int, is_said: bool) -> None:
    def row(n: int) -> dict[str, str]:
        return {"question": f"What follows {n}?" + f" (Solution: {n + 1})" * (n % every == 0), "answer": str(n + 1)}

    assert (copied_answers([row(100 + n) for n in range(num_rows)]) is not None) == is_said


def test_options_and_numbers_by_chance_are_no_copied_answers() -> None:
    options = [{"question": f"{n}? A. {n} B. {n + 1} C. {n + 2}", "answer": "ABC"[n % 3]} for n in range(60)]
    assert copied_answers(options) is None
    by_chance = [{"question": f"How much is {n} + {n % 5}?", "answer": str(n + n % 5)} for n in range(60)]
    assert copied_answers(by_chance) is None
    verdicts = [{"question": f"Is {n} even, yes or no?", "answer": ("yes", "no")[n % 2]} for n in range(60)]
    assert copied_answers(verdicts) is None


EXAMPLE_TWO: dict[str, Any] = {"question": "1 + 1?", "answer": "2"}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public data sets are not at ../shared/data beside the project")
@pytest.mark.parametrize(
    ("type", "file"), [("gsm8k", "gsm8k_train.jsonl"), ("gsm8k", "gsm8k_test.jsonl"), ("math", "math500.jsonl")]
)
def test_no_public_row_is_accused_and_every_prompt_with_its_solution_is_caught(type: str, file: str) -> None:
    rows = load_rows(type, path=SHARED / file)
    few_shot, rows = rows[:2], rows[2:]
    examples = "".join(f"Q: {row['question']} A: {row['solution']} #### {row['answer']}\n" for row in few_shot)
    prompts = [prompt_of(f"{examples}Q: {row['question']} A:") for row in rows]
    assert [
        row for row, prompt in zip(rows, prompts, strict=True) if leaked_excerpt(prompt, row, few_shot=few_shot)
    ] == []
    leaky = [prompt_of(f"{prompt.text} {row['solution']}") for row, prompt in zip(rows, prompts, strict=True)]
    assert all(leaked_excerpt(prompt, row, few_shot=few_shot) for row, prompt in zip(rows, leaky, strict=True))
    assert copied_answers(rows) is None
