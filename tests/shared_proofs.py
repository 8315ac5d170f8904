"""The way in which a model is scored, proven once in a process for models that are the same."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROVING = "oncurve.policy.scoring_path"
KNOWN: dict[Hashable, Any] = {}
"""The path and the trust that a proof ended with, by everything that it reads."""
IS_SHARED = [False]


def share_proofs(is_shared: bool) -> None:
    """From here on a proof is, or is not, that of an earlier model which is the same; most tests make a tiny one.

    A test that changes code has proofs of its own: they might end otherwise.
    """
    IS_SHARED[0] = is_shared
    scoring_path: Any = sys.modules.get(PROVING)
    if scoring_path is None or scoring_path._find.__module__ == __name__:
        return
    prove = scoring_path._find

    def find(model: PreTrainedModel, *facts: Hashable) -> Any:
        from oncurve.model.weights import set_trust, trust_of

        key = sameness(model, *facts)
        if not IS_SHARED[0] or key is None:
            return prove(model, *facts)
        if key not in KNOWN:
            path = prove(model, *facts)
            KNOWN[key] = path, trust_of(model)
        path, trust = KNOWN[key]
        if model.config.get_text_config()._attn_implementation in (scoring_path.NAME, scoring_path.IN_BLOCKS):
            scoring_path.ordinary_attention(model)
        set_trust(model, trust)
        if path.is_packed:
            scoring_path.use_packed_attention(model, in_blocks=True)
        return path

    scoring_path._find = find


def sameness(model: PreTrainedModel, *facts: Hashable) -> Hashable | None:
    """What a proof reads of a model; None for one whose modules were changed by hand."""
    modules = list(model.modules())
    if any("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks for part in modules):
        return None
    numbers = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(number.dtype.itemsize < 4 or number.is_meta for number in numbers.values()):
        return None  # numpy has no bfloat16
    sums = tuple(
        (name, number.requires_grad, zlib.crc32(number.detach().contiguous().view(-1).numpy()))
        for name, number in numbers.items()
    )
    kinds = tuple(f"{type(part).__module__}.{type(part).__qualname__}" for part in modules)
    return kinds, type(model), model.config.to_json_string(), sums, model.training, *facts
