"""Do environments begin, act, score and end their episodes, and is what they do wrong never the policy's zero?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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
    Kind,
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
