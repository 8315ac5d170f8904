"""Reward functions as people write them for other trainers."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

from oncurve.core.records import Completion, Prompt, Reward


def trl_columns(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    assert kwargs["level"] == [1] * len(prompts)
    assert all(isinstance(ids, list) for ids in kwargs["completion_ids"])
    return [1.0 if gold in text else 0.0 for text, gold in zip(completions, answer, strict=True)]


def trl_without_kwargs(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def trl_positional_prompts(prompts: list[str], completions: list[str]) -> list[bool]:
    return [prompt == text for prompt, text in zip(prompts, completions, strict=True)]


def trl_text(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.5 if re.search(r"<answer>.*</answer>", text, re.DOTALL) else -0.5 for text in completions]


def trl_messages(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    return [float("5" in completion[0]["content"]) for completion in completions]


def trl_chat_prompts(prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]]) -> list[float]:
    pairs = zip(prompts, completions, strict=True)
    return [len(completion[-1]["content"]) if prompt[-1]["content"] == "hi" else 0.0 for prompt, completion in pairs]


def trl_none(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if not text else math.nan if text == "nan" else 1.0 for text in completions]


def trl_dicts(completions: list[str], **kwargs: Any) -> list[dict[str, float]]:
    return [{"reward": 1.0, "format_reward": 1.0, "answer_reward": 0.0, "words": 3} for _ in completions]


async def trl_async(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


async def trl_async_messages(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(completion[0]["content"])) for completion in completions]


def trl_bug(completions: list[str], **kwargs: Any) -> list[float]:
    return [{"a": 1.0}[text] for text in completions]


def trl_wrong_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


def trl_one_number(completions: list[str], **kwargs: Any) -> float:
    return 1.0


def sample(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def sample_other_names(response: str, ground_truth: str, fast: bool = True) -> dict[str, float]:
    right = float(fast and response == ground_truth)
    return {"format_reward": 1.0, "answer_reward": right, "reward": right}


def sample_any_second_name(text: str, target_value: str) -> bool:
    return text == target_value


def sample_columns(completion: str, answer: str, level: int, *, prompt: str) -> float:
    assert prompt.startswith("2 + 3")
    return float(level)


def sample_row(completion: str, **row: Any) -> float:
    return float(row["level"])


def sample_alone(completion: str) -> int:
    return len(completion)


def sample_divides(completion: str, answer: str) -> float:
    return 1 / int(completion)


def sample_messages(completion: list[dict[str, str]], answer: str) -> float:
    return float(completion[-1]["content"] == answer)


class Odd(BaseException):
    """No ordinary exception."""


def stops_by_itself(completion: str, answer: str) -> float:
    raise Odd("enough")


def sample_by_place(prompt: str, completion: str, answer: str, /, level: int) -> float:
    return float(prompt.startswith("2 + 3") and completion == answer and level == 1)


def trl_by_place(prompts: list[str], completions: list[str], /, **kwargs: Any) -> list[float]:
    return [
        float(prompt.startswith("2 + 3") and text == "5") for prompt, text in zip(prompts, completions, strict=True)
    ]


async def sample_async(completion: str, answer: str) -> float:
    await asyncio.sleep(60 if completion == "slow" else 0.05)
    if completion == "bad":
        raise ValueError("bad")
    return float(threading.current_thread() is not threading.main_thread())


class Callable:
    """A callable object with state."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        self.num_calls += 1
        return [float(self.num_calls)] * len(completions)


class Native:
    """An object with the protocol of this package."""

    name = "native"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [Reward(value=2.0) for _ in completions]

    def close(self) -> None:
        pass


class NeedsArguments:
    """Cannot be made by name alone."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold


NOT_CALLABLE = 3
