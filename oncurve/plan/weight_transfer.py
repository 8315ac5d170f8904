"""The way of new weights from the trainer to servers: bytes and seconds of each of its parts."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from oncurve.constants import FILE_BYTES, GB
from oncurve.plan import constants
from oncurve.plan.hardware import Device
from oncurve.plan.planned_run import PlannedRun


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the way. They come one after another."""

    name: str
    bytes: float
    seconds: float
    holds: bool = False
    """The trainer stands still meanwhile, also where servers sample ahead."""


def sync_bytes(run: PlannedRun) -> float:
    """Bytes that travel to the sampler after each step: all weights in the servers' type, or an adapter's.

        matrices 2 B each (4 with float32 arithmetic), vectors 4 B; an adapter 4 B x its weights

    65.6 GB for a full 32B model, or a share of that where differences are sent (rollouts.deltas). Nothing travels where
    one process samples and trains.
    """
    if run.layout.placement == "colocated" and not run.has_server_beside:
        return 0.0
    if run.trains_adapter:
        return 4.0 * run.trained_parameters
    share = 1.0 if run.delta_rate is None else sent_share(run.delta_rate, run.shape.num_parameters)
    return share * whole_bytes(run)


def whole_bytes(run: PlannedRun) -> float:
    """All weights in the servers' type."""
    width = 2 if run.delta_rate is not None else run.width
    matrices = run.shape.layers * run.shape.layer_matrix_parameters + run.shape.head_parameters * (
        1 if run.shape.is_tied else 2
    )
    return float(width * matrices + 4 * (run.shape.num_parameters - matrices))


def sent_share(rate: float, parameters: float) -> float:
    """Size of a step's coded difference, as a share of all weights: lines through the measured points on logarithmic
    scales, AdamW moving each weight by about the learning rate whatever its gradient. Models larger or smaller than
    the measured ones count as the nearest of them.

    >>> sent_share(1.0, 1e9)
    1.0
    """
    (small, first), (large, second) = constants.SENT_SHARES
    position = min(max(math.log(parameters / small) / math.log(large / small), 0.0), 1.0)
    return min(1.0, math.exp((1 - position) * _log_share(rate, first) + position * _log_share(rate, second)))


def _log_share(rate: float, measured: Sequence[tuple[float, float]]) -> float:
    points = [(math.log(measured_rate), math.log(share)) for measured_rate, share in measured]
    index = min(max(bisect([x for x, _ in points], math.log(rate)), 1), len(points) - 1)
    (x, y), (far, high) = points[index - 1 : index + 1]
    return y + (high - y) * (math.log(rate) - x) / (far - x)


def transfer_parts(run: PlannedRun, device: Device, *, network_gbit: float) -> tuple[Part, ...]:
    """The parts of the way that a recipe takes; none where one process samples and trains."""
    size = sync_bytes(run)
    if not size:
        return ()
    whole = 2.0 * run.shape.num_parameters if run.trains_adapter else size
    if run.sends_by_nccl:
        rate = device.link * GB * constants.LINK_SHARE
        if run.layout.placement == "disaggregated":
            rate = min(rate, network_gbit / 8 * GB)
        return (
            Part("broadcast", size, size / rate, holds=True),
            Part("load", size, size / constants.DEVICE_LOAD_RATE, holds=True),
        )
    if run.delta_rate is not None:
        return _differences(size, whole_bytes(run), run, network_gbit=network_gbit)
    return _files(size, whole, run, network_gbit=network_gbit)


def _differences(size: float, whole: float, run: PlannedRun, *, network_gbit: float) -> tuple[Part, ...]:
    """As ``fleet/weights/delta_store.py`` writes them and ``delta_copy.py`` applies them."""
    threads = _threads(whole)
    sums = whole / (threads * constants.SUM_RATE)
    copied, fetched = _copied(whole, run), _fetched(size, run, network_gbit)
    return (
        *copied,
        Part("find what changed", whole, whole / (threads * constants.CODE_RATE)),
        Part("checksum", whole, sums),
        Part("write", size, size / constants.WRITE_RATE),
        *fetched,
        Part("apply and check", whole, whole / (threads * constants.PATCH_RATE) + 2 * sums),
        Part("load", whole, whole / constants.LOAD_RATE),
    )


def _files(size: float, whole: float, run: PlannedRun, *, network_gbit: float) -> tuple[Part, ...]:
    """As ``fleet/weights/shards.py`` writes them and ``file_download.py`` reads them. An adapter is one file, and is
    added to all of the base."""
    threads = 1 if run.trains_adapter else _threads(size)
    sums = size / (threads * constants.SUM_RATE)
    copied, fetched = _copied(size, run), _fetched(size, run, network_gbit)
    return (
        *copied,
        Part("checksum", size, sums, holds=True),
        Part("write", size, size / constants.WRITE_RATE, holds=True),
        *fetched,
        Part("read and check", size, sums),
        Part("load", whole, whole / constants.LOAD_RATE),
    )


def _threads(size: float) -> float:
    """Files that are worked on at the same time: a small model has one."""
    return min(constants.FILES_AT_A_TIME, max(1.0, size / FILE_BYTES))


def _copied(size: float, run: PlannedRun) -> tuple[Part, ...]:
    return (
        (Part("copy to the machine's memory", size, size / constants.TO_HOST_RATE, True),) if run.layout.is_gpu else ()
    )


def _fetched(size: float, run: PlannedRun, network_gbit: float) -> tuple[Part, ...]:
    if run.layout.placement != "disaggregated":
        return ()
    return (Part("fetch over the network", size, size / (network_gbit / 8 * GB)),)
