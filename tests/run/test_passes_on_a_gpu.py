"""Does a GPU take every operation of a pass over a batch, and does the CPU never wait for it there?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from oncurve.core.batch import Batch, collate
from oncurve.core.records import Group
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.packed_attention import use_packed_attention

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu
    from transformers import PreTrainedModel

COPIES = {"a copy to the device"}
"""Tables of the layout go to the device at the begin; nothing comes back."""
ASKED = {"aten::_local_scalar_dense"}
"""Transformers asks once or twice whether rows without a mask are packed."""


@torch.no_grad()
def passes(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """What a padded and a packed pass give under autocast, beside the CPU's in float32, and what they ask of a GPU."""
    from pretend.counting import counting

    expected = completion_logprobs(model, batch, temperature=0.9, packed=False)
    model, found = model.to("cuda"), {}
    for kind, packed in (("padded", False), ("packed", True)):
        if packed:
            use_packed_attention(model)
        with torch.autocast("cuda", dtype=torch.bfloat16), counting() as counts:
            scores = completion_logprobs(model, batch, temperature=0.9, packed=packed)
        found[kind] = {
            "like": [(tuple(part.shape), str(part.dtype), part.device.type) for part in scores],
            "errors": [float((a.cpu() - b)[batch.mask].abs().mean()) for a, b in zip(scores, expected, strict=True)],
            "launched": set(counts.launches),
            "waits": {name: count for name, count in counts.synchronizations.items() if name not in COPIES},
        }
    return found


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_packed_pass_waits_for_nothing_and_both_keep_float32_log_probabilities(
    architecture: str,
    tiny_model: Callable[..., PreTrainedModel],
    random_groups: Callable[..., list[Group]],
    pretend_gpu: PretendGpu,
) -> None:
    batch = collate(random_groups(3, 4), torch.ones(3, 4))
    for kind, found in pretend_gpu(passes, tiny_model(architecture), batch).items():
        assert found["like"] == [(tuple(batch.mask.shape), "torch.float32", "cuda")] * 2
        assert max(found["errors"]) < 0.1, "bfloat16 rounds, it does not compute something else"
        assert found["waits"] == {} or (kind == "padded" and found["waits"].keys() == ASKED)
        assert sum(found["waits"].values()) <= 2
        assert ("aten::_flash_attention_forward" in found["launched"]) is (kind == "packed")
        assert "aten::mm.dtype" in found["launched"], "logits are float32 sums of bfloat16 products"
