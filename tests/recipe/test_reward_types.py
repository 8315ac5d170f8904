"""Does every reward that a recipe names become the function that it stands for, with the recipe's settings?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.recipe.load import parse_config
from oncurve.recipe.preflight import check_algorithm
from oncurve.rewards.section import RewardSection
from oncurve.rewards.settings import R1ZeroReward
from oncurve.rewards.terms import describe_rewards, make_reward_function, part_weights

BASE = "model: embedded\ndata: {type: word_problems}\n"
TWO_STEPS = "1. a\n2. b"


def rewards_of(*rewards: dict[str, Any]) -> Any:
    """The rewards of a recipe with this list."""
    return parse_config(BASE + f"rewards: {json.dumps(rewards)}\n").rewards


def graded(text: str, *rewards: dict[str, Any], num_tokens: int = 3) -> Reward:
    """What a recipe with these rewards pays for one completion."""
    function = make_reward_function(rewards_of(*rewards))
    prompt = Prompt(text="2 + 3?", prompt_ids=(1,), index=0, row={"answer": "5"})
    tokens = tuple(range(num_tokens))
    completion = Completion((1,), tokens, text, (0.0,) * num_tokens, "stop", policy_version=0, index=0)
    try:
        return function([prompt], [completion])[0]
    finally:
        function.close()


@pytest.mark.parametrize(
    ("reward", "right", "wrong"),
    [
        ({"type": "boxed_format"}, r"So \boxed{5}", r"\boxed{5} or \boxed{6}"),
        ({"type": "hash_format"}, "2 + 3\n#### 5", "#### 5\nI think"),
        ({"type": "step_format"}, TWO_STEPS, "1. a"),
        ({"type": "step_format", "min_steps": 3}, TWO_STEPS + "\n3. c", TWO_STEPS),
    ],
    ids=str,
)
def test_a_form_pays_one_or_nothing_and_is_logged_by_its_type(reward: dict[str, Any], right: str, wrong: str) -> None:
    paid = graded(right, reward)
    assert (paid.value, paid.parts) == (1.0, {reward["type"]: 1.0, "format": 1.0})
    assert graded(wrong, reward).value == 0.0


def test_two_forms_in_one_recipe_have_two_names() -> None:
    parts = graded("1. a\n2. b\n#### 5", {"type": "hash_format"}, {"type": "step_format", "min_steps": 3}).parts
    assert parts == {"hash_format": 1.0, "step_format": 0.0, "format": 0.0}


def test_cosine_length_pays_by_its_bounds() -> None:
    reward = {
        "type": "cosine_length",
        "max_tokens": 100,
        "correct": [2.0, 1.0],
        "wrong": [-3.0, -1.0],
        "exceeded": -9.0,
    }
    assert graded("Answer: 5", reward, num_tokens=0).value == pytest.approx(2.0)
    assert graded("Answer: 5", reward, num_tokens=50).value == pytest.approx(1.5)
    assert graded("Answer: 6", reward, num_tokens=50).value == pytest.approx(-2.0)
    assert graded("Answer: 5", reward, num_tokens=100).value == -9.0
    assert graded("Answer: 5", reward).parts["correct"] == 1.0


@pytest.mark.parametrize(
    ("correctness", "right"),
    [
        ({"correctness": "r1_zero"}, "<think> a </think> <answer> 5 </answer>"),
        ({"correctness": "mathematics", "answer_from": "boxed"}, r"\boxed{5}"),
        ({}, "Answer: 5"),
        ({"answer_from": "prose"}, "5"),
    ],
    ids=str,
)
def test_cosine_length_asks_the_correctness_that_it_names(correctness: dict[str, Any], right: str) -> None:
    reward = {"type": "cosine_length", **correctness}
    assert graded(right, reward, num_tokens=0).value == pytest.approx(1.0)
    assert graded("6", reward, num_tokens=0).value == pytest.approx(-1.0)


def test_every_key_that_all_rewards_share_stays_out_of_their_functions() -> None:
    """A new shared key that was handed on would be an unknown argument."""
    shared = {"weight": 2.0, "name": "mine", "only_if_correct": False, "held_out": False, "limited": False}
    shared |= {"rotate_every_steps": None, "weight_by_step": None}
    assert set(shared) == set(RewardSection.model_fields)
    for kind in ("r1_zero", "mathematics", "cosine_length", "json_schema", "tool_calls"):
        own = {"json_schema": '{"type": "object"}'} if kind == "json_schema" else {}
        make_reward_function(rewards_of({"type": kind, **shared, **own})).close()


def test_only_what_pays_has_a_weight() -> None:
    rewards = rewards_of(
        {"type": "r1_zero", "rotate_every_steps": 3, "weight": 0.5},
        {"type": "mathematics", "rotate_every_steps": 3, "weight": 0.5},
        {"type": "length", "weight": 0.1},
        {"type": "mathematics", "name": "loose", "held_out": True},
    )
    assert part_weights(rewards) == {"rotating": 0.5, "length": 0.1}
    function = make_reward_function(rewards)
    assert function.name == "total"
    function.close()
    assert len(describe_rewards(rewards)) == 2


def test_nothing_is_said_of_rewards_that_pay_in_every_step() -> None:
    assert describe_rewards([R1ZeroReward()]) == []
    assert describe_rewards([R1ZeroReward()], is_default=True) == [
        "rewards: none are named, so r1_zero is taken: the right answer in <answer> tags"
    ]


def test_weights_that_a_limit_cuts_are_named_and_a_key_lets_them_pay() -> None:
    mathematics = {"type": "mathematics"}
    shaping = [{"type": "length", "min_tokens": 1}, {"type": "step_format", "weight": 3.0, "min_steps": 1}]
    right = "1. It is \\boxed{5}"
    [line] = describe_rewards(rewards_of(mathematics, *shaping))
    assert line.startswith("rewards: length, step_format can together add or take at most 1, the weight of mathematics")
    assert graded(right, mathematics, *shaping).value == 2.0
    free = [{**each, "limited": False} for each in shaping]
    assert describe_rewards(rewards_of(mathematics, *free)) == []
    assert graded(right, mathematics, *free).value == 5.0
    assert describe_rewards(rewards_of(mathematics, {"type": "length", "weight": 0.5})) == []


def test_two_rotating_rewards_of_one_name_are_refused() -> None:
    same = {"type": "mathematics", "rotate_every_steps": 3}
    with pytest.raises(ConfigError, match="two variants are named 'mathematics'"):
        make_reward_function(rewards_of(same, {**same, "answer_from": "boxed"}))
    named = make_reward_function(rewards_of(same, {**same, "answer_from": "boxed", "name": "boxed"}))
    named.close()


def test_a_schedule_of_a_weight_is_said_and_refused_where_it_has_no_say() -> None:
    scheduled = {"type": "length", "min_tokens": 1, "weight": 0.5, "weight_by_step": [[0, 0.0], [20, 1.0]]}
    [line] = describe_rewards(rewards_of({"type": "mathematics"}, scheduled))
    assert line == "rewards: on the weight of length, 0.5, the factor is 0 at step 0, 1 at step 20"
    with pytest.raises(ConfigError, match="is held_out, so it pays nothing, and weight_by_step is about"):
        rewards_of({"type": "mathematics"}, {**scheduled, "held_out": True})
    with pytest.raises(ConfigError, match="leave it out of rewards that rotate"):
        rewards_of({"type": "mathematics"}, {**scheduled, "rotate_every_steps": 3})
    with pytest.raises(ConfigError, match="pairs of step and factor with rising steps"):
        rewards_of({"type": "mathematics"}, {**scheduled, "weight_by_step": [[20, 1.0], [0, 0.0]]})
    rewards = json.dumps([{"type": "mathematics"}, scheduled])
    config = parse_config(BASE + f"algorithm: {{type: gdpo}}\nrewards: {rewards}\n")
    with pytest.raises(ConfigError, match="multi_objective weighs the parts of the reward by themselves"):
        check_algorithm(config)
