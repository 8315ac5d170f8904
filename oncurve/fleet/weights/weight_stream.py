"""One version of the weights as it is sent: those of an ordinary checkpoint, one by one, in the servers' type."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from oncurve.algorithm.precision import SavedCopies

if TYPE_CHECKING:
    from oncurve.core.sampler import PolicyView

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNED_BYTES = 8


@dataclass(frozen=True)
class Shipment:
    """One version of the weights, still where the policy has them: they must not change until it was sent."""

    label: str
    """``run:version:fingerprint``, which is that of the policy's own weights, whatever type they travel in."""
    version: int
    weights: Mapping[str, Tensor]
    """By their names in a checkpoint; each once, also where two names share a matrix."""
    matrix_type: torch.dtype | None = None
    """Matrices are sent in this type, which is that of the servers; None leaves them as they are."""
    copies: SavedCopies | None = None
    """The rounding of the policy's own copies; None rounds to the nearest."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight, in the order and width of the header."""
        for name in self.weights:
            yield name, self.copy(name)

    def copy(self, name: str) -> Tensor:
        """A weight as it is sent, where it is."""
        weight = self.weights[name]
        dtype = self.type_of(weight)
        rounded = weight.detach().to(dtype) if self.copies is None else self.copies.copy(name, weight, dtype)
        return rounded.contiguous()

    def type_of(self, weight: Tensor) -> torch.dtype:
        """The type of a weight as it is sent. Vectors keep theirs: they are small, and some layers need all of it.

        So does a matrix after which those could not be read any more: in a buffer they begin at a multiple of their
        own width.
        """
        chosen = self.matrix_type
        if chosen is None or not weight.is_floating_point() or weight.dim() < 2 or weight.itemsize <= chosen.itemsize:
            return weight.dtype
        return chosen if weight.numel() * chosen.itemsize % _ALIGNED_BYTES == 0 else weight.dtype

    def bytes_of(self, name: str) -> int:
        """Bytes of one weight as it is sent."""
        weight = self.weights[name]
        return weight.numel() * self.type_of(weight).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they are sent."""
        return sum(self.bytes_of(name) for name in self.weights)

    def header(self) -> dict[str, list[Any]]:
        """Names, types and shapes, from which a server cuts the stream into weights."""
        return {
            "names": list(self.weights),
            "dtype_names": [type_name(self.type_of(weight)) for weight in self.weights.values()],
            "shapes": [list(weight.shape) for weight in self.weights.values()],
        }


def make_shipment(policy: PolicyView, run: str, version: int, *, matrix_type: torch.dtype | None) -> Shipment:
    """The policy's current weights, as ``save_pretrained`` would name them. Nothing is copied."""
    weights = named_weights(policy)
    label = f"{run}:{version}:{fingerprint(weights)}"
    return Shipment(label, version, weights, matrix_type, SavedCopies(policy.model))


def half_shipment(policy: PolicyView, version: int) -> Shipment:
    """The same without a name, with matrices in bfloat16, of which differences are made."""
    return Shipment("", version, named_weights(policy), torch.bfloat16, SavedCopies(policy.model))


def named_weights(policy: PolicyView) -> dict[str, Tensor]:
    """All weights by their names in a checkpoint, each once."""
    plain = remove_tied_weights_from_state_dict(dict(policy.ordinary_weights()), policy.model)
    return revert_weight_conversion(policy.model, plain)


@torch.no_grad()
def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """The start of a checksum over names, shapes and, for each weight, the sum of its numbers' bits.

    The sums are made where the weights are, in whole numbers, so that their order does not matter.
    """
    sums = [
        weight.detach().view(_WHOLE_NUMBERS[weight.element_size()]).sum(dtype=torch.int64) for weight in _real(weights)
    ]
    sum_of_bits = torch.stack([total.cpu() for total in sums]).tolist() if sums else []
    shapes = "".join(f"{name}\0{tuple(weight.shape)}\0" for name, weight in weights.items())
    return hashlib.sha256((shapes + str(sum_of_bits)).encode()).hexdigest()[:12]


def _real(weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
    for weight in weights.values():
        yield torch.view_as_real(weight) if weight.is_complex() else weight


def type_name(dtype: torch.dtype) -> str:
    """A type's name in vLLM.

    >>> type_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
