"""Would a GPU take every operation of a pass over a batch, and does the CPU never wait for it there?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from oncurve.data.collate import collate
from oncurve.records import Group
from oncurve.train.forward import completion_logprobs
from oncurve.train.packed import use_packed_attention

if TYPE_CHECKING:
    from fake_gpu import FakeGpu
    from transformers import PreTrainedModel

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item"}


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_pass_waits_for_nothing_and_keeps_float32_log_probabilities(
    architecture: str,
    packed: bool,
    tiny_model: Callable[..., PreTrainedModel],
    random_groups: Callable[..., list[Group]],
    gpu_autocast: Callable[[torch.dtype], None],
    on_fake_gpu: FakeGpu,
) -> None:
    gpu_autocast(torch.bfloat16)
    model = tiny_model(architecture).to("meta").to_empty(device="cuda")  # pyright: ignore[reportArgumentType]
    if packed:
        use_packed_attention(model)
    batch = collate(random_groups(3, 4), torch.ones(3, 4))
    on_fake_gpu.called.clear()
    for found in completion_logprobs(model, batch, temperature=0.9, packed=packed):
        assert (found.shape, found.dtype, found.device.type) == (batch.mask.shape, torch.float32, "cuda")
    called = set(on_fake_gpu.called)
    assert not called & WAITS
    assert ("aten::_flash_attention_forward" in called) is packed
    assert "aten::mm.dtype" in called, "logits are float32 sums of bfloat16 products"
