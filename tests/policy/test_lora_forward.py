"""Is an adapter beside transformers' modules one sum with its matrix, and can a server take it and give it back?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oncurve.policy.lora import add_adapter
from oncurve.policy.lora_forward import FusedSum, adapters_off, base_state, put_adapter, remove_adapter
from oncurve.policy.lora_merge import adapter_weights
from oncurve.policy.settings import LoraSettings

IDS = torch.randint(0, 30, (64, 20), generator=torch.Generator().manual_seed(0))


def little(model: Any, rate: float = 1e-3, **settings: Any) -> Any:
    """A base of bfloat16 numbers under an adapter that is less than their last digit nearly everywhere."""
    add_adapter(model, LoraSettings(rank=4, **settings), base="")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw).sign() * rate)
            elif "lora_A" not in name:
                weight.copy_(weight.bfloat16())
    return model


def change(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The change of a layer's outputs that its adapter makes."""
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        adapted = layer(x).float()
        with adapters_off(layer):
            return adapted - layer(x).float()


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "llama"])
def test_modules_in_half_width_have_all_of_a_little_adapter_and_pefts_own_have_not(
    architecture: str, tiny_model: Callable[..., Any]
) -> None:
    model = little(tiny_model(architecture))
    for part in [part for part in model.modules() if isinstance(vars(part).get("forward"), FusedSum)]:
        x = torch.randn(4096, part.in_features, generator=torch.Generator().manual_seed(2)).bfloat16().float()
        exact = change(part, x, torch.float32)
        part.lora_B["default"].weight.data *= float(1e-3 * part.base_layer(x).std() / exact.std())
        exact = change(part, x, torch.float32)
        found = change(part, x, torch.bfloat16)
        assert float((found * exact).sum() / exact.square().sum()) == pytest.approx(1, abs=0.1)
        del part.forward
        lost = change(part, x, torch.bfloat16)
        assert float((lost * exact).sum() / exact.square().sum()) < 0.7


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_gradients_in_half_width_are_those_of_pefts_modules(architecture: str, tiny_model: Callable[..., Any]) -> None:
    model = little(tiny_model(architecture), rate=0.05)
    found = []
    for is_own in (True, False):
        for part in model.modules():
            if not is_own and isinstance(vars(part).get("forward"), FusedSum):
                del part.forward
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(IDS).logits.float().log_softmax(-1)[..., 3].mean().backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    assert torch.nn.functional.cosine_similarity(found[0], found[1], dim=0) > 0.99


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_a_server_takes_an_adapter_computes_with_it_and_gives_its_base_back(
    architecture: str, tiny_model: Callable[..., Any]
) -> None:
    trained, served = little(tiny_model(architecture), rate=0.05), tiny_model(architecture)
    served.load_state_dict(base_state(trained))
    before = {name: weight.clone() for name, weight in served.state_dict().items()}
    thin = adapter_weights(trained)
    assert thin is not None
    for _ in range(2):  # a later version takes the place of the one before
        put_adapter(served, thin)
        with torch.no_grad():
            torch.testing.assert_close(served(IDS).logits, trained(IDS).logits, atol=1e-5, rtol=0)
    assert base_state(served).keys() == before.keys()
    remove_adapter(served)
    assert all(torch.equal(weight, before[name]) for name, weight in served.state_dict().items())
