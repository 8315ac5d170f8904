"""Decoding with torch's own operations, slot by slot, in few and large products.

What is computed are the first slots of the caches, those of rows that ended among them until the running rows are moved
together: everything is read and written where it lies, and products come in few different sizes, for each of which
torch would prepare code of its own.

A step of a small model spends its time on calls, not on numbers, so they are few. One matrix gives for every key head
its queries, its key and its value, so that each part is read where it lies. The two numbers that a rotary embedding
turns together lie next to each other, as one complex number: queries and keys are in that order here, and prompts' keys
are stored in it, which leaves every score as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from oncurve.model.caches import LayerCache
from oncurve.model.forward_backward import Angles
from oncurve.model.lora_linear import LoraDelta
from oncurve.model.ops_native import Ops
from oncurve.model.ops_torch import attend_with_sums, paired
from oncurve.model.weights import AttentionSizes, Backbone, LayerParameters, LayerWeights, project

SHARE = 8
"""The slots that are computed come in at most so many different numbers."""
Product = Callable[[Tensor], Tensor]
"""x [R, inputs] to x @ W.T + b [R, outputs]."""


@dataclass(frozen=True, eq=False)
class PrefixGroups:
    """Which slots read which prompt, as a table of slots by prompt; it pads with slot 0."""

    table: Tensor | None
    """[P * G]; None where the slots stand in it in their order."""
    back: Tensor | None
    """The index of each slot in the table [span]."""
    prompts: int
    """P: the prompt slots 0, 1, ... that are read."""
    width: int
    """Tokens of the longest prompt: S."""
    hidden: Tensor | None
    """Added to the scores of each prompt's tokens: -inf where it has none [P, 1, 1, S]; None: all have S."""

    @classmethod
    def of(
        cls, slots: np.ndarray, prompts: np.ndarray, lengths: np.ndarray, *, span: int, dtype: torch.dtype
    ) -> PrefixGroups:
        """From the slot, the prompt's slot and the prompt's tokens of each row [R]."""
        sizes, width = np.bincount(prompts), int(lengths.max())
        count, most = len(sizes), int(sizes.max())
        read = np.full(count, width)  # those that nobody reads hold something
        read[prompts] = lengths
        hidden = None if (read == width).all() else _hidden(np.arange(width) >= read[:, None], dtype)
        order = np.argsort(prompts, kind="stable")
        first = np.cumsum(sizes) - sizes
        cells = prompts[order] * most + np.arange(len(order)) - first[prompts[order]]
        table, back = np.zeros(count * most, dtype=np.int64), np.zeros(span, dtype=np.int64)
        table[cells], back[slots[order]] = slots[order], cells
        if len(table) == span and np.array_equal(table, np.arange(span)):
            return cls(None, None, count, width, hidden)
        return cls(torch.from_numpy(table), torch.from_numpy(back), count, width, hidden)

    def together(self, q: Tensor) -> Tensor:
        """Queries of all slots [span, kv_heads, Q, D] as [P, kv_heads, G * Q, D]: the slots of a prompt one after
        another."""
        picked = q if self.table is None else q.index_select(0, self.table)
        return picked.unflatten(0, (self.prompts, -1)).transpose(1, 2).flatten(2, 3)

    def apart(self, x: Tensor, queries: int) -> Tensor:
        """The way back from [P, kv_heads, G * Q, ...] to [span, kv_heads, Q, ...]."""
        spread = x.unflatten(2, (-1, queries)).transpose(1, 2).flatten(0, 1)
        return spread if self.back is None else spread.index_select(0, self.back)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Inputs and buffers of one decode step, the same for every layer."""

    span: int
    """Slots that are computed."""
    slots: Tensor | None
    """The slot of each row [R]; None where they are 0, 1, ... and no others are computed."""
    past: int | tuple[Tensor, Tensor]
    """Place of the new token: one position for all slots, or slots and their positions."""
    seen: int
    """Own positions up to the newest token of any row."""
    groups: PrefixGroups
    hidden: Tensor | None
    """Added to the scores of own positions: -inf where a slot has none [span, 1, 1, T]; None: all have T."""
    angles: Tensor
    """exp(i angle) of every pair [span, kv_heads, Q + 1, D / 2]; zero in slots without a row."""

    def gather(self, x: Tensor) -> Tensor:
        """The rows of what was computed for all slots."""
        return x if self.slots is None else x.index_select(0, self.slots)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer as a decode step wants it; norms are in the wide type."""

    first_norm: Tensor
    qkv: Product
    """To the Q queries, the key and the value of each key head, queries and keys in pairs."""
    head_norms: Tensor | None
    """Norms of the queries and the key of a key head [Q + 1, D], in pairs."""
    output: Product
    second_norm: Tensor
    gate_up: Product
    down: Product

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        parameters: LayerParameters,
        matrices: LayerWeights,
        sizes: AttentionSizes,
        norm_weight: Callable[[Tensor], Tensor],
        *,
        by_key_head: bool = True,
    ) -> Layer:
        """From what the model holds and its matrices in the compute type; ``norm_weight`` is the layers' own.

        The outputs of ``qkv`` come by key head [kv_heads, Q + 2, D] or by their index in it [Q + 2, kv_heads, D].
        """
        norms, bias, thin = parameters.head_norms, matrices.qkv_bias, matrices.thin
        arranged = partial(_arranged, sizes=sizes, by_key_head=by_key_head)
        qkv, qkv_bias = (arranged(matrices.qkv),), None if bias is None else (arranged(bias),)
        qkv_thin = None if thin.qkv is None else LoraDelta(thin.qkv.a, arranged((thin.qkv.b,)))
        if norms is not None:
            of_queries, of_keys = (paired(norm)[None] for norm in norms)
            norms = torch.cat([of_queries.expand(sizes.heads // sizes.kv_heads, -1), of_keys])
        return cls(
            first_norm=norm_weight(parameters.first_norm),
            qkv=_product(qkv, qkv_thin, qkv_bias),
            head_norms=norms,
            output=_product((matrices.output,), thin.output),
            second_norm=norm_weight(parameters.second_norm),
            gate_up=_product(matrices.gate_up, thin.gate_up),
            down=_product((matrices.down,), thin.down),
        )


Mixed = Callable[[Tensor, Layer, LayerCache], Tensor]
"""From the outputs of ``Layer.qkv`` for all rows to what attention gathers for them [span, heads D]."""


class TorchLayers:
    """All layers for one token per row, in torch alone: the definition that the kernels must meet."""

    draws: ClassVar[bool] = False
    """They draw tokens themselves."""
    reads_anywhere: ClassVar[bool] = False
    """A row costs the same in every slot."""

    def __init__(
        self, backbone: Backbone, weights: Sequence[LayerWeights], ops: Ops, compute_type: torch.dtype, *, slots: int
    ) -> None:
        """For rows in up to ``slots`` slots; the MLP is that of ``ops``."""
        self.backbone, self.sizes, self.wide = backbone, backbone.sizes, backbone.wide
        self.ops, self.compute_type, self.slots = ops, compute_type, slots
        self.layers = [self._layer(*of) for of in zip(backbone.layers, weights, strict=True)]
        self.last_norm = self._norm_weight(backbone.body.norm.weight.detach())
        width = len(self.last_norm)
        self._least_norm = torch.tensor(
            (width * backbone.sizes.epsilon) ** 0.5, dtype=self.wide, device=backbone.device
        )
        self._groups: tuple[np.ndarray, int, PrefixGroups] | None = None

    def __call__(
        self, tokens: Tensor, angles: Angles, positions: Tensor, addresses: Tensor, caches: Sequence[LayerCache]
    ) -> Tensor:
        """One more token per row [R]: the normed output of the last layer [R, H].

        ``angles`` are those of all positions, ``positions`` that of each row [R].
        """
        turn = self._turn(angles.turn().index_select(0, positions), addresses.numpy())
        residual = self.backbone.embed(tokens)
        if turn.slots is not None:
            residual = _spread(residual, turn.slots, turn.span)
        return turn.gather(self._compute(residual, partial(self._mixed, turn=turn), caches))

    def _layer(self, parameters: LayerParameters, matrices: LayerWeights) -> Layer:
        """A layer as this step wants it."""
        return Layer.of(parameters, matrices, self.sizes, self._norm_weight)

    def _norm_weight(self, weight: Tensor) -> Tensor:
        """The weight of a norm as ``_add_norm`` takes it."""
        return _scaled(weight)

    def _compute(self, residual: Tensor, mixed: Mixed, caches: Sequence[LayerCache]) -> Tensor:
        """All layers for all rows that are computed [span, H]; ``residual`` is overwritten."""
        added = None
        for layer, cache in zip(self.layers, caches, strict=True):
            residual, x = self._add_norm(residual, added, layer.first_norm)
            gathered = mixed(layer.qkv(x.to(self.compute_type)), layer, cache)
            residual, x = self._add_norm(residual, layer.output(gathered), layer.second_norm)
            added = layer.down(self.ops.swiglu(layer.gate_up(x.to(self.compute_type))))
        return self._add_norm(residual, added, self.last_norm)[1]

    def _mixed(self, qkv: Tensor, layer: Layer, cache: LayerCache, *, turn: StepInputs) -> Tensor:
        """Attention's output for all slots [span, heads D]; ``qkv`` is overwritten."""
        heads = qkv.view(len(qkv), self.sizes.kv_heads, -1, self.sizes.head_size)
        if layer.head_norms is not None:
            _norm_heads(heads[:, :, :-1], layer.head_norms, self.sizes.epsilon)
        return attend(heads, turn, cache)

    def _add_norm(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum x, written over the residual, and its norm.

        w x / sqrt(mean(x^2) + epsilon) is computed as sqrt(H) w x / hypot(|x|, sqrt(H epsilon)).
        """
        total = residual if added is None else residual.add_(added)
        norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True).hypot_(self._least_norm)
        return total, torch.mul(total, weight).div_(norm)

    def _turn(self, angles: Tensor, addresses: np.ndarray) -> StepInputs:
        """The inputs of this step, from exp(i angle) of the rows [R, 1, D / 2]; see ``LayerDecoder.step``."""
        slots, past = addresses[:, 0], addresses[:, 1]
        span = self.span(int(slots.max()) + 1)
        is_plain = span == len(slots) and np.array_equal(slots, np.arange(span))
        seen = int(past.max()) + 1
        is_even, hidden = bool((past == seen - 1).all()), None
        if not is_even:
            shut = np.zeros((span, seen), dtype=np.bool_)
            shut[slots] = np.arange(seen) > past[:, None]
            hidden = _hidden(shut, self.wide)
        kv_heads, queries = self.sizes.kv_heads, self.sizes.heads // self.sizes.kv_heads
        angles = angles[:, None].expand(-1, kv_heads, queries + 1, -1)
        rows = None if is_plain else torch.from_numpy(np.ascontiguousarray(slots))
        return StepInputs(
            span,
            rows,
            seen - 1 if is_even else (torch.from_numpy(slots), torch.from_numpy(past)),
            seen,
            self._read(addresses, span),
            hidden,
            angles.contiguous() if rows is None else _spread(angles, rows, span),
        )

    def span(self, used: int) -> int:
        """Slots to compute so that the first ``used`` are among them."""
        step = 8 * -(-self.slots // (8 * SHARE))
        return min(-(-used // step) * step, self.slots)

    def _read(self, addresses: np.ndarray, span: int) -> PrefixGroups:
        """The rows that read each prompt; it changes only when rows come, go or move."""
        key = addresses[:, [0, 2, 3]]
        if self._groups is None or self._groups[1] != span or not np.array_equal(self._groups[0], key):
            groups = PrefixGroups.of(*(addresses[:, column] for column in (0, 2, 3)), span=span, dtype=self.wide)
            self._groups = key, span, groups
        return self._groups[2]


def matrix_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The product with a matrix, which is arranged for it now where torch would do that again at every call."""
    if weight.dtype != torch.bfloat16 or weight.is_cuda or not _can_arrange():
        return partial(torch.nn.functional.linear, weight=weight, bias=bias)
    arranged = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, arranged, bias, "none", [], "")


def _product(weights: tuple[Tensor, ...], thin: LoraDelta | None, biases: tuple[Tensor, ...] | None = None) -> Product:
    """The product with matrices side by side, and with the adapters beside them."""
    if thin is None and len(weights) == 1:
        return matrix_product(weights[0], None if biases is None else biases[0])
    return partial(project, weights=weights, biases=biases, thin=thin)


@lru_cache
def _can_arrange() -> bool:
    """This build of torch, on this processor, multiplies bfloat16 matrices that were arranged beforehand."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _arranged(parts: Sequence[Tensor], sizes: AttentionSizes, *, by_key_head: bool) -> Tensor:
    """Rows of queries, keys and values in one tensor [C, ...], in the order in which attention takes them."""
    qkv = parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])
    heads = qkv.unflatten(0, (-1, sizes.head_size))
    order = paired(torch.arange(sizes.head_size)).to(qkv.device)
    q, k, v = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads])
    q, k = (part[:, order].unflatten(0, (sizes.kv_heads, -1)) for part in (q, k))
    joined = torch.cat([q, k, v[:, None]], dim=1)
    return (joined if by_key_head else joined.transpose(0, 1)).flatten(0, 2)


def _norm_heads(heads: Tensor, weight: Tensor, epsilon: float) -> None:
    """Norm queries and keys [span, kv_heads, Q + 1, D] head by head, in place, as ``norm_heads`` does (Qwen3)."""
    x = heads.to(weight.dtype)
    heads.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight)


def _scaled(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) * len(weight) ** 0.5


def _spread(x: Tensor, slots: Tensor, span: int) -> Tensor:
    """Rows [R, ...] at their slots, zeros elsewhere [span, ...]."""
    return x.new_zeros(span, *x.shape[1:]).index_copy_(0, slots, x)


def attend(heads: Tensor, turn: StepInputs, cache: LayerCache) -> Tensor:
    """Attention of one new token per slot to its prompt and its own past, which then holds it too: [span, heads D].

    ``heads`` [span, kv_heads, Q + 2, D] holds the Q queries, the key and the value of each key head, and may be
    overwritten. The two parts are weighted by their shares of the softmax. Slots without a row are written to as well:
    a row that starts there sees nothing of it.
    """
    compute_type, heads = heads.dtype, heads.to(turn.angles.dtype.to_real())
    span, groups, queries = turn.span, turn.groups, heads.shape[2] - 2
    torch.view_as_complex(heads[:, :, :-1].unflatten(-1, (-1, 2))).mul_(turn.angles)
    q, new = heads[:, :, :queries], heads[:, :, queries:]
    if isinstance(turn.past, int):
        cache.own.select(3, turn.past)[:, :span].copy_(new.permute(2, 0, 1, 3))
    else:
        slots, past = turn.past
        new = new.transpose(1, 2)
        cache.own[:, slots, :, past] = (new if turn.slots is None else new[slots]).to(cache.own.dtype)
    own = cache.own[:, :span, :, : turn.seen]
    shared = [part[: groups.prompts, :, : groups.width] for part in (cache.prompt_keys, cache.prompt_values)]
    read = _attended(groups.together(q), shared, groups.hidden, compute_type)
    of_prompt = groups.apart(read[0], queries), groups.apart(read[1], queries)
    if own.dtype == q.dtype and not own.is_cuda:
        return _join(q, own, turn.hidden, compute_type, of_prompt).view(span, -1)
    of_own, own_logs = _attended(q, own.unbind(), turn.hidden, compute_type)
    share = torch.sigmoid(of_prompt[1] - own_logs)
    return torch.lerp(of_own, of_prompt[0], share[..., None]).to(compute_type).flatten(1)


def _join(
    q: Tensor,
    own: Tensor,
    hidden: Tensor | None,
    compute_type: torch.dtype,
    of_prompt: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention of queries [span, kv_heads, Q, D] to their own positions, joined with that to their prompts: the result
    and the logarithms of sums.

    One query per row and head is too little for flash attention on a CPU: batched products take less. A prompt is one
    more column of the scores, with the logarithm of its sum.
    """
    keys, values = own.flatten(1, 2).unbind()
    scores = q.new_empty(len(keys), q.shape[2], keys.shape[1])
    scores.baddbmm_(q.flatten(0, 1), keys.transpose(1, 2), beta=0, alpha=q.shape[3] ** -0.5)
    scores = scores.view(*q.shape[:3], -1)
    if hidden is not None:
        scores.add_(hidden)
    mixed, logs = of_prompt
    p = torch.cat([scores, logs.unsqueeze(-1)], dim=-1).softmax(dim=-1)
    of_own = torch.bmm(p[..., :-1].flatten(0, 1), values).view(q.shape)
    return torch.addcmul(of_own, p[..., -1:], mixed, out=q.new_empty(q.shape, dtype=compute_type))


def _attended(
    q: Tensor, cached: Sequence[Tensor], hidden: Tensor | None, compute_type: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys and values that are held in some type, and the logarithms of the softmax's sums.

    Products are in that type if the compute type is no wider.
    """
    dtype = torch.promote_types(cached[0].dtype, compute_type)
    mixed, logs = attend_with_sums(q.to(dtype), *(part.to(dtype) for part in cached), hidden=hidden)
    return mixed.to(q.dtype), logs


def _hidden(shut: np.ndarray, dtype: torch.dtype) -> Tensor:
    """-inf where it is shut and 0 elsewhere [rows, positions], as flash attention wants it [rows, 1, 1, positions]."""
    return torch.where(torch.from_numpy(shut), -torch.inf, 0.0).to(dtype)[:, None, None]
