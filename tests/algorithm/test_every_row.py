"""What must hold for every named algorithm, checked on a toy policy in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import slow
import torch
from torch import Tensor
from toy import Toy, annotate, make_batch, rewards_of, tensors_of

from oncurve.algorithm.presets import PRESETS, build
from oncurve.algorithm.table import resolve
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, Rewards

GROUP, LIMIT = 4, 6
PROMPTS = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
COMPLETIONS = [
    [1, 2, 0],
    [3, 0],
    [],  # a completion without a token
    [1, 1, 2, 3, 4, 5],  # cut off by the limit
    [2, 0],
    [5, 4, 3, 0],
    [2, 2, 0],
    [1, 0],
    [4, 4, 0],
    [0],
    [1, 2, 3, 0],
    [6, 1, 0],
]
REWARDS = [[1.0, 0.25, 0.0, 0.0], [1.0, None, 0.5, None], [0.75, 0.75, 0.75, 0.75]]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
# Presets as they are, and with everything that a recipe can add to them.
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "kl_coef": 0.07,
        "correction": "mask",
        "correction_low": 0.5,
        "correction_high": 1.6,
        "entropy_coef": 0.02,
        "off_policy_threshold": 0.005,
    },
}


def make(name: str, **choices: Any) -> Algorithm:
    return build(name, group_size=GROUP, max_completion_tokens=LIMIT, **choices)


def policies() -> tuple[Toy, Toy, Toy, Toy]:
    """The policy, and the ones that it was, that sampled, and that it started from."""
    policy = Toy(0)
    old = policy.near(1, distance=0.08)
    return policy, old, old.near(2, distance=0.05), policy.near(3, distance=0.2)


def update(algorithm: Algorithm, *, extra_padding: int = 0) -> tuple[Toy, Batch, Rewards]:
    """A batch of twelve completions with everything that the algorithm asks for."""
    policy, old, sampler, reference = policies()
    batch = make_batch(PROMPTS, COMPLETIONS, GROUPS, extra_padding=extra_padding)
    batch = annotate(batch, old=old, sampler=sampler, reference=reference)
    rewards = rewards_of(REWARDS, batch.completion_lengths)
    batch = replace(batch, advantages=algorithm.advantages(rewards).reshape(-1))
    return policy, algorithm.prepare(batch, rewards), rewards


def gradient(algorithm: Algorithm, policy: Toy, parts: list[Batch]) -> tuple[float, Tensor]:
    """Loss and gradient of an update that is computed in some parts."""
    for weight in policy.weights:
        weight.grad = None
    value = 0.0
    for part in parts:
        loss, _ = algorithm.loss(*policy.logprobs(part), part)
        loss.backward()
        value += loss.item()
    return value, torch.cat([weight.grad.flatten() for weight in policy.weights if weight.grad is not None])


@pytest.fixture(params=EXTRAS)
def extra(request: pytest.FixtureRequest) -> dict[str, Any]:
    return EXTRAS[request.param]


@pytest.mark.parametrize("name", PRESETS)
def test_the_update_is_the_same_however_it_is_cut(name: str, extra: dict[str, Any]):
    algorithm = make(name, **extra)
    policy, batch, _ = update(algorithm)
    value, whole = gradient(algorithm, policy, [batch])
    for size in (1, 5):
        rows = torch.arange(len(batch)).split(size)
        cut_value, cut = gradient(algorithm, policy, [batch.select(part) for part in rows])
        assert cut_value == pytest.approx(value, abs=1e-10)
        assert (cut - whole).abs().max() < 1e-10


@pytest.mark.parametrize("name", PRESETS)
def test_the_order_of_rows_does_not_matter(name: str, extra: dict[str, Any]):
    algorithm = make(name, **extra)
    policy, batch, _ = update(algorithm)
    value, whole = gradient(algorithm, policy, [batch])
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    mixed_value, mixed = gradient(algorithm, policy, [batch.select(part) for part in order.split(5)])
    assert mixed_value == pytest.approx(value, abs=1e-10)
    assert (mixed - whole).abs().max() < 1e-10


@pytest.mark.parametrize("name", PRESETS)
def test_padding_does_not_matter(name: str, extra: dict[str, Any]):
    algorithm = make(name, **extra)
    policy, batch, _ = update(algorithm)
    value, whole = gradient(algorithm, policy, [batch])
    _, padded, _ = update(algorithm, extra_padding=3)
    padded_value, padded_gradient = gradient(algorithm, policy, [padded])
    assert padded_value == pytest.approx(value, abs=1e-10)
    assert (padded_gradient - whole).abs().max() < 1e-10


@pytest.mark.parametrize("reference", ["frozen", "old"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_stands_in_the_padding_is_never_read(name: str, reference: str):
    algorithm = make(name, **EXTRAS["everything"], reference=reference)
    policy, batch, _ = update(algorithm)
    value, whole = gradient(algorithm, policy, [batch])
    spoiled = {
        key: torch.where(batch.mask, getattr(batch, key), torch.nan)
        for key in tensors_of(batch)
        if key in ("old_logprobs", "ref_logprobs", "sampler_logprobs", "old_entropy")
    }
    poisoned = replace(batch, **spoiled)
    logprobs, entropy = policy.logprobs(poisoned)
    loss, statistics = algorithm.loss(
        torch.where(batch.mask, logprobs, torch.nan), torch.where(batch.mask, entropy, torch.nan), poisoned
    )
    for weight in policy.weights:
        weight.grad = None
    loss.backward()
    found = torch.cat([weight.grad.flatten() for weight in policy.weights if weight.grad is not None])
    assert loss.item() == pytest.approx(value, abs=1e-12)
    assert (found - whole).abs().max() < 1e-12
    assert not any(math.isnan(mean.total) for mean in statistics.values())


@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_agrees_with_loops(name: str, extra: dict[str, Any]):
    algorithm, row = make(name, **extra), resolve(name, **extra)
    policy, batch, rewards = update(algorithm)
    logprobs, entropy = policy.logprobs(batch)
    loss, _ = algorithm.loss(logprobs, entropy, batch)
    assert loss.item() == pytest.approx(slow_loss(row, batch, rewards, logprobs, entropy), abs=1e-12)


def slow_loss(row, batch: Batch, rewards: Rewards, logprobs: Tensor, entropy: Tensor) -> float:
    """The whole of an algorithm in loops, from rewards to the scalar."""
    table = [
        [value if known else None for value, known in zip(values, graded, strict=True)]
        for values, graded in zip(rewards.values.tolist(), rewards.graded.tolist(), strict=True)
    ]
    now, old = logprobs.tolist(), batch.old_logprobs.tolist()
    mask, sampler, reference = batch.mask.tolist(), batch.sampler_logprobs.tolist(), batch.ref_logprobs.tolist()
    if row.reference == "old":
        reference = old
    if row.kl_coef and row.kl_in == "reward":
        sums = [
            sum(slow.kl(row.kl_estimator, a, b) for a, b, keep in zip(*line, strict=True) if keep)
            for line in zip(old, reference, mask, strict=True)
        ]
        table = [
            [None if value is None else value - row.kl_coef * sums[GROUP * p + g] for g, value in enumerate(line)]
            for p, line in enumerate(table)
        ]
    advantages = [value for line in slow_advantages(row, table, rewards) for value in line]
    constants = {
        key: getattr(row, key) for key in ("clip_low", "clip_high", "ratio_max") if getattr(row, key) is not None
    }
    kept = mask
    if row.high_entropy_share < 1:
        values = sorted(
            value
            for line, keeps in zip(batch.old_entropy.tolist(), mask, strict=True)
            for value, keep in zip(line, keeps, strict=True)
            if keep
        )
        place = (1 - row.high_entropy_share) * (len(values) - 1)
        below = int(place)
        threshold = values[below] + (values[below + 1] - values[below]) * (place - below)
        kept = [
            [keep and value >= threshold for value, keep in zip(line, keeps, strict=True)]
            for line, keeps in zip(batch.old_entropy.tolist(), mask, strict=True)
        ]
    losses = []
    for i in range(len(batch)):
        line = slow.token_loss(row.loss, now[i], old[i], advantages[i], mask[i], **constants)
        if row.kl_coef and row.kl_in == "advantage":
            line = [
                slow.token_loss(row.loss, [a], [b], advantages[i] - row.kl_coef * (b - c), [keep], **constants)[0]
                for a, b, c, keep in zip(now[i], old[i], reference[i], mask[i], strict=True)
            ]
        if row.correction != "none":
            weights = slow.correction(
                row.correction,
                row.correction_level,
                old[i],
                sampler[i],
                mask[i],
                row.correction_low,
                row.correction_high,
            )
            line = [value * weight for value, weight in zip(line, weights, strict=True)]
        if row.off_policy_threshold is not None:
            weight = slow.off_policy(now[i], sampler[i], advantages[i], mask[i], row.off_policy_threshold)
            line = [value * weight for value in line]
        line = [value if keep else 0.0 for value, keep in zip(line, kept[i], strict=True)]
        if row.kl_coef and row.kl_in == "loss":
            gaps = [a - b for a, b, keep in zip(now[i], old[i], mask[i], strict=True) if keep]
            s = slow.mean(gaps) if gaps else 0.0
            for t, (a, b) in enumerate(zip(now[i], reference[i], strict=True)):
                log_ratio = s if row.loss.startswith("sequence_") and row.loss != "sequence_gated" else a - old[i][t]
                weight = slow.ratio(log_ratio, 0.0) if row.kl_importance else 1.0
                line[t] += row.kl_coef * slow.kl(row.kl_estimator, a, b) * weight
        losses.append(line)
    total = slow.normalized(row.normalize, losses, mask, GROUPS, limit=LIMIT)
    return total - row.entropy_coef * slow.normalized("token_mean", entropy.tolist(), mask, GROUPS)


def slow_advantages(row, table, rewards: Rewards) -> list[list[float]]:
    spread: dict[str, Any] = {"ddof": row.std_ddof, "epsilon": row.std_epsilon}
    match row.advantage:
        case "none":
            return [[0.0] * len(line) for line in table]
        case "group_std" | "group_mean":
            return slow.group_relative(table, scale_by_std=row.advantage == "group_std", **spread)
        case "batch_std":
            return slow.by_batch(table, of="rewards", **spread)
        case "batch_centered_std":
            return slow.by_batch(table, of="advantages", **spread)
        case "whitened":
            return slow.whitened(table, **spread)
        case "leave_one_out":
            return slow.leave_one_out(table)
        case "mean_normalized":
            return slow.mean_normalized(table)
        case "length_weighted":
            return slow.length_weighted(table, rewards.num_tokens.tolist())
        case "multi_objective":
            known = rewards.graded.tolist()
            parts = [
                [
                    [v if k else None for v, k in zip(a, b, strict=True)]
                    for a, b in zip(part.tolist(), known, strict=True)
                ]
                for part in rewards.parts.values()
            ]
            return slow.multi_objective(parts, [1.0] * len(parts), **spread)
        case _:
            return [[value or 0.0 for value in line] for line in table]


@pytest.mark.proves("F20")
@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str):
    """Without a KL every loss is, at ratio 1, the plain policy gradient under the same normalizer."""
    row = resolve(name, kl_coef=0.0, high_entropy_share=1.0)
    algorithm = make(name, kl_coef=0.0, high_entropy_share=1.0)
    policy, batch, _ = update(algorithm)
    batch = replace(batch, old_logprobs=None)
    _, found = gradient(algorithm, policy, [batch])
    plain = make("grpo", loss="policy_gradient", normalize=row.normalize)
    _, expected = gradient(plain, policy, [batch])
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1.1])
def test_a_batch_of_equal_rewards_moves_nothing(name: str, value: float):
    if name == "rft":
        pytest.skip("without a baseline every reward counts")
    algorithm = make(name, kl_coef=0.0)
    for size in range(2, 65):
        rewards = Rewards.of([[value] * size, [value] * size])
        rewards = replace(rewards, parts={"correct": rewards.values, "format": 1 - rewards.values})
        assert (algorithm.advantages(rewards) == 0).all(), size


@pytest.mark.parametrize("name", PRESETS)
def test_a_group_without_two_rewards_or_without_signal_gets_exactly_zero(name: str):
    advantages = make(name).advantages(rewards_of([[1.0, 0.0, 0.5, 0.0], [None, None, None, 1.0], [0.7] * 4]))
    assert (advantages[1, :3] == 0).all()
    if name in ("rft", "reinforce_pp", "gdpo"):
        return  # no baseline from the group
    assert (advantages[1:] == 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_permuting_completions_permutes_their_advantages(name: str):
    algorithm = make(name)
    table = [[1.0, 0.25, None, 0.0], [0.5, 1.0, 0.0, 0.0]]
    lengths = torch.tensor([[3, 5, 2, 9], [4, 4, 1, 7]])
    order = torch.tensor([2, 0, 3, 1])
    straight = algorithm.advantages(rewards_of(table, lengths))
    permuted = algorithm.advantages(rewards_of([[line[i] for i in order] for line in table], lengths[:, order]))
    assert torch.allclose(permuted, straight[:, order], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "name", [name for name, row in PRESETS.items() if row.advantage not in ("raw", "mean_normalized")]
)
def test_a_constant_added_to_every_reward_changes_no_advantage(name: str):
    algorithm = make(name)
    table, lengths = [[1.0, 0.25, None, 0.0], [0.5, 1.0, 0.0, 0.0]], torch.tensor([[3, 5, 2, 9], [4, 4, 1, 7]])
    straight = rewards_of(table, lengths)
    moved = replace(straight, values=straight.values + 2, parts={k: v + 2 for k, v in straight.parts.items()})
    assert torch.allclose(algorithm.advantages(moved), algorithm.advantages(straight), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_when_all_completions_are_masked_the_loss_is_zero_and_finite(name: str, extra: dict[str, Any]):
    algorithm = make(name, **extra)
    policy, batch, _ = update(algorithm)
    nothing = torch.zeros_like(batch.mask)
    batch = replace(batch, mask=nothing, policy_mask=None if batch.policy_mask is None else nothing).measured()
    value, found = gradient(algorithm, policy, [batch])
    assert value == 0.0
    assert (found == 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_completions_whose_grader_failed_have_no_policy_gradient(name: str):
    algorithm = make(name, kl_coef=0.0)
    policy, batch, _ = update(algorithm)
    failed = torch.tensor([5, 7])
    assert (batch.advantages[failed] == 0).all()
    _, found = gradient(algorithm, policy, [batch.select(failed)])
    assert (found == 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_rows_without_advantage_may_be_left_out_where_the_algorithm_says_so(name: str, extra: dict[str, Any]):
    algorithm = make(name, **extra)
    policy, batch, _ = update(algorithm)
    _, whole = gradient(algorithm, policy, [batch])
    kept = batch.select((batch.advantages != 0).nonzero().flatten())
    _, found = gradient(algorithm, policy, [kept])
    is_same = bool((found - whole).abs().max() < 1e-12)
    assert is_same or algorithm.needs_every_row
