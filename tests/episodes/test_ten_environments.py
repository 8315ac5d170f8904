"""Do environments run as people write them: with steps of several libraries, with tools, and with any kind of end?"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scripted import make_sampler, one

from oncurve.core.errors import SamplerError
from oncurve.core.records import Group, Prompt
from oncurve.core.sampler import SamplingRequest
from oncurve.observe.measure import episode_metrics
from oncurve.policy.trained_policy import TrainedPolicy

MakePrompts = Callable[..., list[Prompt]]


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


class TwoTurns:
    """What the ten share: the second turn is the last, and each is worth a point."""

    turns = 0

    def _turn(self) -> bool:
        self.turns += 1
        return self.turns == 2


class Gymnasium(TwoTurns):
    """Five values, observations are dictionaries with numbers of numpy; reset gives facts too."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"turn": np.int64(0)}, {}

    def step(self, action: str) -> Any:
        is_last = self._turn()
        return {"turn": np.int64(self.turns)}, 1.0, is_last, False, {}


class Truncating(Gymnasium):
    """Ends by its limit; observations are arrays."""

    def step(self, action: str) -> Any:
        is_last = self._turn()
        return np.array([self.turns, 0]), np.float64(1.0), np.False_, np.bool_(is_last), {}


class Gym(TwoTurns):
    """Four values; reset gives the observation alone."""

    def reset(self) -> Any:
        return "begin"

    def step(self, action: str) -> Any:
        return "on", 1, self._turn(), {}


class Tensors(Gym):
    """A list of tensors without facts."""

    def step(self, action: str) -> Any:
        return ["on", torch.tensor([1.0]), torch.tensor([self._turn()])]


class Answer(NamedTuple):
    """What a step gives, with names."""

    observation: str
    reward: float
    done: bool
    info: dict[str, Any]


class Awaited(TwoTurns):
    """Everything is awaited, and values have names."""

    async def reset(self, answer: str) -> str:
        return f"begin {len(answer)}"

    async def step(self, action: str) -> Answer:
        return Answer("on", 1.0, self._turn(), {})


class SaysDone(Gym):
    """Its attribute says that it is done, and its step does not."""

    done = False

    def step(self, action: str) -> Any:
        self.done = self._turn()
        return "on", 1.0, False, {}


class PaysAtTheEnd(Gymnasium):
    """The first step gives no reward."""

    def step(self, action: str) -> Any:
        is_last = self._turn()
        return "on", 2.0 if is_last else None, is_last, False, {}


class LeavesItToRewards(Gymnasium):
    """No step gives a reward."""

    def step(self, action: str) -> Any:
        return "on", None, self._turn(), False, {}


class Pressed(TwoTurns):
    """A tool, and an attribute of numpy."""

    def reset(self, **row: Any) -> None:
        self.done: Any = np.bool_(False)

    def press(self) -> dict[str, Any]:
        """Press."""
        self.done = np.bool_(self._turn())
        return {"turn": np.int64(self.turns)}

    def get_reward(self) -> Any:
        return np.float32(self.turns)


class AwaitedTools(Pressed):
    """Tool and reward are awaited, and the attribute is a tensor."""

    async def press(self) -> dict[str, Any]:  # type: ignore[override]
        """Press."""
        self.done = torch.tensor(self._turn())
        return {"turn": torch.tensor(self.turns)}

    async def get_reward(self) -> Any:
        return torch.tensor(2.0)


class Property(Pressed):
    """The attribute is a property, and the reward has parts."""

    def reset(self, **row: Any) -> None:
        pass

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self.turns == 2

    def press(self) -> dict[str, Any]:
        """Press."""
        self._turn()
        return {"turn": self.turns}

    def get_reward(self) -> Any:
        return {"reward": 2, "pressed": True}


class Slots:
    """The attribute is a slot, and there is no reward to give."""

    __slots__ = ("done", "turns")

    def reset(self, **row: Any) -> None:
        self.turns, self.done = 0, False

    def press(self) -> dict[str, Any]:
        """Press."""
        self.turns += 1
        self.done = self.turns == 2
        return {"turn": self.turns}

    def get_reward(self) -> None:
        return None


class Named(TwoTurns):
    """Steps are dictionaries."""

    def reset(self) -> Any:
        return {"observation": "begin", "info": {}}

    def step(self, action: str) -> Any:
        is_last = self._turn()
        return {"observation": "on", "reward": 1.0, "terminated": is_last, "truncated": False}


@dataclass
class Stepped:
    """What OpenEnv's client gives."""

    observation: str
    reward: float | None
    done: bool


class Objects(TwoTurns):
    """Reset and step give objects; a property may not be asked before reset."""

    @property
    def state(self) -> Any:
        raise RuntimeError("there is none before reset")

    def reset(self) -> Stepped:
        return Stepped("begin", None, False)

    def step(self, action: str) -> Stepped:
        return Stepped("on", 1.0, self._turn())


class Messages(Gymnasium):
    """Observations are messages of a chat, as those of verifiers."""

    def step(self, action: str) -> Any:
        return [{"role": "user", "content": "on"}], 1.0, self._turn(), False, {}


class Silent(Gymnasium):
    """There is nothing to observe, and closing is awaited."""

    closed = 0

    def step(self, action: str) -> Any:
        return None, 1.0, self._turn(), False, {}

    async def close(self) -> None:
        Silent.closed += 1


STYLES = {
    Gymnasium: (2.0, '{"turn": 1}'), Truncating: (2.0, "[1, 0]"), Gym: (2.0, "on"), Tensors: (2.0, "on"),
    Awaited: (2.0, "on"), SaysDone: (2.0, "on"), Pressed: (2.0, '{"turn": 1}'), AwaitedTools: (2.0, '{"turn": 1}'),
    PaysAtTheEnd: (2.0, "on"), LeavesItToRewards: (None, "on"), Property: (2.0, '{"turn": 1}'),
    Slots: (None, '{"turn": 1}'), Named: (2.0, "U: on\nA:"), Objects: (2.0, "U: on\nA:"), Messages: (2.0, "U: on\nA:"),
    Silent: (2.0, "U: \nA:"),
}  # fmt: skip


@pytest.mark.parametrize("factory", STYLES, ids=lambda factory: factory.__name__)
def test_an_environment_is_played_to_its_end_and_rewarded(
    factory: Any, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    has_steps = hasattr(factory, "step")
    said = "go<|end|>" if has_steps else '<tool>{"name": "press", "arguments": {}}</tool>'
    sampler = make_sampler(policy, lambda read: said, environments={"e": factory})
    prompts = make_prompts("q")
    completion = one(sampler, prompts)
    reward, observation = STYLES[factory]
    assert (completion.finish_reason, completion.failure, completion.num_turns) == ("done", None, 2)
    assert completion.environment_reward is not None
    assert completion.environment_reward.value == reward
    assert completion.environment_reward.is_failure is False
    assert observation in completion.text
    measured = episode_metrics([Group(prompts[0], (completion,))])
    assert measured.get("episode/calls") == (None if has_steps else 2.0)
    sampler.close()
    assert factory is not Silent or Silent.closed == 2, "that of the look at it, and that of the episode"


class Worded(Gym):
    """The end is a word, which is true whatever it says."""

    def step(self, action: str) -> Any:
        return "on", 1.0, "False", {}


def test_an_end_that_is_a_word_is_a_failure_of_the_environment(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(policy, lambda read: "go<|end|>", environments={"e": Worded})
    failed = one(sampler, make_prompts("q")).environment_reward
    assert failed is not None
    assert "step gave the end 'False'" in failed.detail
    sampler.close()


class Stored(Pressed):
    """A data base of one thread."""

    def reset(self, **row: Any) -> None:
        self.base = sqlite3.connect(":memory:")

    def press(self) -> Any:
        """Press."""
        return self.base.execute("select 1").fetchone()


def test_what_is_bound_to_one_thread_stops_with_the_remedy(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    said = '<tool>{"name": "press", "arguments": {}}</tool>'
    sampler = make_sampler(policy, lambda read: said, environments={"e": Stored})
    with pytest.raises(SamplerError, match=r"press: ProgrammingError.*check_same_thread=False"):
        sampler.sample(SamplingRequest(make_prompts("q", "r", "s", "t"), 4))
    sampler.close()
