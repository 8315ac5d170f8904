"""Demonstrations: completions that stand in the data, as tokens of a supervised stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oncurve.constants import ROLES
from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Prompt, Segment
from oncurve.data.chat_template import Chat, Message, chat_texts, turn_end
from oncurve.data.prompts import (
    Excluded,
    Template,
    Tokenizer,
    chosen_chat,
    encode,
    encode_all,
    find_template,
    render_prompts,
    write_gold,
)
from oncurve.wording import listed

TrainOn = Literal["assistant", "last"]
"""Which of the assistant's messages in a conversation are learned."""


@dataclass(frozen=True)
class Demonstration:
    """A completion that stands in the data, as the policy would have written it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    """The completion's tokens, the end token included."""
    text: str
    segments: tuple[Segment, ...] = ()
    """In a conversation of several turns: which tokens are the assistant's; empty if all are."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt.prompt_ids) + len(self.token_ids)

    def leaves_room(self, limit: int | None) -> bool:
        """The prompt is short enough to be sampled from."""
        return limit is None or len(self.prompt.prompt_ids) <= limit


def demonstrated_row(source: str, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row with a completion of its own, checked, with a "question" and an "answer"; None for a row without one.

    Known forms: {"messages": [...]}, {"prompt": ..., "completion": ...} where both are text or both are lists of
    messages, {"prompt": ..., "turns": [what the policy says, what it is answered, ...]}, {"prompt": ..., "parts":
    [{"text": ..., "learned": ...}, ...]}, and {"text": ...}. Without a column "answer" the answer is empty.

    Raises DataError, with ``source``, for a completion that is empty or no text, and for messages without an assistant.
    """
    answer = str(row.get("answer") or "").strip()
    completion, prompt = row.get("completion"), row.get("prompt", row.get("question"))
    if isinstance(completion, list) or "messages" in row:
        spoken = [*(prompt if isinstance(prompt, list) else []), *completion] if completion else row.get("messages")
        messages = _checked_messages(source, spoken, num_prompt_messages=_num_prompt_messages(row))
        question = next(
            (message["content"] for message in messages if message["role"] == "user"), messages[0]["content"]
        )
        return {**row, "messages": messages, "question": question, "answer": answer}
    if isinstance(row.get("turns"), list) and "completion" not in row:
        row = {**row, "parts": _parts_of_turns(source, row["turns"])}
    if "completion" in row or "parts" in row:
        if not isinstance(prompt, str) or not prompt.strip():
            if prompt is not None and not isinstance(prompt, str):
                raise DataError(f"{source}: the prompt is no text ({prompt!r:.60}). Write it as text")
            raise DataError(
                f"{source}: a completion without a prompt. Columns: {listed(row)}. Write {{prompt, completion}}, or "
                f"set data.columns: {{question: <its name>}}"
            )
        if "completion" not in row:
            return {**row, "prompt": prompt, "question": prompt, "parts": _parts(source, row), "answer": answer}
        return {**row, "question": prompt, "completion": _written(source, completion, "completion"), "answer": answer}
    if "text" in row and not ("question" in row or "prompt" in row):
        text = _written(source, row["text"], "text")
        return {**row, "text": text, "question": text, "answer": answer}
    return None


def taught_text(row: Mapping[str, Any]) -> str:
    """The text that a row of ``demonstrated_row`` teaches: its completion, or the assistant's last message."""
    if "messages" in row:
        return next(message["content"] for message in reversed(row["messages"]) if message["role"] == "assistant")
    if "parts" in row and "completion" not in row:
        return "".join(part["text"] for part in row["parts"])
    return str(row.get("completion", row.get("text", "")))


def taught_rows(task: str, *, count: int, lesson_fraction: float, seed: int = 0) -> list[dict[str, Any]]:
    """So many rows of the package's own lessons and imperfect demonstrations of a task, lessons first."""
    from oncurve.tasks.texts import demonstrated_texts  # lazy

    lessons = round(count * lesson_fraction)
    rows: list[dict[str, Any]] = []
    for prompt, parts in demonstrated_texts(task, lessons=lessons, demonstrations=count - lessons, seed=seed):
        spoken = [{"text": text, "learned": is_learned} for text, is_learned in parts]
        rows.append({"prompt": prompt, "question": prompt, "answer": "", "parts": spoken})
    return rows


def _parts_of_turns(source: str, turns: list[Any]) -> list[dict[str, Any]]:
    """Turns of the policy and of its environment as parts: each of the policy's ends with the end token."""
    if not turns or any(not isinstance(text, str) or not text for text in turns):
        raise DataError(f"{source}: turns must be texts, the policy's first: [guess, answer, guess, ...]")
    return [{"text": text, "learned": index % 2 == 0, "ends": index % 2 == 0} for index, text in enumerate(turns)]


def _parts(source: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a completion, checked; what a tool says is not learned."""
    parts: Any = row["parts"]
    for part in parts if isinstance(parts, list) and parts else [parts]:
        text, is_learned = (part.get("text"), part.get("learned", True)) if isinstance(part, Mapping) else (None, None)
        tokens = part.get("tokens", []) if isinstance(part, Mapping) else []
        are_ids = isinstance(tokens, list) and all(isinstance(token, int) and token >= 0 for token in tokens)
        if not isinstance(text, str) or not isinstance(is_learned, bool) or not are_ids:
            raise DataError(f"{source}: a part is {part!r:.60}. Write a list of {{text}} and {{text, learned: false}}")
    if not any(part.get("learned", True) and part["text"].strip() for part in parts):
        raise DataError(f"{source}: none of the parts is learned. Drop the row")
    return [{**part, "learned": part.get("learned", True)} for part in parts]


def _num_prompt_messages(row: Mapping[str, Any]) -> int:
    """Messages of a row that are its prompt, and not learned whoever says them."""
    are_apart = isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list)
    return len(row["prompt"]) if are_apart else 0


def _checked_messages(source: str, messages: Any, *, num_prompt_messages: int) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{source}: messages must be a list of {{role, content}}, found {messages!r:.60}")
    for number, message in enumerate(messages):
        role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, Mapping) else (0, 0)
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{source}: message {number} is {message!r:.60}. Write {{role, content}} with text as content and as "
                f"role one of {listed(ROLES)}"
            )
    spoken = [message for message in messages[num_prompt_messages:] if message["role"] == "assistant"]
    if not spoken:
        raise DataError(
            f"{source}: none of the messages is the assistant's, so there is nothing to learn. Drop the row"
        )
    if any(not message["content"].strip() for message in spoken):
        raise DataError(f"{source}: a message of the assistant is empty. Fill it in, or drop the row")
    if messages[0]["role"] == "assistant":
        raise DataError(f"{source}: the assistant speaks first, so there is no prompt. Put a user's message before it")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _written(source: str, value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{source}: {column!r} is empty or no text ({value!r:.40}). Fill it in, or drop the row")
    return value


def render_demonstrations(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    template: str = "plain",
    chat: Chat = False,
    few_shot: Sequence[Mapping[str, Any]] = (),
    train_on: TrainOn = "assistant",
    max_tokens: int | None = None,
    first: int = 0,
) -> tuple[list[Demonstration], list[Excluded]]:
    """The demonstrations of some rows, and those left out because prompt and completion exceed ``max_tokens``.

    A row's "prompt" is read as it is, its "question" through the template, its messages through the tokenizer's chat
    template; with ``chat`` all of them go there. The completion is the row's own, or what the template makes of
    "solution" and "answer". Prompt and completion are tokenized apart, as in sampling, and the end token follows. In a
    conversation everything after the assistant first speaks is the completion, in which only the assistant's tokens are
    trained on; with ``train_on`` "last", only its last message is, and what stands before is the prompt. What it says
    in a "prompt" of messages is not learned. Of a row of {"text"} everything but the first token is trained on. The
    ``first`` row has this number.

    Raises ConfigError for a tokenizer without an end token, or a chat template that writes the beginning of a
    conversation otherwise than alone; DataError if no row is left, or one goes on behind an end token.
    """
    chat = demonstrated_chat(rows, chat, tokenizer, template)
    if not isinstance(tokenizer.eos_token_id, int):
        raise ConfigError(
            f"{tokenizer.name_or_path}: its tokenizer has no end token, so a model could not learn where to stop"
        )
    chosen = find_template(template)
    prompts = _prompts(rows, tokenizer, chosen, chat, few_shot, first)
    tokens_of = _tokens_of_parts(rows, tokenizer)
    demonstrations: list[Demonstration] = []
    excluded: list[Excluded] = []
    for index, row in enumerate(rows, first):
        if "messages" in row:
            made = _conversation(index, row, tokenizer, train_on, chat)
        elif _is_text(row):
            made = _text(index, row, tokenizer)
        elif _is_in_parts(row):
            made = _in_parts(prompts[index], row, tokenizer, tokens_of)
        else:
            made = _completed(prompts[index], row, tokenizer, chosen, chat)
        if max_tokens is not None and made.num_tokens > max_tokens:
            excluded.append(Excluded(index, made.num_tokens, max_tokens))
        else:
            demonstrations.append(made)
    if not demonstrations:
        shortest = min(left_out.num_tokens for left_out in excluded)
        raise DataError(
            f"all {len(rows)} rows are longer than {max_tokens} tokens, prompt and completion together; the shortest "
            f"has {shortest}. Raise sft.max_tokens, or take a model with a longer context"
        )
    return demonstrations, excluded


def _prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: Template,
    chat: bool | Mapping[str, Any],
    few_shot: Sequence[Mapping[str, Any]],
    first: int,
) -> dict[int, Prompt]:
    """The prompts of rows that are neither messages nor a text, by the indices of their rows."""
    of = dict(enumerate(rows, first))
    verbatim = {index: str(row["prompt"]) for index, row in of.items() if _is_verbatim(row, chat)}
    plain = [index for index, row in of.items() if not ("messages" in row or _is_text(row) or index in verbatim)]
    prompts: dict[int, Prompt] = {}
    if plain:
        chosen = [of[index] for index in plain]
        rendered, _ = render_prompts(chosen, tokenizer, template=template, chat=chat, few_shot=few_shot)
        prompts = {index: replace(prompt, index=index) for index, prompt in zip(plain, rendered, strict=True)}
    if verbatim:
        read = encode_all([*verbatim.values()], tokenizer, add_special_tokens=True)
        for (index, text), ids in zip(verbatim.items(), read, strict=True):
            prompts[index] = Prompt(text, ids, index, of[index])
    return prompts


def _is_verbatim(row: Mapping[str, Any], chat: bool | Mapping[str, Any]) -> bool:
    """Prompt and completion are read as they are. Raises ConfigError for parts that would go through a chat."""
    if chat and "parts" in row:
        raise ConfigError("rows of {prompt, parts} are read as they are: set data.chat=false, or give {messages}")
    return "prompt" in row and ("completion" in row or "parts" in row) and not chat


def demonstrated_chat(
    rows: Sequence[Mapping[str, Any]], chat: Chat, tokenizer: Tokenizer, template: str
) -> bool | Mapping[str, Any]:
    """The value of ``chat`` for some rows: auto leaves rows of {prompt, completion} as they are written."""
    if chat == "auto" and any(_is_verbatim(row, False) for row in rows):
        return False
    return chosen_chat(chat, tokenizer, template)


def _is_text(row: Mapping[str, Any]) -> bool:
    return "text" in row and row["text"] == row.get("question")


def _is_in_parts(row: Mapping[str, Any]) -> bool:
    return "parts" in row and "completion" not in row


def _tokens_of_parts(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """The tokens of the texts of parts, each text once: the marks around calls stand in every row."""
    parts = [part for row in rows if _is_in_parts(row) for part in row["parts"]]
    texts = list(dict.fromkeys(part["text"] for part in parts if part["text"] and "tokens" not in part))
    return dict(zip(texts, encode_all(texts, tokenizer), strict=True)) if texts else {}


def _completed(
    prompt: Prompt, row: Mapping[str, Any], tokenizer: Tokenizer, template: Template, chat: bool | Mapping[str, Any]
) -> Demonstration:
    """A prompt and the completion of its row, or the worked solution in the template's form."""
    text = str(row["completion"]) if "completion" in row else write_gold(row, template)
    if prompt.messages is None:
        _refuse_early_end(prompt.index, text, tokenizer, tokenizer.eos_token_id)
        return Demonstration(prompt, _ended(encode(tokenizer, text), tokenizer.eos_token_id), text)
    end = turn_end(tokenizer, chat, prompt.messages)
    _refuse_early_end(prompt.index, text, tokenizer, end)
    opening = template.opening.strip()
    opened = opening if opening and prompt.text.endswith(opening) else ""
    spoken: Message = {"role": "assistant", "content": f"{opened}{text}".strip()}
    whole = chat_texts(
        [[dict(message) for message in prompt.messages] + [spoken]], tokenizer, chat, opens_answer=False
    )[0]
    ids = encode(tokenizer, _behind(prompt.text, whole, tokenizer, prompt.index))
    return Demonstration(prompt, _ended(ids, end), text)


def _in_parts(
    prompt: Prompt, row: Mapping[str, Any], tokenizer: Tokenizer, tokens_of: Mapping[str, tuple[int, ...]]
) -> Demonstration:
    """A prompt and a completion of which others wrote some parts; ``tokens_of`` are those of texts.

    A part keeps its tokens where this tokenizer reads them as its text. The end token belongs to the last part, and to
    those that ``ends`` marks: turns of the policy in an environment.
    """
    text = taught_text(row)
    parts = [part for part in row["parts"] if part["text"]]
    are_tokens = [_reads(part, tokenizer) for part in parts]
    if not all(are_tokens):
        _refuse_early_end(prompt.index, text, tokenizer, tokenizer.eos_token_id)
    ids: list[int] = []
    segments: list[Segment] = []
    for number, (part, is_tokens) in enumerate(zip(parts, are_tokens, strict=True), start=1):
        more = tuple(part["tokens"]) if is_tokens else tokens_of.get(part["text"])
        more = tuple(encode(tokenizer, part["text"])) if more is None else more
        more = _ended(more, tokenizer.eos_token_id) if part.get("ends") or number == len(parts) else more
        segments.append(Segment(part["learned"], len(ids), len(ids) + len(more), part["text"]))
        ids += more
    is_plain = all(segment.is_policy for segment in segments)
    return Demonstration(prompt, tuple(ids), text, () if is_plain else tuple(segments))


def _reads(part: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """The part has tokens, and they are this tokenizer's."""
    return "tokens" in part and read_back(part["tokens"], tokenizer) == part["text"]


def read_back(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of tokens, marks included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _refuse_early_end(index: int, text: str, tokenizer: Tokenizer, end: int) -> None:
    """Raises DataError for a completion that goes on behind an end token: a model stops there."""
    name = str(tokenizer.decode([end]))
    behind = _cut(text, name)[1]
    if behind.strip():
        raise DataError(
            f"row {index}: its completion goes on behind the end token {name} ({behind.strip()!r:.40}), "
            f"where a model stops. Cut it there, or give it as {{messages}}, {{text}} or {{prompt, turns}} without end "
            f"tokens"
        )


def _conversation(
    index: int, row: Mapping[str, Any], tokenizer: Tokenizer, train_on: TrainOn, chat: bool | Mapping[str, Any]
) -> Demonstration:
    """A conversation, cut behind what the assistant says last."""
    messages: list[Message] = list(row["messages"])
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [number for number in turns if number >= _num_prompt_messages(row)]
    turns = turns[-1:] if train_on == "last" else turns
    end_id = turn_end(tokenizer, chat, messages[: turns[0]])
    for number in turns:
        _refuse_early_end(index, messages[number]["content"], tokenizer, end_id)
    before = chat_texts([messages[:number] for number in turns], tokenizer, chat)
    after = chat_texts([messages[: number + 1] for number in turns], tokenizer, chat, opens_answer=False)
    prompt_ids = tuple(encode(tokenizer, before[0]))
    ids: list[int] = []
    segments: list[Segment] = []

    def add(part: Sequence[int], text: str, *, is_policy: bool) -> None:
        if part:
            segments.append(Segment(is_policy, len(ids), len(ids) + len(part), text))
            ids.extend(part)

    done, name = "", str(tokenizer.decode([end_id]))
    for number, (start, end) in enumerate(zip(before, after, strict=True)):
        if number:
            between = _behind(done, start, tokenizer, index)
            add(encode(tokenizer, between), between, is_policy=False)
        turn = _behind(start, end, tokenizer, index)
        spoken, _ = _cut(turn, name)
        done = start + spoken + (name if name in turn else "")
        add(_ended(encode(tokenizer, spoken), end_id), messages[turns[number]]["content"], is_policy=True)
    prompt = Prompt(before[0], prompt_ids, index, row, tuple(messages[: turns[0]]))
    completion = "\n".join(messages[number]["content"] for number in turns)
    return Demonstration(prompt, tuple(ids), completion, tuple(segments) if len(segments) > 1 else ())


def _text(index: int, row: Mapping[str, Any], tokenizer: Tokenizer) -> Demonstration:
    first, *others = encode(tokenizer, str(row["text"]), add_special_tokens=True)
    opening = tokenizer.decode([first]) if others else ""
    end: int = tokenizer.eos_token_id
    ids = others if others[-1:] == [end] else [*others, end]  # end tokens inside are part of the text
    return Demonstration(Prompt(opening, (first,), index, row), tuple(ids), str(row["text"]))


def _behind(start: str, whole: str, tokenizer: Tokenizer, index: int) -> str:
    """The rest of a text behind its beginning."""
    if not whole.startswith(start):
        raise ConfigError(
            f"row {index}: the chat template of {tokenizer.name_or_path} writes the beginning of a conversation "
            f"differently once the assistant has answered, so its part cannot be marked. Set data.chat_template=adding "
            f"for one that leaves turns as they were, or give rows of {{prompt, completion}} with data.chat=false"
        )
    return whole[len(start) :]


def _cut(text: str, end: str) -> tuple[str, str]:
    """The parts before and behind the first end token."""
    spoken, mark, behind = text.partition(end)
    return (spoken, behind) if mark else (text, "")


def _ended(ids: Sequence[int], end: int) -> tuple[int, ...]:
    """The tokens up to the first end token, which is added where there is none."""
    ended = list(ids)
    return tuple([*ended[: ended.index(end)], end] if end in ended else [*ended, end])
