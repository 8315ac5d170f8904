"""Is a stop string found when its last token appears, and only then?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from oncurve.rollouts.engine.stops import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def first_stop(text: str, stop: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Tokens of a text after which it is said to have stopped first."""
    ids, stops = tokenizer(text)["input_ids"], StopStrings(stop, tokenizer)
    return next((length for length in range(1, len(ids) + 1) if stops.ended([ids[:length]])[0]), None)


@pytest.mark.parametrize(
    ("text", "stop", "upto"),
    [
        ("2+3=5</answer> and more", ("</answer>",), "2+3=5</answer>"),
        ("an answer\n\nmore", ("\n\n",), "an answer\n\n"),
        ("one # two #### 5", ("####",), "one # two ####"),
        ("first B then A", ("A", "B"), "first B"),
        ("grüß Gott, 世界 peace", ("世界",), "grüß Gott, 世界"),
        ("😀 smile 😀", ("smile 😀",), "😀 smile 😀"),
        ("the man", ("ma",), "the man"),  # "an" is one token: the stop string ends inside it
        ("x" * 300 + "END", ("END",), "x" * 300 + "END"),
    ],
)
def test_a_completion_stops_with_the_token_that_finishes_the_string(
    text: str, stop: tuple[str, ...], upto: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert first_stop(text, stop, tokenizer) == len(tokenizer(upto)["input_ids"])


@pytest.mark.parametrize("text", ["</answer", "< /answer>", "</ANSWER>", ""])
def test_a_string_that_is_not_there_does_not_stop(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    assert first_stop(text, ("</answer>",), tokenizer) is None


@pytest.mark.parametrize("stop", [(), ("",)])
def test_nothing_to_look_for_stops_nothing(stop: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> None:
    assert StopStrings(stop, tokenizer).ended([[1, 2], [3]]) == [False, False]


def test_a_string_finished_by_an_earlier_token_does_not_stop_again(tokenizer: PreTrainedTokenizerFast) -> None:
    stops = StopStrings(("ab",), tokenizer)
    ids = tokenizer("xab yz ab")["input_ids"]
    assert [stops.ended([ids[:length]])[0] for length in range(1, len(ids) + 1)] == [
        text.endswith("ab")
        for text in ("x", "xa", "xab", "xab ", "xab y", "xab yz", "xab yz ", "xab yz a", "xab yz ab")
    ]


def test_completions_are_told_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    stops = StopStrings(("ab", "q"), tokenizer)
    assert stops.ended([tokenizer(text)["input_ids"] for text in ("xab", "ba", "q", "")]) == [True, False, True, False]
