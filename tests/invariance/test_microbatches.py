"""Is an update the same however its rows are cut into microbatches? In float64, where rounding hides no mistake."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from doubles import in_double
from lanes import gate
from torch import Tensor

from oncurve.algorithm.presets import PRESETS, build
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, Rewards, collate
from oncurve.core.records import Group, Mean
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, GROUP_SIZE, LONGEST = 64, 8, 12

MakePolicy = Callable[..., TrainedPolicy]
RandomGroups = Callable[..., list[Group]]

EACH_LOSS = ("grpo", "dapo", "rloo", "gspo", "luspo", "cispo", "sapo", "vespo", "distil", "high_entropy", "cs336")
"""Rows of the table whose loss or normalizer differs; the others differ from one of them in numbers or advantages."""
both_presets = pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
with_and_without_kl = pytest.mark.parametrize(
    ("preset", "kl_coef"), gate(itertools.product(("grpo", "dr_grpo"), (0.0, 0.1)), ("grpo", 0.1), ("dr_grpo", 0.0))
)
"""Both presets and both kinds of loss; the gate has each of them once."""
packed_and_padded = pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])


def make_algorithm(preset: str, kl_coef: float) -> Algorithm:
    return build(preset, group_size=GROUP_SIZE, max_completion_tokens=LONGEST, kl_coef=kl_coef)


@pytest.fixture(scope="module")
def make_double(make_policy: MakePolicy, tiny_model: Callable[..., PreTrainedModel]) -> MakePolicy:
    """A policy and its reference in float64; one of a kind is shared by the tests that move no weight."""

    @functools.cache
    def shared(packing: bool, tokens_per_microbatch: int) -> TrainedPolicy:
        return make(packing=packing, tokens_per_microbatch=tokens_per_microbatch, moves=True)

    def make(*, packing: bool = True, tokens_per_microbatch: int = 8192, moves: bool = False) -> TrainedPolicy:
        if not moves:
            return shared(packing, tokens_per_microbatch)
        return make_policy(
            in_double(tiny_model("qwen2")),
            optimizer=OptimizerSettings(learning_rate=1e-3, max_gradient_norm=0.5),
            compute_type="float64",
            packing=packing,
            tokens_per_microbatch=tokens_per_microbatch,
            reference=in_double(tiny_model("qwen2", seed=1)).requires_grad_(False),
        )

    return make


@pytest.fixture
def rewards() -> Rewards:
    """Rewards of many kinds for eight groups of eight: one group of equal ones, one that was not graded."""
    generator = torch.Generator().manual_seed(2)
    values: list[list[float | None]] = torch.rand(ROWS // GROUP_SIZE, GROUP_SIZE, generator=generator).tolist()
    values[2] = [1.0] * GROUP_SIZE
    values[5][3] = None
    rewards = Rewards.of(values)
    return replace(rewards, parts={"whole": rewards.values, "high": (rewards.values > 0.5).float()})


@pytest.fixture
def batch(random_groups: RandomGroups, rewards: Rewards) -> Batch:
    """The rows of those rewards, ragged, those that were cut off left out of the loss."""
    groups = random_groups(ROWS // GROUP_SIZE, GROUP_SIZE, longest=LONGEST)
    return collate(groups, make_algorithm("grpo", 0.0).advantages(rewards), mask_truncated=True)


def by_rows(batch: Batch, rows: int) -> Iterator[Batch]:
    """Microbatches of so many rows each, the last one smaller."""
    for start in range(0, len(batch), rows):
        yield batch.select(torch.arange(start, min(start + rows, len(batch))))


def accumulate(policy: TrainedPolicy, algorithm: Algorithm, microbatches: Iterator[Batch]) -> dict[str, Mean]:
    """Forward and backward over microbatches as the loop does it; the statistics added up."""
    sums: dict[str, Mean] = {}
    for microbatch in microbatches:
        logprobs, entropy = policy.logprobs(microbatch)
        loss, statistics = algorithm.loss(logprobs, entropy, microbatch)
        policy.backward(loss)
        for key, mean in statistics.items():
            sums[key] = sums[key] + mean if key in sums else mean
    sums["policy/loss"] += Mean(0.0, 1)  # microbatches add to the loss, and updates to its count
    return sums


def gradient(policy: TrainedPolicy, algorithm: Algorithm, microbatches: Iterator[Batch]) -> Tensor:
    """The gradient that microbatches leave behind, as one long vector."""
    policy.backend.optimizer.zero_grad(set_to_none=True)
    accumulate(policy, algorithm, microbatches)
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.model.parameters()]
    return torch.cat([piece.flatten() for piece in pieces]).clone()


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert expected.dtype == torch.float64
    assert expected.abs().max() > 1e-3
    assert (found - expected).abs().max().item() < 1e-10


@pytest.mark.proves("F30", "D36")
@with_and_without_kl
@packed_and_padded
def test_microbatches_of_1_3_16_and_64_rows_give_one_gradient(
    preset: str, kl_coef: float, packing: bool, make_double: MakePolicy, batch: Batch
) -> None:
    policy, algorithm = make_double(packing=packing), make_algorithm(preset, kl_coef)
    batch = policy.annotate(batch, old=False, entropy=False, reference=algorithm.needs_reference)
    whole = gradient(policy, algorithm, by_rows(batch, 64))
    for rows in (1, 3, 16):
        assert_same(gradient(policy, algorithm, by_rows(batch, rows)), whole)


@pytest.mark.proves("F30")
@pytest.mark.parametrize("preset", gate(PRESETS, *EACH_LOSS))
def test_every_row_of_the_table_has_one_gradient(
    preset: str, make_double: MakePolicy, batch: Batch, rewards: Rewards
) -> None:
    algorithm = build(preset, group_size=GROUP_SIZE, max_completion_tokens=LONGEST)
    policy = make_double(tokens_per_microbatch=100)
    annotated = policy.annotate(batch, old=True, entropy=algorithm.needs_entropy, reference=algorithm.needs_reference)
    annotated = replace(annotated, advantages=algorithm.advantages(rewards).flatten())
    [update] = algorithm.prepare(annotated, rewards).split(ROWS)
    whole = gradient(policy, algorithm, iter([update]))
    assert_same(gradient(policy, algorithm, by_rows(update, 7)), whole)
    trained = update if algorithm.needs_every_row else update.with_signal()
    assert_same(gradient(policy, algorithm, policy.microbatches(trained)), whole)


@with_and_without_kl
def test_microbatches_by_tokens_give_the_same_gradient_packed_or_padded(
    preset: str, kl_coef: float, make_double: MakePolicy, batch: Batch
) -> None:
    algorithm = make_algorithm(preset, kl_coef)
    policy = make_double(packing=False)
    annotated = policy.annotate(batch, old=False, entropy=False, reference=algorithm.needs_reference)
    whole = gradient(policy, algorithm, by_rows(annotated, 64))
    for packing in (True, False):
        for tokens in (60, 300):
            other = make_double(packing=packing, tokens_per_microbatch=tokens)
            annotated = other.annotate(batch, old=False, entropy=False, reference=algorithm.needs_reference)
            assert len(list(other.microbatches(annotated))) > 1
            assert_same(gradient(other, algorithm, other.microbatches(annotated)), whole)


@with_and_without_kl
@packed_and_padded
def test_the_order_of_the_rows_does_not_matter(
    preset: str, kl_coef: float, packing: bool, make_double: MakePolicy, batch: Batch
) -> None:
    policy, algorithm = make_double(packing=packing), make_algorithm(preset, kl_coef)
    batch = policy.annotate(batch, old=False, entropy=False, reference=algorithm.needs_reference)
    shuffled = batch.select(torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)))
    whole = gradient(policy, algorithm, by_rows(batch, 64))
    for rows in (16, 64):
        assert_same(gradient(policy, algorithm, by_rows(shuffled, rows)), whole)


@both_presets
@packed_and_padded
def test_more_padding_changes_nothing(preset: str, packing: bool, make_double: MakePolicy, batch: Batch) -> None:
    policy, algorithm = make_double(packing=packing), make_algorithm(preset, 0.0)
    whole = gradient(policy, algorithm, by_rows(batch, 64))
    wide = replace(
        batch,
        prompt_ids=torch.nn.functional.pad(batch.prompt_ids, (0, 5), value=3),
        completion_ids=torch.nn.functional.pad(batch.completion_ids, (0, 7), value=4),
        mask=torch.nn.functional.pad(batch.mask, (0, 7)),
        sampler_logprobs=torch.nn.functional.pad(batch.sampler_logprobs, (0, 7), value=-9.0),
    )
    assert_same(gradient(policy, algorithm, iter([wide])), whole)


@both_presets
def test_rows_without_an_advantage_can_be_left_out(preset: str, make_double: MakePolicy, batch: Batch) -> None:
    policy, algorithm = make_double(), make_algorithm(preset, 0.0)
    assert not algorithm.needs_every_row
    kept = batch.with_signal()
    assert len(kept) == ROWS - GROUP_SIZE - 1
    whole = gradient(policy, algorithm, by_rows(batch, 64))
    for rows in (3, 64):
        assert_same(gradient(policy, algorithm, by_rows(kept, rows)), whole)


@pytest.mark.proves("F18")
@with_and_without_kl
def test_two_updates_on_stored_log_probabilities_end_at_the_same_weights(
    preset: str, kl_coef: float, make_double: MakePolicy, batch: Batch
) -> None:
    algorithm = make_algorithm(preset, kl_coef)
    ends: list[Tensor] = []
    for rows in (32, 3):
        policy = make_double(moves=True)
        before = torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])
        annotated = policy.annotate(batch, old=True, entropy=False, reference=algorithm.needs_reference)
        clipped: list[float] = []
        for update in annotated.split(32):
            statistics = accumulate(policy, algorithm, by_rows(update, rows))
            clipped.append(statistics["policy/ratio_mean"].value)
            policy.update()
        assert clipped[0] == pytest.approx(1.0, abs=1e-5)
        assert abs(clipped[1] - 1.0) > 1e-4, "the second update sees another policy than the one that sampled"
        ends.append(torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()]))
    assert (ends[0] - before).abs().max() > 1e-3
    assert (ends[1] - ends[0]).abs().max().item() < 1e-10


@with_and_without_kl
def test_statistics_do_not_depend_on_the_microbatches(
    preset: str, kl_coef: float, make_double: MakePolicy, batch: Batch
) -> None:
    policy, algorithm = make_double(), make_algorithm(preset, kl_coef)
    annotated = policy.annotate(batch, old=True, entropy=False, reference=algorithm.needs_reference)
    whole = accumulate(policy, algorithm, by_rows(annotated, 64))
    assert {"policy/loss", "policy/entropy", "policy/ratio_mean", "mismatch/kl"} <= set(whole)
    assert ("policy/kl" in whole) == (kl_coef > 0)
    for rows in (3, 16):
        parts = accumulate(policy, algorithm, by_rows(annotated, rows))
        assert {key: mean.value for key, mean in parts.items()} == pytest.approx(
            {key: mean.value for key, mean in whole.items()}, rel=1e-6, abs=1e-9
        )
