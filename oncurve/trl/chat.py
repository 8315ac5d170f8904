"""Prompts of TRL's data sets: as text or as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.errors import DataError


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row's prompt, completion or messages are lists of messages."""
    for key in ("prompt", "chosen", "rejected", "completion", "messages"):
        value = example.get(key)
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
            return True
    return False


def apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, str]:
    """The prompt, or the messages, of a conversational row as text."""
    if "messages" in example:
        return {"text": tokenizer.apply_chat_template(example["messages"], tokenize=False, **template_kwargs)}
    return {"prompt": prompt_text(example["prompt"], tokenizer, template_kwargs)}


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> Mapping[str, Any]:
    """The same for conversational rows; others as they are."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def prompt_text(prompt: Any, tokenizer: Any, options: Mapping[str, Any], *, place: str = "a row") -> str:
    """A prompt as the model reads it, where the assistant's turn begins; text stays as it is.

    A first token that the tokenizer puts before every text is not written twice. Raises DataError for a prompt that is
    neither text nor messages of text, and for a tokenizer without a chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
        raise DataError(f"{place}: its prompt is {prompt!r:.80}. Give text, or a list of messages")
    if any(not isinstance(message.get("content"), str) for message in prompt):
        raise DataError(
            f"{place}: a message of its prompt has no text; pictures and tool calls are not trained on here"
        )
    from jinja2.exceptions import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            f"{place}: its prompt is a list of messages, and the tokenizer of {tokenizer.name_or_path!r} has no chat "
            f"template. Take the instruct version of the model, set tokenizer.chat_template, or give text"
        )
    try:
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, ValueError, TypeError) as error:
        raise DataError(
            f"{place}: the chat template of {tokenizer.name_or_path!r} refuses its prompt: {error}"
        ) from None
    first = tokenizer.bos_token
    adds_first = bool(first) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(first) if adds_first else text
