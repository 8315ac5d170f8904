"""Does every row become the right text and the right tokens, once?"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import BOS, CHAT_TEMPLATE, EOS, NO_SYSTEM_CHAT_TEMPLATE, byte_tokenizer

from oncurve.core.errors import ConfigError, DataError
from oncurve.data.prompts import TEMPLATES, Template, find_template, render_prompts, write_gold

ROW = {"question": "2+3?", "answer": "5", "solution": "2+3=<<2+3=5>>5."}
EXAMPLE = {"question": "1+1?", "answer": "2", "solution": "1+1=2."}


def only_text(row: dict[str, Any], **options: Any) -> str:
    prompts, excluded = render_prompts([row], options.pop("tokenizer", byte_tokenizer()), **options)
    assert excluded == []
    return prompts[0].text


@pytest.mark.proves("F38", "F87")
def test_r1_zero_is_a_conversation_that_ends_where_the_thinking_begins() -> None:
    text = only_text(ROW, template="r1_zero")
    assert text.endswith("\nUser: 2+3?\nAssistant: <think>")
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in text


def test_think_answer_is_the_prompt_of_the_embedded_task() -> None:
    from oncurve.tasks.word_problems import demonstrations, word_problems

    assert only_text(ROW, template="think_answer") == "User: 2+3?\nAssistant: <think>"
    template = TEMPLATES["think_answer"]
    for prompt, _ in demonstrations(50):
        question = prompt.removeprefix("User: ").removesuffix("\nAssistant: <think>")
        assert prompt == template.turn.format(user=question) + template.opening
    golds = [
        write_gold({"answer": problem.answer, "solution": problem.solution}, template)
        for problem in word_problems("train", 50)
    ]
    form = re.compile(r"\S.*</think> <answer> \d+ </answer>")
    assert all(form.fullmatch(gold) for gold in golds)
    assert any(form.fullmatch(completion) for _, completion in demonstrations(50))


@pytest.mark.proves("F87", "F88", "F89")
@pytest.mark.parametrize(
    ("template", "end", "gold"),
    [
        ("r1_zero", "Assistant: <think>", " 2+3=5. </think> <answer> 5 </answer>"),
        ("think_answer", "Assistant: <think>", "2+3=5.</think> <answer> 5 </answer>"),
        ("boxed", "\\boxed{}.\nSolution:", " 2+3=5.\n\\boxed{5}"),
        ("gsm8k", "as a number.\nSolution:", " 2+3=5.\n#### 5"),
        (
            "reasoning_answer",
            "User: 2+3?\nAssistant:",
            "\n<reasoning>\n2+3=5.\n</reasoning>\n<answer>\n5\n</answer>",
        ),
        ("question_only", "2+3?", " 2+3=5.\n\\boxed{5}"),
    ],
)
def test_every_template_has_its_end_and_its_gold_completion(template: str, end: str, gold: str) -> None:
    assert only_text(ROW, template=template).endswith(end)
    assert write_gold(ROW, TEMPLATES[template]) == gold


def test_a_gold_completion_without_a_solution_is_its_form_and_answer() -> None:
    assert write_gold({"answer": "5"}, TEMPLATES["think_answer"]) == "</think> <answer> 5 </answer>"


@pytest.mark.proves("D5")
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_no_template_shows_anything_of_a_row_but_its_question(name: str) -> None:
    row = {"question": "the question", "answer": "SECRET", "solution": "SECRET", "user": "SECRET"}
    for chat in (False, True):
        text = only_text(row, template=name, chat=chat, tokenizer=byte_tokenizer(chat_template=CHAT_TEMPLATE))
        assert "SECRET" not in text
        assert text.count("the question") == 1


def test_braces_in_a_question_stay_as_they_are() -> None:
    question = r"Is \frac{1}{2} = {answer}? {question} {0} {user} \g<1>"
    text = only_text({"question": question, "answer": "SECRET"}, template="think_answer")
    assert text == f"User: {question}\nAssistant: <think>"


@pytest.mark.proves("F87")
def test_few_shot_examples_are_earlier_exchanges() -> None:
    text = only_text(ROW, template="think_answer", few_shot=[EXAMPLE])
    assert text == (
        "User: 1+1?\nAssistant: <think>1+1=2.</think> <answer> 2 </answer>\n\nUser: 2+3?\nAssistant: <think>"
    )
    assert only_text(ROW, template="r1_zero", few_shot=[EXAMPLE]).count("dialogue") == 1


def test_a_template_can_come_from_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Q: {question}\nThink, then write <answer> your answer </answer>.\nA:\n")
    template = find_template(str(path))
    assert only_text(ROW, template=template) == "Q: 2+3?\nThink, then write <answer> your answer </answer>.\nA:"
    assert write_gold(ROW, template) == " 2+3=5. </think> <answer> 5 </answer>"
    path.write_text("{question} End with #### and the number.")
    assert write_gold(ROW, find_template(str(path))).endswith("#### 5")
    path.write_text("{question} = ?")
    assert write_gold(ROW, find_template(str(path))).endswith("\\boxed{5}")
    path.write_text("no place")
    with pytest.raises(ConfigError, match=r"no place for the question"):
        find_template(str(path))
    path.write_text("{question} It is about {subject}.")
    with pytest.raises(ConfigError, match=r"mine\.txt holds \{subject\}, and only \{question\} is filled in"):
        find_template(str(path))
    path.write_text("Q: {Question}")
    with pytest.raises(ConfigError, match=r"\{question\} is filled in\. Write it in lower case, or"):
        find_template(str(path))
    path.write_text("{question} End with \\boxed{number}, x^{n} or \\frac{a}{b}, not { subject }.")
    assert only_text(ROW, template=find_template(str(path))).endswith(
        "\\boxed{number}, x^{n} or \\frac{a}{b}, not { subject }."
    )
    path.write_bytes(b"\xff{question}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        find_template(str(path))


def test_an_unknown_template_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no 'r1zero'\. Did you mean 'r1_zero'\? Use one of .*'boxed'.* text file"):
        render_prompts([ROW], byte_tokenizer(), template="r1zero")


@pytest.mark.parametrize("part", ["system", "user", "turn", "opening"])
def test_a_template_that_would_show_the_answer_is_refused(part: str) -> None:
    parts = {"user": "{question}", "turn": "{user}"}
    parts[part] = parts.get(part, "") + " {answer}"
    with pytest.raises(ConfigError, match=rf"{{answer}} in its {part} would show"):
        Template(name="leaky", **parts)


def test_prompt_tokens_are_the_text_and_nothing_else() -> None:
    tokenizer = byte_tokenizer()
    prompts, _ = render_prompts([ROW, EXAMPLE], tokenizer, template="boxed")
    for index, (prompt, row) in enumerate(zip(prompts, (ROW, EXAMPLE), strict=True)):
        assert tokenizer.decode(prompt.prompt_ids) == prompt.text
        assert (prompt.index, prompt.row, prompt.messages) == (index, row, None)


def test_a_tokenizer_that_adds_bos_adds_it_once_and_an_end_token_is_taken_away() -> None:
    plain = render_prompts([ROW], byte_tokenizer())[0][0]
    both = render_prompts([ROW], byte_tokenizer(adds_bos=True, adds_eos=True))[0][0]
    assert both.prompt_ids == (BOS, *plain.prompt_ids)
    assert EOS not in both.prompt_ids


def test_an_end_token_that_the_template_asks_for_stays() -> None:
    template = Template(name="ends", turn="{user}</s>")
    assert render_prompts([ROW], byte_tokenizer(), template=template)[0][0].prompt_ids[-1] == EOS


@pytest.mark.proves("F38", "D13")
def test_chat_prompts_go_through_the_chat_template_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer(adds_bos=True, adds_eos=True, chat_template=CHAT_TEMPLATE)
    prompt = render_prompts([ROW], tokenizer, template="reasoning_answer", chat=True, few_shot=[EXAMPLE])[0][0]
    system = TEMPLATES["reasoning_answer"].system
    example = "<reasoning>\n1+1=2.\n</reasoning>\n<answer>\n2\n</answer>"
    assert prompt.text == f"<s>[system]{system}</s>[user]1+1?</s>[assistant]{example}</s>[user]2+3?</s>[assistant]"
    assert prompt.messages == (
        {"role": "system", "content": system},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": example},
        {"role": "user", "content": "2+3?"},
    )
    assert prompt.prompt_ids.count(BOS) == 1
    assert prompt.prompt_ids[-1] != EOS
    assert tokenizer.decode(prompt.prompt_ids) == prompt.text


def test_the_opening_is_put_into_the_mouth_of_the_assistant_once() -> None:
    written = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    assert only_text(ROW, template="think_answer", chat=True, tokenizer=written).endswith("[assistant]<think>")
    already = byte_tokenizer(chat_template=CHAT_TEMPLATE.replace("[assistant]{%", "[assistant]<think>\n{%"))
    assert only_text(ROW, template="think_answer", chat=True, tokenizer=already).endswith("[assistant]<think>\n")


def test_a_model_without_system_messages_reads_the_text_in_the_first_user_message() -> None:
    tokenizer = byte_tokenizer(chat_template=NO_SYSTEM_CHAT_TEMPLATE)
    prompt = render_prompts([ROW], tokenizer, template="r1_zero", chat=True)[0][0]
    assert prompt.messages == ({"role": "user", "content": f"{TEMPLATES['r1_zero'].system}\n\n2+3?"},)


def test_a_chat_template_that_refuses_everything_is_named() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match=r"tiny/byte-tokenizer: its chat template refuses the messages \(never\)"):
        render_prompts([ROW], tokenizer, chat=True)


def test_chat_without_a_chat_template_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"tiny/byte-tokenizer: .*no chat template.*data\.chat: false.*instruct"):
        render_prompts([ROW], byte_tokenizer(), chat=True)


@pytest.mark.proves("F42", "D37")
def test_prompts_that_are_too_long_are_excluded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "x" * length, "answer": "1"} for length in (5, 50, 7, 51)]
    with caplog.at_level(logging.WARNING):
        prompts, excluded = render_prompts(rows, byte_tokenizer(), template="question_only", max_prompt_tokens=7)
    assert [prompt.index for prompt in prompts] == [0, 2]
    assert [(row.index, row.num_tokens, row.limit_tokens) for row in excluded] == [(1, 50, 7), (3, 51, 7)]
    assert "2 of 4 prompts left out: longer than 7 tokens" in caplog.text


def test_a_limit_that_excludes_every_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"all 1 prompts are longer than max_prompt_tokens \(3\); the shortest has 4"):
        render_prompts([ROW], byte_tokenizer(), template="question_only", max_prompt_tokens=3)


@pytest.mark.parametrize("row", [{"answer": "5"}, {"question": " ", "answer": "5"}, {"question": 5, "answer": "5"}])
def test_a_row_without_a_question_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"row 1: no text in column 'question'.*data\.columns"):
        render_prompts([ROW, row], byte_tokenizer())


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        render_prompts([], byte_tokenizer())
