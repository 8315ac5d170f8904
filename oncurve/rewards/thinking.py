"""Marks between which models think, and the text outside of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Prompt

_TAGS = (
    "think", "thinking", "thought", "thoughts", "reasoning", "reason", "seed:think", "longcat_think", "scratchpad",
    "mm:think",
    "reflection", "analysis", "cot_think", "inner_monologue", "internal_thinking",
)  # fmt: skip
MARKS: tuple[tuple[str, str], ...] = (
    *((f"<{tag}>", f"</{tag}>") for tag in _TAGS),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|start_thinking|>", "<|end_thinking|>"),
    ("<|begin_of_thinking|>", "<|end_of_thinking|>"),
    ("<|think|>", "<|/think|>"),
    ("<|thinking|>", "<|/thinking|>"),
    ("<unused94>thought", "<unused95>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel|> analysis", "<|channel|>final<|message|>"),
)
"""Begin and end of the thinking of every family of models that is known, in any case of letters."""
_BEGINS = re.compile("|".join(re.escape(begin) for begin, _ in MARKS), re.IGNORECASE)
_ENDS = tuple(dict.fromkeys(end.lower() for _, end in MARKS))
_MESSAGE = "<|message|>"
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
    lowered = text.lower() if text.isascii() else re.sub("[A-Z]", lambda letter: letter[0].lower(), text)
    end = max(start + len(mark) if (start := lowered.rfind(mark)) >= 0 else 0 for mark in _ENDS)
    if not end and is_open:
        return ""
    rest = text[end:]
    opening = _BEGINS.search(rest)
    return rest[: opening.start()] if opening else rest


def spoken_text(prompt: Prompt, completion: Completion) -> str:
    """The text of a completion outside of its thinking, which the prompt may have begun.

    A completion that ends by itself has ended its thinking, whether it says so or not; one that was cut off has not.
    """
    prompt_text = prompt.text.rstrip().removesuffix(_MESSAGE)
    begins = list(_BEGINS.finditer(prompt_text))
    is_open = completion.is_truncated and bool(begins) and begins[-1].end() == len(prompt_text)
    return after_thinking(completion.text, is_open=is_open)


def refuse_unknown_marks(model: str, template: object, special_tokens: Iterable[str]) -> None:
    """Raises ConfigError where a model marks its thinking as no known family does: it would be read as the answer."""
    unknown = unknown_marks(template if isinstance(template, str) else "", special_tokens)
    if unknown:
        raise ConfigError(
            f"model: {model} marks its thinking with {' '.join(unknown)}, which no known family does, so that "
            f"its thinking would be read as its answer. Name a template with <think> and </think> as data.chat_template"
        )


def unknown_marks(template: str, special_tokens: Iterable[str]) -> list[str]:
    """Marks of a chat template, or tokens of a tokenizer, that speak of thinking and are in no known family.

    What stands between such marks would be read as the answer.

    >>> unknown_marks("{{ '<ponder_think>' }}", ["</think>", "<|im_end|>"])
    ['<ponder_think>']
    """
    known = {mark.lower() for pair in MARKS for mark in pair}
    candidates = [match.group() for match in _THINKING_MARK.finditer(template)]
    candidates += [token for token in special_tokens if _THINKING_MARK.fullmatch(token)]
    return [mark for mark in dict.fromkeys(candidates) if mark.lower() not in known]
