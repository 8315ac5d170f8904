"""Rewards of a script for TRL: functions of lists, and models that score a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from oncurve.errors import ConfigError
from oncurve.records import SOURCE_ROW, Completion, Prompt, Reward
from oncurve.rewards.base import RewardFunction
from oncurve.rewards.custom import from_function

PATIENCE_SECONDS = 3600.0
"""TRL waits for an async reward without end."""


def reward_name(function: Any) -> str:
    """The name of a reward in logs, as TRL has it."""
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, nn.Module):
        return str(vars(function.config).get("_name_or_path") or type(function).__name__).split("/")[-1]
    if isinstance(function, partial):
        return reward_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def reward_of(
    function: Any, name: str, *, messages: bool, tokenizer: Any = None, extras: Mapping[str, Any] | None = None
) -> RewardFunction:
    """A reward of a script for the loop here. ``messages`` says that prompts and completions are lists of messages.

    Raises ConfigError for what cannot be called.
    """
    if isinstance(function, (str, nn.Module)):
        return RewardModel(function, name, tokenizer=tokenizer, messages=messages)
    if not callable(function):
        raise ConfigError(f"reward_funcs: a {type(function).__name__} cannot be called. Pass functions or model names")
    return from_function(
        function,
        name=name,
        completions_as="messages" if messages else "text",
        timeout_seconds=PATIENCE_SECONDS,
        is_batched=True,
        extras=extras,
        nan_is_none=True,  # as TRL, which makes NaN of None
    )


class RewardModel:
    """A sequence classifier whose first output is the reward of prompt and completion together."""

    def __init__(self, model: str | nn.Module, name: str, *, tokenizer: Any = None, messages: bool = False) -> None:
        """Raises ConfigError for a name that cannot be loaded."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.name, self.messages = name, messages
        try:
            if isinstance(model, str):
                model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
            place: Any = model
            self.tokenizer: Any = tokenizer or AutoTokenizer.from_pretrained(place.config._name_or_path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"reward_funcs: {name} cannot be loaded: {' '.join(str(error).split())[:300]}") from None
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        place.config.pad_token_id = self.tokenizer.pad_token_id
        self.model = place.eval()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """The first output for every text."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self.model.device)
        with torch.inference_mode():
            scores = self.model(**inputs).logits[:, 0].float().tolist()
        return [Reward(value=score) for score in scores]

    def close(self) -> None:
        """Nothing to end."""

    def _text(self, prompt: Prompt, completion: Completion) -> str:
        if not self.messages:
            return prompt.text + completion.text
        said = [*prompt.row[SOURCE_ROW]["prompt"], {"role": "assistant", "content": completion.text}]
        return str(self.tokenizer.apply_chat_template(said, tokenize=False))
