"""Is the least work of sampling and training, as the benchmarks count it, what a count by hand gives?"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("roofline", ROOT / "benchmarks" / "speed" / "roofline.py")
assert spec is not None
assert spec.loader is not None
roofline = importlib.util.module_from_spec(spec)
sys.modules["roofline"] = roofline  # where its dataclasses look for their module
spec.loader.exec_module(roofline)

SIZE = roofline.TokenWork(
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
    read = roofline.prefill(SIZE, [3, 2])
    assert (read.tokens, read.operations) == (5, 2 * (100 * 5 + 30 * 2) + ATTENTION * (1 + 2 + 3 + 1 + 2))
    assert read.bytes == (8 * 5 + 100) * 2
    decoded = roofline.decode(SIZE, [(3, [3, 1]), (2, [2, 2])], steps=2)
    sees = (4 + 5) + (3 + 3)
    assert (decoded.tokens, decoded.operations) == (4, 2 * 130 * 4 + ATTENTION * sees)
    shared = (3 * 2 + 1 + 2) + (2 * 1 + 1 + 1)  # the prompt once for both rows of a group, own tokens for each
    assert decoded.bytes == (130 * 2 + 8 * shared) * 2


def test_training_counts_a_groups_prompt_once_and_no_last_token() -> None:
    once = roofline.forward(SIZE, [(0, 3, 2), (0, 3, 1), (7, 1, 3)], predicted=6)
    tokens, sees = 3 + 1 + 0 + 1 + 2, (1 + 2 + 3) + 4 + 1 + (2 + 3)
    assert (once.tokens, once.operations) == (tokens, 2 * (100 * tokens + 30 * 6) + ATTENTION * sees)
    back = roofline.backward(SIZE, once, predicted=6)
    assert back.operations == 2 * once.operations, "everything is trained: twice the forward pass"
    frozen = replace(SIZE, trained_matrix_weights=0, trained_head_weights=0)
    assert roofline.backward(frozen, once, predicted=6).operations == once.operations + ATTENTION * sees


def test_the_limits_are_rates_of_this_machine() -> None:
    assert roofline.gemm_flops(torch.float32, size=64, repeats=2) > 1e6
    assert roofline.read_bandwidth(gibibytes=0.001, repeats=2) > 1e6
    assert roofline.product_seconds([(16, 64, 32, 2)], repeats=2) > 0
