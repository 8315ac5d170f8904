"""Proof that a server applies all of an adapter: what it changes of stored tokens, on the server and in training.

A server that adds the adapter to matrices of 8 bits, or to outputs of 8 bits, has a small part of it and says nothing:
between trainer and server there are 1e-8 nats of KL, far below any bound, because the adapter changes little more. So
it is the change that is compared, with the adapter minus without:

    fraction = <server's change, trainer's change> / <trainer's change, trainer's change>      1 is right

Arithmetic sets the floor. Without the adapter both compute the same policy, and what they differ by there (about 1e-6
nats in float32, 1e-2 between two ways of computing in bfloat16) is the noise of one log-probability. From it follows
the error of the fraction, and a fraction that may be off by more than MOST_ERROR says nothing yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from oncurve.model.context import context_of
from oncurve.policy.forward import row_logprobs
from oncurve.policy.lora_forward import adapters_off

if TYPE_CHECKING:
    from oncurve.core.sampler import PolicyView

NUM_TOKENS = 64
PASSAGE = (
    "Question: A baker sells rolls for 3 coins and loaves for 12 coins. On Monday she sold 15 rolls and 4 loaves. How "
    "many coins did she take?\nAnswer: The rolls brought 15 * 3 = 45 coins, and the loaves 4 * 12 = 48 coins. Together "
    "that is 45 + 48 = 93 coins, so she took 93 coins on Monday."
)
"""The stored tokens are its first: text of the kind that models are trained on."""
LEAST_NOISE = 1e-6
"""Nats by which float32 rounds a log-probability, also where two programs agree by chance."""
MOST_ERROR = 0.05
"""Standard error up to which a fraction is judged."""
TOLERANCE, DEVIATIONS = 0.1, 5
"""The fraction may be off by so much, by so many standard errors, and by what noise in the trainer's change takes from
it: a server of many versions is asked often, and must not be refused by chance."""


@dataclass(frozen=True, slots=True)
class AdapterShare:
    """The part of an adapter's change that a server has."""

    fraction: float
    error: float
    """Standard error of the fraction, from the noise of the arithmetic."""
    trainer_nats: float
    """Root mean square of the trainer's change of a log-probability."""
    server_nats: float
    """The server's change along the trainer's."""

    @property
    def is_known(self) -> bool:
        """The adapter changes enough to tell."""
        return self.error <= MOST_ERROR

    @property
    def is_wrong(self) -> bool:
        """The server lacks a part of the adapter, or has too much of it."""
        too_small = NUM_TOKENS / 2 * self.error**2  # mean of x'y / x'x where x has noise of its own
        return self.is_known and abs(self.fraction - 1) > TOLERANCE + DEVIATIONS * self.error + too_small


@dataclass(frozen=True, slots=True)
class AdapterProof:
    """The change that the adapter of one version makes in training."""

    token_ids: tuple[int, ...]
    """The stored tokens, of which each but the first is predicted."""
    adapted: tuple[float, ...]
    """Their log-probabilities in training."""
    base: tuple[float, ...]
    """The same without the adapter."""

    def share(self, adapted: Sequence[float], base: Sequence[float]) -> AdapterShare:
        """The part that a server has, from its log-probabilities with the adapter and without."""
        own_base, there = np.array(self.base), np.array(base)
        own, theirs = np.array(self.adapted) - own_base, np.array(adapted) - there
        size = float(np.sqrt(own @ own))
        if size == 0:
            return AdapterShare(1.0, float("inf"), 0.0, 0.0)
        noise = max(LEAST_NOISE, float(np.sqrt(np.mean((there - own_base) ** 2))))
        fraction, nats = float(theirs @ own) / size**2, size / len(own) ** 0.5
        return AdapterShare(fraction, 2**0.5 * noise / size, nats, fraction * nats)


def stored_tokens(policy: PolicyView) -> tuple[int, ...]:
    """The stored tokens of a policy: of PASSAGE, or numbers that run through its vocabulary where it reads too little
    of that."""
    config = policy.model.config.get_text_config()
    room = min(NUM_TOKENS, (context_of(config) or NUM_TOKENS) - 2)
    ids = [token for token in policy.tokenizer(PASSAGE)["input_ids"] if token < config.vocab_size][: room + 1]
    if len(ids) <= room or len(set(ids)) < room // 4:
        ids = [(index * 7919 + 1) % config.vocab_size for index in range(room + 1)]
    return tuple(int(token) for token in ids)


@torch.no_grad()
def measure(policy: PolicyView) -> AdapterProof:
    """The change that the policy's adapter makes of the stored tokens, in the arithmetic of training."""
    ids, model = stored_tokens(policy), policy.model
    row = torch.tensor(ids, device=model.device)
    with policy.compute():
        adapted = row_logprobs(model, row).tolist()
        with adapters_off(model):
            base = row_logprobs(model, row).tolist()
    return AdapterProof(ids, tuple(adapted), tuple(base))


def mismatch(share: AdapterShare, label: str) -> str:
    """Why a server cannot be sampled from."""
    return (
        f"it applies {share.fraction:.2f} of the adapter of {label}: in training the adapter changes the "
        f"log-probabilities of the stored tokens by {share.trainer_nats:.2g} nats (root mean square), and here by "
        f"{share.server_nats:.2g} along that, with a standard error of {share.error:.2g} of it. Start the server as "
        f"docs/servers.md says, with the model and the oncurve of the trainer"
    )
