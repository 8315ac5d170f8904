"""Length and repetition, against values computed by hand."""

from __future__ import annotations

import pytest
from reward_records import completion_of, prompt_of, with_tokens

from oncurve.core.errors import ConfigError
from oncurve.rewards.formats import BoxedFormat
from oncurve.rewards.mathematics import Mathematics
from oncurve.rewards.shaping import CosineLength, LengthWindow, Overlong, Repetition, correctness_format_length
from oncurve.rewards.weighted_sum import WeightedSum


@pytest.mark.proves("F102")
@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (4, 0.0), (5, 1.0), (9, 1.0), (10, 1.0), (11, 0.0)])
def test_a_length_inside_the_window_pays(length: int, value: float) -> None:
    assert LengthWindow(5, 10).value(completion_of("", num_tokens=length)) == value


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_the_overlong_penalty_grows_over_the_buffer(length: int, value: float) -> None:
    assert Overlong(100, 20).value(completion_of("", num_tokens=length)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ((), 0.0),
        ((1,), 0.0),
        ((1, 2, 3, 4), 0.0),
        ((1, 1, 1, 1, 1), -0.75),  # 4 pairs, 1 distinct
        ((1, 2, 1, 2, 1), -0.5),  # 4 pairs, 2 distinct
    ],
)
def test_repetition_is_the_share_of_ngrams_said_before(tokens: tuple[int, ...], value: float) -> None:
    assert Repetition(2).value(with_tokens(*tokens)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "length", "value"),
    [
        (r"\boxed{5}", 0, 1.0),
        (r"\boxed{5}", 50, 0.75),
        (r"\boxed{5}", 99, 0.5),
        (r"\boxed{6}", 0, -1.0),
        (r"\boxed{6}", 50, -0.75),
        (r"\boxed{5}", 100, -2.0),
    ],
)
def test_cosine_length_rewards_short_right_and_long_wrong_answers(text: str, length: int, value: float) -> None:
    function = CosineLength(Mathematics(), max_tokens=100, exceeded=-2.0)
    reward = function([prompt_of()], [completion_of(text, num_tokens=length)])[0]
    assert reward.value == pytest.approx(value, abs=2e-3)
    assert reward.parts["correct"] == float("5" in text)


def test_cosine_length_keeps_errors() -> None:
    function = CosineLength(Mathematics(), max_tokens=100)
    assert function([prompt_of(None)], [completion_of("5")])[0].error == "unparsable_reference"
    function.close()


def shaped(text: str, num_tokens: int = 10, only_if_correct: bool = False) -> float | None:
    function = correctness_format_length(
        Mathematics(answer_from="prose"), BoxedFormat(), LengthWindow(5, 50), only_if_correct=only_if_correct
    )
    assert isinstance(function, WeightedSum)
    return function([prompt_of()], [completion_of(text, num_tokens=num_tokens)])[0].value


@pytest.mark.proves("F101", "D32")
def test_correctness_form_and_length_add_up_with_their_weights() -> None:
    assert shaped(r"\boxed{5}") == pytest.approx(1.15)
    assert shaped("5") == pytest.approx(1.05)
    assert shaped(r"\boxed{6}") == pytest.approx(0.15)
    assert shaped(r"\boxed{6}", num_tokens=3) == pytest.approx(0.1)
    assert shaped(r"\boxed{6}", only_if_correct=True) == 0.0


@pytest.mark.proves("F101", "D32")
def test_form_and_length_must_not_outweigh_the_answer() -> None:
    with pytest.raises(ConfigError, match="more than the answer"):
        correctness_format_length(Mathematics(), BoxedFormat(), LengthWindow(5, 50), weights=(1.0, 0.9, 0.2))


def test_windows_and_limits_that_make_no_sense_are_refused() -> None:
    for make in (lambda: LengthWindow(10, 5), lambda: Overlong(10, 20), lambda: Overlong(10, 0), lambda: Repetition(0)):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(ConfigError):
        CosineLength(Mathematics(), max_tokens=0)
