"""Reward functions of one's own, including those written for other trainers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from itertools import islice
from typing import Any, Literal, SupportsFloat

from oncurve.chat_messages import messages_of
from oncurve.core.errors import ConfigError, Failure, attempt
from oncurve.core.grading import RewardFunction, ungraded
from oncurve.core.records import NOT_APPLICABLE, RAW_ANSWER, SOURCE_ROW, Completion, Prompt, Reward
from oncurve.rewards.foreign_code import limited, run_async
from oncurve.rewards.notes import Notes, state_at
from oncurve.rewards.parameters import ANSWER_NAMES, OPTIONAL_COLUMNS, STATE_NAMES, completion_parameter
from oncurve.rewards.section import UNKNOWN_LENGTH, RunLength
from oncurve.user_code import contained
from oncurve.wording import listed, shortened

CompletionsAs = Literal["auto", "text", "messages"]
"""How a function gets completions: as strings, as lists of chat messages, or as strings and, if it fails, messages."""

RETURNED_NONE = "the function returned None, as one without `return` does. Let it return a number"
_VALUE_KEYS = ("reward", "score", "value")
LARGEST = 1e30
"""Rewards are float32 in a batch, and their squares float64."""
_PART_NAMES = {"format_reward": "format", "answer_reward": "correct"}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_SHAPE_ERRORS = (TypeError, AttributeError, KeyError, IndexError)


def from_function(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    completions_as: CompletionsAs = "auto",
    timeout_seconds: float = 60.0,
    is_batched: bool | None = None,
    extras: Mapping[str, Any] | None = None,
    nan_is_none: bool = False,
    length: RunLength = UNKNOWN_LENGTH,
) -> RewardFunction:
    """A reward function from whatever somebody wrote.

    Accepted as they are: an object with the protocol of ``RewardFunction``; a function with a parameter
    ``completions``, called like TRL's with lists and keywords; any other function, called for each completion as
    ``f(completion, answer)``. Each may be async; each may return numbers, None (not applicable) or dictionaries with a
    "reward" and named parts. ``timeout_seconds`` is for one completion: so many times as long for a call with lists.
    ``is_batched`` says whether it is called with lists where its parameters do not; ``extras`` are further arguments of
    such a call. NaN is an error, or with ``nan_is_none`` the same as None. Each may ask for ``step``,
    ``trainer_state``, ``log_metric`` and ``log_extra`` (``notes``); ``length`` is that of the run.
    """
    if isinstance(function, RewardFunction) and not inspect.isfunction(function):
        return function
    known = name or getattr(function, "__name__", None) or type(function).__name__
    parameters = _parameters(function)
    if is_batched is None:
        only_keywords = [p.kind for p in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
        is_batched = only_keywords or not parameters.keys().isdisjoint(("completions", "completion_ids"))
    adapter = _Batched if is_batched else _PerSample
    return adapter(
        function,
        name=known,
        parameters=parameters,
        completions_as=completions_as,
        timeout_seconds=timeout_seconds,
        extras=extras or {},
        nan_is_none=nan_is_none,
        length=length,
    )


def reads_answer(function: Callable[..., Any]) -> bool:
    """Whether a function asks for the answer of a row, so that there is a right one; True where that cannot be told."""
    if isinstance(function, RewardFunction) and not inspect.isfunction(function):
        return True
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [name for name, parameter in _parameters(function).items() if parameter.kind not in fixed]
    if "completions" in names:
        return bool({*ANSWER_NAMES} & {*names})
    others = {*names} - {completion_parameter(names)}
    return bool({*ANSWER_NAMES, "row"} & others) or (
        len(others) == 1 and not others <= {"prompt", "question", *OPTIONAL_COLUMNS, *STATE_NAMES}
    )


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in _parameters(function)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    signature = attempt(lambda: inspect.signature(function))
    if isinstance(signature, Failure):
        raise ConfigError(f"rewards: the parameters of {function!r} cannot be read: {signature.detail}")
    return signature.parameters


class _Adapted:
    """Common parts of both kinds of adapters: names of arguments, the form of completions, async calls."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        parameters: Mapping[str, inspect.Parameter],
        completions_as: CompletionsAs,
        timeout_seconds: float,
        extras: Mapping[str, Any],
        nan_is_none: bool,
        length: RunLength,
    ) -> None:
        self.name = name
        self.nan_is_none = nan_is_none
        self.function = self.__wrapped__ = function
        self.extras = extras
        self.length = length
        self.completions_as: CompletionsAs = completions_as
        self.timeout_seconds = timeout_seconds
        self._parameters = parameters
        self._completion_name = completion_parameter(list(parameters))
        self._positional_name = (
            None if isinstance(self, _Batched) else self._completion_name
        )  # TRL gives everything by name
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion; what the function breaks in this process is put back."""
        with contained(f"rewards: {self.name}"):
            return self._grade(prompts, completions)

    def _grade(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        raise NotImplementedError

    def _reward(self, value: Any) -> Reward:
        """The function's result for one completion, as a reward or an error."""
        if isinstance(value, Failure):
            return ungraded(value)
        reward = attempt(lambda: to_reward(value, nan_is_none=self.nan_is_none))
        return ungraded(reward) if isinstance(reward, Failure) else reward

    def close(self) -> None:
        """Nothing to end: a function owns no processes that we know of."""

    def _called(self, arguments: dict[str, Any]) -> Any:
        """The result of a call with arguments by name: those that stand first by position, the others as keywords."""
        first = next(iter(self._parameters), None)
        positional = [
            arguments.pop(name)
            for name, p in self._parameters.items()
            if name in arguments
            and (p.kind in _POSITIONAL or (name == first == self._positional_name and p.kind is not p.KEYWORD_ONLY))
        ]
        return self.function(*positional, **arguments)

    def _in_either_form(self, call: Callable[[bool], Any]) -> Any:
        """Calls with completions as text, then as messages if the function takes no text; what worked once stays.

        Text goes first because a function for text may misread messages in silence ("####" in a list is False), while
        one for messages cannot index a string by "content".
        """
        if self.completions_as != "auto":
            return call(self.completions_as == "messages")
        try:
            result = call(False)
            self.completions_as = "text"
        except _SHAPE_ERRORS as first:
            try:
                result = call(True)
            except _SHAPE_ERRORS:
                raise first from None
            self.completions_as = "messages"
        return result

    def _wait_for(self, result: Any) -> Any:
        """The result of a call, awaited if it has to be."""
        if inspect.isawaitable(result):
            result = run_async([result], self.timeout_seconds)[0]
        return _returned(result)


class _Batched(_Adapted):
    """A function in TRL's style: ``f(prompts=[...], completions=[...], **columns) -> [...]``."""

    def _grade(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        if self.completions_as == "auto" and prompts and SOURCE_ROW in prompts[0].row:
            self.completions_as = "text" if isinstance(prompts[0].row[SOURCE_ROW]["prompt"], str) else "messages"
        notes = Notes()

        def call(as_messages: bool) -> Any:
            notes.clear()
            return self._call(prompts, completions, notes, as_messages=as_messages)

        with limited(self.timeout_seconds * max(len(completions), 1)):
            values = self._in_either_form(call)
            if isinstance(values, (str, Mapping, Set)) or not isinstance(values, Iterable):
                raise TypeError(f"{self.name} returned {type(values).__name__}, not one value per completion")
            results = list(islice(values, len(completions) + 1))  # one too many is noticed
        rewards = [self._reward(value) for value in results]
        return notes.noted(rewards) if len(rewards) == len(completions) else rewards

    def _call(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], notes: Notes, *, as_messages: bool
    ) -> Any:
        rows: list[Mapping[str, Any]] = [prompt.source_row for prompt in prompts]
        arguments: dict[str, Any] = {
            column: [row.get(column) for row in rows]
            for column in dict.fromkeys(column for row in rows for column in row)
            if column not in ("prompt", "prompts", "completion", "completions", "completion_ids")
        }
        state = state_at(completions, self.length)
        if "step" in self._parameters:
            arguments.setdefault("step", state.global_step)
        arguments |= {
            "prompts": [
                _prompt_in_form(*pair, as_messages=as_messages) for pair in zip(prompts, completions, strict=True)
            ],
            "completions": [messages_of(completion) if as_messages else completion.text for completion in completions],
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "trainer_state": state,
            "log_extra": notes.log_extra,
            "log_metric": notes.log_metric,
            **self.extras,
        }
        environments = [completion.environment for completion in completions]
        if any(made is not None for made in environments) or asks_for(self.function, "environments"):
            arguments["environments"] = environments
        declared = {key: value for key, value in arguments.items() if self._takes_all or key in self._parameters}
        return self._wait_for(self._called(declared))


class _PerSample(_Adapted):
    """A function of one completion: ``f(completion, answer) -> float | dict``; other names are columns of the row."""

    def _grade(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        notes = [Notes() for _ in completions]
        results = [self._limited(*case) for case in zip(prompts, completions, notes, strict=True)]
        pending = [result for result in results if inspect.isawaitable(result)]
        awaited = iter(run_async(pending, self.timeout_seconds))
        results = [
            attempt(lambda: _returned(next(awaited))) if inspect.isawaitable(result) else result for result in results
        ]
        rewards = [self._reward(result) for result in results]
        return [note.noted([reward])[0] for note, reward in zip(notes, rewards, strict=True)]

    def _limited(self, prompt: Prompt, completion: Completion, notes: Notes) -> Any:
        """The function's result for a completion, or why there is none: one that fails is an error by itself."""

        def call() -> Any:
            with limited(self.timeout_seconds):
                return self._call(prompt, completion, notes)

        return attempt(call)

    def _call(self, prompt: Prompt, completion: Completion, notes: Notes) -> Any:
        arguments = self._arguments(prompt, completion, notes)

        def call(as_messages: bool) -> Any:
            notes.clear()
            written = messages_of(completion) if as_messages else completion.text
            result = self._called({**arguments, str(self._completion_name): written})
            is_undecided = self.completions_as == "auto"  # the first one alone, before the others run together
            return self._wait_for(result) if is_undecided else result

        return self._in_either_form(call)

    def _arguments(self, prompt: Prompt, completion: Completion, notes: Notes) -> dict[str, Any]:
        """The columns that the parameters besides the completion's name.

        The next one is the answer under whatever name, unless that reads like another column's misspelt: then nothing
        is given, and the call fails for the want of it.
        """
        named = [
            key
            for key, p in self._parameters.items()
            if key != self._completion_name
            and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        row = prompt.source_row if RAW_ANSWER in prompt.row else prompt.row
        answer = row.get("answer")
        absent = dict.fromkeys(OPTIONAL_COLUMNS)
        state = state_at([completion], self.length)
        known = {
            **absent,
            "step": state.global_step,
            "trainer_state": state,
            "log_metric": notes.log_metric,
            "log_extra": notes.log_extra_of_sample,
            **dict.fromkeys(ANSWER_NAMES, answer),
            "prompt": _prompt_text(prompt, completion),
            "row": row,
            **row,
        }
        if self._takes_all:
            return {**row, **{key: known[key] for key in named if key in known}}
        arguments = {key: known[key] for key in named if key in known}
        if named and named[0] not in arguments and self._parameters[named[0]].default is inspect.Parameter.empty:
            others = tuple(column for column in row if column != "answer")
            if not _is_misspelt(named[0], others):
                arguments[named[0]] = answer
        return arguments


@cache
def _is_misspelt(name: str, columns: tuple[str, ...]) -> bool:
    """Whether a name reads like that of one of these columns; asked for each completion, so kept."""
    return bool(difflib.get_close_matches(name, columns, n=1, cutoff=0.8))


def to_reward(value: Any, *, nan_is_none: bool = False) -> Reward:
    """A reward from a number, a tensor of one number, None (not applicable), a dictionary, or a Reward.

    NaN is an error, since it is usually 0/0; with ``nan_is_none`` it is None. Raises TypeError or ValueError for
    anything else, infinity included.
    """
    if isinstance(value, Reward):
        return value
    if value is None:
        return Reward(value=None, error=NOT_APPLICABLE, detail=RETURNED_NONE)
    if isinstance(value, Mapping):
        return _from_mapping(value, nan_is_none=nan_is_none)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        returned = "a generator (write return, not yield)" if inspect.isgenerator(value) else shortened(repr(value), 60)
        lists = ". A function of lists has a parameter `completions`" if isinstance(value, (list, tuple)) else ""
        raise type(error)(
            f"the function returned {returned}; a reward is a number, None, or {{'reward': number}}{lists}"
        ) from None
    if abs(number) > LARGEST:
        raise ValueError(f"the function returned {number:.3g}; a reward is finite, within ±1e30")
    if number != number:
        if nan_is_none:
            return Reward(value=None, error=NOT_APPLICABLE, detail="the function returned NaN")
        return Reward(
            value=None, error="nan", detail="the function returned NaN, usually 0/0; return None for no opinion"
        )
    return Reward(value=number)


def _from_mapping(values: Mapping[str, Any], *, nan_is_none: bool) -> Reward:
    key = next((key for key in _VALUE_KEYS if key in values), None)
    if key is None:
        raise ValueError(f"the function returned a dictionary of {listed(map(str, values))}, without a 'reward'")
    correct = values.get("correct")
    if correct is not None and (not isinstance(correct, SupportsFloat) or float(correct) < 0 or float(correct) > 1):
        returned = shortened(repr(correct), 60)
        raise ValueError(f"the function returned 'correct' as {returned}; it says from 0 to 1 how right the answer is")
    parts: dict[str, float] = {}
    for name, value in values.items():
        if name != key and isinstance(value, SupportsFloat):
            reward = to_reward(value, nan_is_none=nan_is_none)
            if reward.is_failure:
                raise ValueError(f"the function returned {str(name)!r} as NaN; a part is a finite number, or None")
            if reward.value is not None:
                parts[_PART_NAMES.get(str(name), str(name))] = reward.value
    reward = to_reward(values[key], nan_is_none=nan_is_none)
    return Reward(value=reward.value, parts=parts, error=reward.error, detail=reward.detail)


def _prompt_in_form(prompt: Prompt, completion: Completion, *, as_messages: bool) -> Any:
    """The question as a function reads it, with the words of its environment behind it."""
    question = prompt.row[SOURCE_ROW]["prompt"] if SOURCE_ROW in prompt.row else None
    if isinstance(question, str) or (question is None and not as_messages):
        return question if question is not None else _prompt_text(prompt, completion)
    messages = [dict(message) for message in question or prompt.messages or ({"role": "user", "content": prompt.text},)]
    if completion.observation:
        messages[-1]["content"] += completion.observation
    return messages


def _prompt_text(prompt: Prompt, completion: Completion) -> str:
    return (completion.own_prompt if completion.observation else None) or prompt.text


def _returned(result: Any) -> Any:
    """A result as it is; an exception in its place is raised."""
    if isinstance(result, BaseException):
        raise result
    return result
