"""Where the final answer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, get_args

import pytest
from cpu_time import assert_ends_within
from reward_records import completion_of, prompt_of

from oncurve.rewards.answer_locations import (
    AnswerSource,
    after_hash,
    answer_tag,
    find_answer,
    last_boxed,
    locate_answer,
)
from oncurve.rewards.prose import last_expression, last_number
from oncurve.rewards.thinking import MARKS, PHRASES, after_thinking, spoken_text, uncut_thinking, unknown_marks


@pytest.mark.proves("D29")
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} and \boxed{\sqrt{\frac{3}{4}}}", r"\frac{1}{2}, \sqrt{\frac{3}{4}}"),
        (r"\boxed{\frac{1}{2}}, no, \boxed{\sqrt{\frac{3}{4}}}", r"\sqrt{\frac{3}{4}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{3} then \boxed{5", "3"),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{5} }", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{31}, as told by \boxed{}", "31"),
        (r"Thus \\boxed{58}", "58"),
        (r"\boxed 5", "5"),
        (r"$\boxed\frac12$, so", r"\frac12"),
        (r"put it into \boxed and stop", None),
        (r"\boxed{{{{", None),
        ("", None),
    ],
)
def test_the_last_box_that_closes_counts(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.proves("F90")
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("x\n#### 18\n", "18"),
        ("#### 17\n#### 18", "18"),
        ("####\n18", "18"),
        ("#### 18\nbye", "18"),
        ("####", None),
        ("18", None),
    ],
)
def test_the_answer_follows_the_last_mark_on_its_line(text: str, answer: str | None) -> None:
    assert after_hash(text) == answer


@pytest.mark.proves("D30")
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 42 </answer>", "42"),
        ("<answer>\n42\n</answer>\nUser: <b>", "42"),
        ("<answer> 42 </answer> </answer>", "42"),
        ("<answer> 41 </answer> <answer> 42 </answer>", "42"),
        ("<answer> <answer> 42 </answer>", "42"),
        ("<answer> 42", None),
        ("42 </answer>", None),
        ("<answer> 42 </answer> <answer> 43", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_answer_tag_is_cut_at_the_first_closing_tag_after_the_last_opening_one(
    text: str, answer: str | None
) -> None:
    assert answer_tag(text) == answer


@pytest.mark.proves("F96")
@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("It is 5.", "5"),
        ("1,000 eggs", "1,000"),
        ("paid $1,250.50 each", "$1,250.50"),
        ("about $1,250.50 each", None),
        ("**$18**", "$18"),
        ("-3", "-3"),
        ("$-5", "$-5"),
        ("from 3-4", "3-4"),
        ("3/4 of it", "3/4"),
        ("12.5%", "12.5%"),
        ("1.5e3", "1.5e3"),
        (".5", ".5"),
        ("x=5.", "x=5"),
        (r"so $\frac{1}{2}$ of them", r"\frac{1}{2}"),
        (r"first $x=2$, then \(y+1\).", "y+1"),
        (r"$x=2$ in 3 steps", "3"),
        ("2x + 3", "2x + 3"),
        ("(4, 9).", "(4, 9)"),
        ("(it has 4)", "4"),
        ("1 234 parts", "1 234"),
        ("1.5 million people", "1.5 million"),
        ("3, 5 and 7", "3, 5 and 7"),
        ("She paid $5, and got $18 back", "$18"),
        ("17 is wrong, 18 is right", "18"),
        ("It took 3 hours 20 minutes", "3 hours 20 minutes"),
        ("on May 17.", "May 17"),
        ("The probability is 1 in 4", None),
        ("$x=3$ or $x=4$", "x=3, x=4"),
        ("What is 2 + 3?", None),
        ("Compute $2 \\cdot 3$", None),
        (r"Is it $\frac{1}{2}+\frac{1}{3}$", None),
        ("2 + 3 = 5", "2 + 3 = 5"),
        ("nothing", None),
        ("", None),
        ("36, not 35", "36"), ("It is not 20", None), ("not 19 but 20", "20"), ("20?", None), ("about 20", None),
        ("not $20$", None), ("$20$?", None), ("could be 5", None), ("exceed 5", None), ("It is [3] 20", "20"),
        ("| a | 20 |", "20"), ("so 5 in step 3", "5"), ("equation 4 gives 7", "7"), ("see equation 4", None),
        ("(step 5)", None), ("answer 5. step 6", "5"), ("4+5=9 in the 40 minutes", "4+5=9"), ("1 2 3 4 5", None),
        ("1 2 3 4", "1 2 3 4"), ("1 out of 4", None), ("twenty-one eggs", "twenty-one"), ("three eggs and five", None),
        ("$12$ percent", "12 percent"), ("7 pm.", "7 pm"), ("20 km", "20"), ("(4,9", "4,9"), ("4,9)", "4,9"),
        ("answer:42", "42"), ("= 42", "42"), ("the sum 3 + 4", None), ("on May 17, 2024", "May 17, 2024"), ("a 5", "5"),
        ("I 5", "5"), (r"\begin{align}x&=1\end{align}", r"\begin{align}x&=1\end{align}"),
        (r"\begin{align}x&=1\end{align} so 3", "3"), (r"\(a\), \(b\) and \(c\)", "a, b, c"), ("5;", "5"),
    ],
)  # fmt: skip
def test_the_last_expression_is_taken_whole(text: str, expression: str | None) -> None:
    assert last_expression(text) == expression


@pytest.mark.parametrize(
    ("text", "is_open", "answer"),
    [
        ("<think>5</think> 6", False, " 6"),
        ("<think>5</think>", False, ""),
        ("<think>5", False, ""),
        ("5", False, "5"),
        ("5", True, ""),
        ("5</think>6", True, "6"),
        ("6 <think> 5", False, "6 "),
        ("<think>4</think>6<think>5", False, "6"),
    ],
)
def test_thinking_is_never_said_whether_closed_begun_by_the_prompt_or_cut_off(
    text: str, is_open: bool, answer: str
) -> None:
    assert after_thinking(text, is_open=is_open) == answer


@pytest.mark.parametrize(("source", "answer"), [("boxed", "1"), ("hash", "2"), ("answer_tag", "3"), ("marked", "3")])
def test_every_place_finds_its_own_answer(source: AnswerSource, answer: str) -> None:
    assert find_answer("4 \\boxed{1}\n#### 2\n<answer> 3 </answer> 5", source) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether.", "72"),
        ("It is 5. ", "5"), ("3.", "3"), ("7-4", "4"), ("x=-4", "-4"), ("1,000,000 and 12,34", "34"), ("50 %", "50"),
        ("no number at all", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_number_is_read_as_courses_read_it(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_an_empty_place_is_no_answer() -> None:
    assert find_answer(r"\boxed{ }", "boxed") is None
    assert find_answer("<answer> </answer>", "answer_tag") is None
    assert find_answer("<answer> </answer> 5", "prose") == "5"


@pytest.mark.parametrize("unit", ["{", r"\boxed{", "<answer>", "####", "1,", "-", "$", "</think>", "\x00", "9"])
def test_a_megabyte_costs_no_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    for source in ("boxed", "answer_tag", "hash", "prose"):
        assert_ends_within(1.0, partial(find_answer, text, source))


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<reasoning>", "</reasoning>"),
        ("<Thought>", "</Thought>"),
        ("[THINK]", "[/THINK]"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        *((f"<{name}>", f"</{name}>") for name in ("seed:think", "mm:think", "ifm|think_fast", "think:x", "cot_think")),
        ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|thinking|>", "<|/thinking|>"),
        ("◁think▷", "◁/think▷"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_no_family_of_models_is_paid_for_its_thinking(opening: str, closing: str) -> None:
    draft = r"\boxed{5}"
    assert find_answer(f"{opening} {draft} {closing} none", "boxed") is None
    assert find_answer(f"{opening} {draft}", "boxed") is None
    assert find_answer(f"{opening} {draft} {closing} It is \\boxed{{6}}.", "boxed") == "6"
    prompt, cut_off = prompt_of("5", text=f"Question {opening}"), replace(completion_of(draft), finish_reason="length")
    assert spoken_text(prompt, cut_off) == ""


def test_no_text_breaks_the_reader() -> None:
    signs = ("= ", "=", "- ", "* ", "12", "$5", "x", "answer is", "Answer:", "\n", "(", ")", "The", "9:", "<<3=3>>",
             "Human:", "\\boxed{", "}", "$", "not", "?", "!", "×", "%", "in the")  # fmt: skip
    random = Random(0)
    for number in range(4_000):
        text = (" " if number % 2 else "").join(random.choices(signs, k=random.randint(1, 8)))
        for source in get_args(AnswerSource):
            assert find_answer(text, source) != "", text


@pytest.mark.parametrize(
    ("text", "location"),
    [
        (r"so \boxed{5}", "box"),
        ("</think> <answer> 5 </answer>", "tag"),
        ("so\n#### 5", "hash"),
        ("The answer is 5.", "statement"),
        ("so it is 5", "nowhere"),
        ("", "nowhere"),
    ],
)
def test_the_place_of_an_answer_is_known(text: str, location: str) -> None:
    assert locate_answer(text, "marked").location == location


def test_prose_is_read_where_it_is_asked_for_by_name() -> None:
    assert find_answer("so it is 5", "marked") is None
    assert locate_answer("so it is 5", "prose").location == "prose"
    assert locate_answer(r"\boxed{4}, or 5", "prose").text == "4"


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_every_known_mark_is_cut(begin: str, end: str) -> None:
    assert find_answer(rf"{begin} \boxed{{5}} {end} I give up.", "boxed") is None
    assert find_answer(rf"{begin} \boxed{{5}}", "boxed") is None


def test_an_unknown_mark_of_a_template_or_tokenizer_is_found() -> None:
    written = "{{ '<|deepthink|>' }} {{ message['reasoning_content'] }}"
    assert unknown_marks(written, ["<|im_end|>"]) == ["<|deepthink|>"]
    assert unknown_marks("", ["<|deep_thought|>", "</think>", "<ponder_think>"]) == ["<|deep_thought|>"]
    assert unknown_marks("{% if enable_thinking is defined and thinking %}[TOOL]{% endif %}", []) == []


@pytest.mark.parametrize(("begin", "end"), PHRASES)
def test_a_sentence_begins_thinking_only_where_the_prompt_ends_with_it(begin: str, end: str) -> None:
    draft = replace(completion_of(r"\boxed{5}"), finish_reason="length")
    assert spoken_text(prompt_of("5", text=f"Question\n{begin}\n"), draft) == ""
    assert find_answer(rf"{begin} \boxed{{5}} {end} \boxed{{6}}", "boxed") == "6"
    assert find_answer(rf"{begin} so it is \boxed{{5}}", "boxed") == "5"


@pytest.mark.parametrize(
    ("opening", "written", "uncut"),
    [
        ("", "<think>{thinking}</think>{content}", None),
        ("", "{content}", None),
        ("", "<|mull|>{thinking}<|answer|>{content}", "' <|mull|>T6173'"),
        ("", "<think>{thinking}<answers>{content}", "'T6173<answers>A7219'"),
        ("", "{thinking}\n[BEGIN FINAL RESPONSE]\n{content}", "' T6173'"),
        ("Here are my reasoning steps:\n", "{thinking}\n[BEGIN FINAL RESPONSE]\n{content}", None),
        ("", "[{{'type': 'thinking', 'thinking': '{thinking}'}}, {{'text': '{content}'}}]", None),
    ],
)
def test_the_thinking_that_a_template_writes_is_cut_or_named(opening: str, written: str, uncut: str | None) -> None:
    def write(messages: Sequence[Mapping[str, Any]], opens_answer: bool) -> str | None:
        text = str(messages[0]["content"]) + " "
        for message in messages[1:]:
            if "reasoning_content" not in message:
                return None
            text += written.format(thinking=message["reasoning_content"], content=message["content"])
        return text + opening if opens_answer else text

    assert uncut_thinking(write) == uncut
