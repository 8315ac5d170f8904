from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from tables.algorithms import algorithms_markdown, formula, unknown_pieces

from oncurve.algorithm import losses, pairings, table
from oncurve.algorithm.pairings import RULES, check_pairing
from oncurve.algorithm.presets import build
from oncurve.algorithm.table import COURSE_LOSSES, LOSSES, PRESETS, Preset, resolve
from oncurve.core.formulas import clipped
from oncurve.core.records import SamplingParams

Choices = partial(
    pairings.Choices, sampling=SamplingParams(), updates_per_step=1, max_staleness=0,
    sampler_is_trainer=True, masks_truncated=False, punishes_length=False, lora=False, negative_rewards=False,
    num_reward_parts=2,
)  # fmt: skip
LONG = SamplingParams(max_completion_tokens=4096)

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_table_and_its_rules_need_no_torch():
    code = "import sys, oncurve.algorithm.table, oncurve.algorithm.pairings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_row_names_its_source_and_its_use():
    for name, row in PRESETS.items():
        assert name.isidentifier()
        assert row.paper
        assert row.changes.endswith(".")
        assert row.use_when.endswith(".")


def test_every_name_of_the_table_can_be_built():
    names = {
        "advantage": get_args(table.AdvantageName),
        "loss": (*get_args(table.LossName), *COURSE_LOSSES),
        "normalize": get_args(table.NormalizerName),
        "kl_estimator": get_args(table.KLName),
        "reference": get_args(table.ReferenceName),
        "correction": get_args(table.CorrectionName),
    }
    for key, values in names.items():
        for value in values:
            if value != "custom":
                build("grpo", group_size=4, max_completion_tokens=8, kl_coef=0.1, **{key: value})


def of_a_loss(name: str, *, old_of_the_second_token: float) -> tuple[float, float, float]:
    """What both tokens of a completion contribute, and the gradient of the first at the second."""
    logprobs, old = torch.tensor([[-0.5, -0.7]]), torch.tensor([[-0.5001, old_of_the_second_token]])
    result = losses.LOSSES[name](logprobs.requires_grad_(), old, torch.ones(1), torch.ones(1, 2, dtype=torch.bool))
    [both] = result[0] if isinstance(result, tuple) else result
    [gradient] = torch.autograd.grad(both[0], logprobs)
    return both[0].item(), both[1].item(), gradient[0, 1].item()


def test_what_the_table_says_of_a_loss_is_what_its_function_does():
    assert {*LOSSES} == {*get_args(table.LossName)} == {*losses.LOSSES, "custom"}
    for name, function in losses.LOSSES.items():
        (first, second, reach), (changed, other, _) = (
            of_a_loss(name, old_of_the_second_token=old) for old in (-0.7, -0.69995)
        )
        assert LOSSES[name].is_of_completion == (first != changed), name
        assert (LOSSES[name].level is None) == (second == other), name
        assert LOSSES[name].is_whole == (reach != 0), name
        bounds = {"clip_low", "ratio_max"} & inspect.signature(function).parameters.keys()
        assert bounds == {"clip": {"clip_low", "ratio_max"}, "cap": {"ratio_max"}, None: set()}[LOSSES[name].limit]


def test_none_leaves_the_choice_of_the_row():
    everything = {field.name: None for field in fields(Preset) if field.name in table.CHOICES}
    for name, row in PRESETS.items():
        assert resolve(name, **everything) == row


def test_a_name_that_does_not_exist_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'dapo'"):
        resolve("dapoo")
    with pytest.raises(ValueError, match="did you mean 'clip_high'"):
        resolve("dapo", clip_hihg=0.3)
    with pytest.raises(ValueError, match="no loss 'clip'"):
        build("dapo", group_size=4, max_completion_tokens=8, loss="clip")


@pytest.mark.proves("F7")
def test_the_losses_of_the_course():
    assert resolve("cs336", loss="no_baseline").advantage == "raw"
    assert resolve("cs336", loss="reinforce_with_baseline").loss == "policy_gradient"
    assert resolve("cs336", loss="grpo_clip").loss == "clipped"
    assert resolve("cs336", scale_by_std=False).advantage == "group_mean"


def test_scale_by_std_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="does not apply"):
        resolve("rloo", scale_by_std=True)


def test_the_page_of_algorithms_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == algorithms_markdown(), "run: make docs"


def test_every_function_that_a_recipe_can_name_is_explained():
    names = [
        *get_args(table.AdvantageName),
        *get_args(table.LossName),
        *get_args(table.NormalizerName),
        *get_args(table.KLName),
    ]
    assert unknown_pieces([name for name in names if name != "custom"]) == []


def test_a_formula_is_read_without_its_source():
    assert formula(clipped) == ["l_t = -min(w_t A, clip(w_t, 1 - clip_low, 1 + clip_high) A)"]


# Choices that each rule is about, and choices next to them that it must leave alone.
EXAMPLES: dict[str, tuple[Choices, Choices]] = {
    "kl_in advantage with a loss that has one ratio per completion": (
        Choices(row=resolve("distil", loss="sequence_clipped")),
        Choices(row=resolve("distil", loss="clipped")),
    ),
    "kl_in advantage with another estimator than k1": (
        Choices(row=resolve("distil", kl_estimator="k2")),
        Choices(row=resolve("distil")),
    ),
    "advantage none without a KL in the advantages": (
        Choices(row=resolve("distil", kl_in="loss")),
        Choices(row=resolve("distil")),
    ),
    "loss truncated_importance with ratio_max below 1": (
        Choices(row=resolve("cispo", ratio_max=0.2)),
        Choices(row=resolve("cispo", ratio_max=1.2)),
    ),
    "a clipped loss with ratio_max of 1 or less": (
        Choices(row=resolve("dapo", ratio_max=1.0)),
        Choices(row=resolve("dapo", ratio_max=1.1)),
    ),
    "a clipped loss with ratio_max inside clip_high": (
        Choices(row=resolve("dapo", ratio_max=1.2)),
        Choices(row=resolve("dapo", ratio_max=3.0)),
    ),
    "a sequence_clipped loss with clip_low or clip_high above 0.05": (
        Choices(row=resolve("gspo", clip_high=0.2)),
        Choices(row=resolve("gspo")),
    ),
    "loss clipped with clip_low and clip_high below 0.01": (
        Choices(row=resolve("grpo", clip_low=3e-4, clip_high=4e-4)),
        Choices(row=resolve("grpo", clip_high=0.05)),
    ),
    "loss sequence_clipped or sequence_soft_gated with a normalizer other than sequence_mean or sequence_sum": (
        Choices(row=resolve("gspo", normalize="token_mean")),
        Choices(row=resolve("luspo")),
    ),
    "a loss with one ratio per completion with a correction at token level": (
        Choices(row=resolve("gspo", correction="truncate")),
        Choices(row=resolve("gspo", correction="truncate", correction_level="geometric")),
    ),
    "loss sequence_gated with a correction": (
        Choices(row=resolve("vespo", correction="mask", correction_level="sequence")),
        Choices(row=resolve("vespo", old_logprobs="sampler")),
    ),
    "old_logprobs sampler with a correction": (
        Choices(row=resolve("dapo", old_logprobs="sampler", correction="truncate")),
        Choices(row=resolve("dapo", old_logprobs="sampler")),
    ),
    "a correction whose bounds do not hold 1": (
        Choices(row=resolve("dapo", correction="mask", correction_high=0.2)),
        Choices(row=resolve("dapo", correction="mask", correction_low=0.5, correction_high=5.0)),
    ),
    "correction_level sequence with completions of 2048 tokens or more": (
        Choices(row=resolve("dapo", correction="mask", correction_level="sequence"), sampling=LONG),
        Choices(row=resolve("dapo", correction="mask", correction_level="sequence")),
    ),
    "a sampler that is not the trainer, without correction": (
        Choices(row=resolve("dapo"), sampler_is_trainer=False),
        Choices(row=resolve("dapo", correction="truncate"), sampler_is_trainer=False),
    ),
    "completions of older weights (staleness), without correction": (
        Choices(row=resolve("dapo"), max_staleness=1),
        Choices(row=resolve("dapo", correction="truncate"), max_staleness=1),
    ),
    "top_p, top_k, min_p that leave tokens out where the loss compares with the sampler": (
        Choices(row=resolve("dapo", correction="truncate"), sampling=SamplingParams(top_p=0.9)),
        Choices(row=resolve("dapo", correction="truncate")),
    ),
    "top_p, top_k, min_p that leave tokens out in training": (
        Choices(row=resolve("dapo"), sampling=SamplingParams(top_k=20)),
        Choices(row=resolve("dapo")),
    ),
    "loss policy_gradient with several updates per step": (
        Choices(row=resolve("rloo"), updates_per_step=2),
        Choices(row=resolve("dapo"), updates_per_step=2),
    ),
    "loss policy_gradient with stale completions": (
        Choices(row=resolve("rloo"), max_staleness=1),
        Choices(row=resolve("cispo"), max_staleness=1),
    ),
    "loss importance_weighted with completions two or more steps old": (
        Choices(row=resolve("grpo", loss="importance_weighted"), max_staleness=2),
        Choices(row=resolve("grpo", loss="importance_weighted"), max_staleness=1),
    ),
    "advantage length_weighted with several updates per step or stale completions": (
        Choices(row=resolve("opo", loss="clipped"), updates_per_step=2),
        Choices(row=resolve("opo")),
    ),
    "kl_estimator k1 in the loss without kl_importance": (
        Choices(row=resolve("grpo", kl_coef=0.04, kl_estimator="k1", kl_importance=False)),
        Choices(row=resolve("grpo", kl_coef=0.04, kl_estimator="k1")),
    ),
    "kl_estimator k1_reversed": (
        Choices(row=resolve("sequence_reinforce", kl_coef=0.01)),
        Choices(row=resolve("sequence_reinforce")),
    ),
    "kl_estimator k3 in the loss without kl_importance": (
        Choices(row=resolve("trl_0_14")),
        Choices(row=resolve("trl_0_14", kl_importance=True)),
    ),
    "kl_in reward with an estimator other than k1": (
        Choices(row=resolve("rloo", kl_coef=0.04, kl_estimator="k3")),
        Choices(row=resolve("rloo", kl_coef=0.04)),
    ),
    "reference old with one update per step": (
        Choices(row=resolve("grpo", kl_coef=0.04, reference="old")),
        Choices(row=resolve("grpo", kl_coef=0.04, reference="old"), updates_per_step=4),
    ),
    "reference base without LoRA": (
        Choices(row=resolve("grpo", kl_coef=0.04, reference="base")),
        Choices(row=resolve("grpo", kl_coef=0.04, reference="base"), lora=True),
    ),
    "reference frozen with LoRA": (
        Choices(row=resolve("grpo", kl_coef=0.04), lora=True),
        Choices(row=resolve("grpo", kl_coef=0.04)),
    ),
    "advantage mean_normalized with rewards below zero": (
        Choices(row=resolve("maxrl"), negative_rewards=True),
        Choices(row=resolve("maxrl")),
    ),
    "advantage multi_objective with fewer than two reward parts": (
        Choices(row=resolve("gdpo"), num_reward_parts=1),
        Choices(row=resolve("gdpo"), num_reward_parts=2),
    ),
    "mask_truncated with a penalty on overlong completions": (
        Choices(row=resolve("dapo"), masks_truncated=True, punishes_length=True),
        Choices(row=resolve("dapo"), punishes_length=True),
    ),
}


def test_every_rule_has_an_example():
    assert EXAMPLES.keys() == {rule.what for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_a_rule_finds_its_pairing_and_leaves_its_neighbour_alone(rule):
    wrong, right = EXAMPLES[rule.what]
    found = {finding.what: finding for finding in check_pairing(wrong)}
    assert found[rule.what].severity == rule.severity
    assert rule.what not in {finding.what for finding in check_pairing(right)}


def test_no_row_is_refused_as_it_stands():
    for row in PRESETS.values():
        assert not [finding for finding in check_pairing(Choices(row=row)) if finding.severity == "refuse"]


def test_refusals_come_first():
    found = check_pairing(Choices(row=resolve("rloo", kl_coef=0.1, kl_estimator="k3", loss="clipped", ratio_max=0.5)))
    assert [finding.severity for finding in found] == ["refuse", "warn"]


def test_what_to_do_names_a_key_or_a_value():
    for rule in RULES:
        assert rule.what[0].islower()
        assert rule.why.endswith(".")
        assert rule.do.endswith(".")
