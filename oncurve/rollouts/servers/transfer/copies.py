"""What does a server get that was not there when weights went from GPU to GPU? The same weights as files, written when
the first one asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from oncurve.rollouts.servers.manifest import Manifest
from oncurve.rollouts.servers.store import WeightStore
from oncurve.rollouts.servers.transfer.shipment import Shipment

if TYPE_CHECKING:
    from oncurve.rollouts.base import PolicyView


class Copies:
    """Files of the current version, where somebody needs them.

    Owner of the weights is the policy, which changes them while it trains. They are read only while the trainer waits
    for completions (``still``), or from a copy in this machine's memory where it does not wait.
    """

    def __init__(self, store: WeightStore, *, trains_meanwhile: bool) -> None:
        """``trains_meanwhile``: the policy trains while servers sample, so that a copy is made of each version."""
        self._store, self._trains_meanwhile = store, trains_meanwhile
        self._lock = threading.Lock()
        self._is_still = False
        self._offered: tuple[PolicyView, Shipment, Mapping[str, Tensor] | None] | None = None
        self._written: Manifest | None = None

    def offer(self, policy: PolicyView, shipment: Shipment) -> Manifest:
        """These are the current weights: a version without files, so far."""
        with self._lock:
            kept = None
            if self._trains_meanwhile:
                kept = {
                    name: weight.detach().to("cpu", copy=True) for name, weight in policy.ordinary_weights().items()
                }
            self._offered = (policy, shipment, kept)
        return Manifest(shipment.label, shipment.version, (), (), "")

    @contextmanager
    def still(self) -> Iterator[None]:
        """The weights do not change inside of this. Waits at its end for files that are being written."""
        with self._lock:
            self._is_still = True
        try:
            yield
        finally:
            with self._lock:
                self._is_still = False

    def files(self, label: str) -> Manifest | None:
        """The files of a version. None where it is not the current one, or while the policy trains.

        Raises SamplerError if the disk does not take them.
        """
        with self._lock:
            if self._written is not None and self._written.label == label:
                return self._written
            if self._offered is None or self._offered[1].label != label:
                return None
            policy, shipment, kept = self._offered
            if kept is None and not self._is_still:
                return None
            weights = policy.ordinary_weights() if kept is None else kept

            def write(folder: Path) -> None:
                policy.model.save_pretrained(folder, state_dict=dict(weights))

            self._written = self._store.publish(shipment.version, write, label=label)
            return self._written
