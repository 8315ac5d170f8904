"""Does a GPU's decode step give the same by every way, and does sampling wait, keep and launch no more than it says?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import decoding_on_device
import pytest
from lanes import gate

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu

families = pytest.mark.parametrize("family", gate(["qwen2", "qwen3", "llama"], "llama"))


@families
@pytest.mark.parametrize("plant", ["", "buffers move"])
def test_recorded_eager_flash_and_masked_steps_agree(family: str, plant: str, pretend_gpu: PretendGpu) -> None:
    """A length that was baked in, or a buffer that was replaced, would be read again by a recording."""
    found = pretend_gpu(decoding_on_device.steps_by_all_ways, family, plant)
    assert found["recorded"] == 0
    assert found["masked"] < 0.03 * found["largest"]
    flash, eager, masked, _ = found["counts"]
    assert eager == 0
    assert 1 <= flash <= (4 if plant else 2), "one for each number of rows"
    assert masked >= 1


@families
def test_a_layer_is_so_few_launches(family: str, pretend_gpu: PretendGpu) -> None:
    found = pretend_gpu(decoding_on_device.launches, family)
    norms = 3 if family == "qwen3" else 2
    assert found["norms"] == norms
    assert found["operations"] <= (38 if family == "qwen3" else 32), "22 on CUDA, where a norm is one; 24 with Qwen3's"


def test_a_step_that_reads_a_number_back_goes_on_without_a_recording(pretend_gpu: PretendGpu) -> None:
    found = pretend_gpu(decoding_on_device.a_step_that_asks)
    assert found["same"]
    assert found["count"] == 0
    [line] = found["said"]
    assert line.startswith("decode steps run without CUDA graphs, slower: recording one raised")


def alike(some: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> float:
    """The share of tokens before the first that differs; near a tie rounding decides, and all that follows."""
    same = [
        next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in zip(some, others, strict=True)
    ]
    return sum(same) / sum(map(len, some))


def test_the_engine_gives_the_modules_tokens_by_every_way_also_after_an_update(pretend_gpu: PretendGpu) -> None:
    found = pretend_gpu(decoding_on_device.engine_by_all_ways)
    for weights in ("before", "after"):
        ways = found[weights]
        for way in ("masked", "module"):
            assert alike(ways["flash"], ways[way]) > 0.75, (weights, way)
    assert alike(found["before"]["flash"], found["after"]["flash"]) < 0.25


def test_steps_that_start_ahead_draw_the_same_tokens(pretend_gpu: PretendGpu) -> None:
    found = pretend_gpu(decoding_on_device.engine_ahead)
    assert found["ahead"] == found["after"]
    assert len({len(tokens) for tokens in found["ahead"]}) > 1, "rows end at different times"


def test_sampling_waits_once_a_step_and_gives_its_memory_back(pretend_gpu: PretendGpu) -> None:
    found = pretend_gpu(decoding_on_device.kept_after_sampling)
    (live, reserved), (live_before, reserved_before) = found["after"], found["before"]
    assert live == live_before
    assert reserved < reserved_before + 2**18, "no pool of recordings, caches or weights"
    steps = found["steps"]
    assert found["graphs"] >= steps - 8, "most steps are repeated"
    assert found["waits"]["event"] <= steps, "one wait for each step"
    assert sum(found["waits"].values()) - found["waits"]["event"] < 30, "and those of the beginning and the end"
