"""Decoding with the compiled kernels: all layers in one call, on weights packed beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oncurve.model.caches import LayerCache
from oncurve.model.forward_backward import Angles
from oncurve.model.lora_linear import LoraDelta, Matrix
from oncurve.model.ops_native import NativeOps
from oncurve.model.weights import Backbone, LayerParameters

INPUT_BLOCK = 32
"""Inputs of a packed matrix come in blocks of so many; those of an adapter begin with a block of their own."""


class NativeLayers:
    """The layers of a backbone with their weights as they are now, packed and in the compute type."""

    draws: ClassVar[bool] = False
    """See ``TorchLayers``."""
    reads_anywhere: ClassVar[bool] = True
    """See ``TorchLayers``."""

    def __init__(self, backbone: Backbone, ops: NativeOps, rows: int) -> None:
        """For calls of up to ``rows`` rows."""
        self.backbone, self.ops, self.most_rows = backbone, ops, rows
        self._is_apart = ops.compute_type != backbone.wide
        self._ranks = [self._most(index) for index in range(4)]
        self._weights = [self._of_layer(number) for number in range(len(backbone.layers))]
        self._addresses: tuple[list[int], Tensor] = ([], torch.empty(0, dtype=torch.long))
        self._scratch = ops.decode_scratch(self._sizes(rows, own=0, prompt=0))

    def _of_layer(self, number: int) -> list[Tensor | None]:
        """The weights in the order in which the kernel's ``Layer`` holds them."""
        layer = self.backbone.layers[number]
        bias = None
        if layer.biases is not None:
            joined = torch.cat(layer.bias_copies(self.ops.compute_type)).float()
            bias = torch.nn.functional.pad(joined, (0, -len(joined) % 16))
        query_norm, key_norm = layer.head_norms or (None, None)
        packed, adapters = zip(
            *[self._pack(*of) for of in zip(_matrices(layer), self._ranks, strict=True)], strict=True
        )
        qkv, output, gate_up, down = packed
        return [
            layer.first_norm,
            qkv,
            bias,
            query_norm,
            key_norm,
            output,
            layer.second_norm,
            gate_up,
            down,
            *adapters,
        ]

    def _adapter(self, matrices: Sequence[Matrix]) -> LoraDelta | None:
        """The adapters beside matrices; none in float32, where they are added to them."""
        return LoraDelta.of(matrices, self.ops.compute_type) if self._is_apart else None

    def _most(self, index: int) -> int:
        """The largest rank of the adapters at one of a layer's four places."""
        adapters = [self._adapter(_matrices(layer)[index]) for layer in self.backbone.layers]
        return max((len(thin.a) for thin in adapters if thin is not None), default=0)

    def _pack(self, matrices: Sequence[Matrix], rank: int) -> tuple[Tensor, Tensor | None]:
        """Matrices below one another with the B of their adapters beside them, as further inputs; and the A."""
        if not rank:
            return self.ops.pack([matrix.current() for matrix in matrices], [matrix.key for matrix in matrices]), None
        base = torch.cat([matrix.copy(self.ops.compute_type) for matrix in matrices]).float()
        thin = self._adapter(matrices)
        padding = -base.shape[1] % INPUT_BLOCK
        a, b = base.new_zeros(rank, base.shape[1]), base.new_zeros(len(base), rank)
        if thin is not None:
            a[: len(thin.a)], b[:, : len(thin.a)] = thin.a, thin.b
        together = torch.cat([torch.nn.functional.pad(base, (0, padding)), b], dim=1)
        return self.ops.pack([together]), self.ops.pack([a])

    def _sizes(self, rows: int, *, own: int, prompt: int) -> list[int]:
        """The numbers of the kernel's ``Sizes``."""
        layer, sizes = self.backbone.layers[0], self.backbone.sizes
        mlp, hidden = layer.gate_up[0].weight.shape
        heads = (sizes.heads, sizes.kv_heads, sizes.head_size)
        return [rows, self.most_rows, len(self.backbone.layers), hidden, mlp, *heads, own, prompt, *self._ranks]

    def _layers(self, caches: Sequence[LayerCache]) -> Tensor:
        """The addresses of weights and caches [layers, 17], made anew when a cache has moved."""
        moves = [buffer.data_ptr() for cache in caches for buffer in cache.all()]
        if self._addresses[0] != moves:
            weights = [[0 if part is None else part.data_ptr() for part in layer] for layer in self._weights]
            rows = [[*own, *moves[4 * number : 4 * number + 4]] for number, own in enumerate(weights)]
            self._addresses = moves, torch.tensor(rows, dtype=torch.long)
        return self._addresses[1]

    def __call__(
        self, tokens: Tensor, angles: Angles, positions: Tensor, addresses: Tensor, caches: Sequence[LayerCache]
    ) -> Tensor:
        """One more token per row [R]: the normed output of the last layer [R, H].

        ``angles`` are those of all positions; that of each row [R] follows from ``addresses``.
        """
        own, prompt = caches[0].positions, caches[0].prompt_keys.shape[-1]
        return self.ops.decode(
            self._layers(caches),
            self.backbone.embed(tokens),
            angles,
            addresses,
            (self.backbone.body.norm.weight, self.backbone.sizes.epsilon),
            self._scratch,
            self._sizes(len(tokens), own=own, prompt=prompt),
        )


def _matrices(layer: LayerParameters) -> tuple[Sequence[Matrix], ...]:
    """The matrices of a layer by what they are multiplied with: attention's input, its output, the MLP's, its inner."""
    return layer.qkv, (layer.output,), layer.gate_up, (layer.down,)
