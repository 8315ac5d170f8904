"""Reward functions that TRL has ready, with its names and arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.rewards.answer_locations import last_boxed
from oncurve.rewards.mathematics import AnswerChecker
from oncurve.rewards.statement import formulas

Completions = Sequence[Any]
_ANCHOR = re.compile(r"answer\b[^.\n]{0,40}?(?:\bis\b|:|=)?[\s:*]*$", re.IGNORECASE)
_THINKING = re.compile(r"\s*<think>((?!<think>).)*?</think>.*", re.DOTALL)


def accuracy_reward(completions: Completions, solution: Sequence[str], **_: Any) -> list[Any]:
    """1 where the boxed answer, or else the last formula called an answer, equals the solution's; None for a solution
    that cannot be read. As in TRL, a formula that nothing introduces as the answer is none.
    """
    golds = [_gold(str(gold)) for gold in solution]
    answers = [_answer(_text(completion)) for completion in completions]
    verdicts = _checker().check(list(zip(answers, golds, strict=True)))
    return [
        {"right": 1.0, "wrong": 0.0, "over_limit": 0.0, "unparsable_reference": None}[verdict]
        if verdict not in ("timeout", "crashed")
        else Reward(value=None, error=verdict, detail="the answers could not be compared")
        for verdict in verdicts
    ]


def reasoning_accuracy_reward(
    completions: Completions, solution: Sequence[str], reasoning_delimiters: Sequence[str] | None = None, **_: Any
) -> list[Any]:
    """The same of what follows the reasoning; 0 where the reasoning does not end."""
    delimiters = reasoning_delimiters or ["</think>"]
    texts = [_text(completion) for completion in completions]
    marks = [next((mark for mark in delimiters if mark in text), None) for text in texts]
    answers = [text.rsplit(mark, 1)[-1] if mark else "" for text, mark in zip(texts, marks, strict=True)]
    graded = accuracy_reward(answers, solution)
    return [value if mark else 0.0 for value, mark in zip(graded, marks, strict=True)]


def think_format_reward(completions: Completions, **_: Any) -> list[float]:
    """1 where the completion begins with one closed <think> section."""
    return [float(bool(_THINKING.match(_text(completion)))) for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A penalty that grows from 0 to -1 over the last ``soft_punish_cache`` tokens before the limit.

    (L_max - L_cache - |y|) / L_cache        DAPO, arXiv:2503.14476, equation 13
    """
    free = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        return [
            0.0 if n <= free else -1.0 if n > max_completion_len else (free - n) / soft_punish_cache for n in lengths
        ]

    return soft_overlong_punishment_reward


def soft_overlong_punishment(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The penalty with the constants of TRL's command: from 1,024 to 1,280 tokens."""
    return get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)(completion_ids)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """The share of tokens' n-grams that were there before, times ``max_penalty``; arXiv:2502.03373, appendix C.2."""
    if max_penalty > 0:
        raise ConfigError(f"max_penalty is {max_penalty:g}; a penalty is 0 or below")

    def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        penalties = []
        for ids in completion_ids:
            grams = [tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)]
            repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
            penalties.append(repeated * max_penalty if repeated else 0.0)
        return penalties

    return repetition_penalty_reward


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[Any]]:
    """Right answers pay more the shorter they are, wrong ones cost less the longer; arXiv:2502.03373, appendix C.1."""

    def cosine_scaled_reward(
        completions: Completions, solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[Any]:
        values = []
        for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            if not isinstance(right, float):
                values.append(right)
                continue
            end, start = (min_value_correct, max_value_correct) if right else (max_value_wrong, min_value_wrong)
            share = (1 + math.cos(math.pi * min(len(ids) / max_len, 1.0))) / 2  # 1 for nothing, 0 at the limit
            values.append(end + (start - end) * share)
        return values

    return cosine_scaled_reward


@cache
def _checker() -> AnswerChecker:
    return AnswerChecker()


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _answer(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    named = [content for start, _, content in formulas(text) if _ANCHOR.search(text[max(0, start - 100) : start])]
    return named[-1] if named else None


def _gold(solution: str) -> str:
    matches = formulas(solution)
    return last_boxed(solution) or (matches[-1][2] if matches else solution.strip())
