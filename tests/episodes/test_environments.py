"""Do environments begin, act, score and end their episodes, and is what they do wrong never the policy's zero?"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hanging import Hanging
from pydantic import BaseModel
from scripted import make_sampler, one

import oncurve
from oncurve.core.errors import ConfigError, SamplerError
from oncurve.core.grading import grade
from oncurve.core.records import Group, Prompt, Reward, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.episodes.dialects import TagDialect
from oncurve.episodes.environments import (
    Environment,
    Kind,
    answer_of,
    first_observation,
    is_step,
    methods_as_tools,
    reward_of,
)
from oncurve.episodes.episode_sampler import EpisodeSampler
from oncurve.episodes.episode_setup import EpisodeSetup
from oncurve.episodes.settings import EpisodeSection
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.rewards.custom import from_function
from oncurve.rewards.user_functions import EnvironmentReward
from oncurve.rewards.weighted_sum import Term, WeightedSum
from oncurve.sample.engine import InProcessEngine

MakePrompts = Callable[..., list[Prompt]]


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


class Counter:
    """Counts up to where its row says; closed ones are remembered."""

    closed: ClassVar[list[Counter]] = []

    def reset(self, answer: str = "", **row: Any) -> str:
        self.count, self.goal = 0, 2
        return f" count to {self.goal} for {answer}"

    def up(self, by: int) -> str:
        """
        Counts up.

        Args:
            by: How far.
        """
        if by < 0:
            raise ValueError("only up")
        self.count += by
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def close(self) -> None:
        self.closed.append(self)


class Echoing:
    """Gymnasium's form: three turns, each worth a tenth of its letters."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return f" begin {seed is not None}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return f"heard {len(action)}", len(action) / 10, self.turns == 3, False, {}


def counting(read: str) -> str:
    """Wrongly first, then twice by one."""
    told = read.count("<result>")
    return ["<tool>-1</tool>", "<tool>1</tool>", "<tool>1</tool>", "there<|end|>"][told]


def test_methods_are_tools_and_the_environment_scores(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    Counter.closed.clear()
    sampler = make_sampler(policy, counting, environments={"counter": Counter})
    completion = one(sampler, make_prompts("q"))
    assert completion.own_prompt == "q count to 2 for q"
    assert policy.tokenizer.decode(completion.prompt_ids) == completion.own_prompt
    assert [call.answer for call in completion.calls] == ["error: ValueError: only up", "at 1", "at 2"]
    assert (completion.finish_reason, completion.environment_reward) == ("stop", Reward(1.0))
    assert len(Counter.closed) == 1  # the one that was looked at to begin with
    assert completion.environment.count == 2
    sampler.close()
    assert len(Counter.closed) == 2


def test_environments_stay_open_until_grading_is_over_and_measured_ones_until_the_next_sampling(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(policy, counting, environments={"counter": Counter})
    Counter.closed.clear()
    params = SamplingParams(max_completion_tokens=200)
    assert sampler.staleness == 0
    for staleness, step, closed in (
        (0, 1, 0), (0, None, 0), (0, 1, 1), (0, 2, 3), (0, None, 3), (1, 3, 4), (1, 4, 5), (1, 2, 6),
    ):  # fmt: skip
        sampler.staleness = staleness
        sampler.sample(SamplingRequest(make_prompts("q"), 1, params=None if step else params, step=step or 0))
        assert len(Counter.closed) == closed, (staleness, step)
    assert sampler.sample(SamplingRequest([], 1)) == []
    sampler.close()
    assert len(Counter.closed) == 8


def test_an_environment_gets_a_seed_of_its_prompt_and_step_that_its_group_shares(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    class Seeded(Echoing):
        seeds: ClassVar[list[int | None]] = []

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            self.seeds.append(seed)
            return super().reset(seed)

    sampler = make_sampler(policy, lambda read: "y<|end|>", environments={"echo": Seeded})
    for step in (1, 1, 2):
        sampler.sample(SamplingRequest(make_prompts("q", "r"), 2, step=step))
    seeds = [sorted(Seeded.seeds[at : at + 4]) for at in (0, 4, 8)]  # type: ignore[type-var]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds == [[35791686] * 2 + [1494663151] * 2] * 2 + [[1044003161] * 2 + [1539859419] * 2]
    sampler.close()


def test_the_whole_turn_is_an_action_where_an_environment_has_steps(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(policy, lambda read: "x" * read.count("U:") + "y<|end|>", environments={"echo": Echoing})
    completion = one(sampler, make_prompts("q"))
    assert completion.text == "y<|end|>\nU: heard 1\nA:xy<|end|>\nU: heard 2\nA:xxy"
    assert completion.own_prompt == "q begin True"
    assert completion.finish_reason == "done"
    assert completion.environment_reward == Reward(0.1 + 0.2 + 0.3)
    assert not completion.is_truncated
    sampler.close()


class Talks(Echoing):
    """Begins with more words than its row has, so that the model's context ends before max_completion_tokens."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed)
        return " word" * 10, {}


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_an_episode_ends_where_the_context_of_its_model_does(
    architecture: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(8)), encoding="utf-8")
    data = {"type": "jsonl", "path": str(rows), "template": "plain"}
    result = oncurve.train(
        checkpoints[architecture], data, lambda completion: -float(len(completion)), environments=Talks,
        evaluation={"num_prompts": 2}, algorithm={"group_size": 2},
        rollouts={"max_completion_tokens": 250},
        run={"steps": 1, "prompts_per_step": 2, "folder": str(tmp_path)},
    )  # fmt: skip
    assert result.metrics[-1]["episode/ended/context"] > 0


def test_an_environment_that_says_done_ends_the_episode(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    class Ends(Counter):
        done = False

        def up(self, by: int) -> str:
            """
            Ends.

            Args:
                by: Anything.
            """
            self.done = True
            return "over"

    sampler = make_sampler(policy, lambda read: "<tool>1</tool>", environments={"ends": Ends})
    completion = one(sampler, make_prompts("q"))
    assert (completion.finish_reason, completion.num_turns, completion.calls[0].answer) == ("done", 1, "over")
    sampler.close()


def test_rows_name_their_environment_and_see_its_tools_alone(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    class Other(Counter):
        def down(self, by: int) -> str:
            """
            Counts down.

            Args:
                by: How far.
            """
            return "down"

    environments = {"counter": Counter, "other": Other}
    sampler = make_sampler(policy, lambda read: "a<|end|>", environments=environments)
    assert list(sampler.setup.tools_of({"environment": "counter"})) == ["up"]
    assert list(sampler.setup.tools_of({"environment": "other"})) == ["down", "up"]
    with pytest.raises(ConfigError, match="names 'third'"):
        sampler.setup.tools_of({"environment": "third"})
    sampler.close()


class Breaks(Counter):
    """Breaks in the way that the prompt's answer says."""

    forever = threading.Event()

    def reset(self, answer: str = "", **row: Any) -> str | None:
        self.how, self.count, self.goal = answer, 0, 1
        if self.how == "r":
            raise OSError("no room")
        if self.how == "h":
            self.forever.wait()
        return None

    def up(self, by: int) -> str:
        """
        Breaks.

        Args:
            by: Anything.
        """
        if self.how == "c":
            raise ConnectionResetError("gone")
        if self.how == "w":
            self.forever.wait()
        if self.how == "m":
            raise ValueError("a mistake of the policy")
        return "up"

    def get_reward(self) -> float:
        return {"g": "many", "n": float("nan")}.get(self.how, 0.0)  # type: ignore[return-value]


def test_what_an_environment_does_wrong_is_ungraded_and_never_zero(
    policy: TrainedPolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaks, "forever", Hanging(monkeypatch))
    script = lambda read: "fine<|end|>" if "<result>" in read else "<tool>1</tool>"  # noqa: E731
    sampler = make_sampler(policy, script, environments={"breaks": Breaks}, environment_seconds=600.0)
    letters = "rhcwgnmo"
    groups = sampler.sample(SamplingRequest(make_prompts(*letters), 2))
    kinds = {letter: [one.failure for one in group.completions] for letter, group in zip(letters, groups, strict=True)}
    assert kinds == {
        "r": ["environment_crashed"] * 2,
        "h": ["environment_timeout"] * 2,
        "c": ["environment_died"] * 2,
        "w": ["environment_timeout"] * 2,
        "g": ["environment_crashed"] * 2,
        "n": ["environment_crashed"] * 2,
        "m": [None] * 2,
        "o": [None] * 2,
    }
    seen: list[str] = []

    def reward(completion: str, answer: str) -> float:
        seen.append(answer)
        return 0.25

    total = WeightedSum([Term(from_function(reward)), Term(EnvironmentReward())])
    prompts = [group.prompt for group in groups for _ in group.completions]
    rewards = grade(total, prompts, [one for group in groups for one in group.completions])
    assert seen == ["m", "m", "o", "o"]
    assert [reward.value for reward in rewards] == [None] * 12 + [0.25] * 4
    assert [reward.error for reward in rewards[:2]] == ["environment_crashed"] * 2
    Breaks.forever.set()
    sampler.close()


def test_reward_functions_get_the_environments_and_the_messages(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(policy, counting, environments={"counter": Counter})
    completion = one(sampler, make_prompts("q"))

    def reward(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
        roles = [message["role"] for message in completions[0]]
        assert roles == ["assistant", "tool", "assistant", "tool", "assistant", "tool", "assistant"]
        assert completions[0][0]["tool_calls"][0]["function"] == {"name": "up", "arguments": {"by": -1}}
        assert completions[0][0]["content"] == "", "the call is not among the words"
        assert completions[0][-1]["content"] == "there"
        return [float(environment.count) for environment in environments]

    graded = grade(from_function(reward, completions_as="messages"), make_prompts("q"), [completion])
    assert graded == [Reward(2.0)]
    sampler.close()


def test_objects_that_are_no_environments_are_refused() -> None:
    class Asks:
        def reset(self) -> str:
            return "How much is 1 + 1?"

    with pytest.raises(ConfigError, match="has no reset method"):
        Kind.of("a", lambda: object())
    assert Kind.of("a", Asks).tools == {}, "it may only ask, and a reward function looks at it"
    with pytest.raises(ConfigError, match="is made without arguments, and that failed"):
        Kind.of("a", lambda: 1 / 0)


class Pressed:
    """An environment with one tool."""

    def reset(self, **row: Any) -> None: ...

    def press(self) -> str:
        """Press."""
        return "on"


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "entered": ({"__enter__": lambda self: self}, "a context manager, which nothing enters"),
    "awaited": ({"__aenter__": lambda self: self}, r"write close\(self\)"),
    "needs": ({"get_reward": lambda self, answer: 1.0}, "its get_reward needs answer, and gets nothing"),
    "number": ({"get_reward": 1.0}, "its get_reward is no method"),
    "helper": ({"helper": lambda self, x: x}, "begin with an underscore"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_nothing_here_would_call_is_refused_when_it_is_looked_at(kind: str) -> None:
    body, says = ODD[kind]
    with pytest.raises(ConfigError, match=f"environment e: .*{says}"):
        Kind.of("e", type("Odd", (Pressed,), body))
    if kind in ("entered", "awaited"):
        Kind.of("e", type("Closing", (Pressed,), {**body, "close": lambda self: None}))


def test_an_object_and_inherited_methods_are_no_environment() -> None:
    class Inheriting(Pressed, BaseModel):
        pass

    with pytest.raises(ConfigError, match=r"it is a Pressed object\. Give its class"):
        Kind.of("e", Pressed())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="It comes from BaseModel, whose methods would all be tools"):
        Kind.of("e", Inheriting)


def test_one_object_for_all_episodes_ends_the_run(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    shared = Pressed()
    sampler = make_sampler(policy, lambda read: "go<|end|>", environments={"e": lambda: shared})
    with pytest.raises(SamplerError, match="its factory gave one and the same object for two episodes"):
        sampler.sample(SamplingRequest(make_prompts("q"), 2))
    sampler.close()


def real(
    sampler: Any, policy: TrainedPolicy, params: SamplingParams, factory: Callable[[], Any] = Echoing
) -> EpisodeSampler:
    """Episodes of a real model, which need not know any form of calls."""
    setup = EpisodeSetup(
        tools={},
        kinds={"echo": Kind.of("echo", factory)},
        make_dialect=lambda tokenizer: TagDialect(tokenizer, turn="\nU: {user}\nA:"),
        rerender=lambda tokenizer, prompt, words: (
            prompt.text + words,
            tuple(tokenizer.encode(prompt.text + words, add_special_tokens=False)),
        ),
        limits=EpisodeSection(max_turns=6),
    )
    made = EpisodeSampler(sampler, params, setup)
    made.load_weights(policy, version=1)
    return made


PARAMS = SamplingParams(max_completion_tokens=60, stop=("a", "e", "1", " "), seed=5)


def sampled(groups: list[Group]) -> list[tuple[Any, ...]]:
    return [
        (one.token_ids, one.sampler_logprobs, one.segments, one.finish_reason)
        for group in groups
        for one in group.completions
    ]


def test_an_episode_is_the_same_alone_and_among_63_others(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    prompts = make_prompts(*(f"prompt {place}" for place in range(16)))
    together = real(InProcessEngine(PARAMS, max_rows=64), policy, PARAMS)
    alone = real(InProcessEngine(PARAMS, max_rows=3), policy, PARAMS)
    everybody = together.sample(SamplingRequest(prompts, 4, step=2))
    assert max(len(one.segments) for group in everybody for one in group.completions) >= 5
    for place in (0, 7, 15):
        found = sampled(alone.sample(SamplingRequest([prompts[place]], 4, step=2)))
        expected = sampled(everybody[place : place + 1])
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine[0], mine[2], mine[3]) == (theirs[0], theirs[2], theirs[3])
            assert mine[1] == pytest.approx(theirs[1], abs=1e-5)  # products of another size round differently
    together.close()
    alone.close()


def test_log_probabilities_of_sampler_and_trainer_agree(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    from oncurve.core.batch import collate

    for inner in (InProcessEngine(PARAMS), InProcessEngine(PARAMS, own_layers=False)):
        sampler = real(inner, policy, PARAMS)
        groups = sampler.sample(SamplingRequest(make_prompts("one", "two", "three"), 4, step=1))
        batch = collate(groups, torch.zeros(3, 4)).measured()
        assert (~batch.mask).any()
        with torch.no_grad():
            logprobs, _ = policy.logprobs(batch)
        gap = (logprobs - batch.sampler_logprobs)[batch.mask].abs().max()
        assert gap < 1e-5
        assert any(one.num_turns > 1 for group in groups for one in group.completions)
        sampler.close()


def test_the_first_turn_is_that_of_a_plain_completion(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    class Silent(Echoing):
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed)
            return "", {}

    prompts = make_prompts("one", "two")
    episodes = real(InProcessEngine(PARAMS), policy, PARAMS, Silent).sample(SamplingRequest(prompts, 4, step=1))
    engine = InProcessEngine(PARAMS)
    engine.load_weights(policy, version=1)
    for group, plain in zip(episodes, engine.sample(SamplingRequest(prompts, 4, step=1)), strict=True):
        for episode, completion in zip(group.completions, plain.completions, strict=True):
            first = episode.segments[0]
            assert episode.token_ids[: first.end] == completion.token_ids
            assert episode.sampler_logprobs[: first.end] == pytest.approx(completion.sampler_logprobs, abs=1e-5)


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
