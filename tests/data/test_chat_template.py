"""What a model's chat template is used for, what it is told, and what becomes of its errors."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import BOS, CHAT_TEMPLATE, EOS, byte_tokenizer

from oncurve.core.errors import ConfigError, DataError
from oncurve.data.chat_template import asks_time, prepare_tokenizer, write_conversations
from oncurve.data.demonstrations import demonstrated_row, render_demonstrations
from oncurve.data.prompts import describe_chat, render_prompts

ASKED = [{"role": "user", "content": "2+3?"}]
MOMENT = datetime(2026, 11, 5, 9, 7, 3)
DATED = "{{ strftime_now('%d %b %Y, %-d.%m.%y %H:%M:%S 100%%') }}\n" + CHAT_TEMPLATE
ROWS = [{"question": "2+3?", "answer": "5"}]


def told(template: str, moment: datetime | None = MOMENT, **options: Any) -> str:
    tokenizer = byte_tokenizer(chat_template=template)
    prepare_tokenizer(tokenizer, template=None, moment=moment)
    return write_conversations([ASKED], tokenizer, **options)[0]


def test_a_template_is_told_the_moment_that_belongs_to_the_run() -> None:
    assert told(DATED).startswith(f"{MOMENT.strftime('%d %b %Y, %-d.%m.%y %H:%M:%S')} 100%\n<s>[user]2+3?</s>")
    inside = "{% macro head() %}{{ 'It is ' + strftime_now('%Y-%m-%d') }}{% endmacro %}{{ head() }}" + CHAT_TEMPLATE
    assert told(inside).startswith("It is 2026-11-05<s>")
    defaulted = (
        "{% if not date_string is defined %}{% if strftime_now is defined %}"
        "{% set date_string = strftime_now('%d %b') %}{% endif %}{% endif %}{{ date_string }}" + CHAT_TEMPLATE
    )
    assert told(defaulted).startswith("05 Nov<s>")
    assert told(defaulted, arguments={"date_string": "26 Jul"}).startswith("26 Jul<s>")
    today = datetime.now().strftime("%d %b %Y")
    assert today in told(DATED, moment=None)
    assert not asks_time(byte_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.mark.parametrize("directive", "aAwdbBmyYHIpMSfjUWcxXGuVDFTRe")
def test_every_directive_of_the_clock_is_the_moment(directive: str) -> None:
    assert told(f"{{{{ strftime_now('%{directive}') }}}}|" + CHAT_TEMPLATE).split("|")[0] == MOMENT.strftime(
        f"%{directive}"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"\(roles must alternate\)"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate"),
        ("{{ messages[0].content.parts.text }}", "has no attribute"),
        ("{{ messages[7].content }}", "list object has no element 7"),
        ("{{ nobody.knows }}", "'nobody' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ strftime_now(3) }}", "Error"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{{ bos_token }}", "leaves out what the user says"),
    ],
)
def test_whatever_a_template_raises_is_one_sentence(template: str, reason: str) -> None:
    tokenizer = byte_tokenizer(chat_template=template)
    with pytest.raises(ConfigError, match=reason) as refusal:
        render_prompts(ROWS, tokenizer, template="boxed", chat=True)
    message = str(refusal.value)
    assert message.startswith("tiny/byte-tokenizer: its chat template refuses the messages (")
    assert "\n" not in message


def test_messages_are_given_in_the_form_that_the_template_takes() -> None:
    parts = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
    assert told(parts, opens_answer=False) == "[user]2+3?</s>"
    joined = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '' + c.function.arguments }}"
    tokenizer = byte_tokenizer(chat_template=joined + "{% endfor %}{% endfor %}")
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    assert write_conversations([[*ASKED, called]], tokenizer) == ['2+3?{"a": 1}']
    as_json = byte_tokenizer(chat_template="{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    spoken = [{"role": "user", "content": 'say "é"'}]
    assert write_conversations([spoken], as_json) == [r'"say \"é\""']
    with pytest.raises(ConfigError, match="leaves out what the user says"):  # parts are not written as Python's lists
        told("{% for m in messages %}{% if m.content is not string %}{{ m.content }}{% endif %}{% endfor %}")


def test_auto_takes_the_chat_template_unless_the_prompt_is_made_for_base_models() -> None:
    chat, plain = byte_tokenizer(chat_template=CHAT_TEMPLATE), byte_tokenizer()

    def text(tokenizer: Any, template: str, rows: Any = ROWS) -> str:
        return render_prompts(rows, tokenizer, template=template, chat="auto")[0][0].text

    assert text(chat, "question_only") == "<s>[user]2+3?</s>[assistant]"
    assert text(plain, "question_only") == "2+3?"
    assert text(chat, "as_is") == "2+3?"
    assert text(chat, "r1_zero").endswith("User: 2+3?\nAssistant: <think>")
    assert "in the chat template of m" in str(describe_chat("auto", chat, "boxed", model="m"))
    assert "r1_zero is made for base models" in str(describe_chat("auto", chat, "r1_zero", model="m"))
    assert describe_chat("auto", plain, "boxed", model="m") is None
    assert describe_chat(True, chat, "boxed", model="m") is None


def test_auto_reads_off_a_file_whether_it_lays_out_plain_text(tmp_path: Path) -> None:
    chat = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    (tmp_path / "laid_out.txt").write_text("Problem: {question}\nSolution:", encoding="utf-8")
    (tmp_path / "asks.txt").write_text("{question} Think first.", encoding="utf-8")
    laid_out, _ = render_prompts(ROWS, chat, template=str(tmp_path / "laid_out.txt"), chat="auto")
    asks, _ = render_prompts(ROWS, chat, template=str(tmp_path / "asks.txt"), chat="auto")
    assert (laid_out[0].text, asks[0].text) == (
        "Problem: 2+3?\nSolution:",
        "<s>[user]2+3? Think first.</s>[assistant]",
    )


def test_auto_refuses_questions_that_are_rendered_already() -> None:
    chat = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    rendered = [{"question": "[user]2+3?</s>[assistant]", "answer": "5"}]
    with pytest.raises(DataError, match=r"its question holds '</s>'.* rendered already\. Set data\.template=as_is"):
        render_prompts(rendered, chat, template="boxed", chat="auto")
    assert render_prompts(rendered, chat, template="as_is", chat="auto")[0][0].text == rendered[0]["question"]


def test_a_template_of_ones_own_is_read_and_tried(tmp_path: Path) -> None:
    tokenizer, path = byte_tokenizer(), tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*own\.jinja cannot be read"):
        prepare_tokenizer(tokenizer, template=str(path), moment=None)
    path.write_text("{{ messages[3].content }}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own\.jinja cannot write a message"):
        prepare_tokenizer(tokenizer, template=str(path), moment=None)
    with pytest.raises(ConfigError, match="no template that only adds can be made of"):
        prepare_tokenizer(byte_tokenizer(), template="adding", moment=None)
    path.write_text(CHAT_TEMPLATE, encoding="utf-8")
    prepare_tokenizer(tokenizer, template=str(path), moment=None)
    assert render_prompts(ROWS, tokenizer, template="question_only", chat="auto")[0][0].text.startswith("<s>[user]")


ENDINGS = {  # what stands behind a turn, with the tokenizer's end token another one
    "as Qwen2.5": "<|im_end|>\n",
    "as Gemma": "<end_of_turn>\n",
    "as Phi-3": "<|end|>\n",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_demonstrations_end_turns_as_the_template_does(ending: str) -> None:
    end = ending.strip()
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE.replace("</s>", ending.replace("\n", "\\n")))
    tokenizer.chat_template = CHAT_TEMPLATE.replace("</s>", ending)
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    talk = [message for _ in range(3) for message in (*ASKED, {"role": "assistant", "content": "It is 5."})]
    row = demonstrated_row("row 0", {"messages": talk})
    assert row is not None
    [demonstration], _ = render_demonstrations([row], tokenizer)
    whole = tokenizer.apply_chat_template(talk, return_dict=False)
    ids = [*demonstration.prompt.prompt_ids, *demonstration.token_ids]
    assert ids == whole[: len(ids)]
    assert ids[-1] == tokenizer.convert_tokens_to_ids(end)
    assert EOS not in ids
    assert ids[0] == BOS
    [plain], _ = render_demonstrations([{**ROWS[0], "solution": "2+3=5."}], tokenizer, template="boxed", chat="auto")
    assert plain.token_ids[-1] == tokenizer.convert_tokens_to_ids(end)
    assert plain.token_ids.count(EOS) == 0


def test_thoughts_of_demonstrations_stay_with_a_template_that_only_adds() -> None:
    opens = CHAT_TEMPLATE.replace("[assistant]{%", "[assistant]<think>\n{%").replace(
        "{{ message.content }}", "{{ message.content.split('</think>')[-1] }}"
    )
    talk = [*ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>5"}] * 2
    row = demonstrated_row("row 0", {"messages": talk})
    assert row is not None
    tokenizer = byte_tokenizer(chat_template=opens)
    with pytest.raises(ConfigError, match=r"Set data\.chat_template=adding"):
        render_demonstrations([row], tokenizer)
    prepare_tokenizer(tokenizer, template="adding", moment=None)
    [demonstration], _ = render_demonstrations([row], tokenizer)
    text = tokenizer.decode([*demonstration.prompt.prompt_ids, *demonstration.token_ids])
    assert text == "<s>[user]2+3?</s>[assistant]<think>\nhm\n</think>5</s>" + (
        "[user]2+3?</s>[assistant]<think>\nhm\n</think>5</s>"
    )


def test_a_question_of_messages_and_a_completion_as_text_stay_as_they_are_under_auto() -> None:
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    row = demonstrated_row("row 0", {"prompt": "2+3=", "completion": "5"})
    assert row is not None
    [demonstration], _ = render_demonstrations([row], tokenizer, chat="auto")
    assert demonstration.prompt.text == "2+3="
    assert demonstration.token_ids[-1] == EOS


def test_prompts_that_are_too_long_because_of_tools_say_so() -> None:
    tells = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHAT_TEMPLATE
    tokenizer = byte_tokenizer(chat_template=tells)
    schema = {"type": "function", "function": {"name": "f", "description": "Long. " * 40, "parameters": {}}}
    options: dict[str, Any] = {"template": "question_only", "chat": "auto", "max_prompt_tokens": 60}
    with pytest.raises(DataError, match="use fewer tools or shorter docstrings"):
        render_prompts(ROWS, tokenizer, **options, tools_of=lambda row: [schema])
    assert len(render_prompts(ROWS, tokenizer, **options, tools_of=lambda row: None)[0]) == 1
