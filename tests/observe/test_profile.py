"""Is the least work of a phase what a count by hand gives, and does the profile come back from its file?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oncurve.errors import DataError
from oncurve.observe import profile
from oncurve.observe.profile import MachineLimits, Spent, TokenWork

SIZE = TokenWork(
    matrix_weights=100,
    trained_matrix_weights=100,
    head_weights=30,
    trained_head_weights=30,
    trained_weights=170,
    layers=2,
    query_size=5,
    kv_numbers=8,
    number_bytes=2,
)
ATTENTION = 4 * 2 * 5
"""Operations per token and token that it sees."""


def test_sampling_counts_prompts_once_and_every_token_after_the_first() -> None:
    read = profile.prefill(SIZE, [3, 2])
    assert (read.tokens, read.operations) == (5, 2 * (100 * 5 + 30 * 2) + ATTENTION * (1 + 2 + 3 + 1 + 2))
    assert read.bytes == (8 * 5 + 100) * 2
    decoded = profile.decode(SIZE, [(3, [3, 1]), (2, [2, 2])], steps=2)
    sees = (4 + 5) + (3 + 3)
    assert (decoded.tokens, decoded.operations) == (4, 2 * 130 * 4 + ATTENTION * sees)
    shared = (3 * 2 + 1 + 2) + (2 * 1 + 1 + 1)  # the prompt once for both rows of a group, own tokens for each
    assert decoded.bytes == (130 * 2 + 8 * shared) * 2


def test_training_counts_a_groups_prompt_once_and_no_last_token() -> None:
    once = profile.forward(SIZE, [(0, 3, 2), (0, 3, 1), (7, 1, 3)], predicted=6)
    tokens, sees = 3 + 1 + 0 + 1 + 2, (1 + 2 + 3) + 4 + 1 + (2 + 3)
    assert (once.tokens, once.operations) == (tokens, 2 * (100 * tokens + 30 * 6) + ATTENTION * sees)
    back = profile.backward(SIZE, once, predicted=6)
    assert back.operations == 2 * once.operations, "everything is trained: twice the forward pass"
    frozen = replace(SIZE, trained_matrix_weights=0, trained_head_weights=0)
    assert profile.backward(frozen, once, predicted=6).operations == once.operations + ATTENTION * sees
    assert profile.optimizer(SIZE).bytes == 170 * 8 * 4


def test_shares_divide_by_the_limits() -> None:
    limits = MachineLimits(operations_per_second=100.0, bytes_per_second=10.0)
    assert profile.shares(Spent(2.0, 1, 50.0, 4.0, 1), limits) == (0.25, 0.2)
    assert profile.shares(Spent(2.0, 1, 0.0, 4.0, 1), limits) == (None, 0.2)
    assert profile.shares(Spent(), limits) == (None, None)


def test_a_profile_comes_back_with_medians_that_leave_out_the_first_step(tmp_path: Path) -> None:
    assert profile.read_profile(tmp_path) == ({}, [])
    assert profile.profile_text(tmp_path) == ""
    limits = MachineLimits(1e9, 2**30)
    profile.write_limits(tmp_path, limits, compute_type="float32")
    for step, seconds in enumerate((90.0, 1.0, 2.0, 9.0), start=1):
        part = Spent(seconds / 2, 10, 1e8, 0.0, 4)
        profile.write_step(tmp_path, step, {"sample": Spent(seconds, 10, 1e8, 0.0, 1), "decode": part})
    profile.write_limits(tmp_path, MachineLimits(2e9, 2**30), compute_type="float32")
    profile.write_step(tmp_path, 4, {"sample": Spent(3.0, 10, 1e8, 0.0, 1), "decode": part})  # again, after a restart
    described, [sample, decode] = profile.read_profile(tmp_path)
    assert described["operations_per_second"] == 2e9
    assert (sample.name, sample.is_part, sample.spent.seconds) == ("sample", False, 2.0)
    assert sample.multiplied == pytest.approx(1e8 / 2.0 / 2e9)
    assert (decode.name, decode.is_part, decode.read) == ("decode", True, None)
    text = profile.profile_text(tmp_path)
    assert "products of float32 matrices 2 GFLOP/s, memory 1.0 GiB/s" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["sample", "decode"]
    (tmp_path / profile.PROFILE).write_text("{}\n[]\n{}\n")
    with pytest.raises(DataError, match="line 2"):
        profile.read_profile(tmp_path)
