"""The way of new weights from the trainer to servers: bytes and seconds of each of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.plan import constants
from oncurve.plan.hardware import GB, Device
from oncurve.plan.setup import Setup
from oncurve.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the way. They come one after another."""

    name: str
    bytes: float
    seconds: float
    is_on_trainer: bool
    """The trainer does it, once; the others are done by all servers at the same time."""


def sync_bytes(shape: ModelShape, setup: Setup) -> float:
    """What must travel to the sampler after each step: all weights in the servers' type, or an adapter's.

        matrices 2 B each (4 with float32 arithmetic), vectors 4 B; an adapter 4 B x its weights

    65.6 GB for a full 32B model. Nothing travels where one process samples and trains.
    """
    if setup.placement == "colocated" and not setup.has_server_beside:
        return 0.0
    if setup.method == "lora":
        return 4.0 * shape.lora_parameters(setup.rank, setup.targets)
    matrices = shape.layers * shape.layer_matrix_parameters + shape.head_parameters * (1 if shape.is_tied else 2)
    return float(setup.width * matrices + 4 * (shape.num_parameters - matrices))


def way_of_weights(shape: ModelShape, setup: Setup, device: Device, *, network_gbit: float) -> tuple[Part, ...]:
    """The parts of the way that a recipe takes; none where one process samples and trains."""
    size = sync_bytes(shape, setup)
    if not size:
        return ()
    whole = 2.0 * shape.num_parameters if setup.method == "lora" else size
    if setup.transfer == "nccl":
        rate = device.link * GB * constants.LINK_SHARE
        if setup.placement == "disaggregated":
            rate = min(rate, network_gbit / 8 * GB)
        return (
            Part("broadcast", size, size / rate, True),
            Part("load", size, size / constants.DEVICE_LOAD_RATE, False),
        )
    if setup.transfer == "ipc":
        return (
            Part("fill the buffer", size, 2 * size / (device.bandwidth * GB), True),
            Part("load", size, size / constants.DEVICE_LOAD_RATE, False),
        )
    return _files(size, whole, setup, network_gbit=network_gbit)


def _files(size: float, whole: float, setup: Setup, *, network_gbit: float) -> tuple[Part, ...]:
    """As ``rollouts/servers/shards.py`` writes them and ``fetch.py`` reads them. An adapter is one file, and is added
    to all of the base."""
    threads = 1 if setup.method == "lora" else constants.FILES_AT_A_TIME
    sums = size / (threads * constants.SUM_RATE)
    copied = (Part("copy to the machine's memory", size, size / constants.TO_HOST_RATE, True),) if setup.is_gpu else ()
    fetched = ()
    if setup.placement == "disaggregated":
        fetched = (Part("fetch over the network", size, size / (network_gbit / 8 * GB), False),)
    return (
        *copied,
        Part("checksum", size, sums, True),
        Part("write", size, size / constants.WRITE_RATE, True),
        *fetched,
        Part("read and check", size, sums, False),
        Part("load", whole, whole / constants.LOAD_RATE, False),
    )
