"""Does rotation give every variant its turn, and does the held-out grader stay out of the value?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.rotation import HeldOut, Rotating


class Fixed:
    """Pays what a function of the text says."""

    def __init__(self, name: str, pays: Callable[[str], float]) -> None:
        self.name = name
        self.pays = pays
        self.is_closed = False
        self.correct = 1.0

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [Reward(self.pays(completion.text), parts={"correct": self.correct}) for completion in completions]

    def close(self) -> None:
        self.is_closed = True


def variants(count: int = 3) -> list[Fixed]:
    return [Fixed(f"v{number}", lambda _, value=float(number): value) for number in range(count)]


def batch(step: int, prompts: int = 4, group: int = 3) -> tuple[list[Prompt], list[Completion]]:
    rows = [index for index in range(prompts) for _ in range(group)]
    return [prompt_of(index=index) for index in rows], [
        replace(completion_of("text", prompt_index=index), policy_version=step) for index in rows
    ]


def test_both_are_reward_functions() -> None:
    assert isinstance(Rotating(variants(), every_steps=1), RewardFunction)
    assert isinstance(HeldOut(*variants(2)), RewardFunction)


def test_every_variant_has_one_turn_in_a_round_and_all_of_a_step_meet_the_same() -> None:
    rotating = Rotating(variants(), every_steps=2, seed=5)
    values = [{reward.value for reward in rotating(*batch(step))} for step in range(12)]
    assert all(len(of_step) == 1 for of_step in values)
    turns = [of_step.pop() for of_step in values]
    assert turns[0::2] == turns[1::2]
    assert sorted(map(str, turns[0:6:2])) == sorted(map(str, turns[6:12:2])) == ["0.0", "1.0", "2.0"]


def test_the_turn_follows_from_seed_and_step_alone() -> None:
    def turns(seed: int) -> list[int]:
        rotating = Rotating(variants(), every_steps=1, seed=seed)
        return [rotating.variant_of(step) for step in range(60)]

    assert turns(3) == turns(3) != turns(4)


def test_a_group_of_mixed_age_goes_by_its_first_completion() -> None:
    prompts, completions = batch(0, prompts=1, group=4)
    mixed = [replace(completion, policy_version=version) for version, completion in enumerate(completions)]
    assert len({reward.value for reward in Rotating(variants(), every_steps=1)(prompts, mixed)}) == 1


def test_equal_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="two variants are named 'v0'"):
        Rotating([*variants(1), *variants(1)], every_steps=1)


def test_the_held_out_grader_is_logged_and_never_paid() -> None:
    both = HeldOut(Fixed("length", lambda text: float(len(text))), Fixed("strict", lambda text: 0.25))
    [reward, *_] = both(*batch(0))
    assert both.name == "length"
    assert reward.value == 4.0
    assert reward.parts == {"correct": 1.0, "held_out": 0.25}


def test_a_held_out_grader_that_fails_costs_no_completion() -> None:
    def fail(text: str) -> float:
        raise ValueError("broken")

    prompts, completions = batch(0)
    rewards = grade(HeldOut(Fixed("a", lambda text: 1.0), Fixed("b", fail)), prompts, completions)
    assert {reward.value for reward in rewards} == {1.0}
    assert all("held_out" not in reward.parts for reward in rewards)


def test_closing_closes_all() -> None:
    parts = variants(3)
    HeldOut(Rotating(parts[:2], every_steps=1), parts[2]).close()
    assert all(part.is_closed for part in parts)


def strict_and_loose() -> list[Fixed]:
    """Two graders, of which the first finds no answer right."""
    strict, lenient = variants(2)
    strict.correct = 0.0
    return [strict, lenient]


def test_one_pays_and_all_are_logged() -> None:
    rotating = Rotating(variants(2), every_steps=1)
    rewards = [rotating(*batch(step, prompts=1, group=1))[0] for step in range(8)]
    assert {reward.value for reward in rewards} == {0.0, 1.0}
    assert all(reward.parts == {"correct": 1.0, "v0": 0.0, "v1": 1.0} for reward in rewards)


def test_an_answer_is_right_if_all_say_so_in_whatever_step() -> None:
    rotating = Rotating(strict_and_loose(), every_steps=1)
    rewards = [rotating(*batch(step, prompts=1, group=1))[0] for step in range(8)]
    assert {reward.value for reward in rewards} == {0.0, 1.0}
    assert {reward.parts["correct"] for reward in rewards} == {0.0}


def test_a_failure_out_of_turn_costs_nothing() -> None:
    def fail(text: str) -> float:
        raise ValueError("broken")

    rotating = Rotating([*variants(1), Fixed("bad", fail)], every_steps=1)
    rewards = [rotating(*batch(step, prompts=1, group=1))[0] for step in range(8)]
    assert {reward.error for reward in rewards} == {None, "crashed"}
    assert all(reward.parts["v0"] == 0.0 and "bad" not in reward.parts for reward in rewards)


def test_a_held_out_grader_can_have_a_part_of_its_own() -> None:
    inner = HeldOut(Fixed("a", lambda text: 1.0), Fixed("b", lambda text: 2.0), part="held_out/b")
    [reward, *_] = HeldOut(inner, Fixed("c", lambda text: 3.0), part="held_out/c")(*batch(0))
    assert (reward.value, reward.parts) == (1.0, {"correct": 1.0, "held_out/b": 2.0, "held_out/c": 3.0})
