"""Does a difference give back every bit, and is a damaged one refused?"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from oncurve.fleet.weights.delta import Region, apply, encode

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)


def as_bytes(weight: torch.Tensor) -> np.ndarray:
    return weight.contiguous().view(-1).view(torch.uint8).numpy().copy()


def there_and_back(base: np.ndarray, new: np.ndarray, regions: list[Region]) -> int:
    kept = base.copy()
    coded = encode(base, new, regions)
    found = apply(coded.data, base)
    assert found.tobytes() == new.tobytes()
    assert base.tobytes() == kept.tobytes(), "the old version stays as it is"
    return len(coded.data)


@settings(deadline=None, max_examples=150)
@given(
    size=some.integers(0, 400),
    width=some.sampled_from([1, 2, 4, 8]),
    share=some.sampled_from([0.0, 0.01, 0.2, 0.4, 0.7, 1.0]),
    far=some.sampled_from([1, 100, 2**62]),
    seed=some.integers(0, 2**32 - 1),
)
def test_random_changes_of_every_width_come_back_to_the_bit(
    size: int, width: int, share: float, far: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    base = draw.integers(0, 256, size * width, dtype=np.uint8)
    new = base.copy()
    numbers = new.view(f"<u{width}")
    steps = draw.integers(-far, far, size, endpoint=True).astype(np.int64).view(np.uint64).astype(numbers.dtype)
    numbers[:] = np.where(draw.random(size) < share, numbers + steps, numbers)
    there_and_back(base, new, [Region(0, size * width, width)])


@settings(deadline=None, max_examples=60)
@given(data=some.data())
def test_files_of_several_tensors_with_anything_between_them_come_back(data: some.DataObject) -> None:
    base = np.frombuffer(data.draw(some.binary(min_size=0, max_size=200)), np.uint8)
    new = np.frombuffer(data.draw(some.binary(min_size=base.size, max_size=base.size)), np.uint8)
    cuts = sorted(data.draw(some.lists(some.integers(0, base.size), max_size=6)))
    widths = data.draw(some.lists(some.sampled_from([1, 2, 4, 8]), min_size=6, max_size=6))
    regions = [Region(a, b, width) for a, b, width in zip(cuts[::2], cuts[1::2], widths, strict=False)]
    there_and_back(base, new, regions)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nan_payloads_signed_zeros_infinities_and_empty_tensors_come_back(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    special = [0, 1, -1, 2 ** (8 * width - 1) - 1, 7] if width > 1 else [0, 1, 255, 127, 128]
    if dtype.is_floating_point:
        made = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype)
        special += made.view(bits).tolist()
        special.append(special[-1] + 3)  # a NaN that carries something
    base = torch.tensor([a for a in special for _ in special], dtype=bits)
    new = torch.tensor([b for _ in special for b in special], dtype=bits)
    there_and_back(as_bytes(base), as_bytes(new), [Region(0, base.numel() * width, width)])
    empty = np.empty(0, np.uint8)
    there_and_back(empty, empty, [Region(0, 0, width)])


def test_few_changed_weights_in_half_width_take_few_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(200_000, generator=generator) * 0.02
    moved = masters + 1e-6 * torch.randn(masters.shape, generator=generator)
    base, new = (as_bytes(weight.bfloat16()) for weight in (masters, moved))
    regions = [Region(0, base.size, 2)]
    coded = encode(base, new, regions)
    assert coded.total == 200_000
    assert 0 < coded.changed < 0.05 * coded.total
    assert there_and_back(base, new, regions) < 0.03 * base.size
    assert there_and_back(base, base, regions) < 100
    noise = torch.randint(0, 256, (base.size,), dtype=torch.uint8, generator=generator).numpy()
    assert there_and_back(base, noise, regions) < 1.001 * base.size + 200, "what has no pattern travels as it is"


@settings(deadline=None, max_examples=300)
@given(data=some.data())
def test_a_damaged_difference_is_refused_or_gives_some_file_of_the_same_size(data: some.DataObject) -> None:
    draw = np.random.default_rng(0)
    base = draw.integers(0, 256, 600, dtype=np.uint8)
    new = base.copy()
    new[draw.integers(0, 600, 40)] += 1
    coded = bytearray(encode(base, new, [Region(0, 400, 2), Region(400, 600, 4)]).data)
    if data.draw(some.booleans()):
        del coded[data.draw(some.integers(0, len(coded) - 1)) :]
    else:
        coded[data.draw(some.integers(0, len(coded) - 1))] ^= data.draw(some.integers(1, 255))
    with contextlib.suppress(ValueError):
        assert apply(bytes(coded), base).size == base.size


def test_files_of_different_sizes_have_no_difference() -> None:
    with pytest.raises(ValueError, match="cannot become one of 3"):
        encode(np.zeros(4, np.uint8), np.zeros(3, np.uint8), [])
    coded = encode(np.zeros(4, np.uint8), np.ones(4, np.uint8), [])
    with pytest.raises(ValueError, match="for a file of 4 bytes"):
        apply(coded.data, np.zeros(5, np.uint8))
