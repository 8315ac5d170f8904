"""Does an update see as many prompts and completions as TRL's trainer would give it, batch for batch?"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from oncurve.core.errors import ConfigError
from oncurve.trl.trl_batch import StepShape, TrlBatch, step_of

PER_DEVICE, ACCUMULATION, PASSES, ITERATIONS = (2, 4, 8), (1, 2, 4), (None, 1, 2, 3, 4, 8), (1, 2)
ROWS = 64


def theirs(batch: TrlBatch) -> list[list[tuple[int, int, int]]]:
    """(generation batch, pass over it, prompt) of every completion of every update in one epoch, by TRL's sampler."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    from trl.trainer.utils import RepeatSampler

    names: dict[str, Any] = {"num_iterations": batch.iterations, "steps_per_generation": batch.steps_per_generation}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = trl.GRPOConfig(
            output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=batch.per_device,
            gradient_accumulation_steps=batch.accumulation, num_generations=batch.group_size, **names,
        )  # fmt: skip
    repeated = config.num_iterations * config.steps_per_generation
    sampler = RepeatSampler(
        range(ROWS), mini_repeat_count=config.num_generations, repeat_count=repeated,
        batch_size=config.generation_batch_size // config.num_generations, shuffle=False,
    )  # fmt: skip
    drawn, size = list(sampler), config.generation_batch_size
    loaded = [drawn[at : at + size] for at in range(0, len(drawn), size)]
    passes: list[list[tuple[int, int, int]]] = []
    for number, rows in enumerate(loaded):  # as _prepare_inputs: a new batch after every `repeated` passes
        generation, rest = divmod(number, repeated)
        iteration, part = divmod(rest, config.steps_per_generation)
        first = part * batch.per_device
        passes.append([(generation, iteration, prompt) for prompt in rows[first : first + batch.per_device]])
    updates = [passes[at : at + batch.accumulation] for at in range(0, len(passes), batch.accumulation)]
    return [[row for piece in update for row in piece] for update in updates]


def cases() -> list[TrlBatch]:
    made = [
        TrlBatch(per_device=p, accumulation=a, processes=1, group_size=4, iterations=i, steps_per_generation=s)
        for p, a, s, i in itertools.product(PER_DEVICE, ACCUMULATION, PASSES, ITERATIONS)
    ]
    return [batch for batch in made if batch.generated % batch.group_size == 0]


@pytest.mark.parametrize("batch", cases(), ids=lambda b: f"{b.per_device}-{b.accumulation}-{b.passes}-{b.iterations}")
def test_an_update_sees_what_it_sees_in_trl(batch: TrlBatch) -> None:
    step, updates = step_of(batch), theirs(batch)
    assert len(updates) == batch.updates(epochs=1, rows=ROWS)
    if not step.is_exact:
        assert any(len({row[:2] for row in update}) > 1 for update in updates)
        return
    assert step.completions_per_update * step.updates == step.prompts * batch.group_size
    first = updates[: step.updates * step.iterations]
    assert len({row[2] for update in first for row in update}) == step.prompts
    if batch.passes % batch.accumulation == 0:  # a batch and nothing else, as often as it is gone over
        assert {len(update) for update in first} == {step.completions_per_update}
        assert {row[0] for update in first for row in update} == {0}
        assert len(first) == step.updates * step.iterations
    else:  # whole batches in one update, every completion of them counted alike
        assert len(first[0]) == step.completions_per_update * batch.iterations


def test_processes_multiply_the_batch() -> None:
    single = TrlBatch(per_device=4, accumulation=2, processes=1, group_size=8)
    eight = TrlBatch(per_device=4, accumulation=2, processes=8, group_size=8)
    assert (step_of(single).prompts, step_of(eight).prompts) == (1, 8)


def test_a_generation_batch_size_stands_for_the_passes() -> None:
    batch = TrlBatch(per_device=8, accumulation=2, processes=1, group_size=8, generation_batch=64)
    assert step_of(batch) == StepShape(prompts=8, completions_per_update=16, updates=4, iterations=1, is_exact=True)


@pytest.mark.parametrize(("iterations", "steps"), [(1, 25), (2, 13)])
def test_steps_are_batches_of_completions(iterations: int, steps: int) -> None:
    batch = TrlBatch(
        per_device=8, accumulation=1, processes=1, group_size=8, steps_per_generation=4, iterations=iterations
    )
    assert step_of(batch).count(100) == steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 3}, "does not divide the 8 completions"),
        ({"group_size": 1}, "below 2"),
        ({"generation_batch": 12}, "does not divide"),
        ({"generation_batch": 16, "steps_per_generation": 2}, "exclude each other"),
        ({"iterations": 0}, "at least 1"),
    ],
)
def test_what_trl_refuses_is_refused(changes: dict[str, int], message: str) -> None:
    numbers: dict[str, Any] = {"per_device": 8, "accumulation": 1, "processes": 1, "group_size": 8} | changes
    with pytest.raises(ConfigError, match=message):
        step_of(TrlBatch(**numbers))
