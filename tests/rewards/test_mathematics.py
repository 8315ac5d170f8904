"""The mathematics reward: what is paid, what is an error, and what hostile answers cost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_time import assert_ends_within
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.rewards.mathematics import AnswerChecker, Mathematics, Scale
from oncurve.rewards.r1_zero import R1Zero
from oncurve.rewards.weighted_sum import categorize

TIMEOUT_SECONDS = 1.0


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    made = AnswerChecker(timeout_seconds=TIMEOUT_SECONDS)
    yield made
    made.close()


def graded(reward: Mathematics | R1Zero, text: str, answer: object = "5") -> Reward:
    return reward([prompt_of(answer)], [completion_of(text)])[0]


@pytest.mark.proves("F94", "F97", "F98")
@pytest.mark.parametrize(
    ("scale", "right", "misplaced", "wrong"),
    [("binary", 1.0, 0.0, 0.0), ("signed", 1.0, -1.0, -1.0), ("graded", 1.0, 0.2, 0.0)],
)
def test_scales_pay_what_they_say(
    scale: Scale, right: float, misplaced: float, wrong: float, checker: AnswerChecker
) -> None:
    reward = Mathematics(answer_from="boxed", scale=scale, checker=checker)
    assert graded(reward, r"\boxed{5}").value == right
    assert graded(reward, "The answer is 5.").value == misplaced
    assert graded(reward, r"\boxed{6}").value == wrong


@pytest.mark.proves("F93")
def test_parts_tell_right_wrong_and_bad_format_apart(checker: AnswerChecker) -> None:
    reward = Mathematics(answer_from="boxed", checker=checker)
    texts = [r"\boxed{5}", r"\boxed{6}", "5"]
    rewards = reward([prompt_of()] * 3, [completion_of(text) for text in texts])
    assert [categorize(reward) for reward in rewards] == ["correct", "wrong", "bad_format"]
    own = {"correct", "format", "over_limit"}
    assert {key: rewards[0].parts[key] for key in own} == {"correct": 1.0, "format": 1.0, "over_limit": 0.0}
    locations = [{key for key, share in reward.parts.items() if key not in own and share} for reward in rewards]
    assert locations == [{"found_in_box"}, {"found_in_box"}, {"found_in_prose"}]
    assert rewards[0].detail == "answer '5', reference '5'"


def test_accuracy_that_ignores_format_finds_the_answer_anywhere(checker: AnswerChecker) -> None:
    reward = Mathematics(answer_from="prose", checker=checker)
    for text in (r"\boxed{5}", "#### 5", "<answer> 5 </answer>", "so it is 5."):
        assert categorize(graded(reward, text)) == "correct"


@pytest.mark.parametrize("answer", [None, "", "  ", "x" * 1000, r"\frac{", r"\undefinedmacro{x}+"])
def test_a_reference_that_cannot_be_read_is_an_error_and_no_zero(answer: object, checker: AnswerChecker) -> None:
    reward = graded(Mathematics(checker=checker), r"\boxed{x^2+1}", answer)
    assert (reward.value, reward.error) == (None, "unparsable_reference")
    assert "reference" in reward.detail


def test_a_reference_that_keeps_the_grader_busy_is_an_error(checker: AnswerChecker) -> None:
    reward = graded(Mathematics(checker=checker), r"\boxed{\sqrt{2}}", "((9^{999})^{999})^{999}")
    assert reward.error == "unparsable_reference"


def test_a_row_without_the_column_is_an_error(checker: AnswerChecker) -> None:
    reward = Mathematics(answer_column="solution", checker=checker)
    assert graded(reward, r"\boxed{5}").error == "unparsable_reference"


def test_references_may_be_numbers(checker: AnswerChecker) -> None:
    assert graded(Mathematics(checker=checker), r"\boxed{5}", 5).value == 1.0
    assert graded(Mathematics(checker=checker), r"\boxed{5}", 5.0).value == 1.0


SLOW = "(" + "+".join(rf"\sin {letter}" for letter in "abcdfghjklmnopqrst") + ")^{%d}"
"""A formula that algebra does not finish in time."""
HOSTILE = {
    "tower of powers": "9**9**9",
    "billion digits": "((9^{999})^{999})^{999}",
    "root of a billion digits": r"\sqrt{((9^{999})^{999})^{999}}",
    "expansion": "(x+1)^{999}",
    "two expansions": "(x+1)^{999}(x+2)^{999}",
    "expansion of a sum": "(a+b+c+d+e)^{60}",
    "factorial in an exponent": "7^{99!}",
    "binomial": r"\binom{99999999}{5555555}",
    "code": "__import__('os').system('touch /tmp/oncurve-was-here')",
    "100,000 braces": "{" * 100_000,
    "100,000 parentheses": "(" * 100_000,
    "590 parentheses": "(" * 590,
    "NUL": "5\x00",
    "lone surrogate": "5\ud800",
    "a megabyte of letters": "a" * 1_000_000,
    "a megabyte of digits": "5" * 1_000_000,
    "fractions": r"\frac" * 150,
    "roots": r"\sqrt{" * 50 + "5" + "}" * 50,
    "signs": "-" * 600,
    "factorial": "100000000!",
    "sum": r"\sum_{k=1}^{1000000000} k",
}


@pytest.mark.proves("D7")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_wrong_and_costs_at_most_the_time_limit(name: str, checker: AnswerChecker) -> None:
    started = time.monotonic()
    reward = graded(Mathematics(checker=checker), rf"\boxed{{{HOSTILE[name]}}}", r"\sqrt{3}")
    assert reward.value == 0.0
    assert time.monotonic() - started < 60  # what is not stopped takes minutes, also on a busy machine
    assert not Path("/tmp/oncurve-was-here").exists()


def test_an_answer_over_the_limit_is_counted(checker: AnswerChecker) -> None:
    reward = graded(Mathematics(checker=checker), rf"\boxed{{{SLOW % 3}}}", "x^2")
    assert (reward.value, reward.error) == (0.0, None)
    assert reward.parts["over_limit"] == 1.0
    assert graded(Mathematics(checker=checker), r"\boxed{6}").parts["over_limit"] == 0.0


def test_verdicts_are_remembered_by_answer_and_reference(checker: AnswerChecker) -> None:
    pair = (r"\frac{\sqrt{20}}{2}", r"\sqrt{5}")
    assert checker.check([pair]) == ["right"]
    assert_ends_within(0.2, lambda: checker.check([pair] * 1000))
    assert checker.check([pair] * 1000) == ["right"] * 1000


def test_the_exact_path_costs_microseconds() -> None:
    pairs = [(f"{number:,}.00", str(number)) for number in range(2000)]
    assert AnswerChecker().check(pairs) == ["right"] * 2000
    assert_ends_within(1.0, lambda: AnswerChecker().check(pairs))  # 20 to 40 microseconds each on an idle machine


def test_no_algebra_is_imported_here() -> None:
    code = r"""
import sys
from oncurve.core.records import Completion, Prompt
from oncurve.rewards.mathematics import Mathematics
prompt = Prompt(text="", prompt_ids=(1,), index=0, row={"answer": "\\sqrt{3}"})
texts = ("\\boxed{\\sqrt{3}}", "\\boxed{\\sqrt{3}(\\sin^2 x+\\cos^2 x)}")
said = [Completion((1,), (), text, (), "stop", policy_version=0, index=0) for text in texts]
reward = Mathematics(workers=1)
print([graded.value for graded in reward([prompt] * 2, said)])
print(sorted({"sympy", "math_verify", "latex2sympy2_extended"} & set(sys.modules)))
reward.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == ["[1.0, 1.0]", "[]"]


def test_completions_stay_aligned(checker: AnswerChecker) -> None:
    prompts = [prompt_of(str(k)) for k in range(20)]
    completions = [completion_of(rf"\boxed{{{k}}}" if k % 3 else r"\boxed{\sqrt{2}}") for k in range(20)]
    values = [reward.value for reward in Mathematics(checker=checker)(prompts, completions)]
    assert values == [float(k % 3 != 0) for k in range(20)]


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="answer_from is 'any'"):
        Mathematics(answer_from="any")  # type: ignore[arg-type]


@pytest.mark.proves("F98")
def test_partial_credit_must_be_less_than_full() -> None:
    with pytest.raises(ConfigError, match="partial"):
        Mathematics(scale="graded", partial=1.0)


@pytest.mark.proves("F93")
@pytest.mark.parametrize(
    ("text", "form", "correct"),
    [
        ("2 + 3 = 5 </think> <answer> 5 </answer>", 1.0, 1.0),
        ("2 + 3 = 5 </think>\n\n<answer>5</answer>", 1.0, 1.0),
        ("</think><answer>5</answer>", 1.0, 1.0),
        ("<think> 2 + 3 </think> <answer> 5 </answer>", 1.0, 1.0),
        ("\n<think>2 + 3</think> <answer> 5 </answer>\nUser: and 3 + 4?", 1.0, 1.0),
        (r"2 + 3 </think> <answer> \boxed{5} </answer>", 1.0, 1.0),
        ("2 + 3 </think> <answer> 5.0 </answer>", 1.0, 1.0),
        ("2 + 3 </think> <answer> 6 </answer>", 1.0, 0.0),
        ("2 + 3 </think> <answer> </answer>", 0.0, 0.0),
        ("2 + 3 </think> 5", 0.0, 0.0),
        ("2 + 3 <answer> 5 </answer>", 0.0, 0.0),
        ("2 + 3 </think> so <answer> 5 </answer>", 0.0, 0.0),
        ("<answer> 5 </answer> </think>", 0.0, 0.0),
        ("</think> <answer> 4 </answer> <answer> 5 </answer>", 0.0, 0.0),
        ("</think> </think> <answer> 5 </answer>", 0.0, 0.0),
        ("a <think> b </think> <answer> 5 </answer>", 0.0, 0.0),
        ("<think> <think> b </think> <answer> 5 </answer>", 0.0, 0.0),
        ("</think> <answer> 5", 0.0, 0.0),
        ("</think> <answer> 5 </answer> User: </think> <answer> 7 </answer>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_r1_zero_pays_only_the_right_answer_in_the_right_form(
    text: str, form: float, correct: float, checker: AnswerChecker
) -> None:
    reward = graded(R1Zero(checker=checker), text)
    assert reward.value == correct
    assert reward.parts == {"format": form, "correct": correct, "over_limit": 0.0}


def test_r1_zero_without_a_reference_is_an_error_even_in_bad_form(checker: AnswerChecker) -> None:
    assert graded(R1Zero(checker=checker), "5", None).error == "unparsable_reference"


def test_a_completion_cut_off_in_a_thinking_that_the_prompt_began_says_nothing(checker: AnswerChecker) -> None:
    prompt = prompt_of("5", text="2 + 3? <think>")
    texts = (r"maybe \boxed{5}", r"maybe \boxed{5}</think> \boxed{5}", r"maybe \boxed{5}</think>")
    cut_off = [replace(completion_of(text), finish_reason="length") for text in texts]
    rewards = Mathematics(checker=checker)([prompt] * 3, cut_off)
    assert [reward.value for reward in rewards] == [0.0, 1.0, 0.0]


def test_slow_answers_cost_their_own_verdict_and_no_right_one() -> None:
    texts = [rf"\boxed{{{SLOW % (4 + k)}}}" if k % 3 == 0 else rf"\boxed{{y+x+{k}-{k}}}" for k in range(6)]
    checker = AnswerChecker(timeout_seconds=0.6, workers=2)
    rewards = Mathematics(checker=checker)([prompt_of("x+y")] * len(texts), [completion_of(text) for text in texts])
    checker.close()
    assert [reward.error for reward in rewards] == [None] * len(texts)
    assert [reward.value for reward in rewards] == [0.0, 1.0, 1.0] * 2
    assert [reward.parts["over_limit"] for reward in rewards] == [1.0, 0.0, 0.0] * 2
