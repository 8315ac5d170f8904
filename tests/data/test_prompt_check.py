"""Prompts that a model could not read, or a policy could not answer, as `oncurve check` shows and refuses them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_for_tests import BOS, CHAT_TEMPLATE, EOS, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from oncurve.data.prompt_check import find_prompt_faults, prompt_report
from oncurve.data.prompts import find_template, render_prompts, write_gold

ROW = {"question": "2+3?", "answer": "5", "solution": "2+3=5."}


def faults(template: str, *, tokenizer: Any = None, chat: Any = False, row: Any = ROW, **facts: Any) -> list[str]:
    tokenizer, form = tokenizer or byte_tokenizer(), find_template(template)
    prompts, _ = render_prompts([row], tokenizer, template=form, chat=chat)
    known = {"vocabulary": None, "end_ids": (EOS,), **facts}
    findings = find_prompt_faults(prompts, tokenizer, form, lambda row: write_gold(row, form), **known)
    return [finding.what for finding in findings]


def words_only() -> PreTrainedTokenizerFast:
    """A tokenizer that keeps words and loses what stands between them."""
    words = ["[UNK]", "think", "answer", "<", "/", ">", "2", "+", "3", "=", "5", "."]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[UNK]", pad_token="[UNK]")


def test_ordinary_prompts_have_no_fault() -> None:
    chat = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    assert faults("boxed") == faults("think_answer") == []
    assert faults("reasoning_answer", tokenizer=chat, chat=True) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"template": "boxed", "vocabulary": 50}, "tokens that the model has no embedding for"),
        (
            {"template": "as_is", "tokenizer": byte_tokenizer(adds_bos=True), "row": {**ROW, "question": "<s>2+3?"}},
            "the prompt begins with '<s>' twice",
        ),
        (
            {
                "template": "think_answer",
                "chat": True,
                "tokenizer": byte_tokenizer(
                    chat_template=CHAT_TEMPLATE.replace("[assistant]{%", "[assistant]<think>\n\n</think>\n\n{%")
                ),
            },
            "the thinking is closed and opened again",
        ),
        (
            {
                "template": "r1_zero",
                "chat": True,
                "tokenizer": byte_tokenizer(
                    chat_template=CHAT_TEMPLATE.replace("for message in messages", "for message in messages[1:]")
                ),
            },
            "the chat template drops it",
        ),
        (
            {
                "template": "boxed",
                "chat": True,
                "tokenizer": byte_tokenizer(chat_template=CHAT_TEMPLATE.partition("{% if add_gen")[0]),
            },
            "does not open the assistant's turn",
        ),
        ({"template": "think_answer", "tokenizer": words_only()}, "cannot write the reference completion"),
    ],
)
def test_each_fault_of_a_prompt_is_named(options: dict[str, Any], what: str) -> None:
    assert any(what in fault for fault in faults(**options))


def test_a_prompt_is_shown_as_the_model_reads_it() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    prompts, _ = render_prompts([ROW], tokenizer, template="think_answer")
    report = prompt_report(prompts[0], tokenizer, (EOS,))
    assert "    <s>User: 2+3?\n    Assistant: <think>" in report
    assert "a completion ends with '</s>'" in report
    assert prompts[0].prompt_ids[0] == BOS
