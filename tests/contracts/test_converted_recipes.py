"""Does a converted recipe have TRL's own loss?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oncurve.recipe.load import parse_config
from oncurve.trl.conversion import convert
from oncurve.trl.draft import recipe_text
from oncurve.trl.options import OptionOutcome

LIMIT = 50
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": LIMIT},
    "dapo, wider above": {"loss_type": "dapo", "epsilon_high": 0.28},
    "luspo for each token": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
    "two-sided": {"loss_type": "dapo", "delta": 1.5},
    "kl": {"loss_type": "grpo", "beta": 0.04},
    "kl as printed": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES.keys())
def test_the_loss_of_a_converted_recipe_is_trls(options: dict[str, Any]) -> None:
    import trl_reference

    from oncurve.run.builder import make_algorithm

    if trl_reference.REASON:
        pytest.skip(trl_reference.REASON)
    found = OptionOutcome("train.py", "embedded", {"num_generations": 4, **options}, num_rewards=1)
    draft = convert(found, rows=64)
    draft.put("data.type", "given", comment="")
    algorithm = make_algorithm(parse_config(recipe_text(draft, "")))
    theirs = {name: value for name, value in options.items() if name not in ("epsilon", "epsilon_high")}
    low = options.get("epsilon", 0.2)
    rows = trl_reference.Rows.random(3)
    expected = trl_reference.loss(rows, epsilon_low=low, epsilon_high=options.get("epsilon_high", low), **theirs)
    logprobs, entropy = rows.logprobs.clone().requires_grad_(), rows.entropy.clone().requires_grad_()
    value, _ = algorithm.loss(logprobs, entropy, rows.batch())
    gradients = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    for mine, other in zip((value.detach(), *gradients), expected, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)
