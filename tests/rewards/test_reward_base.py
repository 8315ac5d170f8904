"""Sums of rewards, and the boundary at which failures stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError, RewardError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.weighted_sum import Term, WeightedSum, categorize, check_errors


class Fixed:
    """Gives the same reward to every completion."""

    def __init__(self, reward: Reward, name: str = "fixed") -> None:
        self.reward = reward
        self.name = name
        self.num_closed = 0

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [self.reward] * len(completions)

    def close(self) -> None:
        self.num_closed += 1


class Fails(Fixed):
    """Raises when a text of the batch says so."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        if any("bomb" in completion.text for completion in completions):
            raise ZeroDivisionError("bomb")
        return super().__call__(prompts, completions)


def value(number: float, **parts: float) -> Reward:
    return Reward(value=number, parts=parts)


def total(*terms: Term) -> Reward:
    return WeightedSum(terms)([prompt_of()], [completion_of("")])[0]


@pytest.mark.proves("F109")
def test_the_value_is_the_weighted_sum_and_the_parts_are_not_weighted() -> None:
    reward = total(Term(Fixed(value(1.0), "a"), 2.0), Term(Fixed(value(0.5), "b"), -1.0))
    assert reward.value == 1.5
    assert reward.parts == {"a": 1.0, "b": 0.5}


def test_a_term_can_be_renamed_and_keeps_its_own_parts() -> None:
    reward = total(Term(Fixed(value(1.0, correct=1.0, format=1.0), "r1_zero"), name="main"))
    assert reward.parts == {"main": 1.0, "correct": 1.0, "format": 1.0}


def test_of_a_fixed_part_the_lowest_counts() -> None:
    reward = total(
        Term(Fixed(value(1.0, correct=1.0, format=1.0), "mathematics")), Term(Fixed(value(0.0, format=0.0), "format"))
    )
    assert reward.parts["format"] == 0.0
    assert categorize(reward) == "bad_format"


def test_parts_of_the_same_name_are_kept_apart() -> None:
    reward = total(Term(Fixed(value(1.0), "length")), Term(Fixed(value(0.0, length=7.0), "other")))
    assert reward.parts == {"length": 1.0, "other": 0.0, "other.length": 7.0}


def test_a_gated_term_pays_only_beside_a_right_answer() -> None:
    form = Term(Fixed(value(1.0), "form"), 0.1, only_if_correct=True)
    assert total(Term(Fixed(value(0.0, correct=0.0), "m")), form).value == 0.0
    assert total(Term(Fixed(value(1.0, correct=1.0), "m")), form).value == 1.1


def test_a_clipped_term_stays_within_its_bounds() -> None:
    assert total(Term(Fixed(value(7.0)), clip=(-1.0, 1.0))).value == 1.0
    assert total(Term(Fixed(value(-7.0)), 0.5, clip=(-1.0, 1.0))).value == -0.5


@pytest.mark.proves("D5")
def test_shaping_can_add_or_take_at_most_what_correctness_is_worth() -> None:
    answer = Term(Fixed(value(0.0, correct=0.0), "m"), 1.0)
    shaping = [Term(Fixed(value(1.0), "a"), 0.8), Term(Fixed(value(1.0), "b"), 0.9)]
    assert total(answer, *shaping).value == 1.0
    free = [replace(term, is_limited=False) for term in shaping]
    assert total(answer, *free).value == pytest.approx(1.7)
    assert total(answer, shaping[0], free[1]).value == pytest.approx(1.7)
    assert total(answer, *shaping, Term(Fixed(value(1.0), "c"), 0.5, is_limited=False)).value == 1.5
    assert total(answer, Term(Fixed(value(-50.0), "a"))).value == -1.0


def test_without_a_correctness_term_nothing_is_limited() -> None:
    assert total(Term(Fixed(value(50.0)))).value == 50.0


def test_one_failed_term_makes_the_sum_an_error() -> None:
    broken = Reward(value=None, error="unparsable_reference", detail="answer '?'")
    reward = total(Term(Fixed(value(1.0), "a")), Term(Fixed(broken, "b")))
    assert (reward.value, reward.error, reward.detail) == (None, "unparsable_reference", "b: answer '?'")
    assert reward.parts == {"a": 1.0}


def test_a_term_that_does_not_apply_is_left_out() -> None:
    absent = Reward(value=None, error="not_applicable")
    assert total(Term(Fixed(value(1.0), "a")), Term(Fixed(absent, "b"))).value == 1.0
    assert total(Term(Fixed(absent, "b"))).error == "not_applicable"


@pytest.mark.proves("D54")
def test_an_exception_becomes_an_error_and_no_zero() -> None:
    rewards = WeightedSum([Term(Fails(value(1.0), "f"))])([prompt_of()], [completion_of("bomb")])
    assert rewards[0].value is None
    assert rewards[0].error == "crashed"
    assert "ZeroDivisionError: bomb" in rewards[0].detail


def test_an_exception_costs_only_the_group_that_caused_it() -> None:
    prompts = [prompt_of(index=k // 2) for k in range(6)]
    completions = [completion_of("bomb" if k == 3 else "") for k in range(6)]
    rewards = grade(Fails(value(1.0)), prompts, completions)
    assert [reward.error for reward in rewards] == [None, None, "crashed", "crashed", None, None]


def test_where_every_environment_failed_nothing_is_asked_and_each_says_why() -> None:
    def function(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        if not completions:
            raise ValueError("there is nothing to grade")
        return [Reward(1.0)] * len(completions)

    failed = replace(completion_of("x"), failure="environment_crashed", failure_detail="no puzzle")
    graded = grade(function, [prompt_of("1")] * 2, [failed] * 2)  # type: ignore[arg-type]
    assert [(reward.error, reward.detail) for reward in graded] == [("environment_crashed", "no puzzle")] * 2


def test_a_timeout_has_its_own_kind() -> None:
    class Late(Fixed):
        def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
            raise TimeoutError

    assert grade(Late(value(1.0)), [prompt_of()], [completion_of("")])[0].error == "timeout"


@pytest.mark.parametrize("wrong", [[], [value(1.0)] * 3, [1.0, 1.0]])
def test_a_function_that_returns_the_wrong_thing_is_an_error(wrong: list[object]) -> None:
    class Wrong(Fixed):
        def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
            return wrong  # type: ignore[return-value]

    rewards = grade(Wrong(value(1.0)), [prompt_of()] * 2, [completion_of("")] * 2)
    assert [reward.error for reward in rewards] == ["crashed"] * 2


def test_ctrl_c_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)

    class Interrupted(Fixed):
        def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(Interrupted(value(1.0)), [prompt_of()], [completion_of("")])


def test_an_empty_batch_gives_no_rewards() -> None:
    assert WeightedSum([Term(Fixed(value(1.0)))])([], []) == []


def test_closing_the_sum_closes_every_function() -> None:
    functions = [Fixed(value(1.0), "a"), Fixed(value(1.0), "b")]
    WeightedSum([Term(function) for function in functions]).close()
    assert [function.num_closed for function in functions] == [1, 1]


def test_a_sum_is_a_reward_function() -> None:
    assert isinstance(WeightedSum([Term(Fixed(value(1.0)))]), RewardFunction)


def test_a_sum_of_nothing_and_equal_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        WeightedSum([])
    with pytest.raises(ConfigError, match="two of them are named 'fixed'"):
        WeightedSum([Term(Fixed(value(1.0))), Term(Fixed(value(0.0)))])


@pytest.mark.proves("D32")
@pytest.mark.parametrize(
    ("reward", "category"),
    [
        (value(1.0, correct=1.0, format=1.0), "correct"),
        (value(0.0, correct=0.0, format=1.0), "wrong"),
        (value(0.0, correct=0.0, format=0.0), "bad_format"),
        (value(1.0, correct=1.0, format=0.0), "bad_format"),
        (value(1.0, correct=1.0), "correct"),
        (value(0.9), "graded"),
        (value(-1.0, correct=1.0, format=1.0), "correct"),
        (Reward(value=None, error="crashed", parts={"correct": 1.0}), "error"),
    ],
)
def test_the_category_comes_from_the_fixed_parts_and_never_from_the_value(reward: Reward, category: str) -> None:
    assert categorize(reward) == category


@pytest.mark.proves("D54")
def test_too_many_errors_stop_the_run_with_an_example() -> None:
    failed = Reward(value=None, error="crashed", detail="KeyError: 'answer'")
    check_errors([value(1.0)] * 8 + [failed] * 2)
    with pytest.raises(RewardError, match=r"3 of 10 completions .* 'crashed': KeyError: 'answer'"):
        check_errors([value(1.0)] * 7 + [failed] * 3)
    with pytest.raises(RewardError, match=r"^step 4: grading failed for 3 of 10"):
        check_errors([value(1.0)] * 7 + [failed] * 3, step=4)


def test_rewards_that_do_not_apply_do_not_stop_the_run() -> None:
    check_errors([Reward(value=None, error="not_applicable")] * 10)


def test_a_weight_follows_its_schedule_by_the_step_of_the_policy_that_sampled() -> None:
    terms = [Term(Fixed(value(1.0), "a")), Term(Fixed(value(1.0), "b"), 2.0, [(10, 0.0), (20, 1.0)])]
    completions = [replace(completion_of(""), policy_version=step) for step in (0, 10, 15, 20, 99)]
    rewards = WeightedSum(terms)([prompt_of()] * 5, completions)
    assert [reward.value for reward in rewards] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert all(dict(reward.parts) == {"a": 1.0, "b": 1.0} for reward in rewards), "parts are not weighted"


def test_the_limit_of_what_knows_no_answer_follows_the_schedule_of_what_does() -> None:
    answer = Term(Fixed(value(0.0, correct=0.0), "m"), 1.0, [(0, 0.5), (10, 1.0)])
    total_at = WeightedSum([answer, Term(Fixed(value(9.0), "long"))])
    completions = [replace(completion_of(""), policy_version=step) for step in (0, 10)]
    assert [reward.value for reward in total_at([prompt_of()] * 2, completions)] == [0.5, 1.0]


class _Meets:
    """A function that returns only once another one is under way, too."""

    def __init__(self, name: str, barrier: threading.Barrier, *, waits: bool) -> None:
        self.name, self.barrier, self.thread = name, barrier, 0
        if waits:
            self.waits = True

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        self.thread = threading.get_ident()
        self.barrier.wait(60)
        return [Reward(1.0)] * len(completions)

    def close(self) -> None:
        """Nothing to end."""


def test_functions_that_wait_do_it_beside_those_that_compute() -> None:
    barrier = threading.Barrier(3)
    functions = [_Meets(name, barrier, waits=name != "here") for name in ("judge", "here", "programs")]
    reward = total(*(Term(function, weight) for function, weight in zip(functions, (1.0, 2.0, 4.0), strict=True)))
    assert (reward.value, list(reward.parts)) == (7.0, ["judge", "here", "programs"])
    assert functions[1].thread == threading.get_ident()
    assert functions[0].thread != functions[2].thread
