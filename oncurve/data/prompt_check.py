"""Checks of prompts as the model reads them: special tokens, ends of turns, round trips of the reference completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oncurve.data.conversations import MESSAGES
from oncurve.data.data_finding import DataFinding
from oncurve.data.prompts import Template, Tokenizer
from oncurve.errors import shortened
from oncurve.records import Prompt

THINKS_TWICE = re.compile(r"</think>\s*<think>\s*$")
HARMONY = re.compile(r"<\|start\|>assistant\s*<think>\s*$")
"""A header that needs a channel before anything is written."""


def shown_prompt(prompt: Prompt, tokenizer: Tokenizer, end_ids: Sequence[int]) -> str:
    """A prompt with its special tokens as the model reads it, indented, and what ends a completion."""
    text = str(tokenizer.decode(list(prompt.prompt_ids), skip_special_tokens=False))
    ends = ", ".join(repr(str(tokenizer.decode([token], skip_special_tokens=False))) for token in end_ids)
    lines = [f"prompt of row {prompt.index} as the model reads it, {len(prompt.prompt_ids)} tokens:"]
    lines += [f"    {line}" for line in text.splitlines() or [""]]
    lines.append(
        f"a completion ends with {ends or 'a stop string or the limit'}; the reward sees it without its end token"
    )
    return "\n".join(lines)


def find_prompt_faults(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    template: Template,
    gold: Callable[[Mapping[str, Any]], str],
    *,
    vocabulary: int | None,
    end_ids: Sequence[int],
) -> Iterator[DataFinding]:
    """What is wrong with how prompts are written for this model.

    ``vocabulary`` is how many embeddings the model has, ``end_ids`` are the tokens that end a completion.
    """
    yield from _beyond_embeddings(prompts, vocabulary)
    yield from _two_beginnings(prompts, tokenizer)
    yield from _thinking_out_of_place(prompts)
    yield from _lost_system(prompts, template)
    yield from _open_turn(prompts, tokenizer, end_ids)
    yield from _broken_round_trip(prompts, tokenizer, gold)


def _beyond_embeddings(prompts: Sequence[Prompt], vocabulary: int | None) -> Iterator[DataFinding]:
    largest = [max(prompt.prompt_ids, default=0) for prompt in prompts]
    places = [place for place, token in enumerate(largest) if vocabulary is not None and token >= vocabulary]
    if places:
        token, example = largest[places[0]], prompts[places[0]]
        yield DataFinding(
            "error",
            "the prompt has tokens that the model has no embedding for",
            tuple(prompts[place].index for place in places),
            f"row {example.index}: token {token}, and the model has {vocabulary} embeddings",
            "Resize the model: model.resize_token_embeddings(len(tokenizer)), then save both.",
        )


def _two_beginnings(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[DataFinding]:
    bos = tokenizer.bos_token_id
    places = [prompt.index for prompt in prompts if bos is not None and prompt.prompt_ids[:2] == (bos, bos)]
    if places:
        yield DataFinding(
            "warning",
            f"the prompt begins with {tokenizer.bos_token!r} twice",
            tuple(places),
            f"row {places[0]}: the text has one and the tokenizer adds another",
            f"Leave {tokenizer.bos_token!r} out of the questions, or give messages with data.chat=true.",
        )


def _thinking_out_of_place(prompts: Sequence[Prompt]) -> Iterator[DataFinding]:
    for pattern, what in (
        (THINKS_TWICE, "the thinking is closed and opened again before the model writes"),
        (HARMONY, "the model's chat format has no place for <think> where the template puts it"),
    ):
        found = [prompt for prompt in prompts if pattern.search(prompt.text)]
        if found:
            yield DataFinding(
                "error",
                what,
                tuple(prompt.index for prompt in found),
                f"row {found[0].index}: ...{found[0].text[-60:]!r}",
                "Choose a data.template without <think>, such as boxed, or other arguments in data.chat.",
            )


def _lost_system(prompts: Sequence[Prompt], template: Template) -> Iterator[DataFinding]:
    said = " ".join(template.system.split())
    asked = [prompt for prompt in prompts if prompt.messages is not None and MESSAGES not in prompt.row]
    lost = [prompt for prompt in asked if said and said not in " ".join(prompt.text.split())]
    if lost:
        yield DataFinding(
            "error",
            f"the instruction of the template {template.name!r} is not in the prompt: the chat template drops it",
            tuple(prompt.index for prompt in lost),
            f"row {lost[0].index}: {shortened(lost[0].text)}",
            "Choose a data.template that instructs in the user's message, such as boxed or gsm8k.",
        )


def _open_turn(prompts: Sequence[Prompt], tokenizer: Tokenizer, end_ids: Sequence[int]) -> Iterator[DataFinding]:
    """With a chat template: the first special token behind the assistant's words must end a completion."""
    if not prompts or prompts[0].messages is None or not tokenizer.chat_template:
        return
    said = [*prompts[0].messages, {"role": "assistant", "content": "Done."}]
    text = str(tokenizer.apply_chat_template(said, tokenize=False))
    behind = tokenizer(text.rpartition("Done.")[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    first = next((token for token in behind if token in special), None)
    if first is not None and first not in end_ids:
        yield DataFinding(
            "warning",
            "a turn ends with a token that does not end a completion",
            (prompts[0].index,),
            f"the chat template writes {tokenizer.decode([first])!r} behind the assistant's words",
            "Add it to eos_token_id of the model's generation_config.json, or to rollouts.stop.",
        )


def _broken_round_trip(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, gold: Callable[[Mapping[str, Any]], str]
) -> Iterator[DataFinding]:
    """The tokenizer must be able to write the reference completion, or no completion can earn what that earns."""
    broken: list[tuple[Prompt, str]] = []
    for prompt in prompts[:100]:
        text = gold(prompt.row)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        back = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if back.strip() != text.strip():
            broken.append((prompt, back))
    if broken:
        prompt, back = broken[0]
        yield DataFinding(
            "error" if len(broken) == len(prompts[:100]) else "warning",
            "the tokenizer cannot write the reference completion as it is",
            tuple(each.index for each, _ in broken),
            f"row {prompt.index}: {shortened(gold(prompt.row), 60)!r} becomes {shortened(back, 60)!r}",
            "Take a tokenizer that keeps case and spaces, or a reward that reads the text as this one writes it.",
        )
