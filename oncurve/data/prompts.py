"""Prompt templates: from a row to the text and tokens that the policy reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import SOURCE_ROW, Prompt
from oncurve.data.chat_template import (
    MESSAGES,
    Chat,
    Message,
    TemplateRefusal,
    Tokenizer,
    special_ids,
    template_arguments,
    turn_end,
    write_chats,
    write_conversations,
)
from oncurve.wording import did_you_mean, listed

logger = logging.getLogger(__name__)

ToolsOf = Callable[[Mapping[str, Any]], "list[Mapping[str, Any]] | None"]
"""The schemas of the tools of a row; None or empty for none."""

_PLACEHOLDER = re.compile(r"\{(question|answer|solution|user)\}")
_UNKNOWN = re.compile(r"(?<![\w}\\^])\{(?!(?:question|answer|solution)\})[^\W\d]\w*\}")
"""A placeholder that a template does not know, other than the argument of a LaTeX command."""
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
"""Marks for a calculator in the solutions of GSM8K: ``<<48/2=24>>``."""


@dataclass(frozen=True, slots=True)
class Template:
    r"""The words around a question, and the form of the completion that they ask for.

    Example: ``Template(name="plain", turn="User: {user}\nAssistant:", completion=" {solution} #### {answer}")``
    writes "User: 2+3?\nAssistant:". As chat, ``system`` and ``user`` become messages, ``turn`` is left to the
    tokenizer's chat template, and the assistant's turn begins with ``opening``.
    """

    name: str
    system: str = ""
    """The system message; "" for none."""
    user: str = "{question}"
    """The user's message."""
    turn: str = "{user}"
    """One exchange as plain text, up to the assistant's first word."""
    opening: str = ""
    """The first characters of the assistant's turn; they belong to the prompt."""
    completion: str = " {solution} \\boxed{{answer}}"
    """A perfect completion, for few-shot examples and for checking that the reward accepts it."""
    keeps_space: bool = False
    """White space around a question stays."""
    is_for_base_models: bool = False
    """It lays out plain text, so that the model's chat template is used only where the recipe says so."""

    def __post_init__(self) -> None:
        for part in ("system", "user", "turn", "opening"):
            for name in ("answer", "solution"):
                if f"{{{name}}}" in getattr(self, part):
                    raise ConfigError(
                        f"template {self.name!r}: {{{name}}} in its {part} would show the model what it has to find. "
                        f"Remove it."
                    )
        if "{question}" not in self.user or "{user}" not in self.turn:
            raise ConfigError(f"template {self.name!r} has no place for the question. Write {{question}} into it.")


_THINK_ANSWER = "{solution}</think> <answer> {answer} </answer>"
_SPACED_THINK_ANSWER = " {solution} </think> <answer> {answer} </answer>"
_BOXED = " {solution}\n\\boxed{{answer}}"

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template(
            name="r1_zero",
            system=(
                "This is a dialogue of a User with an Assistant. For each question of the User, the Assistant reasons "
                "in private before it gives its answer. It writes the reasoning inside <think> </think> and the answer "
                "inside <answer> </answer>, like this: <think> the reasoning </think> <answer> the answer </answer>."
            ),
            turn="User: {user}\nAssistant:",
            opening=" <think>",
            completion=_SPACED_THINK_ANSWER,
            is_for_base_models=True,
        ),
        Template(name="think_answer", turn="User: {user}\nAssistant:", opening=" <think>", completion=_THINK_ANSWER),
        Template(
            name="boxed",
            user="{question}\nWork it out step by step and put the final answer inside \\boxed{}.",
            turn="Question: {user}\nSolution:",
            completion=_BOXED,
        ),
        Template(
            name="gsm8k",
            user='{question}\nWork it out step by step. The last line is "####" and the answer as a number.',
            turn="Question: {user}\nSolution:",
            completion=" {solution}\n#### {answer}",
        ),
        Template(
            name="reasoning_answer",
            system=(
                "Reply in exactly this form:\n"
                "<reasoning>\nyour steps\n</reasoning>\n<answer>\nthe answer alone\n</answer>"
            ),
            turn="User: {user}\nAssistant:",
            completion="\n<reasoning>\n{solution}\n</reasoning>\n<answer>\n{answer}\n</answer>",
        ),
        Template(name="question_only", completion=_BOXED),
        Template(name="as_is", completion=_BOXED, keeps_space=True, is_for_base_models=True),
        Template(name="plain", completion="{answer}"),
        Template(
            name="tool_answer",
            turn="User: {user}\nAssistant:",
            completion=" <answer>{answer}</answer>",
        ),
        Template(
            name="complete_program",
            user="Complete this Python function. Answer with the whole program in one fenced block.\n\n"
            "```python\n{question}\n```",
            turn="Question: {user}\nSolution:",
            completion="\n```python\n{answer}\n```",
        ),
        Template(name="program", turn="User: {user}\nAssistant:", completion=" ```python\n{answer}\n```"),
    )
}
"""The templates that a recipe can name. The wording is ours: for numbers that compare with a published prompt,
give that prompt as a text file."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row that is not trained on because its prompt is too long."""

    index: int
    """Place of the row, counted from 0."""
    num_tokens: int
    limit_tokens: int


def find_template(name: str) -> Template:
    r"""A template by its name, or made from a text file with ``{question}`` in it.

    The form of completion that a file asks for is read off its words: tags, ``####``, else ``\boxed{}``.

    Raises ConfigError if there is neither such a name nor such a file.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"data.template: there is no {name!r}. {did_you_mean(name, TEMPLATES)}Use one of {listed(TEMPLATES)}, "
            f"or the path of a text file with {{question}} in it."
        )
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.template: {path} is not UTF-8 text. Save it as UTF-8.") from error
    if unknown := _UNKNOWN.search(text):
        is_near = unknown[0].lower() == "{question}"
        raise ConfigError(
            f"data.template: {path} holds {unknown[0]}, and only {{question}} is filled in. "
            f"{'Write it in lower case' if is_near else 'Remove it'}, or, to show "
            f"the model these very characters, write it with a space: {{ {unknown[0][1:-1]} }}"
        )
    completion = _BOXED
    if "<answer>" in text:
        completion = _SPACED_THINK_ANSWER
    elif "####" in text:
        completion = TEMPLATES["gsm8k"].completion
    is_laid_out = text.rstrip().endswith((":", "<think>"))
    return Template(name=path.stem, user=text, completion=completion, is_for_base_models=is_laid_out)


def chosen_chat(chat: Chat, tokenizer: Tokenizer, template: str | Template) -> bool | Mapping[str, Any]:
    """The value of ``data.chat`` for a model: "auto" takes its chat template, if it has one.

    A template made for base models lays out plain text, and with it auto takes none.
    """
    if not isinstance(chat, str):
        return chat
    chosen = find_template(template) if isinstance(template, str) else template
    return bool(tokenizer.chat_template) and not chosen.is_for_base_models


def unnamed_turn_end(chat: Chat, tokenizer: Tokenizer, template: str, end_ids: Collection[int]) -> int | None:
    """The token with which the chat template ends the assistant's turn, if it is none of ``end_ids``; None without one.

    A tokenizer of a base model often names another: that of Qwen2.5 ends texts with <|endoftext|>, its template turns
    with <|im_end|>.
    """
    chosen = chosen_chat(chat, tokenizer, template)
    if chosen is False or not tokenizer.chat_template:
        return None
    try:
        end = turn_end(tokenizer, chosen, [{"role": "user", "content": "Hello"}])
    except TemplateRefusal:  # which is said when the prompts are written
        return None
    return None if end in end_ids else end


def describe_turn_end(tokenizer: Tokenizer, end: int) -> str:
    """A sentence on a token that ``unnamed_turn_end`` found."""
    written = str(tokenizer.decode([end], skip_special_tokens=False))
    return (
        f"{written} ends a completion: the chat template ends a turn with it, though neither the tokenizer nor "
        f"generation_config.json names it as an end token. The trained model's generation_config.json will"
    )


def describe_chat(chat: Chat, tokenizer: Tokenizer, template: str, *, model: str) -> str | None:
    """A sentence on what "auto" chose; None where nothing was chosen."""
    if not isinstance(chat, str) or not tokenizer.chat_template:
        return None
    if chosen_chat(chat, tokenizer, template):
        return f"prompts: in the chat template of {model} (data.chat=false: plain text)"
    return (
        f"prompts: plain text, since data.template {template} is made for base models (data.chat=true: in the chat "
        f"template of {model})"
    )


def write_gold(row: Mapping[str, Any], template: Template) -> str:
    """The completion that a perfect policy could write for a row, from its worked solution and answer.

    GSM8K's calculator marks (``<<48/2=24>>``) are left out. Without a "solution" column only the form and the answer
    remain.
    """
    solution = CALCULATOR_MARK.sub("", str(row.get("solution") or "")).strip()
    return _filled(template.completion, {"solution": solution, "answer": str(row["answer"])})


def render_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    template: str | Template = "r1_zero",
    chat: Chat = False,
    few_shot: Sequence[Mapping[str, Any]] = (),
    max_prompt_tokens: int | None = None,
    tools_of: ToolsOf | None = None,
) -> tuple[list[Prompt], list[Excluded]]:
    """The prompts of some rows, and those left out because they are longer than ``max_prompt_tokens``.

    Plain text is tokenized with the special tokens that the tokenizer puts in front, for example BOS, and without an
    end token behind. With ``chat``, which may hold arguments of the chat template, that template writes every special
    token and no other is added; if it has no place for a system message, that text opens the first user message. "auto"
    is as ``chosen_chat`` says. A row that came with messages keeps them. ``few_shot`` are rows whose questions and gold
    completions come first, as earlier exchanges. ``Prompt.index`` is the index in ``rows``. ``tools_of`` gives the
    schemas of the tools that the chat template tells the model of, by the row.

    Raises ConfigError for an unknown template or a missing chat template, DataError if no prompt is left.
    """
    if not rows:
        raise DataError("there are no rows to make prompts of. Check data.path and data.split.")
    if isinstance(template, str):
        template = find_template(template)
    if chat == "auto" and (chat := chosen_chat(chat, tokenizer, template)):
        _refuse_rendered(rows, tokenizer)
    conversations: list[list[Message]] | list[None]
    if chat:
        conversations = [_messages(row, number, template, few_shot) for number, row in enumerate(rows)]
        tools = [tools_of(row) if tools_of else None for row in rows]
        texts, conversations = write_chats(conversations, tokenizer, tools, template_arguments(chat))
        texts = [_opened(text, template.opening) for text in texts]
    else:
        texts = [_plain_text(row, number, template, few_shot) for number, row in enumerate(rows)]
        conversations = [None] * len(rows)
    all_ids = encode_all(texts, tokenizer, add_special_tokens=not chat)
    prompts: list[Prompt] = []
    excluded: list[Excluded] = []
    for index, (row, text, ids, messages) in enumerate(zip(rows, texts, all_ids, conversations, strict=True)):
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            excluded.append(Excluded(index, len(ids), max_prompt_tokens))
        else:
            prompts.append(Prompt(text, ids, index, row, None if messages is None else tuple(messages)))
    _report(excluded, num_rows=len(rows), tells_tools=bool(chat and tools_of and any(map(tools_of, rows))))
    return prompts, excluded


def _refuse_rendered(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> None:
    """Raises DataError for a question in which marks of the chat template stand already."""
    [text] = write_conversations([[{"role": "user", "content": "x"}]], tokenizer)
    names = {str(tokenizer.decode([token])) for token in special_ids(tokenizer)}
    marks = [name for name in names if len(name) > 3 and name in text]
    for index, row in enumerate(rows):
        if mark := next((mark for mark in marks if mark in str(row.get("question"))), None):
            raise DataError(
                f"row {index}: its question holds {mark!r}, a mark of the model's chat template, so it seems to be "
                f"rendered already. Set data.template=as_is, or data.chat=true if it is to be rendered all the same"
            )


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders filled in one pass, so that braces in the values stay as they are."""
    return _PLACEHOLDER.sub(lambda match: values.get(match.group(1), match.group()), text)


def _user_text(row: Mapping[str, Any], source: int | str, template: Template) -> str:
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise DataError(
            f"row {source}: no text in column 'question'. Columns: {listed(row)}. Set data.columns: {{question: ...}}."
        )
    return _filled(template.user, {"question": question if template.keeps_space else question.strip()})


def _plain_text(row: Mapping[str, Any], index: int, template: Template, few_shot: Sequence[Mapping[str, Any]]) -> str:
    if MESSAGES in row:
        raise ConfigError(
            f"row {index}: its question is a list of messages, and prompts are written as plain text. Set "
            f"data.chat=true for a model with a chat template, or give questions as text."
        )
    parts = [template.system] if template.system else []
    for example in few_shot:
        question = _filled(template.turn, {"user": _user_text(example, "of the few-shot examples", template)})
        parts.append(f"{question}{template.opening}{write_gold(example, template)}\n")
    parts.append(_filled(template.turn, {"user": _user_text(row, index, template)}) + template.opening)
    return "\n".join(parts)


def _messages(
    row: Mapping[str, Any], index: int, template: Template, few_shot: Sequence[Mapping[str, Any]]
) -> list[Message]:
    if isinstance(messages_of_row := row.get(SOURCE_ROW, {}).get("prompt"), list):
        return [dict(message) for message in messages_of_row]
    if MESSAGES in row:
        if few_shot:
            raise ConfigError(
                f"row {index}: its question is a list of messages, before which data.few_shot has no place. Put the "
                f"examples into the messages and set data.few_shot=0."
            )
        return [dict(message) for message in row[MESSAGES]]
    messages = [{"role": "system", "content": template.system}] if template.system else []
    for example in few_shot:
        answer = f"{template.opening}{write_gold(example, template)}".strip()
        messages.append({"role": "user", "content": _user_text(example, "of the few-shot examples", template)})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": _user_text(row, index, template)})
    return messages


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The tokens of a text, without an end token behind them."""
    return list(encode_all([text], tokenizer, add_special_tokens=add_special_tokens)[0])


def _opened(text: str, opening: str) -> str:
    """The text with the assistant's first characters, unless the chat template wrote them already."""
    opening = opening.strip()
    return text if not opening or text.rstrip().endswith(opening) else text + opening


def encode_all(
    texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool = False
) -> list[tuple[int, ...]]:
    """The same of several texts in one call, which takes longer than a text."""
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    special = special_ids(tokenizer) if add_special_tokens else frozenset()
    return [
        tuple(_without_end(ids, text, tokenizer, special))
        for text, ids in zip(texts, encoded["input_ids"], strict=True)
    ]


def _without_end(ids: list[int], text: str, tokenizer: Tokenizer, special: frozenset[int]) -> list[int]:
    """The tokens without a mark, such as an end token, that the tokenizer put behind: a prompt is to be continued."""
    is_added = len(ids) > 1 and ids[-1] in special and not text.endswith(tokenizer.decode(ids[-1:]))
    return ids[:-1] if is_added else ids


def _report(excluded: Sequence[Excluded], *, num_rows: int, tells_tools: bool) -> None:
    if not excluded:
        return
    shortest = min(row.num_tokens for row in excluded)
    limit = excluded[0].limit_tokens
    if len(excluded) == num_rows:
        remedy = "use fewer few-shot examples or a shorter template"
        if tells_tools:
            remedy = "use fewer tools or shorter docstrings, since the prompt tells the model of its tools"
        raise DataError(
            f"all {num_rows} prompts are longer than max_prompt_tokens ({limit}); the shortest has {shortest} tokens. "
            f"Raise the limit, or {remedy}."
        )
    logger.warning("%d of %d prompts left out: longer than %d tokens", len(excluded), num_rows, limit)
