"""Are prompts and ends of turns right for every kind of tokenizer, or does the check say what is not?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from oncurve.data.demonstrations import demonstrated_row, render_demonstrations
from oncurve.data.prompt_check import find_prompt_faults, prompt_report
from oncurve.data.prompts import (
    describe_turn_end,
    find_template,
    render_prompts,
    unnamed_turn_end,
    write_gold,
)

ROW = {"question": "What is 2+3?", "answer": "5", "solution": "2+3=5."}
IM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end_header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end_header|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% endfor %}"
)
BARS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
OPENS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' else '' }}<|message|>"
    "{{ m.content }}<|{{ 'return' if m.role == 'assistant' else 'end' }}|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEAF = IM.replace("for m in messages", "for m in messages if m.role != 'system'")
SHUT = IM.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
NAMES = (
    "<|im_start|>", "<|im_end|>", "<|start|>", "<|end_header|>", "<|eot|>", "<start_of_turn>", "<end_of_turn>",
    "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|channel|>", "<|message|>", "<|return|>",
)  # fmt: skip


def of_bytes(template: str | None = None, *, eos: str = "</s>", puts_bos: bool = False) -> Any:
    """Byte-level BPE, as of Qwen, Llama-3 and gpt-oss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(["<s>", "</s>", *alphabet])}, merges=[])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if puts_bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return finished(made, template, eos)


def of_pieces(template: str | None = None, *, eos: str = "</s>", leads: bool = True) -> Any:
    """Pieces with marked spaces and bytes for what is rare, as of Llama-2, Mistral and Gemma."""
    letters = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters += [chr(code) for code in range(33, 127)]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if leads else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if leads else [])])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return finished(made, template, eos)


def of_words(*, eos: str | None) -> Any:
    """WordPiece in lower case with marks at both ends, as of BERT."""
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *letters, *(f"##{letter}" for letter in letters)]
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    if eos is not None:
        tokenizer.eos_token = eos
    return tokenizer


def finished(made: Tokenizer, template: str | None, eos: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tokenizer.add_tokens([AddedToken(name, special=True) for name in NAMES])
    tokenizer.eos_token = eos
    return tokenizer


LOST = "chat template drops it"
SHUT_THINKING = "the thinking is closed and opened again before the model writes"
NO_PLACE = "no place for <think> where the template puts it"
CANNOT = "the tokenizer cannot write the reference completion as it is"
PLAIN = "the model has a chat template, and the prompt is plain text"
ENDLESS = "no token ends a completion"
CASES: dict[str, tuple[Callable[[], Any], str, Any, str | None]] = {
    "qwen2.5": (lambda: of_bytes(IM, eos="<|im_end|>"), "boxed", "auto", None),
    "qwen2.5 base": (lambda: of_bytes(IM), "boxed", True, None),
    "qwen2.5 base, plain": (lambda: of_bytes(IM), "r1_zero", "auto", None),
    "llama-3": (lambda: of_bytes(HEADERS, eos="<|eot|>", puts_bos=True), "reasoning_answer", "auto", None),
    "llama-2": (lambda: of_pieces(INST), "boxed", "auto", None),
    "gemma": (lambda: of_pieces(NO_SYSTEM, eos="<end_of_turn>", leads=False), "reasoning_answer", "auto", None),
    "phi-3": (lambda: of_pieces(BARS, eos="<|end|>"), "boxed", "auto", None),
    "deepseek-r1": (lambda: of_bytes(OPENS), "think_answer", "auto", None),
    "gpt-oss": (lambda: of_bytes(HARMONY, eos="<|return|>"), "boxed", "auto", None),
    "gpt-oss, thinking tag": (lambda: of_bytes(HARMONY, eos="<|return|>"), "think_answer", "auto", NO_PLACE),
    "without system messages": (lambda: of_bytes(DEAF, eos="<|im_end|>"), "r1_zero", True, LOST),
    "thinking shut": (lambda: of_bytes(SHUT, eos="<|im_end|>"), "think_answer", "auto", SHUT_THINKING),
    "instruct in plain text": (lambda: of_bytes(IM, eos="<|im_end|>"), "boxed", False, PLAIN),
    "wordpiece": (lambda: of_words(eos="[SEP]"), "think_answer", "auto", CANNOT),
    "wordpiece without end": (lambda: of_words(eos=None), "think_answer", "auto", ENDLESS),
}


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_what_the_template_writes_and_its_faults_are_named(name: str) -> None:
    make, template, chat, fault = CASES[name]
    tokenizer, form = make(), find_template(template)
    [prompt], _ = render_prompts([ROW], tokenizer, template=form, chat=chat)
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    known: dict[str, Any] = {"vocabulary": len(tokenizer), "end_ids": ends, "chat": chat}
    faults = [
        finding.what
        for finding in find_prompt_faults([prompt], tokenizer, form, lambda r: write_gold(r, form), **known)
    ]
    assert any(fault in what for what in faults) if fault else faults == []
    assert "a completion ends with" in prompt_report(prompt, tokenizer, ends, write_gold(ROW, form))
    bos = tokenizer.bos_token_id
    assert bos is None or prompt.prompt_ids.count(bos) <= 1
    assert prompt.prompt_ids[-1] not in ends, "a prompt is there to be continued"
    if tokenizer.sep_token_id is not None:
        assert tokenizer.sep_token_id not in prompt.prompt_ids
    if prompt.messages is not None:
        own = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        assert list(prompt.prompt_ids[: len(own)]) == own
        assert tokenizer.decode(prompt.prompt_ids[len(own) :]) in ("", "<think>")


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("wordpiece", "thinking", "without"))])
def test_a_conversation_is_learned_in_the_tokens_that_the_template_writes(name: str) -> None:
    tokenizer = CASES[name][0]()
    talk = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "It is 5."}] * 2
    row = demonstrated_row("row 0", {"messages": talk[:2] if name == "deepseek-r1" else talk})
    assert row is not None
    if name == "deepseek-r1":  # its template writes no thoughts, and opens them for the answer
        return
    [demonstration], _ = render_demonstrations([row], tokenizer, chat=True)
    ids = [*demonstration.prompt.prompt_ids, *demonstration.token_ids]
    whole = tokenizer(
        tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False
    )["input_ids"]  # fmt: skip
    written, learned_text = ("".join(tokenizer.decode(row_ids).split()) for row_ids in (whole, ids))
    assert written.startswith(learned_text)
    assert len(learned_text) > len(written) - 12  # what may stand behind the last end token
    if name not in ("llama-2", "phi-3"):  # whose tokenizer puts a space before every text
        assert ids == whole[: len(ids)]
    learned = [
        tokenizer.decode(demonstration.token_ids[segment.start : segment.end])
        for segment in demonstration.segments
        if segment.is_policy
    ]
    assert len({text[-8:] for text in learned}) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_turn_is_found_where_the_tokenizer_names_another(name: str) -> None:
    make, template, chat, _ = CASES[name]
    tokenizer = make()
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    turn_end = unnamed_turn_end(chat, tokenizer, template, ends)
    assert (turn_end is not None) == (name == "qwen2.5 base")
    if turn_end is not None:
        assert describe_turn_end(tokenizer, turn_end).startswith("<|im_end|> ends a completion")
