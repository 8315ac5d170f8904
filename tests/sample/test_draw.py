"""Are tokens drawn from exactly the distribution that was asked for?"""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook
from torch import Tensor

import oncurve.core
from oncurve.core.records import SamplingParams
from oncurve.model.decoding import first_above_by_parts, part_width

with install_import_hook("oncurve.core.draw", "beartype.beartype"):  # each call of a copy with its shapes checked
    finders = (finder.find_spec("oncurve.core.draw", oncurve.core.__path__) for finder in sys.meta_path)
    spec: Any = next(found for found in finders if found is not None)
    checked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checked)
draw, restrict, stream_keys, uniforms = checked.draw, checked.restrict, checked.stream_keys, checked.uniforms
DRAWS = 40_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -4.0, 1.5])


def exact(params: SamplingParams, *, forbidden: tuple[int, ...] = ()) -> list[float]:
    """The distribution by the definitions, one token at a time, in Python's float64."""
    allowed = [token for token in range(len(LOGITS)) if token not in forbidden]
    weights = {token: math.exp(float(LOGITS[token]) / params.temperature) for token in allowed}
    ranked = sorted(weights, key=lambda token: -weights[token])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, before, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if before < params.top_p * total:
            kept.append(token)
        before += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(LOGITS))]


def drawn(params: SamplingParams, *, forbidden: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    numbers = uniforms(stream_keys(1, 2, np.arange(DRAWS), np.zeros(DRAWS, dtype=np.int64)), np.zeros(DRAWS))
    return draw(LOGITS.expand(DRAWS, -1), torch.from_numpy(numbers), params, forbidden=list(forbidden))


@pytest.mark.parametrize(
    ("params", "forbidden"),
    [
        (SamplingParams(), ()),
        (SamplingParams(temperature=0.5), ()),
        (SamplingParams(temperature=3.0), ()),
        (SamplingParams(top_k=3), ()),
        (SamplingParams(top_p=0.8), ()),
        (SamplingParams(min_p=0.2), ()),
        (SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1), ()),
        (SamplingParams(top_p=0.7), (0, 7)),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all", "forbidden"],
)
def test_tokens_follow_the_exact_distribution(params: SamplingParams, forbidden: tuple[int, ...]) -> None:
    expected = np.array(exact(params, forbidden=forbidden)) * DRAWS
    tokens, _ = drawn(params, forbidden=forbidden)
    observed = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi_square < 30  # at most 7 degrees of freedom: exceeded with a probability of 1e-4


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_k=2, top_p=0.5, min_p=0.5)],
    ids=["plain", "restricted"],
)
def test_the_log_probability_is_that_of_the_whole_distribution_at_the_temperature(params: SamplingParams) -> None:
    tokens, logprobs = drawn(params, forbidden=(3,))
    expected = torch.log_softmax(LOGITS.double() / 0.7, dim=0)[tokens]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 4), ({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": 3}, 4), ({"top_k": 4}, 4), ({"top_k": 5}, 4),
        ({"top_p": 0.5}, 1), ({"top_p": 0.51}, 2), ({"top_p": 0.75}, 2), ({"top_p": 0.76}, 3), ({"top_p": 0.875}, 3),
        ({"top_p": 0.88}, 4), ({"min_p": 1.0}, 1), ({"min_p": 0.51}, 1), ({"min_p": 0.5}, 2), ({"min_p": 0.25}, 4),
        ({"top_k": 2, "top_p": 0.6}, 1), ({"top_k": 2, "top_p": 0.7}, 2),
    ],
)  # fmt: skip
def test_cuts_keep_what_lies_on_them_and_equals_together(params: dict[str, Any], kept: int) -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    found = restrict(p, SamplingParams(**params))
    assert int((found > 0).sum()) == kept
    assert torch.equal(found[found > 0], p[found > 0])


def test_greedy_takes_the_largest_allowed_logit_with_its_log_probability_at_temperature_one() -> None:
    number = torch.tensor([0.99], dtype=torch.float64)
    for forbidden, expected in (([], 0), ([0], 7), ([0, 7], 1)):
        token, logprob = draw(LOGITS[None], number, SamplingParams(temperature=0), forbidden=forbidden)
        assert token.tolist() == [expected]
        assert logprob.item() == pytest.approx(torch.log_softmax(LOGITS, dim=0)[expected].item(), abs=1e-6)


def test_numbers_are_pinned_so_that_a_resumed_run_draws_them_again() -> None:
    keys = stream_keys(1, 2, np.array([3, 3, 4]), np.array([4, 5, 4]))
    assert keys.tolist() == [8223237870565399804, 8887043502526235998, 302619882269711488]
    found = uniforms(keys, np.array([0, 7, 7])).tolist()
    assert found == [0.4734541585353439, 0.7214274570367117, 0.8955732806991054]
    assert stream_keys(-1, 0, np.array([0]), np.array([0])).tolist() == [18159682518515982810]


def test_a_row_is_drawn_from_its_own_logits_and_number_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator)
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    together, _ = draw(logits, numbers, params, forbidden=[4])
    alone = [draw(logits[row : row + 1], numbers[row : row + 1], params, forbidden=[4])[0] for row in range(64)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("number", [2.0**-53, 1e-300, 1 - 2.0**-53])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_extreme_numbers_draw_tokens_that_have_a_probability(number: float, params: SamplingParams) -> None:
    logits = torch.tensor([[-math.inf, -200.0, 3.0, 2.0, 1.0, -200.0, -math.inf]])
    token, logprob = draw(logits, torch.tensor([number], dtype=torch.float64), params, forbidden=[])
    assert token.item() in (1, 2, 3, 4)
    assert math.isfinite(logprob.item())


def test_the_first_and_the_last_token_can_be_drawn() -> None:
    logits = torch.zeros(1, 4)
    for number, expected in ((1e-9, 0), (0.2499, 0), (0.2501, 1), (0.7501, 3), (1 - 1e-9, 3)):
        token, _ = draw(logits, torch.tensor([number], dtype=torch.float64), SamplingParams(), forbidden=[])
        assert token.item() == expected


def test_every_one_of_many_unlikely_tokens_can_be_drawn() -> None:
    """Tokens of 2e-8 behind one of 0.999: sums in float32, which lie 6e-8 apart there, would skip two of three."""
    rest = 50_000
    logits = torch.zeros(1, rest + 1)
    logits[0, 0] = math.log(999 * rest)
    numbers = 0.9995 + torch.arange(20, dtype=torch.float64) * 1e-3 / rest
    tokens, _ = draw(logits.expand(20, -1), numbers, SamplingParams(), forbidden=[])
    assert (tokens[1:] - tokens[:-1]).tolist() == [1] * 19


def test_a_number_on_the_border_belongs_to_the_next_token() -> None:
    token, _ = draw(torch.zeros(1, 2), torch.tensor([0.5], dtype=torch.float64), SamplingParams(), forbidden=[])
    assert token.item() == 1


def test_half_width_logits_are_drawn_in_float32() -> None:
    tokens, logprobs = draw(
        LOGITS[None].bfloat16(), torch.tensor([0.5], dtype=torch.float64), SamplingParams(temperature=0.9), forbidden=[]
    )
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax(LOGITS.bfloat16().float() / 0.9, dim=0)[tokens]
    torch.testing.assert_close(logprobs, expected)


def test_a_very_low_temperature_is_greedy_and_finite() -> None:
    tokens, logprobs = draw(
        LOGITS[None], torch.tensor([0.999], dtype=torch.float64), SamplingParams(temperature=1e-4), forbidden=[]
    )
    assert tokens.item() == 0
    assert logprobs.item() == pytest.approx(0.0, abs=1e-6)


def test_the_logits_are_left_as_they_were() -> None:
    logits = LOGITS[None].clone()
    draw(logits, torch.tensor([0.5], dtype=torch.float64), SamplingParams(), forbidden=[0])
    assert torch.equal(logits[0], LOGITS)


@pytest.mark.proves("F71")
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), [0, 1, 2, 3]),
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=4), [0, 1, 2, 3]),
        (SamplingParams(top_k=9), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.4), [0]),
        (SamplingParams(top_p=0.6), [0, 1]),
        (SamplingParams(top_p=0.81), [0, 1, 2]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(min_p=0.5), [0, 1]),
        (SamplingParams(min_p=1.0), [0]),
        (SamplingParams(top_k=3, top_p=0.6), [0, 1]),  # 0.5 of 0.9 is less than 0.6, 0.8 of 0.9 is more
    ],
)
def test_restrictions_keep_the_tokens_that_they_should(params: SamplingParams, kept: list[int]) -> None:
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1 - 1e-4]])
    assert torch.nonzero(restrict(p, params)[0]).squeeze(1).tolist() == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [0]), (0.75, [0, 1]), (0.875, [0, 1, 2])])
def test_a_set_that_has_the_probability_exactly_is_large_enough(top_p: float, kept: list[int]) -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    assert torch.nonzero(restrict(p, SamplingParams(top_p=top_p))[0]).squeeze(1).tolist() == kept


@pytest.mark.parametrize("spread", [0.1, 6.0])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_all_of_it_keeps(spread: float) -> None:
    logits = (torch.randn(8, 5000, generator=torch.Generator().manual_seed(1)) * spread).round(decimals=1)  # with ties
    p = torch.softmax(logits, dim=-1)
    largest, order = p.sort(dim=-1, descending=True, stable=True)
    keep = largest.cumsum(dim=-1) - largest < 0.9 * p.sum(dim=-1, keepdim=True)
    expected = torch.zeros_like(p).scatter(1, order, torch.where(keep, largest, 0.0))
    assert torch.equal(restrict(p, SamplingParams(top_p=0.9)), expected)


@pytest.mark.parametrize("words", [256, 4096, 151_936])
def test_sums_of_parts_find_the_token_that_sums_of_the_whole_vocabulary_find(words: int) -> None:
    random = torch.Generator().manual_seed(words)
    rows = 2**21 // words
    p = torch.softmax(torch.randn(rows, words, generator=random) * torch.linspace(0.5, 6, rows)[:, None], dim=-1)
    uniform = torch.rand(rows, generator=random, dtype=torch.float64)
    uniform[0], uniform[1] = 2.0**-53, 1 - 2.0**-53
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)
    expected = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    found = first_above_by_parts(p, uniform, part_width(words))
    assert found.tolist() == expected.clamp(max=words - 1).tolist()
    assert (p.gather(1, found[:, None]) > 0).all()


def test_a_vocabulary_that_parts_do_not_fit_is_summed_whole() -> None:
    assert [part_width(words) for words in (151_936, 128_256, 256_000, 32_000, 50_257)] == [128, 256, 1024, 256, 0]


def test_a_tensor_of_another_shape_is_refused_here() -> None:
    with pytest.raises(Exception, match="Type-check error"):
        draw(LOGITS, torch.zeros(1), SamplingParams())
