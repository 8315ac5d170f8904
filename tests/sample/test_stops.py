"""Is a stop string found when its last token appears, and only then?"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from lanes import gate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oncurve.core.draw import StopStrings
from oncurve.model.layer_decoders import BYTE_OF, REPLACEMENT, ending_tokens, token_table
from oncurve.observe.run_model import locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|end|>"


def first_stop(text: str, stop: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Tokens of a text after which it is said to have stopped first."""
    ids, stops = tokenizer(text)["input_ids"], stop_strings(stop, tokenizer)
    return next((length for length in range(1, len(ids) + 1) if stops.ended([ids[:length]])[0]), None)


def stop_strings(stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> StopStrings:
    """Stop strings with the table of tokens that can end one, as the engine makes them."""
    return StopStrings(stop, tokenizer, can_end=ending_tokens(stop, tokenizer) if stop else None)


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
    assert stop_strings(stop, tokenizer).ended([[1, 2], [3]]) == [False, False]


def test_a_string_finished_by_an_earlier_token_does_not_stop_again(tokenizer: PreTrainedTokenizerFast) -> None:
    stops = stop_strings(("ab",), tokenizer)
    ids = tokenizer("xab yz ab")["input_ids"]
    assert [stops.ended([ids[:length]])[0] for length in range(1, len(ids) + 1)] == [
        text.endswith("ab")
        for text in ("x", "xa", "xab", "xab ", "xab y", "xab yz", "xab yz ", "xab yz a", "xab yz ab")
    ]


def test_completions_are_told_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    stops = stop_strings(("ab", "q"), tokenizer)
    assert stops.ended([tokenizer(text)["input_ids"] for text in ("xab", "ba", "q", "")]) == [True, False, True, False]


class Plain:
    """Decodes the last tokens of every completion: what is looked for, without a table."""

    def __init__(self, stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stop, self.tokenizer = stop, tokenizer
        self.window = max(len(text.encode()) for text in stop) + 8

    def ended(self, ids: list[int]) -> bool:
        tail, before = (self.decode(part) for part in (ids[-self.window :], ids[-self.window :][:-1]))
        return any(text in tail for text in self.stop) and any(
            tail.rfind(text) > before.rfind(text) for text in self.stop
        )

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


WORDS = (
    "a",
    "an",
    "nan",
    "</answer>",
    "</an",
    "swer>",
    " the",
    "the man",
    "\n",
    "\n\n",
    " ",
    "世",
    "世界",
    "界",
    "é",
    "😀",
    "#",
)
WORDS += ("x</", "answer>", "#### ", "<|end|>", "ß\n", "0", "12", "\t", "<0x41>", "▁")


def byte_level(seed: int) -> PreTrainedTokenizerFast:
    """Random merges over all bytes, also across the borders of characters."""
    draw = random.Random(seed)
    symbols, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    for word in [*WORDS, *("".join(draw.choices(WORDS, k=3)) for _ in range(60))]:
        parts = [letters[byte] for byte in word.encode()]
        for _ in range(draw.randrange(1, 5)):
            if len(parts) < 2:
                break
            place = draw.randrange(len(parts) - 1)
            pair = (parts[place], parts[place + 1])
            parts[place : place + 2] = ["".join(pair)]
            if pair not in merges:
                merges.append(pair)
    symbols = list(dict.fromkeys([*symbols, *("".join(pair) for pair in merges)]))
    made = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(symbols)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END, "<|two words|> é"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def sentence_pieces(seed: int) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have them: words with a sign for the space, and bytes by their numbers."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *(word.replace(" ", "▁") for word in WORDS)]
    made = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(dict.fromkeys(pieces))}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if seed % 2 else steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="a")


def word_pieces(seed: int) -> PreTrainedTokenizerFast:
    """A decoder that looks at neighbours, for which there is no table."""
    pieces = ["[UNK]", *"abc.,!'", "##a", "##an", "##b", "don", "t", "n't", "'s"]
    made = Tokenizer(models.WordPiece(vocab={piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="a")


@pytest.mark.parametrize("seed", gate(range(4), 0))
@pytest.mark.parametrize("make", [byte_level, sentence_pieces, word_pieces, "embedded"])
def test_the_table_of_tokens_changes_no_answer(make: Any, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(locate("embedded")) if make == "embedded" else make(seed)
    assert (token_table(tokenizer) is None) == (make is word_pieces)
    draw, hits = random.Random(seed), 0
    frequent = [token for word in WORDS for token in tokenizer(word, add_special_tokens=False)["input_ids"]]
    for _ in range(150):
        stop = tuple(
            draw.choices(["</answer>", "\n\n", "\n", "an", "a", "世", "世界", "😀", "é", " ", "n't", "a.", "#"], k=2)
        )
        stop += (draw.choice(WORDS), REPLACEMENT)[: draw.choice([0, 1, 1, 2])]
        plain, stops = Plain(stop, tokenizer), stop_strings(stop, tokenizer)
        ids: list[int] = []
        for _ in range(30):
            ids.append(draw.choice(frequent) if draw.random() < 0.7 else draw.randrange(len(tokenizer) + 2))
            expected = plain.ended(ids)
            hits += expected
            assert stops.ended([ids]) == [expected], (stop, ids)
    assert hits > 100


def test_only_completions_whose_newest_token_can_end_a_stop_string_are_decoded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, decoded = stop_strings(("</answer>",), tokenizer), []
    monkeypatch.setattr(stops, "_decode", lambda rows: decoded.append(len(rows)) or [""] * len(rows))
    [less, slash, answer, greater] = [tokenizer(text)["input_ids"][-1] for text in ("x<", "x/", "xr", "x>")]
    stops.ended([[less], [slash], [answer], [greater], [5, greater]])
    assert decoded == [2]


def test_tokens_that_come_later_are_in_the_table() -> None:
    tokenizer = byte_level(0)
    assert not stop_strings(("STOP",), tokenizer).ended([[len(tokenizer)]])[0]
    tokenizer.add_tokens(["say STOP"])
    assert stop_strings(("STOP",), tokenizer).ended([[len(tokenizer) - 1]])[0]
