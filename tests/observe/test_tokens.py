"""Does a record know which characters of a completion belong to which token?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from oncurve.core.records import Completion
from oncurve.observe.tokens import TokenRecord, token_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("text", ["plain and </think>", "café 🙂 → 漢字", "", "line\u2028end", "a\x00b"])
def test_lengths_add_up_to_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    lengths = token_lengths(tokenizer.backend_tokenizer, ids, text)
    assert lengths is not None
    assert len(lengths) == len(ids)
    assert sum(lengths) == len(text)


def test_every_token_has_its_own_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("an é</", add_special_tokens=False)
    # "an" and "</" are tokens of two letters; the two bytes of "é" are two tokens
    assert token_lengths(tokenizer.backend_tokenizer, ids, "an é</") == [2, 1, 0, 1, 2]


def test_the_end_token_has_none(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*tokenizer.encode("to", add_special_tokens=False), tokenizer.eos_token_id]
    assert token_lengths(tokenizer.backend_tokenizer, ids, "to") == [1, 1, 0]


def test_tokens_that_do_not_spell_the_text_have_no_boundaries(tokenizer: PreTrainedTokenizerFast) -> None:
    assert token_lengths(tokenizer.backend_tokenizer, tokenizer.encode("other"), "text") is None


def test_only_the_first_groups_are_described(tokenizer: PreTrainedTokenizerFast) -> None:
    completion = Completion((1,), (65, 66), "xy", (-0.12345, -2.0), "stop", 0, 0)
    record = TokenRecord(None, num_groups=1)
    assert record.entries(0, completion) == {"logprobs": [-0.123, -2.0]}
    assert record.entries(1, completion) == {}
    assert TokenRecord(tokenizer.backend_tokenizer, num_groups=0).entries(0, completion) == {}
    spelled = replace(completion, token_ids=tuple(tokenizer.encode("to", add_special_tokens=False)), text="to")
    assert TokenRecord(tokenizer.backend_tokenizer, num_groups=1).entries(0, spelled)["token_lengths"] == [1, 1]
