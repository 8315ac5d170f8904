"""Does the curriculum choose what teaches, and nothing else?"""

from __future__ import annotations

import json

from oncurve.core.order import Prompts
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.data.curriculum import Curriculum

PROMPTS = [Prompt(text=f"q{i}", prompt_ids=(i,), index=i) for i in range(12)]


def observed(curriculum: Curriculum, prompt: Prompt, values: list[float | None]) -> None:
    completions = tuple(Completion(prompt.prompt_ids, (1,), "a", (0.0,), "stop", 0, i) for i in range(len(values)))
    rewards = [Reward(value) if value is not None else Reward(None, error="timeout") for value in values]
    curriculum.observe([Group(prompt, completions)], [rewards])


def test_without_options_it_is_the_plain_order() -> None:
    plain, curriculum = Prompts(PROMPTS, 4, seed=3), Curriculum(PROMPTS, 4, seed=3)
    for prompt in PROMPTS:
        observed(curriculum, prompt, [1.0, 1.0])
    assert [curriculum.at(step) for step in range(9)] == [plain.at(step) for step in range(9)]
    assert curriculum.state() == {}, "what chooses nothing is not remembered: it would grow with the data"


def test_a_prompt_that_is_always_solved_is_replaced_by_another() -> None:
    curriculum = Curriculum(PROMPTS, 4, retire_above=0.9)
    solved = curriculum.at(0)[0]
    observed(curriculum, solved, [1.0, 1.0])
    chosen = curriculum.at(0)
    assert solved not in chosen
    assert len({prompt.index for prompt in chosen}) == 4


def test_retired_prompts_come_back_when_no_others_are_left() -> None:
    curriculum = Curriculum(PROMPTS, 4, retire_above=0.9)
    for prompt in PROMPTS:
        observed(curriculum, prompt, [1.0])
    assert len({prompt.index for prompt in curriculum.at(0)}) == 4


def test_the_running_pass_rate_forgets_by_half() -> None:
    curriculum = Curriculum(PROMPTS, 4, retire_above=0.9)
    observed(curriculum, PROMPTS[5], [1.0, 0.0])
    observed(curriculum, PROMPTS[5], [1.0, 1.0])
    assert curriculum.pass_rates == {5: 0.75}


def test_a_group_that_could_not_be_graded_says_nothing() -> None:
    curriculum = Curriculum(PROMPTS, 4, retire_above=0.9)
    observed(curriculum, PROMPTS[5], [None, None])
    assert curriculum.pass_rates == {}


def test_half_solved_prompts_come_before_solved_and_hopeless_ones() -> None:
    curriculum = Curriculum(PROMPTS, 3, prefer_half_solved=True)
    for prompt in PROMPTS:
        observed(curriculum, prompt, [1.0, 0.0] if prompt.index % 4 == 0 else [float(prompt.index % 2)])
    for step in range(4):
        chosen = {prompt.index for prompt in curriculum.at(step)}
        assert len(chosen) == 3
        assert chosen & {0, 4, 8}


def test_further_prompts_are_new_and_the_same_for_every_process_that_asks() -> None:
    first, second = Curriculum(PROMPTS, 4, seed=1), Curriculum(PROMPTS, 4, seed=1)
    excluded = {prompt.index for prompt in first.at(2)}
    more = first.more(2, 5, excluded)
    assert more == second.more(2, 5, excluded)
    assert len({prompt.index for prompt in more} - excluded) == 5


def test_a_saved_state_goes_on_where_it_was() -> None:
    first, second = Curriculum(PROMPTS, 4, retire_above=0.9), Curriculum(PROMPTS, 4, retire_above=0.9)
    observed(first, first.at(0)[0], [1.0])
    second.load_state(first.state())
    assert [first.at(step) for step in range(5)] == [second.at(step) for step in range(5)]


def test_with_a_lag_the_prompts_of_a_step_follow_from_the_grades_of_steps_well_before_it_whenever_asked() -> None:
    def graded(curriculum: Curriculum, step: int) -> None:
        for prompt in curriculum.at(step):
            completions = (Completion(prompt.prompt_ids, (1,), "a", (0.0,), "stop", 0, 0),)
            curriculum.observe([Group(prompt, completions)], [[Reward(float(prompt.index % 2))]], step=step)

    lag, ahead, states = 3, {}, {}
    curriculum = Curriculum(PROMPTS, 4, retire_above=0.9, prefer_half_solved=True, lag=lag)
    for step in range(10):
        ahead[step + lag] = curriculum.at(step + lag)  # when a sampler that is ahead wants them
        if step >= lag:
            assert curriculum.at(step) == ahead[step]
        graded(curriculum, step)
        states[step] = curriculum.state()
    resumed = Curriculum(PROMPTS, 4, retire_above=0.9, prefer_half_solved=True, lag=lag)
    resumed.load_state(json.loads(json.dumps(states[7])))
    assert [resumed.at(step) for step in range(8, 13)] == [ahead[step] for step in range(8, 13)]
    assert ahead[11] != Curriculum(PROMPTS, 4, retire_above=0.9, prefer_half_solved=True).at(11), "nothing was chosen"
    at_once = Curriculum(PROMPTS, 4, retire_above=0.9)
    at_once.load_state(json.loads(json.dumps(states[7])))
    assert "late" not in at_once.state()
    assert len(at_once.pass_rates) == len(
        {index for rates in states[7]["late"].values() for index, _ in rates}
        | {index for index in states[7] if index != "late"}
    )
