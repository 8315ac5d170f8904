"""The policy as a sampler in other processes may see it: with its weights under ordinary names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oncurve.core.sampler import PolicyView

if TYPE_CHECKING:
    from torch import Tensor

    from oncurve.model.lora_weights import LoraWeights


class PublishedPolicy(PolicyView, Protocol):
    """A policy whose weights can be sent."""

    def ordinary_weights(self) -> dict[str, Tensor]:
        """The weights under the names of an ordinary checkpoint, with an adapter added to them."""
        ...

    def adapter_weights(self) -> LoraWeights | None:
        """The adapter alone, where nothing else is trained."""
        ...

    def why_not_apart(self) -> str | None:
        """The reason why servers cannot apply the adapter beside its base; None where they can, and without one."""
        ...
