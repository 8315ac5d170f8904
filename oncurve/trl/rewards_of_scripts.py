"""Rewards of a script for TRL: functions of lists, and models that score a text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MethodType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import SOURCE_ROW, Completion, Prompt, Reward
from oncurve.episodes.from_settings import paying_classes
from oncurve.rewards.custom import from_function
from oncurve.rewards.foreign_code import run_async
from oncurve.rewards.weighted_sum import WeightedSum
from oncurve.trl.chat import is_conversational

REWARDS = "_calculate_rewards"
NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a row that a reward does not get."""
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
            module: Any = model
            self.tokenizer: Any = tokenizer or AutoTokenizer.from_pretrained(module.config._name_or_path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"reward_funcs: {name} cannot be loaded: {' '.join(str(error).split())[:300]}") from None
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        module.config.pad_token_id = self.tokenizer.pad_token_id
        self.model = module.eval()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """The first output for every text."""
        questions = [prompt.row[SOURCE_ROW]["prompt"] if self.messages else prompt.text for prompt in prompts]
        answers = [
            [{"role": "assistant", "content": completion.text}] if self.messages else completion.text
            for completion in completions
        ]
        return [Reward(value=score) for score in self.scores(questions, answers)]

    def scores(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """The first output for every text, of prompts and completions as text or as lists of messages."""
        texts = [
            str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))
            if self.messages
            else prompt + completion
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self.model.device)
        with torch.inference_mode():
            return self.model(**inputs).logits[:, 0].float().tolist()

    def close(self) -> None:
        """Nothing to end."""


def sum_inside(function: RewardFunction) -> WeightedSum:
    """The weighted sum within what grades it early, or its share of the prompts in each process."""
    inner: Any = function
    while not isinstance(inner, WeightedSum):
        inner = inner.function
    return inner


class ScriptRewards:
    """The part of a trainer that computes rewards. A script may replace `_calculate_rewards`."""

    translation: Any
    model: Any
    reward_func_names: Any
    is_world_process_zero: Any
    _make: Any
    _replaces: Any
    _in_mode: Any
    _is_training: bool
    _graded_by: WeightedSum | None = None
    """The sum of a run in training, or of the last one."""
    _environment_weights: Sequence[float] = ()
    """Weights of the environments' own rewards that the script has set."""
    _has_columns: bool
    """`_calculate_rewards` was the script's own when the trainer was made."""
    _columns: tuple[Any, Tensor, list[int]] | None = None
    """Completions, the script's own rewards for them [B F], and the columns of these that were read."""

    @property
    def reward_weights(self) -> Tensor:
        """The weight of every reward [functions], those of environments' own among them.

        Others may be set at any time, as in TRL: those set while it trains count from the next step on.
        """
        weights = [weight for _, weight in self.translation.rewards]
        own = self._environment_weights or [1.0] * len(self._paying_environments)
        return torch.tensor([*weights, *own], dtype=torch.float32)

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        """Raises ConfigError for another number of them, and for one that is not finite."""
        values = torch.as_tensor(weights, dtype=torch.float32).flatten().tolist()
        if len(values) != len(self.reward_weights) or not all(map(math.isfinite, values)):
            raise ConfigError(f"reward_weights is {values}. Give a finite number for each of {self.reward_func_names}")
        functions = [function for function, _ in self.translation.rewards]
        rewards = list(zip(functions, values[: len(functions)], strict=True))
        self.translation = replace(self.translation, rewards=rewards)
        self._environment_weights = values[len(functions) :]
        if not self._is_training or self._graded_by is None:
            self._make(is_described=True)
            return
        self._graded_by.reweigh(values)
        if self.is_world_process_zero():
            Console().print(f"note: reward_weights are {values} from now on", markup=False, soft_wrap=True)

    @cached_property
    def _paying_environments(self) -> list[str]:
        """Classes of the script's environments that have a reward of their own."""
        factory = self.translation.arguments.environment_factory
        return [] if factory is None else list(paying_classes(factory))

    def _calculate_rewards(
        self, inputs: Any, prompts: Sequence[Any], completions: Sequence[Any], completion_ids_list: Any
    ) -> Tensor:
        """The reward of every completion by every function [N, functions]; NaN where it has no opinion."""
        arguments = self.translation.arguments
        named = {name: [row[name] for row in inputs] for name in inputs[0] if name not in NO_COLUMNS} | arguments.extras
        columns = []
        for function, (reward, _) in zip(arguments.reward_funcs, self.translation.rewards, strict=True):
            if isinstance(reward, RewardModel):
                values: Any = reward.scores(prompts, completions)
            else:
                values = function(prompts=prompts, completions=completions, completion_ids=completion_ids_list, **named)
            if inspect.isawaitable(values):
                [values] = run_async([values], PATIENCE_SECONDS)
            if isinstance(values, BaseException):
                raise values
            columns.append([math.nan if value is None else float(value) for value in values])
        return torch.tensor(columns, dtype=torch.float32).T

    def _script_rewards(self) -> list[tuple[RewardFunction, float]]:
        """The rewards of the script; columns of what its own method computes, where it has one.

        Raises ConfigError where that could not be all of them.
        """
        arguments, rewards = self.translation.arguments, self.translation.rewards
        self._has_columns = self._replaces(REWARDS)
        if not self._has_columns:
            return rewards
        if self._paying_environments:
            raise ConfigError(
                f"{REWARDS} is replaced, and environments have a get_reward, which it does not compute here. Let a "
                f"reward function read it: it gets `environments`"
            )
        messages = is_conversational({"prompt": self.translation.rows[0][SOURCE_ROW]["prompt"]})
        method, made = self._calculate_rewards, []
        code = method.__func__ if isinstance(method, MethodType) else method
        for index, (reward, weight) in enumerate(rewards):
            column_reward: Any = reward_of(
                partial(self._column, index), reward.name, messages=messages, extras=arguments.extras
            )
            column_reward.__wrapped__ = partial(code, arguments.reward_funcs[index])  # whose change a resume notices
            made.append((column_reward, weight))
        return made

    def _column(
        self, index: int, /, prompts: Any, completions: Any, completion_ids: Any, **columns: Any
    ) -> list[float]:
        """Rewards of the script's method for one function: it is called once for all of them."""
        key = (prompts, completions, completion_ids)
        if self._columns is None or self._columns[0] != key or index in self._columns[2]:
            names = columns.keys() - self.translation.arguments.extras.keys()
            inputs = [
                {"prompt": prompt, **{name: columns[name][row] for name in names}} for row, prompt in enumerate(prompts)
            ]
            with self._in_mode():
                made = self._calculate_rewards(inputs, *key)
            shape = (len(prompts), len(self.translation.rewards))
            if not isinstance(made, Tensor) or made.shape != shape:
                returned = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ConfigError(f"{REWARDS} returns {returned}, not a tensor of completions and functions {shape}")
            self._columns = (key, made, [])
        self._columns[2].append(index)
        return self._columns[1][:, index].tolist()
