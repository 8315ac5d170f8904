"""Do rows keep their numbers, streams and tokens as others come, go and move?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oncurve.core.records import SamplingParams
from oncurve.core.requests import PAST, SLOT, BufferSizes, PromptState, Request, Rows, RowState, Sampled

PARAMS = SamplingParams(max_completion_tokens=4)


def request(count: int = 4, *, token_ids: tuple[int, ...] = (7, 8, 9), **options: Any) -> Request:
    return Request(token_ids, np.arange(10, 10 + count, dtype=np.uint64), PARAMS, (0,), **options)


def started(count: int, asked: Request | None = None) -> tuple[Rows, np.ndarray]:
    rows = Rows(BufferSizes(rows=4, prompts=1, prompt_tokens=3, completion_tokens=8))
    numbers = rows.enter(asked or request(count), 0, count, prompt_slot=2)
    rows.start(numbers)
    return rows, numbers


def test_a_row_has_the_stream_the_prompt_and_the_tokens_of_its_completion() -> None:
    rows, numbers = started(3)
    assert (numbers.tolist(), rows.running.tolist(), rows.num_free) == ([0, 1, 2], [0, 1, 2], 1)
    assert rows.addresses[numbers].tolist() == [[0, 0, 2, 3], [1, 0, 2, 3], [2, 0, 2, 3]]
    assert (rows.keys[numbers].tolist(), rows.limits[numbers].tolist()) == ([10, 11, 12], [4, 4, 4])
    assert rows.record(numbers, np.array([5, 6, 7]), np.array([-1.0, -2.0, -3.0])).tolist() == [1, 1, 1]
    assert rows.record(numbers[:1], np.array([4]), np.array([-0.5])).tolist() == [2]
    assert [rows.recent(0, count) for count in (1, 2, 9)] == [[4], [5, 4], [5, 4]]
    assert rows.result(0, "stop") == ([5, 4], [-1.0, -0.5], "stop")
    assert rows.result(2, "length") == ([7], [-3.0], "length")


def test_a_number_is_used_again_and_a_serial_never() -> None:
    rows, numbers = started(3)
    serials = rows.serials[numbers].copy()
    owner, index = rows.leave(1)
    assert (owner.count, index, rows.num_free) == (4 - 1, 1, 2)
    rows.drop_left()
    assert rows.running.tolist() == [0, 2]
    assert rows.are_there(numbers, serials).tolist() == [True, False, True]
    again = rows.enter(request(2), 1, 1, prompt_slot=0)
    assert (again.tolist(), rows.keys[again].tolist(), rows.owners[1][1]) == ([1], [11], 1)
    assert rows.are_there(numbers, serials).tolist() == [True, False, True]
    assert rows.addresses[1, SLOT] == -1, "it does not run yet"
    rows.leave(1)
    assert rows.num_free == 2, "it had no slot to give back"


@pytest.mark.parametrize(("gone", "are_sparse"), [((3,), False), ((0,), True), ((0, 1), True), ((0, 1, 2, 3), False)])
def test_rows_lie_close_together_again(gone: tuple[int, ...], are_sparse: bool) -> None:
    rows, numbers = started(4)
    for row in gone:
        rows.leave(row)
    rows.drop_left()
    left = [row for row in numbers.tolist() if row not in gone]
    assert rows.are_sparse == are_sparse
    moved, to = rows.compact()
    assert sorted(rows.addresses[left, SLOT].tolist()) == list(range(len(left)))
    assert rows.addresses[rows.running, SLOT].tolist() == list(range(len(left)))
    assert (len(moved), sorted(rows.running.tolist()), rows.num_free) == (len(to), left, len(gone))
    assert all(slot >= len(left) for slot in moved)
    fresh = rows.enter(request(len(gone)), 0, len(gone), prompt_slot=0)
    rows.start(fresh)
    assert sorted(rows.addresses[rows.running, SLOT].tolist()) == [0, 1, 2, 3]


def test_a_row_goes_on_from_its_earlier_turns() -> None:
    prompt = RowState()
    request(1, rows=(prompt,))
    prompt.num_tokens = 1
    asked = request(1, token_ids=(7, 8, 9, 5, 6), rows=(prompt,))
    assert (asked.own, asked.positions) == ((5, 6), 6)
    rows, numbers = started(1, asked)
    assert rows.addresses[0, PAST] == 1
    assert rows.record(numbers, np.array([4]), np.array([-1.0])).tolist() == [1]
    assert (rows.recent(0, 9), rows.result(0, "stop")[0]) == ([4], [4])
    state = prompt.prompt
    assert state is not None
    assert state.num_rows == 1
    asked.read_again()
    assert (asked.own, asked.rows, prompt.prompt, state.num_rows) == ((), (), None, 0)


def test_the_last_row_of_a_prompt_gives_its_cache_up() -> None:
    kept, rows = PromptState((1,)), (RowState(), RowState())
    kept.copies = [(np.zeros(2), np.zeros(3))]  # type: ignore[list-item]
    for row in rows:
        row.begin(kept)
        row.begin(PromptState((2,)))
    assert (kept.num_rows, kept.num_bytes) == (2, 40)
    rows[0].end()
    assert (kept.num_rows, len(kept.copies)) == (1, 1)
    rows[1].end()
    assert (kept.num_rows, kept.copies, rows[1].prompt) == (0, [], None)


def test_each_completion_is_told_once_and_all_when_the_last_has_ended() -> None:
    told: list[tuple[int, Sampled]] = []
    done: list[list[Sampled]] = []
    asked = request(2, on_row=lambda index, sampled: told.append((index, sampled)), on_done=done.append)
    first, second = ([1], [-1.0], "stop"), ([2], [-2.0], "length")
    assert [asked.give(1, second), asked.give(1, second), asked.give(0, first)] == [False, False, True]
    assert (told, done) == ([(1, second), (0, first)], [[first, second]])
    asked.started = 2
    assert (asked.again().sampled, asked.started) == ({}, 0)
    assert [asked.give(0, first), asked.give(1, second)] == [False, True]
    assert len(told) == 2, "what was told is not told again"
