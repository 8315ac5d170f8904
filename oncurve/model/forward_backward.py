"""Forward and backward pass of a model's layers over a packed microbatch.

Both directions are written out: a layer keeps what its backward pass cannot cheaply make again, matrix products run in
the compute type, and residuals, norms, attention and the gradients of residuals in float32 (float64 for such models).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from oncurve.model.lora_linear import joint_gradients
from oncurve.model.ops_native import Ops, operations
from oncurve.model.packing import Layout
from oncurve.model.weights import (
    AttentionSizes,
    Backbone,
    LayerParameters,
    LayerWeights,
    heads_of,
    norm_heads,
    project,
    project_backward,
)


@dataclass(frozen=True, eq=False)
class Angles:
    """Cosines and sines of the positions of all tokens, [N, D / 2] each."""

    cosine: Tensor
    sine: Tensor

    @cached_property
    def _turn(self) -> Tensor:
        return torch.complex(self.cosine, self.sine)[:, None]

    def turn(self) -> Tensor:
        """Both as complex numbers [N, 1, D / 2]."""
        return self._turn

    def at(self, positions: Tensor) -> Angles:
        """The angles of these positions alone."""
        return Angles(self.cosine.index_select(0, positions), self.sine.index_select(0, positions))


@dataclass
class SavedActivations:
    """The activations that the backward pass of a layer needs."""

    first: Tensor
    """The residual before attention [N, H]."""
    first_scale: Tensor
    qkv: Tensor
    heads_before: Tensor | None
    """Queries and keys before their norm; None in models without one."""
    attention: Any
    """Tensors of attention that the operations keep."""
    mixed: Tensor
    """The output of attention before its projection [N, heads D]."""
    attended: Tensor | None
    """Output of attention, to be added to the residual [N, H]; None where ``second`` is kept."""
    second: Tensor | None
    """The residual before the MLP [N, H]; None if it is to be made again, from ``first`` and ``attended``."""
    second_scale: Tensor
    gate_up: Tensor
    """Before their product; overwritten with their gradients."""


Keeps = Literal["everything", "inputs", "nothing"]
"""The activations of a layer that are kept for its backward pass."""
Store = Callable[[Tensor], None]
"""Takes the projected queries, keys and values of all tokens [N, C]."""


def packed_hidden(backbone: Backbone, layout: Layout, compute_type: torch.dtype, *, recompute: bool = False) -> Tensor:
    """Last hidden states, after the final norm, of the positions that predict a trained token [M, H], in the wide type.

    With ``recompute`` a layer keeps its input only and runs again in the backward pass.
    """
    angles = Angles(*backbone.rotary(layout.positions[0]))
    pass_ = LayerPass(layout, angles, backbone.sizes, operations(compute_type), compute_type)
    keeps: Keeps = "nothing" if not torch.is_grad_enabled() else "inputs" if recompute else "everything"
    hidden: Tensor = backbone.body.embed_tokens(layout.ids)[0].to(backbone.wide).contiguous()
    added: Any = None
    for number, layer in enumerate(backbone.layers):
        hidden, added = _Layer.apply(hidden, added, backbone, number, pass_, keeps, *layer.all())  # type: ignore[misc]
    predicting = layout.predicts
    total = hidden.index_select(0, predicting) + added.index_select(0, predicting)
    return _Norm.apply(total, backbone.body.norm.weight, backbone.sizes.epsilon)  # type: ignore[return-value]


class _Norm(torch.autograd.Function):
    """The final norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        _, out, scale = operations(x.dtype).add_norm(x, None, weight, epsilon, x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        operations(x.dtype).norm_backward(grads[0].contiguous(), x, weight, scale, grad_x, grad_weight)
        return grad_x, grad_weight, None


class _Layer(torch.autograd.Function):
    """One layer, from the residual and what is added to it to the residual before the MLP and what the MLP adds.

    A function for each, so that the gradients of its parameters join those of earlier microbatches before the layer
    below makes its own: there is never a second gradient of all weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        added: Tensor | None,
        backbone: Backbone,
        number: int,
        pass_: LayerPass,
        keeps: Keeps,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        layer, before = backbone.layers[number], (residual, added)
        matrices = backbone.layer_weights(layer, pass_.compute_type)
        state = pass_.forward(layer, matrices, residual, added)
        residual, added = pass_.feed_forward(state, matrices)
        if state.second is not None:
            state.second = state.second.detach()  # an output that its own function keeps would never be freed
        ctx.pass_, ctx.backbone, ctx.number = pass_, backbone, number
        ctx.saved = {"everything": state, "inputs": before, "nothing": None}[keeps]
        return residual, added

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):  # the types are chosen here, also where backward runs under autocast
            return _Layer._backward(ctx, *grads)

    @staticmethod
    def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad, added), pass_, state = grads, ctx.pass_, ctx.saved
        ctx.pass_ = ctx.saved = None  # whoever keeps the loss for its value keeps no tables
        layer, has_added = ctx.backbone.layers[ctx.number], ctx.number > 0
        if ctx.number + 1 == len(
            ctx.backbone.layers
        ):  # from outside; below, from the layer above, which has done with it
            grad = grad.contiguous().clone()
        matrices = ctx.backbone.layer_weights(layer, pass_.compute_type)
        if isinstance(state, tuple):
            state = pass_.forward(layer, matrices, *state)
        gradients = pass_.backward(state, layer, matrices, grad, added.contiguous())
        return grad, grad.to(added.dtype) if has_added else None, None, None, None, None, *gradients


@dataclass(frozen=True)
class LayerPass:
    """One microbatch on its way through the layers."""

    layout: Layout
    angles: Angles
    sizes: AttentionSizes
    ops: Ops
    compute_type: torch.dtype

    def forward(
        self,
        layer: LayerParameters,
        matrices: LayerWeights,
        residual: Tensor,
        added: Tensor | None,
        store: Store | None = None,
    ) -> SavedActivations:
        """From the residual and what is added to it to the inputs of the MLP's last matrix.

        ``store`` is shown what attention is given.
        """
        ops, sizes = self.ops, self.sizes
        first, x, first_scale = ops.add_norm(residual, added, layer.first_norm, sizes.epsilon, self.compute_type)
        qkv = project(x, matrices.qkv, matrices.qkv_bias, thin=matrices.thin.qkv)
        heads_before = None if layer.head_norms is None else self._norm_heads(qkv, layer.head_norms)
        if store is not None:
            store(qkv)
        mixed, attention = ops.attention(qkv, self.angles, self.layout, sizes)
        attended = project(mixed, (matrices.output,), thin=matrices.thin.output)
        second, x, second_scale = ops.add_norm(first, attended, layer.second_norm, sizes.epsilon, self.compute_type)
        gate_up = project(x, matrices.gate_up, thin=matrices.thin.gate_up)
        return SavedActivations(
            first, first_scale, qkv, heads_before, attention, mixed, attended, second, second_scale, gate_up
        )

    def feed_forward(self, state: SavedActivations, matrices: LayerWeights) -> tuple[Tensor, Tensor]:
        """The residual before the MLP and what the MLP adds to it; the state lets go of what is made again."""
        assert state.second is not None
        second, acted = state.second, self.ops.swiglu(state.gate_up)
        added = project(acted, (matrices.down,), thin=matrices.thin.down)
        if self.compute_type == second.dtype:
            state.attended = None
        else:
            state.second = None
        return second, added

    def _mlp_inputs(self, state: SavedActivations, layer: LayerParameters) -> tuple[Tensor, Tensor]:
        """The residual before the MLP, and its norm."""
        before = (state.first, state.attended) if state.second is None else (state.second, None)
        norm = (layer.second_norm, self.sizes.epsilon, self.compute_type, state.second_scale)
        second, x, _ = self.ops.add_norm(*before, *norm)
        return second, x

    def backward(
        self, state: SavedActivations, layer: LayerParameters, matrices: LayerWeights, grad: Tensor, added: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the layer's parameters, in the order of ``LayerParameters.all``; None where one is frozen.

        ``grad``, the gradient of the layer's output residual, becomes that of its input in place. ``added`` is the
        gradient of what the MLP adds.
        """
        of_mlp = self._mlp_backward(state, layer, matrices, grad, added)  # two functions: each lets go of what it made
        return [*self._attention_backward(state, layer, matrices, grad), *of_mlp]

    def _mlp_backward(
        self, state: SavedActivations, layer: LayerParameters, matrices: LayerWeights, grad: Tensor, added: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the second norm and the MLP; ``grad`` becomes the gradient of the residual before them."""
        g, thin = added.to(self.compute_type), matrices.thin
        gate_up = state.gate_up
        acted = self.ops.swiglu_backward(project_backward(g, (matrices.down,), thin=thin.down), gate_up)
        second, x = self._mlp_inputs(state, layer)
        grad_down = layer.down.gradients(g, acted)
        grad_gate_up = joint_gradients(layer.gate_up, gate_up, x, at_once=len(matrices.gate_up) == 1)
        g = project_backward(gate_up, matrices.gate_up, thin=thin.gate_up)
        grad_norm = torch.zeros_like(layer.second_norm, dtype=grad.dtype)
        self.ops.norm_backward(g, second, layer.second_norm, state.second_scale, grad, grad_norm)
        return [grad_norm, *grad_gate_up, *grad_down]

    def _attention_backward(
        self, state: SavedActivations, layer: LayerParameters, matrices: LayerWeights, grad: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the first norm and attention; ``grad`` becomes the gradient of the layer's input."""
        ops, sizes, thin = self.ops, self.sizes, matrices.thin
        g = grad.to(self.compute_type)
        grad_output = layer.output.gradients(g, state.mixed)
        at = (state.qkv, state.attention, self.angles, self.layout, sizes)
        grad_qkv = ops.attention_backward(project_backward(g, (matrices.output,), thin=thin.output), *at)
        grad_head_norms = [] if layer.head_norms is None else self._norm_heads_backward(state, layer, grad_qkv)
        norm = (layer.first_norm, sizes.epsilon, self.compute_type, state.first_scale)
        _, x, _ = ops.add_norm(state.first, None, *norm)
        g = grad_qkv.to(self.compute_type)
        grad_weights = joint_gradients(layer.qkv, g, x, at_once=len(matrices.qkv) == 1)
        g = project_backward(g, matrices.qkv, thin=thin.qkv)
        grad_norm = torch.zeros_like(layer.first_norm, dtype=grad.dtype)
        ops.norm_backward(g, state.first, layer.first_norm, state.first_scale, grad, grad_norm)
        return [
            grad_norm,
            *grad_weights,
            *(() if layer.biases is None else self._bias_gradients(layer.biases, grad_qkv)),
            *grad_head_norms,
            *grad_output,
        ]

    def _bias_gradients(self, biases: Sequence[Tensor], grad_qkv: Tensor) -> list[Tensor]:
        sizes = self.sizes
        parts = grad_qkv.sum(dim=0).split([sizes.query_width, sizes.kv_width, sizes.kv_width])
        return [part.to(bias.dtype) for part, bias in zip(parts, biases, strict=True)]

    def _norm_heads(self, qkv: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Norm queries and keys head by head in place (Qwen3); what they were before."""
        before = qkv[:, : self.sizes.query_width + self.sizes.kv_width].clone()
        norm_heads(qkv, weights, self.sizes)
        return before

    def _norm_heads_backward(self, state: SavedActivations, layer: LayerParameters, grad_qkv: Tensor) -> list[Tensor]:
        """Gradients of the heads' norms; those of queries and keys are replaced by the ones before the norm."""
        assert layer.head_norms is not None
        assert state.heads_before is not None
        grad_weights = []
        grads = heads_of(grad_qkv, self.sizes)
        for part, g, weight in zip(heads_of(state.heads_before, self.sizes), grads, layer.head_norms, strict=True):
            x = part.to(g.dtype)
            scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.sizes.epsilon)
            normed, weighted = x * scale, g * weight
            grad_weights.append((g * normed).sum(dim=(0, 1)).to(weight.dtype))
            g.copy_(scale * (weighted - normed * (weighted * normed).mean(dim=-1, keepdim=True)))
        return grad_weights
