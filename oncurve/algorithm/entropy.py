"""Entropy bonus, and training on high-entropy tokens only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass
class EntropyBonus:
    """The coefficient of the mean entropy in the loss; the only thing in an algorithm that changes.

        L = L_policy - c H,  H the mean entropy over the tokens of the update
        c_{k+1} = c_k + step if H_k <= target else c_k - step, kept in [0, highest]; used only while H_k <= target
                                                      Skywork-OR1, arXiv:2505.22312

    Without a target the coefficient stays what it is. The entropy that decides is that of the last step.
    """

    coefficient: float = 0.0
    target: float | None = None
    """In nats; None keeps the coefficient constant."""
    step: float = 0.005
    highest: float = 1.0
    measured: float = math.inf
    """Mean entropy of the last step; infinite before the first, so that nothing is added yet."""

    @property
    def applied(self) -> float:
        """The coefficient that the loss uses now."""
        if self.target is None:
            return self.coefficient
        return self.coefficient if self.measured <= self.target else 0.0

    def adapt(self, entropy: float) -> None:
        """Take note of the mean entropy of a step, and move the coefficient if there is a target.

        NaN, from a step that trained on nothing, changes nothing.
        """
        if math.isnan(entropy):
            return
        self.measured = entropy
        if self.target is not None:
            moved = self.coefficient + (self.step if entropy <= self.target else -self.step)
            self.coefficient = min(max(moved, 0.0), self.highest)

    def state_dict(self) -> dict[str, float]:
        """The state that a checkpoint must hold."""
        return {"coefficient": self.coefficient, "measured": self.measured}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what a checkpoint holds."""
        self.coefficient, self.measured = float(state["coefficient"]), float(state["measured"])


def high_entropy(entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, share: float) -> Bool[Tensor, "B T"]:
    """The given fraction of the tokens under the mask, those of highest entropy; ties may add some.

        H_t >= quantile(H, 1 - share)                 Beyond the 80/20 rule, arXiv:2506.01939

    Give it all tokens of a step: over a microbatch the threshold would depend on how rows were put together.
    """
    values = entropy[mask]
    if not len(values):
        return torch.zeros_like(mask)
    ordered = values.sort().values  # torch.quantile takes at most 2^24 values
    place = (1 - share) * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = low + (high - low) * (place - math.floor(place))
    return mask & (entropy >= threshold)
