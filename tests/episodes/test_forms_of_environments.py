"""Is every form in which environments give observations, rewards, ends and tools read, and another one named?"""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from oncurve.core.records import Reward
from oncurve.episodes.environments import (
    Environment,
    Kind,
    answer_of,
    first_observation,
    is_step,
    methods_as_tools,
    reward_of,
)


class Flag:
    """Three calls and done, said by an attribute of some type."""

    def __init__(self, done: Any) -> None:
        self._kinds, self.calls = done, 0
        self.done = done(False)

    def reset(self, question: str) -> None:
        pass

    def press(self) -> str:
        """Press."""
        self.calls += 1
        self.done = self._kinds(True)
        return "pressed"

    def get_reward(self) -> float:
        return float(self.calls)


class Slotted:
    """Done is a slot."""

    __slots__ = ("calls", "done")

    def __init__(self) -> None:
        self.calls, self.done = 0, False

    def reset(self, question: str) -> None:
        pass

    def press(self) -> str:
        """Press."""
        self.calls, self.done = self.calls + 1, True
        return "pressed"

    def get_reward(self) -> float:
        return float(self.calls)


class Property(Flag):
    """Done is a property."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self.calls > 0

    def press(self) -> str:
        """Press."""
        self.calls += 1
        return "pressed"


@pytest.mark.parametrize(
    "make",
    [partial(Flag, np.bool_), partial(Flag, int), partial(Flag, torch.tensor), Slotted, Property],
    ids=["numpy", "int", "tensor", "slot", "property"],
)
def test_done_ends_an_episode_whatever_it_is_made_of(make: Any) -> None:
    environment = Environment(Kind.of("e", make), make())
    environment.note_done()
    assert not environment.is_done
    environment.inner.press()
    environment.note_done()
    assert environment.is_done


class OldGym:
    """Four values."""

    def reset(self, question: str) -> str:
        return "go"

    def step(self, action: str) -> Any:
        return "on", 1.0, action == "end", {"fact": 1}


class AsyncGym(OldGym):
    """Five values, awaited."""

    async def step(self, action: str) -> Any:
        return "on", np.float32(1.0), np.bool_(action == "end"), False, {}


class OneValue(OldGym):
    """An observation alone."""

    def step(self, action: str) -> Any:
        return "on"


@pytest.mark.parametrize("make", [OldGym, AsyncGym])
def test_steps_of_gym_and_gymnasium_plain_and_async(make: Any) -> None:
    def step(environment: Environment, action: str) -> Any:
        given = environment.step(action)
        return asyncio.run(given) if inspect.isawaitable(given) else given

    environment = Environment(Kind.of("e", make), make())
    assert step(environment, "go") == "on"
    assert not environment.is_done
    step(environment, "end")
    assert environment.is_done
    assert environment.earned == 2.0


class Named:
    """What OpenEnv's step gives."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


@pytest.mark.parametrize(
    ("returned", "text", "earned", "is_done"),
    [
        (("a", 1, False), "a", 1.0, False), (["a", 1, True], "a", 1.0, True), (("a", 1, True, {}), "a", 1.0, True),
        (("a", 1, False, {"x": 1}), "a", 1.0, False), (("a", 1, False, True, {}), "a", 1.0, True),
        (("a", 1, False, False, {"x": 1}), "a", 1.0, False), (("a", None, False), "a", None, False),
        ({"observation": "a", "reward": 2, "done": True}, "a", 2.0, True),
        ({"observation": "a", "reward": 2, "terminated": False, "truncated": True}, "a", 2.0, True),
        (Named(observation="a", reward=0, done=False), "a", 0.0, False),
        (([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], 1, False), "x\ny", 1.0, False),
        (([{"role": "user"}], 1, False), '[{"role": "user"}]', 1.0, False), (([], 1, False), "[]", 1.0, False),
        ((None, 1, False), "", 1.0, False),
    ],
)  # fmt: skip
def test_every_form_of_a_step_is_read(returned: Any, text: str, earned: float | None, is_done: bool) -> None:
    class Stepping(OldGym):
        def step(self, action: str) -> Any:
            return returned

    environment = Environment(Kind.of("e", Stepping), Stepping())
    assert environment.is_paid is None
    assert environment.step("go") == text
    assert (environment.reward(list), environment.is_done) == (earned, is_done)
    returned = ("a", 0.5, False)
    environment.step("go")
    assert (environment.reward(list), environment.is_done) == ((earned or 0.0) + 0.5, is_done)
    returned = ("a", None, False)
    environment.step("go")
    assert environment.reward(list) == (earned or 0.0) + 0.5


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (("a", 1), "step gave 2 values"), (("a",) * 6, "step gave 6 values"), (("a", "1", False), "the reward '1'"),
        (("a", 1, False, {}, {}), "the end {}"), (("a", 1, "no"), "the end 'no'"), ({"observation": "a"}, "gave dict"),
    ],
)  # fmt: skip
def test_what_is_no_step_is_named(returned: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Environment(Kind.of("e", OldGym), OldGym())._stepped(returned)


def test_reset_gets_the_columns_that_it_takes_and_a_seed_where_the_row_has_none() -> None:
    row = {"a": 1, "b": 2}
    assert answer_of(lambda **row: row, row, 7) == row
    assert answer_of(lambda a: a, row, 7) == 1
    assert answer_of(lambda a, seed: (a, seed), row, 7) == (1, 7)
    assert answer_of(lambda seed, **row: (seed, row), {**row, "seed": 3}, 7) == (3, row)
    for returned, text in (
        (("a", {}), "a"), ((), "[]"), ({"observation": "a", "info": 1}, "a"), ({"x": 1}, '{"x": 1}'), (None, ""),
        (Named(observation="a"), "a"), ("a", "a"),
    ):  # fmt: skip
        assert first_observation(returned) == text
    takes = [is_step(method) for method in (lambda: 0, lambda a: 0, lambda a, b: 0, lambda a, b=1, *c, **d: 0)]
    assert takes == [False, True, False, True]
    with pytest.raises(TypeError):
        reward_of([1.0])
    assert reward_of(2) == Reward(2.0)
    assert reward_of({"reward": 0.5, "part": 2}) == Reward(0.5, {"part": 2.0})


def test_a_step_that_gives_something_else_says_what_to_return() -> None:
    with pytest.raises(TypeError, match=r"step gave str; return \(observation, reward, terminated"):
        Environment(Kind.of("e", OneValue), OneValue()).step("go")


def test_no_reward_does_not_apply() -> None:
    assert reward_of(None).error == "not_applicable"
    assert reward_of({"reward": 1, "why": "text", "found": True}).parts == {"found": 1.0}
    with pytest.raises(ValueError, match=r"get_reward gave \['score'\] without 'reward'"):
        reward_of({"score": 1.0})


class Walk:
    """An environment whose methods are tools, one of which is called step."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin."""
        return "go", {}

    def step(self, metres: int) -> str:
        """Go on.

        Args:
            metres: How far.
        """
        return f"{metres} further"

    def get_reward(self) -> float:
        """The end."""
        return 1.0


def test_every_public_method_but_those_of_the_episode_is_a_tool() -> None:
    assert list(methods_as_tools(Walk())) == ["step"]
