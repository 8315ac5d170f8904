"""Questions that are lists of chat messages, from every place that rows come from to the tokens of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers_for_tests import CHAT_TEMPLATE, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import oncurve
from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Completion, Group
from oncurve.data.datasets import adapt_python_rows, hold_out, load_rows
from oncurve.data.prompts import render_prompts
from oncurve.observe.record import read_rollouts
from oncurve.observe.run_model import locate

SYSTEM = {"role": "system", "content": "Answer briefly."}
ASKED = [SYSTEM, {"role": "user", "content": "2+3?"}]
WRITTEN = "<s>[system]Answer briefly.</s>[user]2+3?</s>[assistant]"


def text_of(row: dict[str, Any], **options: Any) -> str:
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    return render_prompts([row], tokenizer, template="as_is", **{"chat": True, **options})[0][0].text


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": ASKED, "answer": "5"}, {}),
        ({"messages": ASKED, "answer": "5"}, {"question": "messages"}),
        ({"prompt": ASKED, "answer": "5"}, {}),
        ({"question": np.array(ASKED, dtype=object), "answer": "5"}, {}),
        ({"question": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]}, {}),
        ({"question": [{**message, "name": None} for message in ASKED]}, {}),
    ],
    ids=["question", "column", "prompt", "numpy", "parts", "columns of datasets"],
)
def test_messages_are_rendered_by_the_chat_template(row: dict[str, Any], columns: dict[str, str]) -> None:
    [adapted] = adapt_python_rows([row], columns=columns)
    assert text_of(adapted) == WRITTEN
    assert adapted["question"] == "system: Answer briefly.\nuser: 2+3?"


def test_messages_of_a_file_are_rendered_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": ASKED, "answer": "5"}) + "\n")
    [row] = load_rows("jsonl", path=file)
    assert text_of(row) == WRITTEN


def test_earlier_turns_with_calls_of_tools_stay_as_they_are() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    rows = adapt_python_rows([{"question": [*ASKED, call, {"role": "tool", "content": "5"}]}])
    assert rows[0]["question_messages"][2] == {**call, "content": ""}


def test_conversations_that_end_alike_are_different_questions() -> None:
    rows = adapt_python_rows([{"question": [{"role": "system", "content": str(n)}, ASKED[1]]} for n in range(20)])
    train, held_out = hold_out(rows, count=5)
    assert (len(train), len(held_out)) == (15, 5)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ([], "an empty list"),
        ([{"role": "user"}], "has no text"),
        (["2+3?"], r"message 1 of 'question' is '2\+3\?'\. Write \{role: user"),
        ([*ASKED, {"role": "assistant", "content": "5"}], "the assistant has the last word"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of type 'image'"),
        ({"role": "user", "content": "2+3?"}, "'question' is {'role'"),
        (b"2+3?", "'question' is b'2"),
        (True, "'question' is True"),
    ],
)
def test_what_is_no_conversation_is_refused(question: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        adapt_python_rows([{"question": question}])


def test_messages_need_a_chat_template_and_have_no_place_for_examples() -> None:
    rows = adapt_python_rows([{"question": ASKED, "answer": "5"}])
    with pytest.raises(ConfigError, match="list of messages, and prompts are written as plain text"):
        text_of(rows[0], chat=False)
    with pytest.raises(ConfigError, match=r"data\.few_shot has no place"):
        text_of(rows[0], few_shot=rows)


def test_a_run_trains_on_messages_and_samples_from_them(tmp_path: Path) -> None:
    model_path = locate("embedded")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}Assistant: "
    rows = [{"question": [SYSTEM, {"role": "user", "content": f"{n} and 1?"}], "answer": n + 1} for n in range(12)]
    seen: list[Any] = []

    def reward(completion: str, question: str) -> float:
        seen.append(question)
        return float(len(completion) % 2)

    trainer = oncurve.Trainer(
        model,
        rows,
        reward,
        tokenizer=tokenizer,
        algorithm={"group_size": 2},
        rollouts={"max_completion_tokens": 4},
        evaluation={"num_prompts": 2},
        run={"steps": 1, "prompts_per_step": 2, "folder": str(tmp_path), "name": "chat"},
    )
    folder = trainer.train().folder
    prompts = [group["prompt"] for group in read_rollouts(folder, 1)]
    assert all(
        prompt.startswith("system: Answer briefly.\nuser: ") and prompt.endswith("and 1?\nAssistant: <think>")
        for prompt in prompts
    )
    assert all(question.startswith("system: Answer briefly.\nuser: ") for question in seen)
    [group] = trainer.sample([{"question": ASKED}])
    assert group.prompt.text == "system: Answer briefly.\nuser: 2+3?\nAssistant: <think>"


def test_answers_reach_a_reward_as_they_are() -> None:
    answers = [["25", "25 shells"], {"unit": "m"}, False, True, None, float("nan")]
    rows = adapt_python_rows([{"question": f"{number}?", "answer": answer} for number, answer in enumerate(answers)])
    seen: list[Any] = []

    def reward(completion: str, answer: Any) -> float:
        seen.append(answer)
        return 1.0

    prompts, _ = render_prompts(rows, byte_tokenizer(), template="plain")
    groups = [
        Group(prompt, (Completion(prompt.prompt_ids, (), "x", (), "stop", policy_version=0, index=0),))
        for prompt in prompts
    ]
    oncurve.score(groups, reward)
    assert seen == [*answers[:4], None, None]
