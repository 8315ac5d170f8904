"""Completions that are sampled at one time: what the recipe says, limited by the memory that is free now."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.algorithm.precision import arithmetic_type, head_type
from oncurve.core.errors import SamplerError
from oncurve.core.records import USUAL_ROWS, DecodeCall
from oncurve.core.requests import BufferSizes, PromptState, RowState
from oncurve.model.decode_memory import MOST_ROWS, RECORDING_BYTES, Widths, most_rows, whole_blocks
from oncurve.model.decoding import LayerDecoder
from oncurve.model.lora_linear import linear_layers
from oncurve.model.weights import Backbone, head_matrix, is_plain_head

log = logging.getLogger(__name__)


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody holds, and what this process holds there without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def widths_of(model: PreTrainedModel, compute_type: torch.dtype) -> Widths:
    """The widths of a model in this arithmetic."""
    config = model.config.get_text_config()
    known, heads = vars(config), int(config.num_attention_heads)
    kv_heads = int(known.get("num_key_value_heads") or heads)
    head_size = int(known.get("head_dim") or config.hidden_size // heads)
    kv = 2 * kv_heads * head_size
    return Widths(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=int(known.get("intermediate_size") or 4 * config.hidden_size),
        qkv=heads * head_size + kv,
        kv=kv,
        vocabulary=config.vocab_size,
        kv_bytes=compute_type.itemsize,
        compute_bytes=compute_type.itemsize,
        heads_per_kv=heads // kv_heads,
    )


def copied_bytes(model: PreTrainedModel, backbone: Backbone | None, compute_type: torch.dtype) -> int:
    """Matrices that sampling holds besides those of the model: in the type of the arithmetic, or in another order."""
    device, num_numbers = model.device, 0
    if backbone is None:
        head = model.get_output_embeddings()
        parts = [part.weight for part in linear_layers(model) if part is not head]
        num_numbers += sum(part.numel() for part in parts if part.dtype == torch.float32 != compute_type)
    else:
        for layer in backbone.layers:
            matrices = [*layer.qkv, layer.output, *layer.gate_up, layer.down]
            num_numbers += sum(matrix.weight.numel() for matrix in matrices if matrix.weight.dtype != compute_type)
            num_numbers += sum(matrix.weight.numel() for matrix in layer.qkv)  # in the order of a decode step
        num_numbers += RECORDING_BYTES // compute_type.itemsize
    if is_plain_head(model):
        weight = head_matrix(model)
        head_dtype = head_type(device, compute_type, weight.dtype)
        return num_numbers * compute_type.itemsize + (
            weight.numel() * head_dtype.itemsize if weight.dtype != head_dtype else 0
        )
    return num_numbers * compute_type.itemsize


@dataclass
class RowBudget:
    """The number of completions that run at one time."""

    max_rows: int | None = None
    """At most; None: on a GPU as many as its memory takes, elsewhere the usual number."""
    kv_tokens: int | None = None
    """Positions of keys and values at most; None: on a GPU as many as its memory takes."""
    limit: int | None = None
    """Rows that fitted when memory ran out; None while it has not."""

    def rows(self, model: PreTrainedModel, backbone: Backbone | None, call: DecodeCall) -> int:
        """The limit for a call, by the memory that is free now; called within the arithmetic of sampling."""
        device = model.device
        if device.type != "cuda":
            most = self.max_rows or USUAL_ROWS
        else:
            most = self.max_rows or MOST_ROWS
            if self.kv_tokens is None:
                compute_type = arithmetic_type(device, next(model.parameters()).dtype)
                free = free_bytes(device) - copied_bytes(model, backbone, compute_type)
                widths = widths_of(model, compute_type)
                most = most_rows(widths, call, free, most=most, by_module=backbone is None)
                log.debug("%d completions at a time, with %.2f GiB free", most, free / 2**30)
        return most if self.limit is None else min(most, self.limit)

    def sizes(self, call: DecodeCall, rows: int) -> BufferSizes:
        """Buffers for so many rows, or for as many as ``kv_tokens`` allows.

        Raises SamplerError if that is not even one.
        """
        rows = min(rows, call.rows)
        prompt_tokens, completion_tokens = whole_blocks(call.prompt_tokens), whole_blocks(call.completion_tokens)
        if self.kv_tokens is not None:
            while rows > 0 and rows * completion_tokens + call.prompts(rows) * prompt_tokens > self.kv_tokens:
                rows -= 1
            if rows == 0:
                raise SamplerError(
                    f"rollouts.kv_tokens is {self.kv_tokens}, but one completion of up to {completion_tokens} tokens "
                    f"behind a prompt of {prompt_tokens} needs {completion_tokens + call.prompts(1) * prompt_tokens}. "
                    f"Raise it"
                )
        return BufferSizes(rows, call.prompts(rows), call.prompt_tokens, call.completion_tokens)

    def shrink(self, rows: int, reason: str, call: DecodeCall, *, key: str = "rollouts.max_rows") -> None:
        """From now on at most half of so many, for which memory did not suffice.

        Raises SamplerError if that was one.
        """
        if rows <= 1:
            raise SamplerError(
                f"there is not enough memory to sample one completion of up to {call.completion_tokens} tokens behind "
                f"a prompt of {call.prompt_tokens} ({reason}). Lower rollouts.max_completion_tokens or data."
                f"max_prompt_tokens, keep less on the device (policy.lora.rank=16, optimizer.type=adamw_8bit), or take "
                f"a smaller model"
            )
        self.limit = rows // 2
        log.warning(
            "OUT OF MEMORY while %d completions were sampled at a time (%s): from now on at most %d. The completions "
            "are the same; set %s=%d to begin so",
            rows,
            reason,
            self.limit,
            key,
            self.limit,
        )


MAX_CACHED_BYTES = 2**30
"""Upper limit for all waiting rows and their prompts together."""


class RowMemory:
    """Rows that are kept; those that left first make room."""

    def __init__(self, limit_bytes: int = MAX_CACHED_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._rows: WeakKeyDictionary[RowState, None] = WeakKeyDictionary()
        """In the order in which they left."""
        self._at_most = 0
        """Bytes, with what ended since they were counted."""

    def keep(self, row: RowState, copies: list[Tensor], num_tokens: int) -> None:
        """Remember what a row has computed."""
        row.copies, row.num_tokens = copies, num_tokens
        row.num_bytes = sum(part.nbytes for part in copies)
        self._rows.pop(row, None)
        self._rows[row] = None
        self._at_most += row.num_bytes + (row.prompt.num_bytes if row.prompt is not None else 0)
        if self._at_most > self.limit_bytes:
            self._make_room()

    def _make_room(self) -> None:
        while self._rows and self._num_bytes() > self.limit_bytes:
            oldest = next(iter(self._rows))
            oldest.make_room()
            del self._rows[oldest]
        self._at_most = self._num_bytes()

    def _num_bytes(self) -> int:
        prompts = {row.prompt for row in self._rows if row.prompt is not None}
        return sum(row.num_bytes for row in self._rows) + sum(prompt.num_bytes for prompt in prompts)


class LayerKeeper:
    """Takes keys and values of rows out of a decoder into a memory, and puts them back."""

    def __init__(self, decoder: LayerDecoder, memory: RowMemory) -> None:
        self.decoder, self.memory = decoder, memory

    def keep(self, row: RowState, prompt: PromptState, addresses: tuple[int, int, int]) -> None:
        """See ``RowKeeper``."""
        slot, past, prompt_slot = addresses
        if not self.decoder.takes_prompt(prompt.copies):
            prompt.copies = self.decoder.prompt(prompt_slot)
        self.memory.keep(row, self.decoder.row(slot, past), past)

    def put_row(self, slot: int, row: RowState) -> bool:
        """See ``RowKeeper``."""
        if row.copies:
            self.decoder.put_row(slot, row.copies)
        return bool(row.copies)

    def put_prompt(self, slot: int, prompt: PromptState) -> bool:
        """See ``RowKeeper``."""
        return self.decoder.put_prompt(slot, prompt.copies)
