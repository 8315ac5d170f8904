"""Are the conversations of a row written as TRL writes them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.run_model import EMBEDDED
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.run.rendered import check_thinking
from oncurve.trl import maybe_apply_chat_template
from oncurve.trl.chat import prompt_text

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if not (loop.last and continue_final_message) %}</{{ m.role }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ begun }}{% endif %}"
)
ASK, SAY = {"role": "user", "content": "How much?"}, {"role": "assistant", "content": "Four."}
WRONG = {"role": "assistant", "content": "Five."}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASK, SAY]},
    "a prompt": {"prompt": [ASK]},
    "a prompt that begins the answer": {"prompt": [ASK, SAY]},
    "a prompt after a tool": {"prompt": [ASK, SAY, {"role": "tool", "content": "4"}]},
    "a prompt and its completion": {"prompt": [ASK], "completion": [SAY], "gold": 4},
    "a begun answer and its completion": {"prompt": [ASK, SAY], "completion": [ASK, SAY]},
    "a preference": {"prompt": [ASK], "chosen": [SAY], "rejected": [WRONG]},
    "a preference without a prompt": {"chosen": [ASK, SAY], "rejected": [ASK, WRONG]},
    "a judged completion": {"prompt": [ASK], "completion": [SAY], "label": True},
    "options of the row": {"prompt": [ASK], "completion": [SAY], "chat_template_kwargs": {"begun": "<think>"}},
    "text": {"prompt": "How much?"},
}


def tokenizer_with_template() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_row_is_written_as_trl_writes_it(row: dict[str, Any]) -> None:
    theirs = pytest.importorskip("trl.data_utils", reason="TRL is not installed: it comes with the extra trl")
    tokenizer = tokenizer_with_template()
    assert maybe_apply_chat_template(row, tokenizer) == theirs.maybe_apply_chat_template(row, tokenizer)


@pytest.mark.parametrize(
    "row", [{"prompt": [{"role": "system", "content": "Be brief."}]}, {"messages": [ASK], **ROWS["a prompt"]}]
)
def test_a_row_that_trl_refuses_is_refused_alike(row: dict[str, Any]) -> None:
    theirs = pytest.importorskip("trl.data_utils", reason="TRL is not installed: it comes with the extra trl")
    tokenizer = tokenizer_with_template()
    with pytest.raises((KeyError, ValueError)) as refused:
        theirs.maybe_apply_chat_template(row, tokenizer)
    with pytest.raises(type(refused.value)):
        maybe_apply_chat_template(row, tokenizer)


def test_the_thinking_of_every_template_of_trl_is_cut() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    templates = sorted(
        (Path(trl.__file__).parent / "chat_templates").glob("*[!g].jinja")
    )  # without those for _training
    tokenizer, config = tokenizer_with_template(), load_config(find_recipe("word_problems"))
    for path in templates:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        check_thinking(config, tokenizer)
    assert len(templates) >= 30
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content | default('') }} So: {{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"writes thinking as 'assistant: T6173'.*cannot be told from the answer"):
        check_thinking(config, tokenizer)


@pytest.mark.parametrize("content", ["{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"])
def test_a_content_in_parts_of_text_is_its_text(content: str) -> None:
    tokenizer = tokenizer_with_template()
    tokenizer.chat_template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{content}{{% endfor %}}"
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "much?"}]
    assert prompt_text([{"role": "user", "content": parts}], tokenizer, {}) == "<user>How much?"
    with pytest.raises(DataError, match="a part that is no text; pictures are not trained on here"):
        prompt_text([{"role": "user", "content": [{"type": "image"}]}], tokenizer, {})
