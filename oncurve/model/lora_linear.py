"""Weight matrices with or without a LoRA adapter beside them, and their gradients.

An adapter adds scale B A to its matrix W (LoRA, arXiv:2106.09685, without dropout), so that a layer multiplies with one
matrix whether there is an adapter or not. Its gradient never needs that of the whole matrix:

    y = x (W + scale B A)^T        grad B = scale g^T (x A^T)        grad A = scale (g B)^T x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oncurve.algorithm.precision import is_slow, narrow, product, weight_key

ADAPTER = "default"
"""The name that peft gives to a model's only adapter."""


@dataclass(frozen=True)
class LowRank:
    """The adapter beside a matrix, as peft's module holds it."""

    module: Any

    @property
    def is_on(self) -> bool:
        """It counts; peft switches it off to compute with the base alone."""
        return not self.module.disable_adapters

    @property
    def a(self) -> Tensor:
        """[rank, inputs]."""
        return self.module.lora_A[ADAPTER].weight

    @property
    def b(self) -> Tensor:
        """[outputs, rank]."""
        return self.module.lora_B[ADAPTER].weight

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return float(self.module.scaling[ADAPTER])

    @torch.no_grad()
    def copies(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and scale B in the type of the products around them."""
        keys = [weight_key(part[ADAPTER]) for part in (self.module.lora_A, self.module.lora_B)]
        return narrow(self.a, dtype, keys[0]), narrow(self.scale * self.b, dtype, keys[1])


@dataclass(frozen=True)
class Matrix:
    """The matrix of a linear layer [outputs, inputs], and the adapter beside it where there is one."""

    weight: Tensor
    adapter: LowRank | None = None
    layer: nn.Module | None = None
    """The linear layer that holds it."""

    @property
    def key(self) -> int | None:
        """The key of its dither; None where copies are rounded to the nearest."""
        return weight_key(self.layer)

    def copy(self, dtype: torch.dtype) -> Tensor:
        """The matrix in a type, without the adapter."""
        return narrow(self.weight, dtype, self.key)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that may be trained, in the order of ``gradients``."""
        return [self.weight] if self.adapter is None else [self.weight, self.adapter.a, self.adapter.b]

    @torch.no_grad()
    def current(self) -> Tensor:
        """W, or W + scale B A in float32 at least: what x is multiplied with."""
        if not self.is_adapted:
            return self.weight
        assert self.adapter is not None
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        a, b = self.adapter.a.to(wide), self.adapter.b.to(wide)
        return torch.addmm(self.weight.to(wide), b, a, alpha=self.adapter.scale)

    @property
    def is_adapted(self) -> bool:
        """An adapter counts beside it."""
        return self.adapter is not None and self.adapter.is_on

    def gradients(self, g: Tensor, x: Tensor) -> list[Tensor | None]:
        """Gradients of the parameters, from that of the outputs g [N, outputs] and the inputs x; None where frozen."""
        own = product(g.T, x).to(self.weight.dtype) if self.weight.requires_grad else None
        if self.adapter is None:
            return [own]
        if not self.adapter.is_on:
            return [own, None, None]
        a, b, scale = self.adapter.a, self.adapter.b, self.adapter.scale
        own_a, own_b = self.adapter.copies(x.dtype)
        grad_a = product(product(g, own_b).T, x).to(a.dtype) if a.requires_grad else None
        grad_b = scale * product(g.T, product(x, own_a.T)).to(b.dtype) if b.requires_grad else None
        return [own, grad_a, grad_b]


@dataclass(frozen=True)
class LoraDelta:
    """The adapters beside matrices with one input, whose outputs are columns of one tensor: x -> (x A^T) B^T.

    In half width an output W x is rounded to 8 bits, and what is added to it afterwards counts only where it is more
    than half of the last of them: of an adapter after one step of 1e-5, nearly nothing. So the adapter's output comes
    first, and the matrix is multiplied onto it (``onto``): the sum is rounded once.
    """

    a: Tensor
    """The A matrices of all, stacked [sum of ranks, inputs]."""
    b: Tensor
    """Each in the rows of its matrix and the columns of its rank, times its scale [outputs, sum of ranks]."""

    @classmethod
    @torch.no_grad()
    def of(cls, matrices: Sequence[Matrix], dtype: torch.dtype) -> LoraDelta | None:
        """None where no adapter counts."""
        rows, pairs, blocks = 0, [], []
        for matrix in matrices:
            if matrix.is_adapted and (adapter := matrix.adapter) is not None:
                a, b = adapter.copies(dtype)
                pairs.append(a)
                blocks.append((rows, b))
            rows += len(matrix.weight)
        if not pairs:
            return None
        a = torch.cat(pairs)
        b, column = a.new_zeros(rows, len(a)), 0
        for row, block in blocks:
            b[row : row + len(block), column : column + block.shape[1]] = block
            column += block.shape[1]
        return cls(a, b)

    def outputs(self, x: Tensor) -> Tensor:
        """The adapters' outputs for x [N, outputs]."""
        return product(product(x, self.a.T), self.b.T)

    def onto(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> Tensor:
        """x @ W.T + b of matrices side by side with the adapters' outputs [N, outputs].

        A bias comes last: it is not on the grid of what it is added to, which therefore still counts.
        """
        if is_slow(x):  # see ``linear``
            joined = torch.cat([weight.float() for weight in weights])
            wide = None if biases is None else torch.cat([bias.float() for bias in biases])
            return nn.functional.linear(x.float(), joined, wide).add_(self.outputs(x)).to(x.dtype)
        out, start = self.outputs(x), 0
        for index, weight in enumerate(weights):
            part = out[:, start : start + len(weight)].addmm_(x, weight.T)
            if biases is not None:
                part.add_(biases[index])
            start += len(weight)
        return out

    def inputs_gradient(self, g: Tensor) -> Tensor:
        """The gradient of x from that of the outputs g [N, outputs]."""
        return product(product(g, self.b), self.a)


def matrix_of(module: Any) -> Matrix:
    """The matrix of a linear layer, with the adapter that peft may have put around it."""
    if type(module) is nn.Linear:
        return Matrix(module.weight, layer=module)
    return Matrix(module.base_layer.weight, LowRank(module), module.base_layer)


def is_matrix(module: nn.Module) -> bool:
    """A linear layer, alone or in an adapter of which everything is known here: one, of whole weights, unmerged."""
    if type(module) is nn.Linear:
        return True
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    layer: Any = module
    return (
        type(layer.base_layer) is nn.Linear
        and list(layer.lora_A) == [ADAPTER]
        and list(layer.active_adapters) == [ADAPTER]
        and not (layer.merged or layer.lora_variant or layer.fan_in_fan_out)
        and layer.lora_B[ADAPTER].bias is None
        and type(layer.lora_dropout[ADAPTER]) is nn.Identity
    )


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model whose matrix is not that of an embedding as well, which is not rounded."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    return [part for part in model.modules() if type(part) is nn.Linear and id(part.weight) not in embeddings]


def joint_gradients(matrices: Sequence[Matrix], g: Tensor, x: Tensor, *, at_once: bool) -> list[Tensor | None]:
    """Gradients of matrices whose outputs are columns of one tensor; ``at_once`` takes one product if all are trained.

    g is [N, outputs of all]; the order is that of the matrices' parameters.
    """
    widths = [len(matrix.weight) for matrix in matrices]
    if at_once and all(matrix.adapter is None and matrix.weight.requires_grad for matrix in matrices):
        parts = product(g.T, x).split(widths)
        return [part.to(matrix.weight.dtype) for part, matrix in zip(parts, matrices, strict=True)]
    parts = g.split(widths, dim=1)
    return [grad for part, matrix in zip(parts, matrices, strict=True) for grad in matrix.gradients(part, x)]
