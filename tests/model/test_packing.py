"""Who sees whom in a packed block, and where its tokens stand, by hand."""

from __future__ import annotations

import torch

from oncurve.model.packing import Block

TWO_ROWS = Block(torch.tensor([[4, 3, 0, 3], [7, 1, 3, 1]]))
"""Three tokens behind a prompt of three, and one token behind a prompt of one."""


def test_a_row_sees_its_own_prompt_and_what_it_said_before() -> None:
    long, short = TWO_ROWS.visible().int().tolist()
    assert long == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert short[0] == [1, 0, 0, 1, 0, 0], "nothing behind its prompt of one token"


def test_padding_sees_something_so_that_its_softmax_is_a_number() -> None:
    assert TWO_ROWS.visible()[1, 1:].any(dim=1).all()


def test_queries_and_keys_are_the_places_of_own_tokens_and_of_prompts() -> None:
    assert TWO_ROWS.queries.reshape(2, 3)[TWO_ROWS.real.reshape(2, 3)].tolist() == [4, 5, 6, 7]
    keys = TWO_ROWS.keys.reshape(2, 6)
    assert keys[0].tolist() == [0, 1, 2, 4, 5, 6]
    assert [keys[1, 0].item(), keys[1, 3].item()] == [3, 7]


def test_what_is_taken_from_the_sequence_can_be_put_back() -> None:
    sequence = torch.arange(8.0)[:, None]
    back = torch.full((8, 1), -1.0)
    TWO_ROWS.put(back, TWO_ROWS.take(sequence))
    assert back[:, 0].tolist() == [-1, -1, -1, -1, 4, 5, 6, 7]
