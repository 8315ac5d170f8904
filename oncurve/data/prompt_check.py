"""Checks of prompts as the model reads them: special tokens, ends of turns, round trips of the reference completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oncurve.core.records import Prompt
from oncurve.data.chat_template import MESSAGES, Chat, missing_header
from oncurve.data.data_finding import DataFinding
from oncurve.data.prompts import Template, Tokenizer
from oncurve.wording import shortened

THINKS_TWICE = re.compile(r"</think>\s*<think>\s*$")
HARMONY = re.compile(r"<\|start\|>assistant\s*<think>\s*$")
"""A header that needs a channel before anything is written."""


def prompt_report(prompt: Prompt, tokenizer: Tokenizer, end_ids: Sequence[int], gold: str | None = None) -> str:
    """A prompt with its special tokens as the model reads it, what ends a completion, and what the reward sees of one.

    ``gold`` is the reference completion, which is shown as the tokenizer spells it.
    """
    text = str(tokenizer.decode(list(prompt.prompt_ids), skip_special_tokens=False))
    ends = ", ".join(repr(str(tokenizer.decode([token], skip_special_tokens=False))) for token in end_ids)
    lines = [f"prompt of row {prompt.index} as the model reads it, {len(prompt.prompt_ids)} tokens:"]
    lines += [f"    {line}" for line in text.splitlines() or [""]]
    lines.append(
        f"a completion ends with {ends or 'a stop string or the limit'}; the reward sees it without its end token"
    )
    if gold is not None:
        lines.append(f"such as {shortened(_spelled(gold, tokenizer), 300)!r}")
    return "\n".join(lines)


def demonstration_report(prompt: Prompt, token_ids: Sequence[int], tokenizer: Tokenizer, end_ids: Sequence[int]) -> str:
    """The same of a prompt whose completion stands in the data."""
    learned = str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
    return f"{prompt_report(prompt, tokenizer, end_ids)}\nit is shown the completion {shortened(learned, 300)!r}"


def find_prompt_faults(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    template: Template,
    gold: Callable[[Mapping[str, Any]], str],
    *,
    vocabulary: int | None,
    end_ids: Sequence[int] | None,
    chat: Chat = "auto",
) -> Iterator[DataFinding]:
    """Faults in how prompts are written for this model.

    ``vocabulary`` is how many embeddings the model has, ``end_ids`` are the tokens that end a completion; None where
    nobody knows.
    """
    yield from _beyond_embeddings(prompts, vocabulary)
    yield from _two_beginnings(prompts, tokenizer)
    yield from _misplaced_thinking(prompts)
    yield from _lost_system(prompts, template)
    yield from _plain_for_chat(prompts, tokenizer, template, chat)
    if end_ids is not None:
        yield from _without_ends(prompts, end_ids)
    yield from _unopened_answer(prompts, tokenizer, chat)
    yield from _broken_round_trip(prompts, tokenizer, gold)


def _beyond_embeddings(prompts: Sequence[Prompt], vocabulary: int | None) -> Iterator[DataFinding]:
    largest = [max(prompt.prompt_ids, default=0) for prompt in prompts]
    indices = [index for index, token in enumerate(largest) if vocabulary is not None and token >= vocabulary]
    if indices:
        token, example = largest[indices[0]], prompts[indices[0]]
        yield DataFinding(
            "error",
            "the prompt has tokens that the model has no embedding for",
            tuple(prompts[index].index for index in indices),
            f"row {example.index}: token {token}, and the model has {vocabulary} embeddings",
            "Resize the model: model.resize_token_embeddings(len(tokenizer)), then save both.",
        )


def _two_beginnings(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[DataFinding]:
    bos = tokenizer.bos_token_id
    indices = [prompt.index for prompt in prompts if bos is not None and prompt.prompt_ids[:2] == (bos, bos)]
    if indices:
        yield DataFinding(
            "warning",
            f"the prompt begins with {tokenizer.bos_token!r} twice",
            tuple(indices),
            f"row {indices[0]}: the text has one and the tokenizer adds another",
            f"Leave {tokenizer.bos_token!r} out of the questions, or give messages with data.chat=true.",
        )


def _misplaced_thinking(prompts: Sequence[Prompt]) -> Iterator[DataFinding]:
    for pattern, what in (
        (THINKS_TWICE, "the thinking is closed and opened again before the model writes"),
        (HARMONY, "the model's chat format has no place for <think> where the template puts it"),
    ):
        affected = [prompt for prompt in prompts if pattern.search(prompt.text)]
        if affected:
            yield DataFinding(
                "error",
                what,
                tuple(prompt.index for prompt in affected),
                f"row {affected[0].index}: ...{affected[0].text[-60:]!r}",
                "Choose a data.template without <think>, such as boxed, or other arguments in data.chat.",
            )


def _lost_system(prompts: Sequence[Prompt], template: Template) -> Iterator[DataFinding]:
    own = [prompt for prompt in prompts if prompt.messages is not None and MESSAGES in prompt.row]
    instructed = [prompt for prompt in prompts if prompt.messages is not None and MESSAGES not in prompt.row]
    for those, what, remedy in (
        (instructed, f"the instruction of the template {template.name!r}",
         "Choose a data.template that instructs in the user's message, such as boxed or gsm8k."),
        (own, "a system message of the row", "Put its text into the user's first message."),
    ):  # fmt: skip
        lost = [prompt for prompt in those if not all(_is_in(text, prompt.text) for text in _systems(prompt, template))]
        if lost:
            yield DataFinding(
                "error",
                f"{what} is not in the prompt: the chat template drops it",
                tuple(prompt.index for prompt in lost),
                f"row {lost[0].index}: {shortened(lost[0].text)}",
                remedy,
            )


def _systems(prompt: Prompt, template: Template) -> list[str]:
    """The system messages of a prompt."""
    if MESSAGES not in prompt.row:
        return [template.system]
    return [str(message["content"]) for message in prompt.row[MESSAGES] if message["role"] in ("system", "developer")]


def _is_in(part: str, text: str) -> bool:
    return " ".join(part.split()) in " ".join(text.split())


def _plain_for_chat(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, template: Template, chat: Chat
) -> Iterator[DataFinding]:
    if prompts and chat is False and tokenizer.chat_template and not template.is_for_base_models:
        yield DataFinding(
            "warning",
            "the model has a chat template, and the prompt is plain text (data.chat is false)",
            tuple(prompt.index for prompt in prompts),
            f"row {prompts[0].index}: {shortened(prompts[0].text)}",
            "Leave data.chat out for an instruct model; a base model may have a template that it was not trained on.",
        )


def _without_ends(prompts: Sequence[Prompt], end_ids: Sequence[int]) -> Iterator[DataFinding]:
    if prompts and not end_ids:
        yield DataFinding(
            "warning",
            "no token ends a completion, so that each goes on to a stop string or the limit",
            tuple(prompt.index for prompt in prompts),
            "the tokenizer has no end token, and the model's generation_config.json names none",
            "Set rollouts.stop, or take a tokenizer with an end token.",
        )


def _unopened_answer(prompts: Sequence[Prompt], tokenizer: Tokenizer, chat: Chat) -> Iterator[DataFinding]:
    """A chat template that knows no add_generation_prompt leaves the assistant's header to the model."""
    if prompts and prompts[0].messages is not None and (header := missing_header(tokenizer, chat, prompts[0].messages)):
        yield DataFinding(
            "warning",
            "the prompt does not open the assistant's turn, which the model would have to do itself",
            tuple(prompt.index for prompt in prompts),
            f"the chat template writes {header!r} before an assistant's words, and nothing for add_generation_prompt",
            "Set data.chat_template to a template that does, or data.chat: false.",
        )


def _broken_round_trip(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, gold: Callable[[Mapping[str, Any]], str]
) -> Iterator[DataFinding]:
    """The tokenizer must be able to write the reference completion, or no completion can earn what that earns."""
    broken: list[tuple[Prompt, str]] = []
    for prompt in prompts[:100]:
        text = gold(prompt.row)
        back = _spelled(text, tokenizer)
        if back.strip() != text.strip():
            broken.append((prompt, back))
    if broken:
        prompt, back = broken[0]
        yield DataFinding(
            "error" if len(broken) == len(prompts[:100]) else "warning",
            "the tokenizer cannot write the reference completion as it is",
            tuple(prompt.index for prompt, _ in broken),
            f"row {prompt.index}: {shortened(gold(prompt.row), 60)!r} becomes {shortened(back, 60)!r}",
            "Take a tokenizer that keeps case and spaces, or a reward that reads the text as this one writes it.",
        )


def _spelled(text: str, tokenizer: Tokenizer) -> str:
    """A text as this tokenizer writes it, and as a reward sees it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
