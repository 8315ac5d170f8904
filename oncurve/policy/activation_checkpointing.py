"""Activation checkpointing: activations are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oncurve.algorithm.precision import dithered_casts
from oncurve.core.errors import TrainingError

if TYPE_CHECKING:
    from oncurve.policy.lora import Adapter


def recomputable_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The layers of a model that may keep only their inputs and run again in the backward pass.

    Raises TrainingError for a model without such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingError(
            f"{type(model).__name__} cannot recompute its activations. Set policy.gradient_checkpointing to false"
        )
    return layers


@contextmanager
def recomputing(
    model: PreTrainedModel, layers: Sequence[GradientCheckpointingLayer], adapter: Adapter | None = None
) -> Iterator[None]:
    """While it lasts, what these layers compute will be computed again in the backward pass.

    The models' own switch for this works in training mode only, and that would bring dropout with it. An adapter's
    dropout is active again when its layer is, and drops the same; and copies of weights are made in the same way.
    """
    drops = adapter is not None and adapter.has_dropout
    again = partial(
        checkpoint,
        use_reentrant=False,
        preserve_rng_state=drops,
        context_fn=lambda: (nullcontext(), _surroundings(model, adapter)),
    )
    for layer in layers:
        layer.forward = partial(again, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own again


@contextmanager
def _surroundings(model: PreTrainedModel, adapter: Adapter | None) -> Iterator[None]:
    """The surroundings of the first pass, in which a layer runs again."""
    with dithered_casts(model), nullcontext() if adapter is None else adapter.dropping_out():
        yield
