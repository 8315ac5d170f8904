"""Conversations as a model's chat template writes them.

A template is code that came with the model: whatever it raises becomes one sentence here. It may ask for the time; what
it is told is the moment that belongs to the tokenizer, so that a run goes on tomorrow with the prompts of today.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError, DataError, Failure, attempt

MESSAGES = "question_messages"
"""Column with the messages of a question that is a list of them; its column "question" holds their text."""


def read_messages(source: str, value: Sequence[Any], *, column: str) -> list[dict[str, Any]]:
    """The messages of a question, each content as one text; other keys, such as tool_calls, are kept.

    Raises DataError for what is no message, for a picture, and for a conversation in which the assistant speaks last.
    """
    messages = [
        _message(f"{source}, message {number} of {column!r}", message) for number, message in enumerate(value, 1)
    ]
    if not messages:
        raise DataError(f"{source}: {column!r} is an empty list. Give at least one message, or drop the row.")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{source}: the assistant has the last word in {column!r}. Keep the messages up to the one to answer."
        )
    return messages


def text_of_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as one text, by which rows are compared and shown: the content of a single one, else all by role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _message(source: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(f"{source} is {value!r:.60}. Write {{role: user, content: text}}.")
    content = value.get("content")
    if content is None and value.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(source, part) for part in content)
    if not isinstance(content, str) or not (content.strip() or value.get("tool_calls")):
        raise DataError(f"{source} has no text: its content is {content!r:.60}. Fill it in, or drop the message.")
    return {**{key: item for key, item in value.items() if item is not None}, "content": content}


def _part(source: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DataError(
            f"{source} has a part of type {kind!r}, and models are trained on text only. Give text, or drop it."
        )
    return text


Message = dict[str, Any]
Tokenizer = Any
"""A tokenizer of transformers."""
Chat = bool | Mapping[str, Any] | str
"""Whether the model's chat template is used: yes, no, its arguments, or "auto"."""
ADDING = "adding"
"""In the place of a file: the model's own template, made so that a further message leaves earlier ones as they are."""
_ASKS_TIME = "strftime_now"
_PARTS = ("{'type':'text'", '{"type":"text"')
"""Traces of a template that takes the parts of a message for text."""
_DIRECTIVES = [*"aAwdbBmyYHIpMSfzZjUWcxXGuVDFTRehklP", *(f"-{directive}" for directive in "dmyHIMSjeklUW")]


class TemplateRefusal(ConfigError):
    """A chat template cannot write some messages; ``reason`` says why, without the name of the model."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name}: its chat template refuses the messages ({reason}). {remedy}")
        self.reason = reason


def write_conversations(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    opens_answer: bool = True,
) -> list[str]:
    """The texts of conversations; with ``opens_answer`` up to where the assistant begins to speak.

    Messages are given in the form that the template takes: contents as text, or as parts for models that see; arguments
    of calls as objects, or as JSON text.

    Raises TemplateRefusal for conversations that it cannot write, or of which it leaves out what the user says.
    """
    options: dict[str, Any] = {**(arguments or {}), "add_generation_prompt": opens_answer, "tokenize": False}
    if tools:
        options["tools"] = list(tools)
    template = attempt(lambda: tokenizer.get_chat_template(tools=options.get("tools")), log=False)
    if isinstance(template, Failure):
        raise TemplateRefusal(_name(tokenizer), _reason(template), "Give the model a chat template")
    options["chat_template"] = _at(template, moment_of(tokenizer))
    reason = ""
    for form in (_as_stored, _with_text_arguments, _with_parts):
        made = [[form(message) for message in messages] for messages in conversations]
        if form is not _as_stored and made == [list(messages) for messages in conversations]:
            continue
        texts = attempt(lambda made=made: tokenizer.apply_chat_template(made, **options), log=False)
        if not isinstance(texts, Failure) and all(map(_says_it, conversations, texts)):
            return [str(text) for text in texts]
        problem = _reason(texts) if isinstance(texts, Failure) else "it leaves out what the user says"
        reason = reason or problem
    raise TemplateRefusal(
        _name(tokenizer),
        reason,
        "Use another data.template, without few-shot examples, or set data.chat: false.",
    )


def write_chats(
    conversations: list[list[Message]],
    tokenizer: Tokenizer,
    tools: list[Any],
    options: Mapping[str, Any],
    *,
    opens_answer: bool = True,
) -> tuple[list[str], list[list[Message]]]:
    """The texts of conversations that end where the assistant begins, and the messages as they were written."""
    name = tokenizer.name_or_path or "the model"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{name}: its tokenizer has no chat template, which data.chat=true and rows of messages need. "
            f"Set data.chat: false and give rows without messages, or take the instruct version of the model."
        )
    merged = [_without_system(messages) for messages in conversations]
    try:
        return _apply(conversations, tokenizer, tools, options, opens_answer), conversations
    except TemplateRefusal:
        if merged == conversations:
            raise
    return _apply(merged, tokenizer, tools, options, opens_answer), merged


def _apply(
    conversations: list[list[Message]],
    tokenizer: Tokenizer,
    tools: list[Any],
    options: Mapping[str, Any],
    opens_answer: bool,
) -> list[str]:
    """The texts of conversations, those with the same tools at once."""
    texts: list[str] = [""] * len(conversations)
    indices: dict[str, list[int]] = {}
    for index, tools_of_text in enumerate(tools):
        indices.setdefault(repr(tools_of_text), []).append(index)
    for alike in indices.values():
        tools_of_text = tools[alike[0]]
        chosen = [conversations[index] for index in alike]
        written = write_conversations(
            chosen, tokenizer, tools=tools_of_text, arguments=options, opens_answer=opens_answer
        )
        for index, text in zip(alike, written, strict=True):
            texts[index] = text
    return texts


def template_arguments(chat: Chat) -> dict[str, Any]:
    """The arguments of the chat template that ``data.chat`` holds."""
    return dict(chat) if isinstance(chat, Mapping) else {}


def chat_texts(
    conversations: list[list[Message]],
    tokenizer: Tokenizer,
    chat: Chat = True,
    *,
    opens_answer: bool = True,
) -> list[str]:
    """The texts of conversations, with ``opens_answer`` up to where the assistant begins to speak.

    Raises ConfigError for a tokenizer without a chat template, or one that refuses these messages.
    """
    nothing: list[Any] = [None] * len(conversations)
    return write_chats(conversations, tokenizer, nothing, template_arguments(chat), opens_answer=opens_answer)[0]


def turn_end(tokenizer: Tokenizer, chat: Chat, before: Sequence[Mapping[str, Any]]) -> int:
    """The token with which the chat template ends a turn behind some messages; the end token where it writes none."""
    conversation = [*(dict(message) for message in before), {"role": "assistant", "content": "oncurve-said-this"}]
    [text] = chat_texts([conversation], tokenizer, chat, opens_answer=False)
    behind = tokenizer(text.rpartition("oncurve-said-this")[2], add_special_tokens=False)["input_ids"]
    marks = special_ids(tokenizer)
    return next((token for token in behind if token in marks), tokenizer.eos_token_id)


def missing_header(tokenizer: Tokenizer, chat: Chat, before: Sequence[Mapping[str, Any]]) -> str:
    """Text that a chat template puts before an assistant's message but not at the end of a prompt; "" if none."""
    question = [dict(message) for message in before]
    conversation = [*question, {"role": "assistant", "content": "oncurve-said-this"}]
    [prompt] = chat_texts([question], tokenizer, chat)
    [closed, whole] = chat_texts([question, conversation], tokenizer, chat, opens_answer=False)
    header = whole.partition("oncurve-said-this")[0].removeprefix(closed).strip()
    return header if prompt == closed and whole.startswith(closed) else ""


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that are marks and no words: those with a role, and those that were added as special."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {int(number) for number, token in added if token.special}


def _without_system(messages: list[Message]) -> list[Message]:
    """The same conversation for a model that knows no system message: its text opens the first user message."""
    if messages[0]["role"] != "system":
        return messages
    first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def moment_of(tokenizer: Tokenizer) -> datetime | None:
    """The time that the tokenizer's chat template gets; None for the clock."""
    return vars(tokenizer).get("template_moment")


def asks_time(tokenizer: Tokenizer) -> bool:
    """The chat template writes a date or the time into its texts."""
    return _ASKS_TIME in json.dumps(tokenizer.chat_template or "")


def prepare_tokenizer(tokenizer: Tokenizer, *, template: str | None, moment: datetime | None) -> None:
    """Give a tokenizer the chat template of a recipe, a file or ``ADDING``, and the moment that it is told.

    Raises ConfigError for a file that cannot be read or is no template, and for a model without a template to add to.
    """
    tokenizer.template_moment = moment or datetime.now().replace(microsecond=0)
    if template is None:
        return
    if template == ADDING:
        if not let_add(tokenizer):
            raise ConfigError(
                f"data.chat_template is {ADDING}, and no template that only adds can be made of that of "
                f"{_name(tokenizer)}. Name a file with one"
            )
        return
    path = Path(template).expanduser()
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: {path} cannot be read ({error}). Name a Jinja file, or write {ADDING}"
        ) from None
    try:
        write_conversations([[{"role": "user", "content": "Hello"}]], tokenizer)
    except TemplateRefusal as refusal:
        raise ConfigError(f"data.chat_template: {path} cannot write a message ({refusal.reason}). Correct it") from None


def let_add(tokenizer: Tokenizer) -> bool:
    """Give a tokenizer a template that only adds, made of its own; False, and nothing changed, where none can be."""
    own = tokenizer.chat_template
    if isinstance(own, str) and _keeps_questions(tokenizer):
        from oncurve.data.adding_template import adding_template  # lazy

        tokenizer.chat_template = adding_template(own)
        if _only_adds(tokenizer):
            return True
        tokenizer.chat_template = own
    return False


_TALK = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nsaid"}] * 2


def _keeps_questions(tokenizer: Tokenizer) -> bool:
    try:
        return write_conversations([_TALK], tokenizer, opens_answer=False)[0].count("asked") == 2
    except TemplateRefusal:
        return False


def _only_adds(tokenizer: Tokenizer) -> bool:
    """Turns of a conversation, thoughts included, read as before when further messages follow."""
    try:
        begun = [write_conversations([_TALK[:count]], tokenizer)[0] for count in (1, 3)]
        [whole] = write_conversations([_TALK], tokenizer, opens_answer=False)
    except TemplateRefusal:
        return False
    return begun[1].startswith(begun[0]) and whole.startswith(begun[1]) and whole.count("said") == 2


def _as_stored(message: Mapping[str, Any]) -> Message:
    return dict(message)


def _with_text_arguments(message: Mapping[str, Any]) -> Message:
    """The arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        written = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
        calls.append({**call, "function": written} if "function" in call else written)
    return {**message, "tool_calls": calls}


def _with_parts(message: Mapping[str, Any]) -> Message:
    """Its content as a list of one part, which the templates of models that see go through."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _says_it(messages: Sequence[Mapping[str, Any]], text: Any) -> bool:
    """The user's last words stand in the text, whatever happened to white space."""
    questions = [message.get("content") for message in messages if message.get("role") == "user"]
    whole = "".join(str(text).split())
    if writes_parts(whole) and not any(mark in str(messages) for mark in ("'text'", '"text"')):
        return False
    if not questions or not isinstance(questions[-1], str):
        return True
    quoted = json.dumps(questions[-1], ensure_ascii=False)[1:-1]
    return any("".join(form.split()) in whole for form in (questions[-1], quoted))


def writes_parts(text: str) -> bool:
    """A template wrote the parts of a message as they are, since it takes a message for text."""
    whole = "".join(text.split())
    return any(mark in whole for mark in _PARTS)


def _name(tokenizer: Tokenizer) -> str:
    return tokenizer.name_or_path or "the model"


def _reason(failure: Failure) -> str:
    return failure.detail.removeprefix("TemplateError: ")


def _at(template: str, moment: datetime | None) -> str:
    """The template with a clock that stands still: transformers takes no function from outside into a template."""
    if moment is None or _ASKS_TIME not in template:
        return template
    pairs = [
        ("%%", "\0"),
        *((f"%{directive}", moment.strftime(f"%{directive}")) for directive in _DIRECTIVES),
        ("\0", "%"),
    ]
    filters = "".join(f" | replace({json.dumps(old)}, {json.dumps(new)})" for old, new in pairs)
    return f"{{%- macro {_ASKS_TIME}(format) -%}}{{{{- format{filters} -}}}}{{%- endmacro +%}}{template}"
