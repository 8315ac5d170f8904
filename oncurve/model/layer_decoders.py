"""Decoders of a policy: of our own layers where they know its family and may decode, of its modules elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from oncurve.core.decoder import Decoder, DecoderPlan, ModuleDecoder
from oncurve.core.records import DecodeCall
from oncurve.core.requests import BufferSizes
from oncurve.core.sampler import PolicyView, padding_id
from oncurve.core.scheduler import RowBatch
from oncurve.model.ahead_batch import AheadBatch
from oncurve.model.decode_memory import MOST_ROWS
from oncurve.model.decode_proof import Proof
from oncurve.model.decoding import LayerDecoder
from oncurve.model.row_budget import RowBudget
from oncurve.model.row_memory import LayerKeeper, RowMemory
from oncurve.model.stop_table import ending_tokens
from oncurve.model.trace_ranges import traced
from oncurve.model.weights import Backbone, head_key, head_matrix


class LayerDecoders:
    """Makes the fastest decoder that computes what the model does."""

    def __init__(
        self, budget: RowBudget | None = None, proof: Proof | None = None, memory: RowMemory | None = None
    ) -> None:
        """``memory`` holds keys and values of rows that wait for an answer."""
        self.budget, self.proof, self.memory = budget or RowBudget(), proof or Proof(), memory or RowMemory()

    @property
    def most_rows(self) -> int:
        """See ``Decoders``."""
        return max(MOST_ROWS, self.budget.max_rows or 0)

    @property
    def is_exact(self) -> bool:
        """The number of positions is set, so that none may be left over."""
        return self.budget.kv_tokens is not None

    def plan(
        self, policy: PolicyView, call: DecodeCall, end_ids: tuple[int, ...], *, is_shared: bool, version: str | None
    ) -> DecoderPlan:
        """See ``Decoders``."""
        backbone = self.proof.backbone(policy)
        sizes = self.budget.sizes(call, self.budget.rows(policy.model, backbone, call))

        def make() -> Decoder:
            if backbone is None:
                return self._by_modules(policy, sizes, end_ids, rounds=not is_shared and version is None)
            decoder = _by_layers(policy, backbone, sizes, apart=version is not None)
            decoder.keeper = LayerKeeper(decoder, self.memory)
            return decoder

        return DecoderPlan(sizes, make)

    def _by_modules(
        self, policy: PolicyView, sizes: BufferSizes, end_ids: tuple[int, ...], *, rounds: bool
    ) -> ModuleDecoder:
        """Through the model's modules; where nobody else reads its matrices, they are rounded once."""
        from oncurve.model.module_caches import OwnHead, cache_kind_of  # lazy

        kind, pad_id = cache_kind_of(policy.model), padding_id(policy, end_ids)
        return TracedModules(policy, sizes, pad_id=pad_id, kind=kind, forward=OwnHead(policy.model, rounds=rounds))

    def shrink(self, rows: int, reason: str, call: DecodeCall, *, key: str) -> None:
        """See ``Decoders``."""
        self.budget.shrink(rows, reason, call, key=key)

    def ending_tokens(self, stop: tuple[str, ...], policy: PolicyView) -> np.ndarray | None:
        """See ``Decoders``."""
        return ending_tokens(stop, policy.tokenizer) if stop else None

    def batch_type(self, plain: type[RowBatch]) -> type[RowBatch]:
        """One that starts steps ahead, which on a CPU is the plain one."""
        return AheadBatch

    def forget_limit(self) -> None:
        """See ``Decoders``."""
        self.budget.limit = None


class TracedModules(ModuleDecoder):
    """The decoder of a model's modules, with ranges in a trace."""

    @traced("prefill")
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """See ``Decoder``."""
        return super().prefill(prompts, slots)

    @traced("decode")
    def hidden(self, tokens: Tensor, positions: Tensor, addresses: Tensor) -> Tensor:
        """See ``Decoder``."""
        return super().hidden(tokens, positions, addresses)


@traced("load")
def _by_layers(policy: PolicyView, backbone: Backbone, sizes: BufferSizes, *, apart: bool) -> LayerDecoder:
    decoder = LayerDecoder(
        backbone,
        head_matrix(policy.model),
        backbone.compute_type(),
        head_key=head_key(policy.model),
        slots=sizes.rows,
        prompt_slots=sizes.prompts,
        prompt_tokens=sizes.prompt_tokens,
        completion_tokens=sizes.completion_tokens,
        apart=apart,
    )
    decoder.head_of = lambda: (head_matrix(policy.model), head_key(policy.model))
    return decoder
