"""Marks between which models think, and the text outside of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Prompt

_WORD = "(?:thinking|think|thoughts?|reasoning|reason|scratchpad|reflection|analysis|monologue)"
_NAME = rf"(?:[\w.-]{{1,16}}[:|_])?{_WORD}(?:[:|_][\w.-]{{1,16}})?"
_TOKEN = rf"<\|(?:[\w.-]{{1,16}}:)?(?:%s)_(?:of_)?{_WORD}(?::[\w.-]{{1,16}})?\|>"
SHAPES: tuple[tuple[str, str], ...] = (
    (rf"<{_NAME}>", rf"</{_NAME}>"),
    (_TOKEN % "begin|start", _TOKEN % "end"),
    (rf"<\|{_WORD}\|>", rf"<\|/{_WORD}\|>"),
)
"""Regular expressions for the begin and the end of thinking, in any case of letters: a tag, or a token, whose name says
so, such as <think>, <seed:think>, <|begin_of_thought|>."""
MARKS: tuple[tuple[str, str], ...] = (
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<unused94>thought", "<unused95>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel|> analysis", "<|channel|>final<|message|>"),
    ("to=self<|message|>", "<|start|>assistant<|message|>"),
    ("to=self<|message|>", "to=user<|message|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|content_thinking|>", "<|content_text|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""The same of families whose marks have no such shape."""
PHRASES: tuple[tuple[str, str], ...] = (
    ("Here is my thought process:", "Here is my response:"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""The same for families that think behind a sentence. Any model may write that sentence, so that it begins thinking
where a prompt ends with it, and nowhere else."""


def _any(pairs: Sequence[tuple[str, str]], side: int) -> re.Pattern[str]:
    """Any of the marks. All are looked for at a sign of punctuation, of which a long text has few."""
    expressions = [pair[side] for pair in SHAPES] + [_expression(pair[side]) for pair in pairs]
    return re.compile(rf"(?=[<\[◁:])(?:{'|'.join(dict.fromkeys(expressions))})", re.IGNORECASE)


def _expression(mark: str) -> str:
    words, rest = re.split(r"(?=[<\[◁:])", mark, maxsplit=1)
    return (f"(?<={re.escape(words)})" if words else "") + re.escape(rest)


_BEGINS, _ENDS = _any(MARKS, 0), _any((*MARKS, *PHRASES), 1)
_PROMPT_BEGINS = re.compile(rf"(?:{_any((*MARKS, *PHRASES), 0).pattern})\Z", re.IGNORECASE)
_MESSAGE = "<|message|>"
MAX_MARK_CHARACTERS = 200
"""White space included."""
_THINKING_MARK = re.compile(
    r"[<\[◁][|/]*[\w:.-]{0,20}(?:think|thought|reason|scratchpad|analysis|monologue)[\w:.-]{0,20}[|]*[>\]▷]",
    re.IGNORECASE,
)
"""A mark whose name speaks of thinking."""


def after_thinking(text: str, *, is_open: bool = False) -> str:
    """The text of a completion outside of its thinking: behind ``</think>``, before a ``<think>`` that stays open.

    ``is_open`` says that the completion begins within its thinking, and has to close it.

    >>> after_thinking("<think>5</think> 6"), after_thinking("<think> 5"), after_thinking("5 or 6", is_open=True)
    (' 6', '', '')
    """
    end = max((match.end() for match in _ENDS.finditer(text)), default=0)
    if not end and is_open:
        return ""
    rest = text[end:]
    opening = _BEGINS.search(rest)
    return rest[: opening.start()] if opening else rest


def spoken_text(prompt: Prompt, completion: Completion) -> str:
    """The text of a completion outside of its thinking, which the prompt may have begun.

    A completion that ends by itself has ended its thinking, whether it says so or not; one that was cut off has not.
    """
    return after_thinking(completion.text, is_open=completion.is_truncated and begins_thinking(prompt.text))


def begins_thinking(prompt_text: str) -> bool:
    """The prompt ends with a mark behind which a model thinks."""
    text = prompt_text[-MAX_MARK_CHARACTERS:].rstrip()
    return any(_PROMPT_BEGINS.search(end) is not None for end in (text, text.removesuffix(_MESSAGE)))


Write = Callable[[Sequence[Mapping[str, Any]], bool], str | None]
"""Messages as a chat template writes them, and whether the assistant is to begin; None if the template refuses them."""


def refuse_unknown_marks(
    model: str,
    template: object,
    special_tokens: Iterable[str],
    write: Write,
) -> None:
    """Raises ConfigError where a model marks its thinking in a way that is not cut: it would be read as the answer.

    A run learns from what is paid: thinking that is read as the answer teaches a model to stop after it.
    """
    unknown = unknown_marks(template if isinstance(template, str) else "", special_tokens)
    if unknown:
        marked = f"marks its thinking with {' '.join(unknown)}, which no known family does"
    elif (uncut := uncut_thinking(write)) is not None:
        marked = f"has a chat template that writes thinking as {uncut}, which cannot be told from the answer"
    else:
        return
    raise ConfigError(
        f"model: {model} {marked}, so that its thinking would be read as its answer. "
        "Name a template with <think> and </think> as data.chat_template"
    )


def unknown_marks(template: str, special_tokens: Iterable[str]) -> list[str]:
    """Marks of a chat template, or tokens of a tokenizer, that speak of thinking and are in no known family.

    What stands between such marks would be read as the answer.

    >>> unknown_marks("{{ '<|deepthink|>' }}", ["</think>", "<ponder_think>", "<|im_end|>"])
    ['<|deepthink|>']
    """
    candidates = [match.group() for match in _THINKING_MARK.finditer(template)]
    candidates += [token for token in special_tokens if _THINKING_MARK.fullmatch(token)]
    return [mark for mark in dict.fromkeys(candidates) if not (_BEGINS.fullmatch(mark) or _ENDS.fullmatch(mark))]


_QUESTION, _THOUGHT, _ANSWER = "Q5127", "T6173", "A7219"
_TURNS: tuple[dict[str, Any], ...] = (
    *({"content": _ANSWER, key: _THOUGHT} for key in ("reasoning_content", "reasoning", "thinking", "thought")),
    {"content": [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]},
)
"""An answer and the thinking before it, in each form in which templates take them."""
_WRITTEN_PART = re.compile(r"""["']thinking["']""")


def uncut_thinking(write: Write) -> str | None:
    """How a chat template writes thinking that would be read as the answer; None if it is cut, or there is none.

    The template writes a message that thinks and answers. Only the answer may be left of it, and nothing of one that
    was cut off while it thought.
    """
    question = {"role": "user", "content": _QUESTION}
    is_begun = begins_thinking(write([question], True) or "")
    for turn in _TURNS:
        text = write([question, {"role": "assistant", **turn}], False) or ""
        thought = text.rfind(_THOUGHT)
        answer = text.find(_ANSWER, thought)
        begin = text.rfind(_QUESTION, 0, max(thought, 0)) + len(_QUESTION)
        if thought < 0 or answer < 0 or _WRITTEN_PART.search(text, begin, thought):  # parts are written as they are
            continue
        cut_off, whole = text[begin : thought + len(_THOUGHT)], after_thinking(text[begin:])
        if not is_begun and _THOUGHT in after_thinking(cut_off):
            return repr(cut_off[-60:])
        if _THOUGHT in whole or _ANSWER not in whole:
            return repr(text[thought : answer + len(_ANSWER)])
    return None
