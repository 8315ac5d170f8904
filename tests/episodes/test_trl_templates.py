"""Which of the chat templates that TRL ships can be played with, read where TRL is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lanes import gate
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oncurve.core.errors import ConfigError
from oncurve.data.chat_template import TemplateRefusal, let_add, write_conversations
from oncurve.episodes.chat_dialect import ChatDialect
from oncurve.episodes.tools import Tool, calculator

FOUND = find_spec("trl")
FOLDER = Path(str(FOUND.origin)).parent / "chat_templates" if FOUND is not None else Path("nowhere")
PATHS = sorted(FOLDER.glob("*.jinja"))
MARK = re.compile(r"<\|[^|<>\s]+\|>|<｜[^<>\s]+?｜>|<\|?[a-z_]+\|?>|<\|[A-Z_]+\|>|</?think>|</?tool_call>")
WITHOUT_TOOLS = (
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "llama3", "llava_next", "phi3", "phi3_5",
    "qwen2_5_vl", "smolvlm",
)  # fmt: skip
"""Their templates write no call of a tool."""
pytestmark = pytest.mark.skipif(not PATHS, reason="TRL with its chat templates is not installed")


def speaking(template: str) -> Any:
    """A tokenizer of bytes with the marks of a template, whose end token is the one behind a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    thoughts = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    names = [
        *sorted(set(MARK.findall(template)) - {"<s>", "</s>", "<pad>"}),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
    ]
    tokenizer.add_tokens([AddedToken(name, special=name not in thoughts) for name in names])
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "SAID"}]
    behind = write_conversations([said], tokenizer, opens_answer=False)[0].rpartition("SAID")[2]
    if end := MARK.search(behind):
        tokenizer.eos_token = end.group()
    return tokenizer


def base_name(path: Path) -> str:
    return path.stem.removesuffix("_training")


@pytest.mark.parametrize("path", gate(PATHS, *PATHS[::3]), ids=lambda path: path.stem)
def test_words_of_an_environment_follow_a_turn(path: Path) -> None:
    tokenizer = speaking(path.read_text(encoding="utf-8"))
    dialect = ChatDialect(tokenizer, has_tools=False, has_observations=True)
    _, text = dialect.encode_observation("Guess again.", ended=True, limit=40)
    assert "Guess again." in text
    assert not text.startswith(tokenizer.eos_token)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_calls_are_read_and_answers_framed_or_the_template_is_refused_in_a_sentence(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = speaking(path.read_text(encoding="utf-8"))
    if base_name(path) in WITHOUT_TOOLS:
        with pytest.raises(ConfigError, match="leaves out calls of tools") as refusal:
            ChatDialect(tokenizer, has_tools=True)
        assert "\n" not in str(refusal.value)
        return
    dialect = ChatDialect(tokenizer, has_tools=True)
    _, text = dialect.encode_answers([("calculator", "the answer is 5")], ended=True, limit=40)
    assert "the answer is 5" in text
    tool = Tool.of(calculator)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "a12345678", **call}]}
    asked = {"role": "user", "content": "2+3?"}
    [prompt] = write_conversations([[asked]], tokenizer, tools=[tool.schema])
    [whole] = write_conversations([[asked, said]], tokenizer, tools=[tool.schema], opens_answer=False)
    if "calculator" in whole[len(prompt) :]:  # else calls are words of the model
        [read] = dialect.read(dialect.without_end(whole[len(prompt) :]), {"calculator": tool})
        assert (read.name, read.arguments) == ("calculator", {"expression": "2+3"})
    assert ("calculator" in prompt) != ("does not tell the model what it may call" in caplog.text)


@pytest.mark.parametrize("path", gate(PATHS, *PATHS[1::3]), ids=lambda path: path.stem)
def test_a_template_is_made_to_add_and_writes_prompts_as_before(path: Path) -> None:
    own, adding = (speaking(path.read_text(encoding="utf-8")) for _ in range(2))
    assert let_add(adding)
    asked, system = {"role": "user", "content": "2+3?"}, {"role": "system", "content": "Be brief."}
    for messages in ([asked], [system, asked]):
        try:
            wanted = write_conversations([messages], own)
        except TemplateRefusal:
            with pytest.raises(TemplateRefusal):
                write_conversations([messages], adding)
        else:
            assert write_conversations([messages], adding) == wanted
