"""Is the memory of every GPU recorded at the named points of a step, and given back before a second try?

There is no GPU here: the counters of torch are replaced, and the code that reads them is the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from oncurve.algorithm.presets import build
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.observe.metrics import unknown_keys
from oncurve.observe.record import read_metrics
from oncurve.policy.device_memory import gpu_memory
from oncurve.run.guards import attempts

if TYPE_CHECKING:
    from oncurve.policy.trained_policy import TrainedPolicy
    from oncurve.run.services import Run

GIB = 2**30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The counters of two GPUs, and what was asked of the driver besides."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: (device + 1) * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (device + 3) * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: asked.append("new peak"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    return asked


@pytest.mark.proves("F51", "D10")
@pytest.mark.usefixtures("two_gpus")
def test_allocated_and_reserved_memory_of_every_gpu_has_the_name_of_its_point() -> None:
    assert gpu_memory("train") == {
        "memory/train_gpu0_allocated_gib": 1.0,
        "memory/train_gpu0_reserved_gib": 3.0,
        "memory/train_gpu1_allocated_gib": 2.0,
        "memory/train_gpu1_reserved_gib": 4.0,
    }
    assert gpu_memory("sample", rank=5) == {
        "memory/sample_gpu5_allocated_gib": 2.0,
        "memory/sample_gpu5_reserved_gib": 4.0,
    }


def test_without_a_gpu_nothing_is_said_of_one() -> None:
    if not torch.cuda.is_available():
        assert gpu_memory("train") == {}


@pytest.mark.proves("F51")
def test_a_run_writes_it_after_every_phase_with_a_peak_for_each_step(
    two_gpus: list[str],
    make_policy: Callable[..., TrainedPolicy],
    make_prompts: Callable[..., list[Prompt]],
    train_in: Callable[..., Run],
) -> None:
    policy, prompts = make_policy(), make_prompts("a b", "c", "d")
    algorithm = build("grpo", group_size=4, max_completion_tokens=6)
    sampling = SamplingParams(max_completion_tokens=6)
    run = train_in(
        policy, prompts, lambda p, c: c.token_ids[0] % 2 == 0, algorithm, sampling, steps=2, prompts_per_step=1
    )
    rows = read_metrics(run.log.folder.path)
    for row in rows:
        named = {f"memory/{point}_gpu{n}_allocated_gib" for point in ("sample", "grade", "train") for n in (0, 1)}
        assert named <= set(row)
        assert row["memory/gpu_gib"] == 7.0
        assert unknown_keys(row) == []
    assert two_gpus.count("new peak") == 2


@pytest.mark.proves("F43")
def test_memory_is_given_back_before_an_update_is_tried_again(
    two_gpus: list[str], make_policy: Callable[..., TrainedPolicy], random_groups: Callable[..., list[Group]]
) -> None:
    from oncurve.core.batch import collate

    groups = random_groups(2, 2)
    batch = collate(groups, torch.ones(2, 2))
    tried = 0
    for attempt in attempts(make_policy(), batch, {}, lambda text: None):
        with attempt:
            tried += 1
            if tried == 1:
                assert "empty" not in two_gpus
                raise torch.OutOfMemoryError("CUDA out of memory")
    assert tried == 2
    assert two_gpus.count("empty") == 1
