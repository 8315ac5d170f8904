"""Which tokens of a row does a supervised stage learn, and what does it say of rows without any?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from oncurve.core.errors import ConfigError, DataError
from oncurve.data.chat_template import prepare_tokenizer
from oncurve.data.demonstrations import (
    Demonstration,
    demonstrated_row,
    render_demonstrations,
    taught_rows,
    taught_text,
)

CHAT = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FORGETFUL = CHAT.replace("{{ message.content }}", "{{ message.content if loop.last else message.content[:1] }}")
TALK = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "It is 5."},
]


def chatting(tokenizer: PreTrainedTokenizerFast, template: str = CHAT) -> Any:
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def rows(*originals: dict[str, Any]) -> list[dict[str, Any]]:
    demonstrated = [demonstrated_row(f"row {index}", row) for index, row in enumerate(originals)]
    return [row if row is not None else original for row, original in zip(demonstrated, originals, strict=True)]


def only(tokenizer: Any, row: dict[str, Any], **options: Any) -> Demonstration:
    demonstrations, excluded = render_demonstrations(rows(row), tokenizer, **options)
    assert not excluded
    return demonstrations[0]


def trained(demonstration: Demonstration, tokenizer: Any) -> list[str]:
    """The texts of the tokens that are learned, one for each turn."""
    if not demonstration.segments:
        return [tokenizer.decode(demonstration.token_ids)]
    return [
        tokenizer.decode(demonstration.token_ids[segment.start : segment.end])
        for segment in demonstration.segments
        if segment.is_policy
    ]


def test_a_prompt_and_a_completion_are_tokenized_apart_and_end(tokenizer: PreTrainedTokenizerFast) -> None:
    demonstration = only(tokenizer, {"prompt": "2+3? a", "completion": "nd 5"}, template="r1_zero")
    assert tokenizer.decode(demonstration.prompt.prompt_ids) == "2+3? a"
    assert demonstration.token_ids == (*tokenizer("nd 5")["input_ids"], tokenizer.eos_token_id)
    assert demonstration.prompt.row["answer"] == ""


def test_a_worked_solution_is_written_in_the_form_of_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"question": "2+3?", "solution": "2+3=5.", "answer": "5"}
    demonstration = only(tokenizer, row, template="think_answer")
    assert demonstration.prompt.text == "User: 2+3?\nAssistant: <think>"
    assert trained(demonstration, tokenizer) == ["2+3=5.</think> <answer> 5 </answer><|end|>"]


def test_everything_that_the_assistant_says_is_learned_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = chatting(tokenizer)
    demonstration = only(tool, {"messages": TALK})
    whole = "[user] How are you?\n[assistant] Fine.<|end|>\n[user] 2+3?\n[assistant] It is 5.<|end|>"
    assert tool.decode([*demonstration.prompt.prompt_ids, *demonstration.token_ids]) == whole
    assert demonstration.prompt.text == "[user] How are you?\n[assistant] "
    assert trained(demonstration, tool) == ["Fine.<|end|>", "It is 5.<|end|>"]
    assert [segment.is_policy for segment in demonstration.segments] == [True, False, True]
    assert [segment.start for segment in demonstration.segments[1:]] == [
        segment.end for segment in demonstration.segments[:-1]
    ]


def test_the_last_message_alone_is_learned_where_that_is_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = chatting(tokenizer)
    demonstration = only(tool, {"messages": TALK}, train_on="last")
    assert demonstration.prompt.text == "[user] How are you?\n[assistant] Fine.<|end|>\n[user] 2+3?\n[assistant] "
    assert trained(demonstration, tool) == ["It is 5.<|end|>"]


def test_prompt_and_completion_as_messages_are_one_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = chatting(tokenizer)
    apart, together = only(tool, {"prompt": TALK[:1], "completion": TALK[1:2]}), only(tool, {"messages": TALK[:2]})
    assert (apart.prompt.prompt_ids, apart.token_ids) == (together.prompt.prompt_ids, together.token_ids)


def test_what_the_assistant_says_in_a_prompt_of_messages_is_not_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = chatting(tokenizer)
    demonstration = only(tool, {"prompt": TALK[:3], "completion": TALK[3:]})
    assert trained(demonstration, tool) == ["It is 5.<|end|>"]
    with pytest.raises(DataError, match=r"row 0: none of the messages is the assistant's"):
        rows({"prompt": TALK[:2], "completion": TALK[2:3]})


def test_a_text_is_learned_beyond_an_end_token_and_a_completion_is_not(tokenizer: PreTrainedTokenizerFast) -> None:
    demonstration = only(tokenizer, {"text": "One.<|end|>Two."})
    assert tokenizer.decode([*demonstration.prompt.prompt_ids, *demonstration.token_ids]) == "One.<|end|>Two.<|end|>"
    assert only(tokenizer, {"prompt": "1?", "completion": "One.<|end|>\n"}).token_ids[-1] == tokenizer.eos_token_id
    with pytest.raises(DataError, match=r"row 0: its completion goes on behind the end token <\|end\|> \('Two.'\)"):
        only(tokenizer, {"prompt": "1?", "completion": "One.<|end|>Two."})
    with pytest.raises(DataError, match=r"row 0: its completion goes on behind"):
        only(chatting(tokenizer), {"messages": [TALK[0], {"role": "assistant", "content": "One.<|end|>Two."}]})


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    import copy

    endless: Any = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="has no end token, so a model could not learn where to stop"):
        only(endless, {"prompt": "1?", "completion": "One."})


def test_a_chat_of_question_and_answer_goes_through_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = chatting(tokenizer)
    demonstration = only(tool, {"question": "2+3?", "answer": "5"}, template="plain", chat=True)
    assert demonstration.prompt.text == "[user] 2+3?\n[assistant] "
    assert trained(demonstration, tool) == ["5<|end|>"]


def test_of_plain_text_everything_behind_its_first_token_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    demonstration = only(tokenizer, {"text": "Once upon"})
    assert tokenizer.decode([*demonstration.prompt.prompt_ids, *demonstration.token_ids]) == "Once upon<|end|>"
    assert len(demonstration.prompt.prompt_ids) == 1


def test_of_a_completion_in_parts_what_a_tool_says_is_not_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"text": "<call>2+3"}, {"text": "5", "learned": False}, {"text": " so 5"}]
    demonstration = only(tokenizer, {"prompt": "2+3?", "parts": parts})
    assert demonstration.prompt.text == "2+3?"
    assert trained(demonstration, tokenizer) == ["<call>2+3", " so 5<|end|>"]
    assert demonstration.text == "<call>2+35 so 5"
    with pytest.raises(DataError, match="goes on behind the end token"):
        only(tokenizer, {"prompt": "2+3?", "parts": [{"text": "5<|end|>"}, *parts]})
    with pytest.raises(ConfigError, match=r"rows of .prompt, parts. are read as they are: set data.chat=false"):
        only(chatting(tokenizer), {"prompt": "2+3?", "parts": parts}, chat=True)


def test_generated_lessons_come_before_generated_demonstrations(tokenizer: PreTrainedTokenizerFast) -> None:
    task = Path(__file__).resolve().parents[2] / "examples" / "maze" / "maze.py"
    taught = taught_rows(str(task), count=10, lesson_fraction=0.4)
    assert ["<tool>" in taught_text(row) for row in taught] == [False] * 4 + [True] * 6
    with pytest.raises(DataError, match=r"data\.task: there is no 'chess'"):
        taught_rows("chess", count=1, lesson_fraction=0.0)


def test_a_row_that_is_too_long_is_left_out_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    both = rows({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 50})
    demonstrations, excluded = render_demonstrations(both, tokenizer, max_tokens=20)
    assert [row.prompt.index for row in demonstrations] == [0]
    assert [(row.index, row.limit_tokens) for row in excluded] == [(1, 20)]
    with pytest.raises(DataError, match="all 1 rows are longer than 2 tokens"):
        render_demonstrations(both[1:], tokenizer, max_tokens=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+3?", "completion": "  "}, r"row 0: 'completion' is empty or no text"),
        ({"completion": "5"}, r"row 0: a completion without a prompt"),
        ({"prompt": 7, "completion": "5"}, r"row 0: the prompt is no text \(7\)"),
        ({"prompt": {"a": "b"}, "completion": "5"}, r"row 0: the prompt is no text"),
        ({"messages": TALK[:1]}, r"row 0: none of the messages is the assistant's"),
        ({"messages": TALK[1:2]}, r"row 0: the assistant speaks first"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " "}]}, r"row 0: a message of the assistant is empty"),
        ({"messages": "hello"}, r"row 0: messages must be a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"row 0: message 0 is .*robot.* role one of 'system'"),
        ({"text": ""}, r"row 0: 'text' is empty"),
        ({"prompt": "2+3?", "parts": "5"}, r"row 0: a part is '5'. Write a list of"),
        ({"prompt": "2+3?", "parts": []}, r"row 0: a part is \[\]"),
        ({"prompt": "2+3?", "parts": [{"text": "5", "learned": False}]}, r"row 0: none of the parts is learned"),
    ],
)
def test_a_row_with_nothing_to_learn_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        demonstrated_row("row 0", row)


def test_a_template_that_writes_earlier_turns_differently_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = chatting(tokenizer, FORGETFUL)
    with pytest.raises(ConfigError, match="leaves out what the user says"):
        only(tool, {"messages": TALK})
    with pytest.raises(ConfigError, match="no template that only adds can be made of"):
        prepare_tokenizer(tool, template="adding", moment=None)


def test_messages_need_a_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        only(tokenizer, {"messages": TALK})
