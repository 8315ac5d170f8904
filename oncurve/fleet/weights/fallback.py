"""Files for servers that were not there when weights went from GPU to GPU: the same weights, written when the first one
asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from oncurve.fleet.weights.store import WeightStore
from oncurve.fleet.weights.weight_manifest import Manifest
from oncurve.fleet.weights.weight_stream import Shipment


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
        self._offered: Shipment | None = None
        self._written: Manifest | None = None

    def offer(self, shipment: Shipment) -> Manifest:
        """These are the current weights: a version without files, so far."""
        with self._lock:
            if self._trains_meanwhile:
                copies = {name: weight.to("cpu", copy=True) for name, weight in shipment}
                self._offered = replace(shipment, weights=copies)
            else:
                self._offered = shipment
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
            shipment = self._offered
            if shipment is None or shipment.label != label or not (self._trains_meanwhile or self._is_still):
                return None
            self._written = self._store.publish_shipment(shipment)
            return self._written
