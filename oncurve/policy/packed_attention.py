"""Attention over a batch without padding, which reads the prompt of a group only once.

The rows of a microbatch are laid end to end as one sequence: each prompt, then the completions that follow it. Linear
layers see only real tokens. Attention, told of the layout through a keyword that transformers hands down to it, lets a
prompt see itself and a completion see its prompt and itself. Gradients of a prompt's keys and values are the sums over
its completions, as if the prompt had been repeated.

On a GPU torch's flash kernel does it over runs of any length, without padding, masks or copies of keys. Own tokens
attend to each other, causally, and tokens behind a prompt to that prompt: two calls. Each gives the mean of the values
that it saw and the logarithm of the sum that its softmax divided by. Both together are the two means, each weighted by
its share of the two sums. In the backward pass each part is exact by itself, given output and logarithm of both
together: it takes the probabilities exp(score - logarithm) and, by query, the product of output and gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oncurve.algorithm.precision import HALF, arithmetic_type
from oncurve.model.packing import HEAD_STEP, LARGEST_HEAD, Block, Layout, Runs

NAME, IN_BLOCKS = "oncurve_packed", "oncurve_packed_in_blocks"
"""Names of the attention among those of transformers; without a layout it is the ordinary SDPA."""


def use_packed_attention(model: PreTrainedModel, *, in_blocks: bool = False) -> None:
    """Make the model's attention understand layouts; ordinary calls of the model stay what they were.

    ``in_blocks`` does without a kernel for runs of any length, also where there is one.
    """
    name, attention = (IN_BLOCKS, block_attention) if in_blocks else (NAME, packed_attention)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    set_attention(model, name)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Give the model's text this attention; towers that see or hear keep theirs."""
    text, own = model.config.get_text_config(), vars(model.config)
    parts = [part for part in model.config.sub_configs if own.get(part) is text]
    model.set_attn_implementation({"": name} | dict.fromkeys(parts, name))


def ordinary_attention(model: PreTrainedModel) -> None:
    """Back to transformers' own SDPA, or to eager attention where a model has no other."""
    try:
        set_attention(model, "sdpa")
    except (ValueError, ImportError):
        set_attention(model, "eager")


def packed_hidden(model: nn.Module, layout: Layout) -> Tensor:
    """Last hidden states of the positions that predict a trained token [M, H]."""
    unmasked = torch.zeros(1, 1, 1, 1, device=layout.ids.device)  # a finished mask: none is made from positions
    output = model(
        input_ids=layout.ids, position_ids=layout.positions, attention_mask=unmasked, use_cache=False, layout=layout
    )
    return output.last_hidden_state[0].index_select(0, layout.predicts)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention by layout where there is one: [1, H, N, D] each to [1, N, H, D].

    A kernel for runs of any length does it where there is one for these tensors, and blocks of similar rows elsewhere.
    """
    layout: Layout | None = kwargs.get("layout")
    kind = arithmetic_type(query.device, query.dtype)
    kernel = kernel_for(query.device, kind)
    if layout is None or kernel is None or not fits(query, value):
        return block_attention(module, query, key, value, attention_mask, **kwargs)
    _check(kwargs)
    q, k, v = (part.squeeze(0).transpose(0, 1).to(kind) for part in (query, key, value))  # [N, H, D]
    return attend(q, k, v, layout, kernel, scale=kwargs.get("scaling")).unsqueeze(0), None


def block_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The same with rows of similar length padded to one block."""
    layout: Layout | None = kwargs.pop("layout", None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _check(kwargs)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [N, H, D]
    pieces = [_attend(block, q, k, v, scale=kwargs.get("scaling")) for block in layout.blocks]
    return torch.cat(pieces).index_select(0, layout.outputs)[None], None


def _check(options: Mapping[str, Any]) -> None:
    """Refuse what a model asks of its attention and packed attention does not do."""
    if options.get("sliding_window") or options.get("softcap") or options.get("s_aux") is not None:
        raise NotImplementedError("packed attention sees the whole row and caps nothing")


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
    """One attention call for a block; its rows end to end with their padding [R * T, H, D]."""
    heads, width = q.shape[1:]
    queries = q.index_select(0, block.queries).view(block.rows, -1, heads, width).transpose(1, 2)
    keys = k.index_select(0, block.keys).view(block.rows, -1, k.shape[1], width).transpose(1, 2)
    values = v.index_select(0, block.keys).view(block.rows, -1, k.shape[1], v.shape[2]).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=block.mask,
        is_causal=block.mask is None,
        scale=scale,
        enable_gqa=heads != k.shape[1],
    )
    return mixed.transpose(1, 2).reshape(-1, heads, v.shape[2])


class Flash:
    """Torch's own flash kernel, which needs a CUDA device.

    Attention of runs: q [M, heads, D] to k and v [N, kv_heads, D], as ``runs`` cuts M and N.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of every query [M, heads, D], and the logarithms of its sums of exp(score) [heads, M].

        Raises NotImplementedError where torch gives the logarithms in another shape.
        """
        out, logs, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, runs.query_starts, runs.key_starts, runs.longest_queries, runs.longest_keys, 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        if logs.shape != (q.shape[1], q.shape[0]):
            raise NotImplementedError(f"torch {torch.__version__} pads the logarithms of the flash kernel")
        return out, logs

    def backward(
        self,
        grad: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor],
        runs: Runs,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; ``saved`` is what ``forward`` gave, or the same for these and further keys."""
        out, logs = (part.contiguous() for part in saved)  # the kernel reads both without asking for their strides
        no_dropout = (grad.new_empty(2, dtype=torch.uint64), grad.new_empty(0))
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *qkv, out, logs, runs.query_starts, runs.key_starts, runs.longest_queries,
            runs.longest_keys, 0.0, causal, *no_dropout, scale=scale,
        )  # fmt: skip


def kernel_for(device: torch.device, product_type: torch.dtype) -> Flash | None:
    """The kernel for products of a type on a device; None where there is none."""
    return Flash() if device.type == "cuda" and product_type in HALF else None


def fits(query: Tensor, value: Tensor) -> bool:
    """The kernel knows heads of these sizes; the size is the last dimension."""
    size = query.shape[-1]
    return size == value.shape[-1] and size % HEAD_STEP == 0 and size <= LARGEST_HEAD


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernel: Flash, *, scale: float | None) -> Tensor:
    """Attention of every token of a packed sequence [N, heads, D]."""
    return _Attention.apply(q, k, v, layout.own_runs, layout.prompt_runs, kernel, scale)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Both calls and their merging."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: Runs,
        prompts: Runs | None,
        kernel: Flash,
        scale: float | None,
    ) -> Tensor:
        out, logs = kernel.forward(q, k, v, own, causal=True, scale=scale)
        if prompts is not None:
            readers, read = prompts.queries, prompts.keys
            qkv = (_take(q, readers), _take(k, read), _take(v, read))
            part, part_logs = kernel.forward(*qkv, prompts, causal=False, scale=scale)
            own_part, own_logs = _take(out, readers), _take(logs, readers, dim=1)
            share = torch.sigmoid(part_logs - own_logs).T.unsqueeze(-1)
            _put(out, readers, torch.lerp(own_part.to(share.dtype), part.to(share.dtype), share).to(out.dtype))
            _put(logs, readers, torch.logaddexp(own_logs, part_logs), dim=1)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.own, ctx.prompts, ctx.kernel, ctx.scale = own, prompts, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, logs = ctx.saved_tensors
        kernel: Flash = ctx.kernel
        grads = kernel.backward(grad, (q, k, v), (out, logs), ctx.own, causal=True, scale=ctx.scale)
        if ctx.prompts is not None:
            readers, read = ctx.prompts.queries, ctx.prompts.keys
            qkv = (_take(q, readers), _take(k, read), _take(v, read))
            saved = (_take(out, readers), _take(logs, readers, dim=1))
            parts = kernel.backward(_take(grad, readers), qkv, saved, ctx.prompts, causal=False, scale=ctx.scale)
            for whole, indices, part in zip(grads, (readers, read, read), parts, strict=True):
                _put(whole, indices, _take(whole, indices) + part)
        return *grads, None, None, None, None


def _take(x: Tensor, indices: slice | Tensor, dim: int = 0) -> Tensor:
    """The values at some places; without a copy where they are a slice."""
    if isinstance(indices, slice):
        return x.narrow(dim, indices.start, indices.stop - indices.start)
    return x.index_select(dim, indices)


def _put(to: Tensor, indices: slice | Tensor, x: Tensor, dim: int = 0) -> None:
    """The way back."""
    if isinstance(indices, slice):
        to.narrow(dim, indices.start, indices.stop - indices.start).copy_(x)
    else:
        to.index_copy_(dim, indices, x)
