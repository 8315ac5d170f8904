"""The next token on a GPU, found by the sums of parts of the vocabulary first."""

from __future__ import annotations

import torch
from torch import Tensor

from oncurve.core.draw import first_above

SMALLEST_PART, LARGEST_PART = 64, 1024
"""Words of a part of the vocabulary, where a GPU looks for the next token."""


def first_above_on_device(p: Tensor, uniform: Tensor) -> Tensor:
    """The token of ``first_above``, by parts on a GPU where the vocabulary can be cut."""
    width = part_width(p.shape[1]) if p.is_cuda else 0
    return first_above_by_parts(p, uniform, width) if width else first_above(p, uniform)


def part_width(vocabulary: int) -> int:
    """Into parts of how many words a vocabulary can be cut; 0 if it is not worth it."""
    width = min(vocabulary & -vocabulary, LARGEST_PART)
    return width if width >= SMALLEST_PART else 0


def first_above_by_parts(p: Tensor, uniform: Tensor, width: int) -> Tensor:
    """The same token, found by the sums of parts of the vocabulary first, and then in its part.

    The cumulative sums of a whole vocabulary in float64 are twice its size, written and read again.
    """
    parts = p.unflatten(1, (-1, width))
    sums = parts.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform[:, None].double() * sums[:, -1:]
    part = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, part)
    chosen = parts.gather(1, part[..., None].expand(-1, -1, width)).squeeze(1)
    cumulative = chosen.cumsum(dim=-1, dtype=torch.float64).add_(before)
    # By its own sum a part may end a rounding before the threshold: then it is the last of its words with a probability
    last = torch.nextafter(cumulative[:, -1:], torch.zeros_like(threshold))
    word = torch.searchsorted(cumulative, torch.minimum(threshold, last), right=True).clamp_(max=width - 1)
    return torch.add(word, part, alpha=width).squeeze(1)
