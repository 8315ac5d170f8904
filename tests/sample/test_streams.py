"""Are the random numbers of sampling uniform, and a function of nothing but their place?"""

from __future__ import annotations

import numpy as np
import pytest

from oncurve.core.draw import stream_keys, uniforms


def keys(seed: int = 0, step: int = 0, *, prompts: int = 4, group_size: int = 4) -> np.ndarray:
    return stream_keys(seed, step, np.repeat(np.arange(prompts), group_size), np.tile(np.arange(group_size), prompts))


def test_a_number_depends_on_its_place_alone() -> None:
    together = uniforms(keys(prompts=8), np.full(32, 5))
    alone = uniforms(stream_keys(0, 0, np.array([3]), np.array([2])), np.array([5]))
    assert together[3 * 4 + 2] == alone[0]


def test_a_number_is_that_of_splitmix64_on_whole_numbers() -> None:
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mixed(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    assert mixed(golden) == 0xE220A8397B1DCDAF, "the first number of splitmix64 from 0"
    for seed, *places, position in ((0, 0, 0, 0, 0), (-3, 5, 7, 2, 11), (2**64 - 1, 1, 2**40, 3, 4096)):
        key = seed & mask
        for part in places:
            key = mixed(key + golden * (part + 1) & mask)
        bits = mixed(key + golden * (position + 1) & mask)
        found = uniforms(
            stream_keys(seed, places[0], *np.array([[place] for place in places[1:]])), np.array([position])
        )
        assert found.tolist() == [((bits >> 12) + 0.5) / 2**52]


def test_seed_step_prompt_completion_and_position_all_matter() -> None:
    def number(seed: int, step: int, prompt: int, index: int, position: int) -> float:
        key = stream_keys(seed, step, np.array([prompt]), np.array([index]))
        return float(uniforms(key, np.array([position]))[0])

    place = (3, 5, 7, 2, 11)
    changed = [tuple(value + (at == where) for at, value in enumerate(place)) for where in range(5)]
    swapped = [(5, 3, 7, 2, 11), (3, 7, 5, 2, 11), (3, 5, 2, 7, 11), (3, 5, 7, 11, 2)]
    numbers = {number(*each) for each in [place, *changed, *swapped]}
    assert len(numbers) == 10


def test_no_two_completions_share_a_stream() -> None:
    every = [keys(seed, step, prompts=16, group_size=16) for seed in range(4) for step in range(16)]
    assert len(np.unique(np.concatenate(every))) == 4 * 16 * 256


def test_large_and_negative_numbers_are_seeds_like_any_other() -> None:
    for seed in (2**63, 2**64 - 1, -1):
        assert keys(seed).dtype == np.uint64
    assert not np.array_equal(keys(2**64 - 1), keys(0))


def test_the_extreme_numbers_lie_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr("oncurve.core.draw.mix", lambda value: extremes)
    low, high = uniforms(extremes, np.zeros(2))
    assert 0 < low < 1e-15
    assert 1 - 1e-15 < high < 1


@pytest.mark.parametrize("axis", ["prompt", "completion", "position", "step", "seed"])
def test_numbers_are_uniform_and_uncorrelated_along_every_axis(axis: str) -> None:
    count, counter, zeros = 20_000, np.arange(20_000), np.zeros(20_000, dtype=np.int64)
    match axis:
        case "prompt":
            drawn = uniforms(stream_keys(0, 0, counter, zeros), zeros)
        case "completion":
            drawn = uniforms(stream_keys(0, 0, zeros, counter), zeros)
        case "position":
            drawn = uniforms(stream_keys(0, 0, zeros, zeros), counter)
        case "step":
            drawn = np.array([uniforms(stream_keys(0, n, zeros[:1], zeros[:1]), zeros[:1])[0] for n in range(count)])
        case _:
            drawn = np.array([uniforms(stream_keys(n, 0, zeros[:1], zeros[:1]), zeros[:1])[0] for n in range(count)])
    observed, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi_square = float((((observed - count / 100) ** 2) / (count / 100)).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: outside with a probability of 1e-4
    neighbours = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(count)
