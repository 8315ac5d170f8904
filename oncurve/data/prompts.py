"""Prompt templates: from a row to the text and tokens that the policy reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.data.conversations import MESSAGES
from oncurve.errors import ConfigError, DataError, did_you_mean, listed
from oncurve.records import SOURCE_ROW, Prompt

logger = logging.getLogger(__name__)

Message = dict[str, str]
ToolsOf = Callable[[Mapping[str, Any]], "list[Mapping[str, Any]] | None"]
"""The schemas of the tools of a row; None or empty for none."""

Tokenizer = Any
"""A tokenizer of transformers."""

_PLACEHOLDER = re.compile(r"\{(question|answer|solution|user)\}")
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
"""What GSM8K writes into its solutions for a calculator: ``<<48/2=24>>``."""


@dataclass(frozen=True, slots=True)
class Template:
    r"""The words around a question, and the form of the completion that they ask for.

    Example: ``Template(name="plain", turn="User: {user}\nAssistant:", completion=" {solution} #### {answer}")``
    writes "User: 2+3?\nAssistant:". As chat, ``system`` and ``user`` become messages, ``turn`` is left to the
    tokenizer's chat template, and the assistant's turn begins with ``opening``.
    """

    name: str
    system: str = ""
    """What is said once, before everything else; empty for nothing."""
    user: str = "{question}"
    """What the user says."""
    turn: str = "{user}"
    """How one exchange is laid out as plain text, up to the assistant's first word."""
    opening: str = ""
    """The first characters of the assistant's turn; they belong to the prompt."""
    completion: str = " {solution} \\boxed{{answer}}"
    """A perfect completion, for few-shot examples and for checking that the reward accepts it."""
    keeps_space: bool = False
    """White space around a question stays."""

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
        Template(name="as_is", completion=_BOXED, keeps_space=True),
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
    completion = _BOXED
    if "<answer>" in text:
        completion = _SPACED_THINK_ANSWER
    elif "####" in text:
        completion = TEMPLATES["gsm8k"].completion
    return Template(name=path.stem, user=text, completion=completion)


def write_gold(row: Mapping[str, Any], template: Template) -> str:
    """The completion that a perfect policy could write for a row, from its worked solution and answer.

    GSM8K's calculator marks (``<<48/2=24>>``) are left out. Without a "solution" column only the form and the answer
    remain.
    """
    solution = CALCULATOR_MARK.sub("", str(row.get("solution") or "")).strip()
    return _filled(template.completion, solution=solution, answer=str(row["answer"]))


def render_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    template: str | Template = "r1_zero",
    chat: bool | Mapping[str, Any] = False,
    few_shot: Sequence[Mapping[str, Any]] = (),
    max_prompt_tokens: int | None = None,
    tools_of: ToolsOf | None = None,
) -> tuple[list[Prompt], list[Excluded]]:
    """The prompts of some rows, and those left out because they are longer than ``max_prompt_tokens``.

    Plain text is tokenized with the special tokens that the tokenizer puts in front, for example BOS, and without an
    end token behind. With ``chat``, which may hold arguments of the chat template, that template writes every special
    token and no other is added; if it has no place for a system message, that text opens the first user message. A
    row that came with messages keeps them. ``few_shot`` are rows whose questions and gold completions come first, as
    earlier exchanges. ``Prompt.index`` is the place in ``rows``. ``tools_of`` gives the schemas of the tools that the
    chat template tells the model of, by the row.

    Raises ConfigError for an unknown template or a missing chat template, DataError if no prompt is left.
    """
    if not rows:
        raise DataError("there are no rows to make prompts of. Check data.path and data.split.")
    if isinstance(template, str):
        template = find_template(template)
    conversations: list[list[Message]] | list[None]
    if chat:
        conversations = [_messages(row, place, template, few_shot) for place, row in enumerate(rows)]
        told = [tools_of(row) if tools_of else None for row in rows]
        texts, conversations = _chat_texts(conversations, tokenizer, told, template_arguments(chat))
        texts = [_opened(text, template.opening) for text in texts]
    else:
        texts = [_plain_text(row, place, template, few_shot) for place, row in enumerate(rows)]
        conversations = [None] * len(rows)
    all_ids = encode_all(texts, tokenizer, add_special_tokens=not chat)
    prompts: list[Prompt] = []
    excluded: list[Excluded] = []
    for index, (row, text, ids, messages) in enumerate(zip(rows, texts, all_ids, conversations, strict=True)):
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            excluded.append(Excluded(index, len(ids), max_prompt_tokens))
        else:
            prompts.append(Prompt(text, ids, index, row, None if messages is None else tuple(messages)))
    _report(excluded, num_rows=len(rows))
    return prompts, excluded


def _filled(text: str, **values: str) -> str:
    """The text with its placeholders filled in one pass, so that braces in the values stay as they are."""
    return _PLACEHOLDER.sub(lambda match: values.get(match.group(1), match.group()), text)


def _user_text(row: Mapping[str, Any], place: int | str, template: Template) -> str:
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise DataError(
            f"row {place}: no text in column 'question'. Columns: {listed(row)}. Set data.columns: {{question: ...}}."
        )
    return _filled(template.user, question=question if template.keeps_space else question.strip())


def _plain_text(row: Mapping[str, Any], place: int, template: Template, few_shot: Sequence[Mapping[str, Any]]) -> str:
    if MESSAGES in row:
        raise ConfigError(
            f"row {place}: its question is a list of messages, and data.chat is false. Set data.chat=true for a model "
            f"with a chat template, or give questions as text."
        )
    parts = [template.system] if template.system else []
    for example in few_shot:
        asked = _filled(template.turn, user=_user_text(example, "of the few-shot examples", template))
        parts.append(f"{asked}{template.opening}{write_gold(example, template)}\n")
    parts.append(_filled(template.turn, user=_user_text(row, place, template)) + template.opening)
    return "\n".join(parts)


def _messages(
    row: Mapping[str, Any], place: int, template: Template, few_shot: Sequence[Mapping[str, Any]]
) -> list[Message]:
    if isinstance(said := row.get(SOURCE_ROW, {}).get("prompt"), list):
        return [dict(message) for message in said]
    if MESSAGES in row:
        if few_shot:
            raise ConfigError(
                f"row {place}: its question is a list of messages, before which data.few_shot has no place. Put the "
                f"examples into the messages and set data.few_shot=0."
            )
        return [dict(message) for message in row[MESSAGES]]
    messages = [{"role": "system", "content": template.system}] if template.system else []
    for example in few_shot:
        shown = f"{template.opening}{write_gold(example, template)}".strip()
        messages.append({"role": "user", "content": _user_text(example, "of the few-shot examples", template)})
        messages.append({"role": "assistant", "content": shown})
    messages.append({"role": "user", "content": _user_text(row, place, template)})
    return messages


def _chat_texts(
    conversations: list[list[Message]],
    tokenizer: Tokenizer,
    tools: list[Any],
    options: Mapping[str, Any],
    *,
    opens_answer: bool = True,
) -> tuple[list[str], list[list[Message]]]:
    """The texts of conversations that end where the assistant begins, and the messages as they were written."""
    from jinja2.exceptions import TemplateError

    name = tokenizer.name_or_path or "the model"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{name}: its tokenizer has no chat template, which data.chat=true and rows of messages need. "
            f"Set data.chat: false and give rows without messages, or take the instruct version of the model."
        )
    try:
        return _apply(conversations, tokenizer, tools, options, opens_answer), conversations
    except TemplateError as error:
        reason = error
    merged = [_without_system(messages) for messages in conversations]
    try:
        return _apply(merged, tokenizer, tools, options, opens_answer), merged
    except TemplateError as error:
        raise ConfigError(
            f"{name}: its chat template refuses the messages ({reason or error}). "
            f"Use another data.template, without few-shot examples, or set data.chat: false."
        ) from error


def _apply(
    conversations: list[list[Message]],
    tokenizer: Tokenizer,
    tools: list[Any],
    options: Mapping[str, Any],
    opens_answer: bool,
) -> list[str]:
    """The texts of conversations, those with the same tools at once."""
    texts: list[str] = [""] * len(conversations)
    places: dict[str, list[int]] = {}
    for place, told in enumerate(tools):
        places.setdefault(repr(told), []).append(place)
    for alike in places.values():
        told = tools[alike[0]]
        given = {**options, "tools": told} if told else options
        chosen = [conversations[place] for place in alike]
        written = tokenizer.apply_chat_template(chosen, tokenize=False, add_generation_prompt=opens_answer, **given)
        for place, text in zip(alike, written, strict=True):
            texts[place] = str(text)
    return texts


def template_arguments(chat: bool | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template that ``data.chat`` holds."""
    return dict(chat) if isinstance(chat, Mapping) else {}


def chat_texts(
    conversations: list[list[Message]],
    tokenizer: Tokenizer,
    chat: bool | Mapping[str, Any] = True,
    *,
    opens_answer: bool = True,
) -> list[str]:
    """The texts of conversations, with ``opens_answer`` up to where the assistant begins to speak.

    Raises ConfigError for a tokenizer without a chat template, or one that refuses these messages.
    """
    nothing: list[Any] = [None] * len(conversations)
    return _chat_texts(conversations, tokenizer, nothing, template_arguments(chat), opens_answer=opens_answer)[0]


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The tokens of a text, without an end token behind them."""
    return list(encode_all([text], tokenizer, add_special_tokens=add_special_tokens)[0])


def _without_system(messages: list[Message]) -> list[Message]:
    """The same conversation for a model that knows no system message: its text opens the first user message."""
    if messages[0]["role"] != "system":
        return messages
    first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def _opened(text: str, opening: str) -> str:
    """The text with the assistant's first characters, unless the chat template wrote them already."""
    opening = opening.strip()
    return text if not opening or text.rstrip().endswith(opening) else text + opening


def encode_all(
    texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool = False
) -> list[tuple[int, ...]]:
    """The same of several texts in one call, which takes longer than a text."""
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    return [
        tuple(_without_end(ids, text, tokenizer) if add_special_tokens else ids)
        for text, ids in zip(texts, encoded["input_ids"], strict=True)
    ]


def _without_end(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens without an end token that the tokenizer put behind them: a prompt is there to be continued."""
    is_added = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if is_added else ids


def _report(excluded: Sequence[Excluded], *, num_rows: int) -> None:
    if not excluded:
        return
    shortest = min(each.num_tokens for each in excluded)
    limit = excluded[0].limit_tokens
    if len(excluded) == num_rows:
        raise DataError(
            f"all {num_rows} prompts are longer than max_prompt_tokens ({limit}); the shortest has {shortest} tokens. "
            f"Raise the limit, use fewer few-shot examples or a shorter template."
        )
    logger.warning("%d of %d prompts left out: longer than %d tokens", len(excluded), num_rows, limit)
