"""Prompts of TRL's data sets: as text or as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from oncurve.core.errors import DataError
from oncurve.data.chat_template import writes_parts

KEYS = ("messages", "prompt", "chosen", "rejected", "completion")
"""Columns of a row that may hold messages."""


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row's prompt, completion or messages are lists of messages."""
    for key in KEYS:
        value = example.get(key)
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
            return True
    return False


def apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, Any]:
    """The conversations of a row as text, under their names; those of ``messages`` as ``text``.

    A prompt ends where the assistant's turn begins, or inside it where its last message is the assistant's. What
    follows a prompt is the rest of the whole conversation's text. Raises KeyError for a row without conversations, and
    ValueError for a prompt that ends with a system message.
    """
    conversations = {key: example[key] for key in KEYS if key in example}
    if not conversations or ("messages" in conversations and len(conversations) > 1):
        raise KeyError(f"Invalid keys in the example: {set(conversations)}")
    options = {"tools": tools or None, "tokenize": False, **example.get("chat_template_kwargs", {}), **template_kwargs}

    def written(messages: Any, turn: Mapping[str, bool] | None = None) -> str:
        return str(tokenizer.apply_chat_template(messages, **options, **(turn or {})))

    if "prompt" not in conversations:
        return {"text" if key == "messages" else key: written(value) for key, value in conversations.items()}
    first, role = conversations.pop("prompt"), example["prompt"][-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"Invalid role in the last message: {role}")
    is_open = role == "assistant"
    prompt = written(first, {"add_generation_prompt": not is_open, "continue_final_message": is_open})
    whole = {key: written(first + value) for key, value in conversations.items()}
    same = takewhile(lambda signs: len(set(signs)) == 1, zip(prompt, *whole.values(), strict=False))
    prompt = "".join(signs[0] for signs in same)  # some templates begin the turn with more than it has
    label = {"label": example["label"]} if "label" in example else {}
    return {"prompt": prompt, **{key: text[len(prompt) :] for key, text in whole.items()}, **label}


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> Mapping[str, Any]:
    """The same for conversational rows; others as they are."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def _text_of(content: Any, source: str) -> str:
    """The text of a message, which may be given in parts. Raises DataError where there is none, or something else."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not parts:
        raise DataError(f"{source}: a message of its prompt has no text; tool calls are not trained on here")
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{source}: a message of its prompt has a part that is no text; pictures are not trained on here"
        )
    return "".join(texts)


def prompt_text(prompt: Any, tokenizer: Any, options: Mapping[str, Any], *, source: str = "a row") -> str:
    """A prompt as the model reads it, where the assistant's turn begins; text stays as it is.

    A first token that the tokenizer puts before every text is not written twice. Raises DataError for a prompt that is
    neither text nor messages of text, and for a tokenizer without a chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
        raise DataError(f"{source}: its prompt is {prompt!r:.80}. Give text, or a list of messages")
    joined = [{**message, "content": _text_of(message.get("content"), source)} for message in prompt]
    from jinja2.exceptions import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            f"{source}: its prompt is a list of messages, and the tokenizer of {tokenizer.name_or_path!r} has no chat "
            f"template. Take the instruct version of the model, set tokenizer.chat_template, or give text"
        )
    has_parts = joined != list(prompt)
    try:
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True, **options)
        if has_parts and writes_parts(str(text)):  # the template takes text alone
            text = tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, ValueError, TypeError) as error:
        if has_parts:
            return prompt_text(joined, tokenizer, options, source=source)
        raise DataError(
            f"{source}: the chat template of {tokenizer.name_or_path!r} refuses its prompt: {error}"
        ) from None
    first = tokenizer.bos_token
    adds_first = bool(first) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(first) if adds_first else text
