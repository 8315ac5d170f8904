"""Where are all weights of a model that is cut into parts, and in which type?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from oncurve.core.errors import ConfigError
from oncurve.policy.distributed import ALONE
from oncurve.policy.from_settings import make_device, make_sharding, own_compute_type, where_whole
from oncurve.policy.half_precision import frozen_copy
from oncurve.policy.settings import OptimizerSettings, PolicySection
from oncurve.policy.sharding import Sharding, ZeroSettings
from oncurve.recipe.load import parse_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeModel = Callable[..., "PreTrainedModel"]
CPU = torch.device("cpu")
RECIPE = """
model: x
data: {type: word_problems}
rewards: [{type: r1_zero}]
"""


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_copy_computes_under_autocast_what_the_model_does(architecture: str, tiny_model: MakeModel) -> None:
    model, ids = tiny_model(architecture), torch.arange(3, 40)[None]
    copied = frozen_copy(model, CPU, halved=True)
    assert not any(weight.requires_grad for weight in copied.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(copied(ids).logits, model(ids).logits)
    halves = {name for name, weight in copied.named_parameters() if weight.dtype == torch.bfloat16}
    assert not {name for name in halves if "norm" in name or "embed" in name or "wte" in name}
    assert bool(halves) is (architecture != "gpt2"), "gpt2 has no linear layers of torch"
    whole = frozen_copy(model, CPU, halved=False)
    for name, weight in model.named_parameters():
        assert torch.equal(whole.get_parameter(name), weight)
        assert whole.get_parameter(name).data_ptr() != weight.data_ptr()


def test_a_copy_shares_what_the_model_shares(tiny_model: MakeModel) -> None:
    model = tiny_model("qwen2")
    model.set_output_embeddings(torch.nn.Linear(*reversed(model.get_input_embeddings().weight.shape), bias=False))
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    copied = frozen_copy(model, CPU, halved=True)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    assert copied.get_output_embeddings().weight.dtype == torch.float32


def test_only_who_samples_or_publishes_has_all_weights() -> None:
    sharding, several = Sharding(), replace(ALONE, count=2)
    other = replace(several, rank=1)

    def places(*changes: str) -> tuple[str, str]:
        sent_from = parse_config(RECIPE, [*changes]).rollouts.weights_leave_from
        assert where_whole(other, ZeroSettings({}), sent_from=sent_from) == "device"
        return where_whole(several, sharding, sent_from=sent_from), where_whole(other, sharding, sent_from=sent_from)

    served = ("rollouts.type=servers", "rollouts.vllm_servers=1")
    assert places("rollouts.type=engine") == ("device", "device")
    assert places(*served) == ("cpu", "none")
    assert places(*served, "rollouts.transfer=nccl") == ("device", "none")


ZERO_2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("keys", "optimizer", "count", "expected"),
    [
        ({"parallel": "none"}, "adamw", 1, None),
        ({"parallel": "ddp"}, "muon", 2, None),
        ({"parallel": "fsdp"}, "muon", 1, None),
        ({"parallel": "fsdp"}, "adamw", 2, Sharding(reshard_after_forward=True, offload=False, degree=None)),
        ({"parallel": "fsdp", "offload": True}, "adamw", 2, Sharding(offload=True)),
        ({"parallel": "fsdp", "reshard_after_forward": False}, "adamw", 2, Sharding(reshard_after_forward=False)),
        ({"parallel": "fsdp", "shard_degree": 2}, "adamw", 4, Sharding(degree=2)),
        ({"parallel": "fsdp", "shard_degree": 2}, "adamw", 2, Sharding(degree=2)),
        ({"parallel": "fsdp", "shard_degree": 2}, "adamw", 1, None),
        ({"parallel": "fsdp", "shard_degree": 2}, "adamw", 3, "shard_degree is 2"),
        ({"parallel": "ddp", "shard_degree": 2}, "adamw", 2, "shard_degree is 2"),
        ({"parallel": "fsdp", "quantization": "nf4"}, "adamw", 2, "cannot cut weights or moments of few bits"),
        ({"parallel": "fsdp"}, "adamw_8bit", 2, "cannot cut weights or moments of few bits"),
        ({"parallel": "deepspeed"}, "adamw", 1, ZeroSettings(ZERO_2)),
        ({"parallel": "deepspeed", "quantization": "nf4"}, "adamw", 1, ZeroSettings(ZERO_2)),
        ({"parallel": "deepspeed", "offload": True}, "adamw", 2, ZeroSettings(ZERO_2, offload=True)),
        ({"parallel": "deepspeed"}, "muon", 1, "needs whole matrices"),
        ({"parallel": "deepspeed"}, "adamw_8bit", 1, "cannot cut weights or moments of few bits"),
    ],
)
def test_weights_are_cut_as_the_recipe_says_where_several_processes_can(
    keys: dict[str, Any], optimizer: Any, count: int, expected: object
) -> None:
    given = PolicySection(**keys), OptimizerSettings(type=optimizer), replace(ALONE, count=count)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            make_sharding(*given)
    else:
        assert make_sharding(*given) == expected


def test_arithmetic_is_narrow_on_a_gpu_and_as_asked_elsewhere() -> None:
    asked, left_open = PolicySection(compute_type="float16"), PolicySection()
    found = [
        own_compute_type(section, torch.device(kind)) for section in (asked, left_open) for kind in ("cpu", "cuda")
    ]
    assert found == ["float16", "float16", "float32", "bfloat16"]
    assert make_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"policy\.device is 'abacus', which this machine"):
        make_device("abacus")
