"""Our rows against TRL's trainer, computed live: loss and gradient on random ragged batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import trl_reference
from torch import Tensor
from trl_reference import Rows

from oncurve.algorithm.losses import sequence_soft_gated, soft_gated
from oncurve.algorithm.presets import build
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, Size

pytestmark = pytest.mark.skipif(bool(trl_reference.REASON), reason=trl_reference.REASON or "TRL is here")

LIMIT = 50
"""The token limit that the constant normalizer divides by."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
SYMMETRIC: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
ASYMMETRIC: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def ours(rows: Rows, algorithm: Algorithm, batch: Batch | None = None) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy = rows.logprobs.clone().requires_grad_(), rows.entropy.clone().requires_grad_()
    value, _ = algorithm.loss(logprobs, entropy, rows.batch() if batch is None else batch)
    gradients = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return value.detach(), *gradients


def assert_same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Value relative to itself, gradients relative to their norm."""
    for one, other in zip(mine, theirs, strict=True):
        gap = (one - other).norm() / other.norm().clamp(min=1e-30) if other.norm() > 0 else one.norm()
        assert gap.item() <= TOLERANCE[dtype], gap.item()


def make(name: str, **choices: Any) -> Algorithm:
    return build(name, group_size=4, max_completion_tokens=LIMIT, **choices)


@dataclass(frozen=True)
class Case:
    theirs: dict[str, Any]
    name: str
    choices: dict[str, Any]


CLIPPED = {
    "grpo": Case({"loss_type": "grpo"}, "grpo", {}),
    "bnpo": Case({"loss_type": "bnpo"}, "grpo", {"normalize": "token_mean"}),
    "dr_grpo": Case({"loss_type": "dr_grpo", "max_completion_length": LIMIT}, "dr_grpo", {}),
    "dapo": Case({"loss_type": "dapo"}, "dapo", {}),
    "grpo at sequence level": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo", {"normalize": "sequence_mean"}
    ),
    "luspo at sequence level": Case({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "luspo", {}),
    "bnpo at sequence level": Case(
        {"loss_type": "bnpo", "importance_sampling_level": "sequence"}, "gspo", {"normalize": "token_mean"}
    ),
    "dapo at sequence level": Case(
        {"loss_type": "dapo", "importance_sampling_level": "sequence"}, "gspo", {"normalize": "token_mean"}
    ),
    "dr_grpo at sequence level": Case(
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "max_completion_length": LIMIT},
        "gspo",
        {"normalize": "constant"},
    ),
}
SHARP = 1.0625
"""TRL rounds its temperature to float32 even for float64 losses; this one survives that."""
UNCLIPPED = {
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo", {"ratio_max": 1.3}),
    "cispo at 5": Case({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {}),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_neg": SHARP},
        "sapo",
        {"loss": partial(soft_gated, sharpness_negative=SHARP)},
    ),
    "cispo at sequence level": Case(
        {"loss_type": "cispo", "epsilon_high": 1.1, "importance_sampling_level": "sequence"},
        "cispo",
        {"loss": "sequence_truncated_importance", "ratio_max": 1.1},
    ),
    "vespo": Case({"loss_type": "vespo"}, "vespo", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("bounds", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("case", CLIPPED.values(), ids=CLIPPED.keys())
def test_clipped_losses_agree(case: Case, bounds: dict[str, float], beta: float, dtype: torch.dtype):
    for seed in range(3):
        rows = Rows.random(seed, dtype=dtype)
        theirs = trl_reference.loss(
            rows, beta=beta, epsilon_low=bounds["clip_low"], epsilon_high=bounds["clip_high"], **case.theirs
        )
        assert_same(ours(rows, make(case.name, kl_coef=beta, **bounds, **case.choices)), theirs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("case", UNCLIPPED.values(), ids=UNCLIPPED.keys())
def test_losses_without_clipping_agree(case: Case, beta: float, dtype: torch.dtype):
    for seed in range(3):
        rows = Rows.random(seed, dtype=dtype)
        theirs = trl_reference.loss(rows, beta=beta, **case.theirs)
        assert_same(ours(rows, make(case.name, kl_coef=beta, **case.choices)), theirs, dtype)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_sapo_with_one_ratio_per_completion_agrees(beta: float):
    for seed in range(3):
        rows = Rows.random(seed)
        level = {"loss_type": "sapo", "importance_sampling_level": "sequence"}
        theirs = trl_reference.loss(rows, beta=beta, sapo_temperature_neg=SHARP, **level)
        mine = make("sapo", loss="sequence_soft_gated", kl_coef=beta)
        mine = replace(mine, token_loss=partial(sequence_soft_gated, sharpness_negative=SHARP))
        assert_same(ours(rows, mine), theirs, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("importance", [True, False])
def test_the_kl_agrees_with_and_without_importance_weights(level: str, importance: bool, dtype: torch.dtype):
    rows = Rows.random(7, dtype=dtype)
    theirs = trl_reference.loss(
        rows, beta=0.04, use_bias_correction_kl=importance, importance_sampling_level=level, loss_type="grpo"
    )
    loss = "clipped" if level == "token" else "sequence_clipped"
    mine = make("grpo", loss=loss, kl_coef=0.04, kl_importance=importance)
    assert_same(ours(rows, mine), theirs, dtype)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [1.5, 1.1])
def test_the_outer_bound_agrees(delta: float, level: str):
    rows = Rows.random(3, spread=1.0)
    theirs = trl_reference.loss(rows, delta=delta, importance_sampling_level=level)
    loss = "clipped" if level == "token" else "sequence_clipped"
    assert_same(ours(rows, make("grpo", loss=loss, ratio_max=delta)), theirs, torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("threshold", [0.01, 0.05])
def test_the_off_policy_mask_agrees(threshold: float, beta: float):
    num_masked = 0
    for seed in range(3):
        rows = Rows.random(seed)
        theirs = trl_reference.loss(rows, beta=beta, off_policy_mask_threshold=threshold)
        num_masked += not torch.equal(theirs[1], trl_reference.loss(rows, beta=beta)[1])
        assert_same(ours(rows, make("grpo", kl_coef=beta, off_policy_threshold=threshold)), theirs, torch.float64)
    assert num_masked


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("case", (CLIPPED | UNCLIPPED).values(), ids=(CLIPPED | UNCLIPPED).keys())
def test_without_old_logprobs_both_take_the_current_ones(case: Case, beta: float):
    rows = Rows.random(5)
    theirs = trl_reference.loss(rows, with_old=False, beta=beta, **case.theirs)
    bounds = SYMMETRIC if case.name in {case.name for case in CLIPPED.values()} else {}
    mine = make(case.name, kl_coef=beta, **bounds, **case.choices)
    assert_same(ours(rows, mine, rows.batch(with_old=False)), theirs, torch.float64)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo at sequence level"])
def test_two_microbatches_of_equal_rows_agree(name: str):
    """TRL divides by the number of microbatches; here the denominators of the whole update are handed in."""
    case = (CLIPPED | UNCLIPPED)[name]
    rows = Rows.random(11, prompts=4)
    size = rows.batch().size
    for part in (slice(0, 8), slice(8, 16)):
        some = rows.select(part)
        theirs = trl_reference.loss(
            some,
            num_items=size.num_tokens,
            current_gradient_accumulation_steps=2,
            steps_per_generation=2,
            **{"epsilon_low": 0.2, "epsilon_high": 0.28, **case.theirs},
        )
        mine = make(case.name, **{**(ASYMMETRIC if name in CLIPPED else {}), **case.choices})
        assert_same(ours(some, mine, some.batch(size=size)), theirs, torch.float64)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_training_on_tokens_of_high_entropy_agrees(share: float):
    rows = Rows.random(13)
    theirs = trl_reference.loss(rows, loss_type="dapo", epsilon_high=0.28, top_entropy_quantile=share, beta=0.04)
    algorithm = make("high_entropy", high_entropy_share=share, kl_coef=0.04)
    batch = replace(rows.batch(), old_entropy=rows.entropy)
    rewards = trl_reference.as_rewards(torch.zeros(12, 1, dtype=torch.float64), group_size=4)
    assert_same(ours(rows, algorithm, algorithm.prepare(batch, rewards)), theirs, torch.float64)


def test_the_entropy_bonus_agrees():
    rows = Rows.random(17)
    theirs = trl_reference.loss(rows, loss_type="dapo", entropy_coef=0.01)
    assert_same(ours(rows, make("dapo", clip_high=0.2, entropy_coef=0.01)), theirs, torch.float64)


CORRECTIONS = {
    "token_truncate": ("truncate", "token", None, 1.5),
    "token_mask": ("mask", "token", 0.5, 1.5),
    "sequence_truncate": ("truncate", "sequence", 0.5, 3.0),
    "sequence_mask": ("mask", "sequence", None, 3.0),
}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_the_correction_of_the_sampler_agrees(mode: str):
    kind, level, low, high = CORRECTIONS[mode]
    for seed in range(3):
        rows = Rows.random(seed)
        weights = trl_reference.importance_weights(rows, mode=mode, low=low, high=high)
        theirs = trl_reference.loss(rows, weights=weights, use_vllm=True, loss_type="dapo", beta=0.04)
        mine = make(
            "dapo",
            clip_high=0.2,
            kl_coef=0.04,
            correction=kind,
            correction_level=level,
            correction_low=low or 0.0,
            correction_high=high,
        )
        assert_same(ours(rows, mine), theirs, torch.float64)


def some_rewards(
    seed: int, *, functions: int = 1, groups: int = 6, group_size: int = 4, failed: float = 0.15
) -> Tensor:
    """Rewards of distinct values, some completions without any."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.rand(groups * group_size, functions, generator=draw, dtype=torch.float64)
    values[torch.rand(len(values), generator=draw) < failed] = torch.nan
    return values


@pytest.mark.parametrize(
    ("scale", "advantage"), [("group", "group_std"), ("batch", "batch_std"), ("none", "group_mean")]
)
@pytest.mark.parametrize("failed", [0.0, 0.15])
def test_advantages_agree(scale: str, advantage: str, failed: float):
    """TRL takes n / (n - 1) in float32, which is exact for the 3 and 33 rewards here as long as none failed."""
    for seed in range(5):
        values = some_rewards(seed, groups=11, group_size=3, failed=failed)
        theirs = trl_reference.advantages(values.clone(), group_size=3, scale_rewards=scale)
        algorithm = make("grpo", advantage=advantage, std_epsilon=1e-4)
        mine = algorithm.advantages(trl_reference.as_rewards(values, group_size=3))
        assert_same((mine,), (theirs,), torch.float32 if failed else torch.float64)


def test_multi_objective_advantages_agree():
    for seed in range(5):
        values = some_rewards(seed, functions=3, groups=11, group_size=3, failed=0.0)
        weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
        theirs = trl_reference.advantages(
            values.clone(), group_size=3, multi_objective_aggregation="normalize_then_sum", weights=weights
        )
        algorithm = make("gdpo", part_weights={"part_0": 1.0, "part_1": 0.5, "part_2": 2.0})
        mine = algorithm.advantages(trl_reference.as_rewards(values, group_size=3))
        assert_same((mine,), (theirs,), torch.float64)


def test_leave_one_out_advantages_and_the_kl_in_the_reward_agree():
    for seed in range(5):
        values = some_rewards(seed, group_size=4)
        rows = Rows.random(seed, prompts=6)
        theirs = trl_reference.advantages(
            values.clone(),
            group_size=4,
            algorithm="rloo",
            beta=0.05,
            old_per_token_logps=rows.old,
            ref_per_token_logps=rows.ref,
            completion_mask=rows.mask.to(rows.old.dtype),
        )
        algorithm = make("rloo", kl_coef=0.05)
        prepared = algorithm.prepare(rows.batch(), trl_reference.as_rewards(values, group_size=4))
        assert_same((prepared.advantages.reshape(-1, 4),), (theirs,), torch.float64)


def test_the_gradient_of_rloo_agrees_on_policy():
    rows = Rows.random(19)
    _, gradient, _ = ours(rows, make("rloo"), rows.batch(with_old=False))
    assert_same((gradient,), (trl_reference.rloo_gradient(rows),), torch.float64)


def test_equal_rewards_give_exactly_zero_here_and_noise_there():
    """Where we differ on purpose: TRL divides the rounding error of a float32 mean by its epsilon."""
    values = torch.full((8, 1), 0.7)
    theirs = trl_reference.advantages(values.clone(), group_size=8)
    mine = make("grpo", std_epsilon=1e-4).advantages(trl_reference.as_rewards(values, group_size=8))
    assert (mine == 0).all()
    assert theirs.abs().max() < 2e-3


def test_a_microbatch_of_another_size_is_where_trl_differs():
    """TRL weighs microbatches alike whatever they hold; the update here is the same however it is cut."""
    rows = Rows.random(23, prompts=4)
    size: Size = rows.batch().size
    whole, _, _ = ours(rows, make("grpo"))
    parts = [
        ours(some, make("grpo"), some.batch(size=size))[0]
        for some in (rows.select(slice(0, 3)), rows.select(slice(3, 16)))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)
    theirs = [
        trl_reference.loss(rows.select(part), current_gradient_accumulation_steps=2)[0]
        for part in (slice(0, 3), slice(3, 16))
    ]
    assert sum(part.item() for part in theirs) != pytest.approx(whole.item(), abs=1e-4)


def test_the_sharpness_of_sapo_agrees_as_far_as_trl_carries_it():
    rows = Rows.random(29)
    assert_same(ours(rows, make("sapo")), trl_reference.loss(rows, loss_type="sapo"), torch.float32)


def test_the_reference_refuses_an_option_it_does_not_know():
    with pytest.raises(TypeError, match="epsilon_hi"):
        trl_reference.trainer(epsilon_hi=0.3)
    assert replace(Rows.random(0), group_size=2).group_size == 2
