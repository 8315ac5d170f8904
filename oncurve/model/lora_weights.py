"""New weights for servers when only an adapter is trained: they get the adapter, and apply it beside their base.

What travels is a hundredth of the weights. Nothing but torch and safetensors is needed here, because vLLM's environment
imports it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oncurve.algorithm.precision import narrow

FILE = "adapter_model.safetensors"
PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_SEEN_NUMBERS = 4096
"""Numbers of each matrix of the base that the fingerprint looks at."""


SAYS_ANOTHER = "this is another model: "
"""First words of such an error, by which a trainer knows it in what vLLM answers."""


class AnotherModel(ValueError):
    """Weights that are not those of the model that is to take them, however often they are sent."""

    def __init__(self, why: str) -> None:
        super().__init__(SAYS_ANOTHER + why)


@dataclass(frozen=True)
class LoraWeights:
    """An adapter as it is handed to servers."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """By the name of the matrix that they are beside: A [rank, in] and B [out, rank]."""
    scales: Mapping[str, float]
    """Factor of each product: alpha / rank."""
    is_transposed: bool
    """The base's matrices are [in, out], as in GPT-2."""
    base: str
    """Fingerprint of these matrices."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names of these matrices in a checkpoint, where they are others."""
    keys: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The keys of the dither of A and B, where the policy's own copies are dithered."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return sum(part.numel() * part.element_size() for pair in self.pairs.values() for part in pair)

    def save(self, folder: Path) -> None:
        """Write it under peft's names."""
        tensors = {}
        for name, (first, second) in self.pairs.items():
            plain = PREFIX + name.removesuffix(".weight")
            tensors |= {plain + _A: first.detach().contiguous().cpu(), plain + _B: second.detach().contiguous().cpu()}
        save_file(tensors, folder / FILE)

    def facts(self) -> dict[str, Any]:
        """The facts that servers get beside the file."""
        facts = {"scales": dict(self.scales), "is_transposed": self.is_transposed, "base": self.base}
        return facts | {"names": dict(self.names), "keys": {name: list(pair) for name, pair in self.keys.items()}}

    def copies(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and scale B of a pair in a type, as the policy's own products take them."""
        (a, b), (of_a, of_b) = self.pairs[name], self.keys.get(name, (None, None))
        return narrow(a, dtype, of_a), narrow(self.scales[name] * b, dtype, of_b)


def read_thin(path: Path, facts: Mapping[str, Any]) -> LoraWeights:
    """An adapter from its file and what was told beside it. Raises ValueError if they do not fit together."""
    tensors = load_file(path)
    pairs = {}
    for key in [key for key in tensors if key.endswith(_A)]:
        plain = key.removesuffix(_A)
        if plain + _B not in tensors:
            raise ValueError(f"{path.name}: {plain} has no second matrix")
        pairs[plain.removeprefix(PREFIX) + ".weight"] = (tensors[key], tensors[plain + _B])
    if not pairs or set(pairs) != set(facts["scales"]) or len(tensors) != 2 * len(pairs):
        raise ValueError(f"{path.name} is not the adapter that was announced")
    return LoraWeights(
        pairs,
        facts["scales"],
        bool(facts["is_transposed"]),
        str(facts["base"]),
        names=facts.get("names", {}),
        keys=facts.get("keys", {}),
    )


def check_base(thin: LoraWeights, base: Callable[[str], Tensor]) -> None:
    """Raises ValueError if the adapter was made for another base than the one whose matrices ``base`` gives."""
    if fingerprint(thin.pairs, base) != thin.base:
        raise AnotherModel(
            "the adapter was trained over another base than this server has; start it again with that one"
        )


def fingerprint(names: Iterable[str], base: Callable[[str], Tensor]) -> str:
    """A checksum over names, shapes and the first numbers of matrices: other models, and the same trained on, differ.

    Numbers in half width are compared after widening, which is exact. Raises ValueError for a matrix that is missing.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        try:
            weight = base(name)
        except KeyError:
            raise AnotherModel(f"this model has no {name}, to which the adapter belongs") from None
        seen = weight.detach().flatten()[:_SEEN_NUMBERS].to("cpu", torch.float32)
        digest.update(f"{name}\0{tuple(weight.shape)}\0".encode() + seen.numpy().tobytes())
    return digest.hexdigest()
