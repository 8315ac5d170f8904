"""The share of the trainer's GPU that is left for a vLLM server beside the policy, and what the server needs of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oncurve.constants import GIB
from oncurve.plan import constants
from oncurve.plan.memory import kv_bytes, weight_parts
from oncurve.plan.planned_run import PlannedRun


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes of one GPU that trains and samples."""

    total: float
    policy: float
    """Memory of the trainer while the server has its own."""
    server: float
    """Weights, buffers, and keys and values of one prompt's completions: less is no use."""

    @property
    def left(self) -> float:
        """For the server."""
        return self.total - self.policy

    @property
    def fits(self) -> bool:
        """The server can work with what is left."""
        return self.server <= self.left

    @property
    def share(self) -> float:
        """The value of vLLM's ``--gpu-memory-utilization``: hundredths of the whole GPU, rounded down."""
        return math.floor(100 * self.left / self.total) / 100

    @property
    def numbers(self) -> str:
        """The reckoning, for a message."""
        return (
            f"of {self.total / GIB:.1f} GiB the policy keeps {self.policy / GIB:.1f}, and a vLLM server with this "
            f"model needs {self.server / GIB:.1f}"
        )


def share_gpu(run: PlannedRun, *, total: float) -> Beside:
    """The share of a GPU that is left beside the policy.

        policy = 12 B x trained weights (4 master, 8 moments) + frozen weights + reference + 4 GiB

    The server sleeps while the policy trains. The 4 GiB are guessed: two contexts, and what torch has in use while it
    samples nothing.
    """
    stays = sum(part.bytes for part in weight_parts(run) if not part.is_buffer)
    row = run.lengths.prompt_tokens + run.longest_tokens
    cache = kv_bytes(run, run.config.algorithm.num_rows(row))
    weights = float(run.width * run.shape.num_parameters)
    return Beside(
        total=total,
        policy=stays + constants.BESIDE_MARGIN_BYTES,
        server=weights + constants.ENGINE_OVERHEAD_BYTES + cache,
    )
