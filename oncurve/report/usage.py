"""Use of a run so far: time by phase, tokens, money."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oncurve.observe.columns import Columns
from oncurve.observe.manifest import gpu_names, processor_text
from oncurve.observe.metrics import PHASES

if TYPE_CHECKING:
    from oncurve.plan.hardware import Device


@dataclass(frozen=True, slots=True)
class Phase:
    """The total of one phase of the steps."""

    name: str
    seconds: float
    tokens: float | None
    """Sampled or trained tokens; None for a phase that moves none."""


def phases(metrics: Columns) -> list[Phase]:
    """Time and tokens by phase, and the rest of the steps as "other"; phases that took no time are left out."""
    spent: list[Phase] = []
    for name in PHASES:
        seconds = metrics.total(f"time/{name}_seconds")
        moved = {"sample": "tokens/sampled", "train": "tokens/trained"}.get(name)
        if seconds > 0:
            spent.append(Phase(name, seconds, metrics.total(moved) if moved else None))
    inside = sum(phase.seconds for phase in spent if phase.name not in ("evaluate", "save"))
    if (other := metrics.total("time/step_seconds") - inside) > 0.01:
        spent.append(Phase("other", other, None))
    return spent


@dataclass(frozen=True, slots=True)
class Spending:
    """Money, as far as it is known."""

    device: str
    """The run's hardware, in words."""
    count: int
    """Devices."""
    hours: float
    usd_per_hour: float | None
    """Price of all devices together; None: no price is known."""
    basis: str
    """Origin of the price, or the reason why there is none."""

    @property
    def usd(self) -> float | None:
        """So far."""
        return None if self.usd_per_hour is None else self.hours * self.usd_per_hour


def spending(metrics: Columns, manifest: Mapping[str, Any], *, usd_per_hour: float | None = None) -> Spending:
    """Hours times the price of the planner's table, or ``usd_per_hour`` for all devices together.

    A run of several processes has one device each. Steps that a crash lost, and the measurement after training, are not
    in the metrics and not in the sum.
    """
    gpus = gpu_names(manifest)
    hours = metrics.elapsed_seconds() / 3600
    device = gpus[0] if gpus else processor_text(manifest)
    count = int(manifest.get("processes") or 1) if gpus else 1
    if usd_per_hour is not None:
        return Spending(device, count, hours, usd_per_hour, f"{usd_per_hour:g} USD per hour, as given")
    priced = None
    if gpus:
        from oncurve.plan.hardware import load_devices  # lazy

        priced = priced_device(gpus[0], load_devices())
    if priced is None or priced.on_demand is None:
        return Spending(device, count, hours, None, "no price of this device is known; give it with --usd-per-hour")
    dated = f", {priced.priced}" if priced.priced else ""
    basis = f"{count} x {priced.on_demand:g} USD per hour on demand ({priced.source or 'unnamed source'}{dated})"
    return Spending(device, count, hours, count * priced.on_demand, basis)


def priced_device(name: str, devices: Mapping[str, Device]) -> Device | None:
    """The row of the table for what a driver calls its GPU: the longest row whose every word is in the name.

    >>> from oncurve.plan.hardware import load_devices
    >>> priced_device("NVIDIA A100-SXM4-80GB", load_devices()).name
    'A100-80GB'
    """
    words = set(_words(name))
    fitting = [device for device in devices.values() if device.is_gpu and set(_words(device.name)) <= words]
    return max(fitting, key=lambda device: len(_words(device.name)), default=None)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
