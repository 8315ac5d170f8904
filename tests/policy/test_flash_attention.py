"""Does attention in training reach torch's flash kernel where there is one? It needs no package besides torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from oncurve.core.batch import collate
from oncurve.core.records import Group

if TYPE_CHECKING:
    from oncurve.policy.trained_policy import TrainedPolicy


@pytest.mark.proves("F45")
def test_padded_rows_ask_for_causal_attention_without_a_mask(
    make_policy: Callable[..., TrainedPolicy],
    random_groups: Callable[..., list[Group]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flash kernel takes no mask; with one, torch would choose another kernel without a word."""
    asked: list[dict[str, Any]] = []
    computed = functional.scaled_dot_product_attention

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return computed(*arguments, **options)

    policy = make_policy("gpt2", packing=False)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    policy.logprobs(collate(random_groups(2, 3), torch.ones(2, 3)))
    assert len(asked) == 2, "one call for each layer"
    assert all(options.get("attn_mask") is None and options["is_causal"] for options in asked)


@pytest.mark.proves("F45")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_flash_kernel_alone_trains_padded_rows(
    make_policy: Callable[..., TrainedPolicy], random_groups: Callable[..., list[Group]], tiny_model: Callable[..., Any]
) -> None:
    policy = make_policy(tiny_model("qwen2").cuda(), packing=False, compute_type="bfloat16")
    batch = collate(random_groups(2, 3), torch.ones(2, 3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error where it cannot be taken
        logprobs, _ = policy.logprobs(batch)
        policy.backward(-logprobs.mean())
    assert float(policy.update()["policy/gradient_norm"].value) > 0
