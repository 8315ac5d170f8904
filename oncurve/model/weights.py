"""Weights of a model of the Llama family, and the type in which its matrices are multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from oncurve.algorithm.precision import HALF, arithmetic_type, linear, narrow, product, weight_key
from oncurve.constants import STATIC_ROTARY
from oncurve.model.decode_memory import OWN_FAMILIES
from oncurve.model.lora_linear import LoraDelta, Matrix, is_matrix, matrix_of

NUMBERS = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, *HALF)}
"""Types of weights by device. A GPU only decodes here, and trains through the model's modules."""


@dataclass(frozen=True)
class AttentionSizes:
    """The shape of attention and norms."""

    heads: int
    kv_heads: int
    head_size: int
    epsilon: float

    @property
    def query_width(self) -> int:
        """Numbers in all query heads of a token."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Numbers in all key heads of a token."""
        return self.kv_heads * self.head_size


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer, as the model holds them."""

    first_norm: Tensor
    qkv: tuple[Matrix, Matrix, Matrix]
    biases: tuple[Tensor, Tensor, Tensor] | None
    """Biases of the same three; None in models without."""
    head_norms: tuple[Tensor, Tensor] | None
    """Norms of queries and keys; None in models without."""
    output: Matrix
    second_norm: Tensor
    gate_up: tuple[Matrix, Matrix]
    down: Matrix

    def bias_copies(self, dtype: torch.dtype) -> list[Tensor]:
        """The biases in a type, of a layer that has them."""
        assert self.biases is not None
        keys = [weight_key(matrix.layer, "bias") for matrix in self.qkv]
        return [narrow(bias.detach(), dtype, key) for bias, key in zip(self.biases, keys, strict=True)]

    def all(self) -> list[Tensor]:
        """Every parameter, in a fixed order."""
        qkv = [parameter for matrix in self.qkv for parameter in matrix.parameters]
        gate_up = [parameter for matrix in self.gate_up for parameter in matrix.parameters]
        optional = [*(self.biases or ()), *(self.head_norms or ())]
        attention = [self.first_norm, *qkv, *optional, *self.output.parameters]
        return [*attention, self.second_norm, *gate_up, *self.down.parameters]


@dataclass(frozen=True)
class LayerLora:
    """The adapters of a layer that are kept apart from its matrices; None where there is none or it is added."""

    qkv: LoraDelta | None = None
    output: LoraDelta | None = None
    gate_up: LoraDelta | None = None
    down: LoraDelta | None = None


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of a layer in the compute type, those with one input joined where that costs no second copy."""

    qkv: tuple[Tensor, ...]
    qkv_bias: tuple[Tensor, ...] | None
    output: Tensor
    gate_up: tuple[Tensor, ...]
    down: Tensor
    thin: LayerLora = LayerLora()


class Backbone:
    """The layers of a model between embedding and head, read from the module that holds their current weights.

    In float32 the module's own matrices are used, with the adapter added where there is one. For bfloat16 they are
    copied at each call, so that no change is missed (fused optimizers leave no trace on a parameter's version),
    matrices with the same input are joined, and adapters stay beside them: added to a matrix of 8 bits, most of a small
    one would be lost.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.body = body = body_of(model)
        head_size = body.layers[0].self_attn.head_dim
        self.sizes = AttentionSizes(
            config.num_attention_heads, config.num_key_value_heads, head_size, config.rms_norm_eps
        )
        self.layers = [layer_parameters(layer) for layer in body.layers]
        self._projections = projections(body)
        self.wide = torch.promote_types(body.norm.weight.dtype, torch.float32)

    @property
    def is_current(self) -> bool:
        """The model still consists of the modules that this was made from: no adapter came or went."""
        return self._projections == projections(self.body)

    @property
    def has_adapter(self) -> bool:
        """An adapter is beside some matrix, on or off."""
        return any(
            matrix.adapter is not None
            for layer in self.layers
            for matrix in (*layer.qkv, layer.output, *layer.gate_up, layer.down)
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.body.embed_tokens.weight.device

    def compute_type(self) -> torch.dtype:
        """The type of matrix products here and now: that of autocast where it is on, otherwise the wide one."""
        return arithmetic_type(self.device, self.wide)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids [N], in the wide type [N, H]."""
        return self.body.embed_tokens.weight.index_select(0, ids).to(self.wide)

    def weights(self, compute_type: torch.dtype) -> list[LayerWeights]:
        """The layers' matrices in a type, as they are now; they do not follow later changes."""
        return [self.layer_weights(layer, compute_type) for layer in self.layers]

    def layer_weights(self, layer: LayerParameters, compute_type: torch.dtype) -> LayerWeights:
        """The same of one of the layers."""
        is_wide = self.device.type == "cpu" and compute_type == self.wide
        return _as_they_are(layer) if is_wide else _apart(layer, compute_type)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [N], [N, D / 2] each, as the model's own rotary embedding makes them."""
        dummy = torch.empty(0, dtype=self.wide, device=positions.device)
        cosine, sine = self.body.rotary_emb(dummy, positions[None])
        half = self.sizes.head_size // 2
        return tuple(part[0, :, :half].to(self.wide).contiguous() for part in (cosine, sine))  # type: ignore[return-value]


def body_of(model: PreTrainedModel) -> Any:
    """The part of a causal language model between its token ids and its head."""
    named = dict(model.named_children())
    return named[model.base_model_prefix] if model.base_model_prefix in named else model.get_decoder()


@dataclass(frozen=True)
class Trust:
    """The ways of our own that were found to compute what a model's own forward pass does."""

    layers: bool = True
    """Our own layers, where they know the family."""
    head: bool = True
    """Its head is computed here; otherwise logits come from the model's own forward pass."""
    padding: bool = True
    """Rows of different length in one call; otherwise each is computed by itself."""


_TRUST: WeakKeyDictionary[PreTrainedModel, Trust] = WeakKeyDictionary()


def trust_of(model: PreTrainedModel) -> Trust:
    """The findings on a model; everything, before it was looked at."""
    return _TRUST.get(model, Trust())


def set_trust(model: PreTrainedModel, trust: Trust) -> None:
    """Compute this model so from now on."""
    _TRUST[model] = trust


def is_plain_head(model: PreTrainedModel) -> bool:
    """The logits are hidden @ weight.T and nothing else."""
    layer, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    is_matrix = type(layer) is nn.Linear and layer.bias is None
    return is_matrix and trust_of(model).head and not any(getattr(config, key, None) for key in changes)


def head_matrix(model: PreTrainedModel) -> Tensor:
    """The matrix that turns last hidden states into logits [V, H]."""
    return cast("nn.Linear", model.get_output_embeddings()).weight


def head_key(model: PreTrainedModel) -> int | None:
    """The key of the head's dither; None where it is rounded to the nearest."""
    return weight_key(model.get_output_embeddings())


_TRUNKS: WeakKeyDictionary[PreTrainedModel, Backbone] = WeakKeyDictionary()


def backbone_of(model: PreTrainedModel) -> Backbone | None:
    """The backbone of a model; None for a model that is not computed here."""
    if not supports(model):
        _TRUNKS.pop(model, None)
        return None
    backbone = _TRUNKS.get(model)
    if backbone is None or not backbone.is_current:
        backbone = _TRUNKS[model] = Backbone(model)
    return backbone


def supports(model: PreTrainedModel) -> bool:
    """The model is of a family that is computed here, with nothing in it that this file does not know."""
    config = model.config.get_text_config()
    if type(model).__name__ not in OWN_FAMILIES.values():
        return False
    if model.device.type not in NUMBERS or not trust_of(model).layers:
        return False
    if isinstance(next(model.parameters()), DTensor):  # weights in parts are put together around the model's layers
        return False
    if any(parameter.dtype not in NUMBERS[model.device.type] for parameter in model.parameters()):
        return False
    if not is_plain_head(model) or type(model.get_input_embeddings()) is not nn.Embedding:  # an adapter around them
        return False
    if config.hidden_act != "silu" or (config.attention_dropout and model.training):
        return False
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return False
    body = body_of(model)
    rotary = body.rotary_emb
    if rotary.rope_type not in STATIC_ROTARY or 2 * rotary.inv_freq.numel() != body.layers[0].self_attn.head_dim:
        return False
    plain = all(is_matrix(module) for module in projections(body))
    own = all("weight" in norm._parameters for norm in norms(body))  # and not that of something inside of it
    return (
        plain
        and own
        and not any(
            module.bias is not None
            for layer in body.layers
            for module in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        )
    )


def projections(body: Any) -> list[nn.Module]:
    """The linear layers of a model's body, each with the adapter around it."""
    layers: list[nn.Module] = []
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layers += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        layers += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return layers


def norms(body: Any) -> list[nn.Module]:
    """The norms of a model's body."""
    heads = [norm for layer in body.layers for name, norm in layer.self_attn.named_children() if name.endswith("_norm")]
    around = [norm for layer in body.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return [*around, *heads, body.norm]


def layer_parameters(layer: Any) -> LayerParameters:
    """The parameters of one of the model's layers."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = all(projection.bias is not None for projection in qkv)
    has_norm = "q_norm" in dict(attention.named_children())
    return LayerParameters(
        first_norm=layer.input_layernorm.weight,
        qkv=tuple(matrix_of(projection) for projection in qkv),  # type: ignore[arg-type]
        biases=tuple(projection.bias for projection in qkv) if has_bias else None,  # type: ignore[arg-type]
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if has_norm else None,
        output=matrix_of(attention.o_proj),
        second_norm=layer.post_attention_layernorm.weight,
        gate_up=(matrix_of(mlp.gate_proj), matrix_of(mlp.up_proj)),
        down=matrix_of(mlp.down_proj),
    )


def _as_they_are(layer: LayerParameters) -> LayerWeights:
    qkv, gate_up = (tuple(matrix.current() for matrix in together) for together in (layer.qkv, layer.gate_up))
    return LayerWeights(qkv, layer.biases, layer.output.current(), gate_up, layer.down.current())


@torch.no_grad()
def _apart(layer: LayerParameters, compute_type: torch.dtype) -> LayerWeights:
    """Matrices without the adapters beside them: what is kept in the type already is not copied."""

    def copies(matrices: Sequence[Matrix]) -> tuple[Tensor, ...]:
        if matrices[0].weight.dtype == compute_type:
            return tuple(matrix.weight for matrix in matrices)
        return (torch.cat([matrix.copy(compute_type) for matrix in matrices]),)

    qkv = copies(layer.qkv)
    biases = None if layer.biases is None else layer.bias_copies(compute_type)
    return LayerWeights(
        qkv=qkv,
        qkv_bias=None if biases is None else tuple(biases) if len(qkv) > 1 else (torch.cat(biases),),
        output=layer.output.copy(compute_type),
        gate_up=copies(layer.gate_up),
        down=layer.down.copy(compute_type),
        thin=LayerLora(
            LoraDelta.of(layer.qkv, compute_type),
            LoraDelta.of([layer.output], compute_type),
            LoraDelta.of(layer.gate_up, compute_type),
            LoraDelta.of([layer.down], compute_type),
        ),
    )


def norm_heads(qkv: Tensor, weights: tuple[Tensor, Tensor], sizes: AttentionSizes) -> None:
    """Norm queries and keys head by head, in place in the columns of qkv [N, C] (Qwen3)."""
    for part, weight in zip(heads_of(qkv, sizes), weights, strict=True):
        x = part.to(weight.dtype)
        part.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + sizes.epsilon) * weight)


def heads_of(queries_and_keys: Tensor, sizes: AttentionSizes) -> tuple[Tensor, Tensor]:
    """Views of queries [N, heads, D] and keys [N, kv_heads, D], which are the first columns."""
    q, k = queries_and_keys[:, : sizes.query_width + sizes.kv_width].split([sizes.query_width, sizes.kv_width], dim=1)
    return q.unflatten(1, (-1, sizes.head_size)), k.unflatten(1, (-1, sizes.head_size))


def project(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] | None = None,
    *,
    thin: LoraDelta | None = None,
) -> Tensor:
    """x @ W.T + b for matrices side by side, with the adapters beside them: their outputs are columns of one tensor."""
    if thin is not None:
        return thin.onto(x, weights, biases)
    if len(weights) == 1:
        return linear(x, weights[0], None if biases is None else biases[0])
    out = x.new_empty(len(x), sum(len(weight) for weight in weights))
    start = 0
    for index, weight in enumerate(weights):
        part = out[:, start : start + len(weight)]
        if biases is None:
            torch.mm(x, weight.T, out=part)
        else:
            torch.addmm(biases[index], x, weight.T, out=part)
        start += len(weight)
    return out


def project_backward(g: Tensor, weights: tuple[Tensor, ...], *, thin: LoraDelta | None = None) -> Tensor:
    """The gradient of x."""
    parts = g.split([len(weight) for weight in weights], dim=1)
    if thin is None:
        grad_x, done = product(parts[0], weights[0]), 1
    else:
        grad_x, done = thin.inputs_gradient(g), 0
    for part, weight in zip(parts[done:], weights[done:], strict=True):
        grad_x.addmm_(part, weight)
    return grad_x
