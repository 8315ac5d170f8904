"""How many rollout servers does a recipe keep busy? The planner's speeds, played through for each number of servers.

    python benchmarks/fleet.py gsm8k model=Qwen/Qwen2.5-7B --servers 1..64 --gpus 8

Options are those of ``oncurve plan``; with ``rollouts.deltas={}`` what changed of the weights travels, with ``--relay``
from one server to the others. ``--spread`` says how ragged lengths are, ``--losses`` how often an hour a server is
lost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fleet_simulation import FleetLayout, Losses, Network, Simulated, Speeds, cut_lognormal, simulate

from oncurve.commands.plan import plan_inputs
from oncurve.errors import ConfigError
from oncurve.plan import constants
from oncurve.plan.hardware import GB, Device
from oncurve.plan.setup import Setup, Work
from oncurve.plan.shape import ModelShape
from oncurve.plan.step_time import decode_share, train_seconds
from oncurve.plan.weight_transfer import sync_bytes, way_of_weights
from oncurve.recipes.find import find_recipe

LENGTH_SPREAD = 0.6
"""Guessed. Standard deviation of a completion's length as a share of the mean, where nobody said."""
MOST_SERVERS = 1024
NEAR = 1.1
"""A step this many times the shortest is as good as the shortest, if it takes fewer servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuestion:
    """What is asked about servers."""

    counts: tuple[int, ...]
    spread: float = LENGTH_SPREAD
    losses_per_hour: float = 0.0
    """Of one server."""
    steps: int = 20
    has_relay: bool = False
    server_gbit: float | None = None
    """Of the link of each server; None: as the trainer's."""


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One number of servers, with sampling in the step and one step ahead."""

    servers: int
    in_step: Simulated
    one_ahead: Simulated


def planned_speeds(shape: ModelShape, work: Work, setup: Setup, device: Device) -> Speeds:
    """What ``oncurve.plan.step_time`` says of sampling and training, for the devices of one server."""
    devices = max(1, setup.sampler_devices)
    rate = devices * device.bf16 * 1e12 * constants.SAMPLE_COMPUTE_UTILIZATION
    apart = replace(setup, placement="disaggregated", sampler_devices=devices)
    bandwidth = devices * device.bandwidth * GB * decode_share(apart, device)
    length = work.prompt_tokens + work.mean_completion_tokens / 2
    way = [part for part in way_of_weights(shape, apart, device, network_gbit=1.0) if "network" not in part.name]
    return Speeds(
        turn_seconds=setup.width * shape.matrix_parameters / bandwidth,
        row_seconds=setup.width * length * shape.kv_numbers_per_token / bandwidth,
        row_least_seconds=2.0 * shape.matrix_parameters / rate,
        prompt_seconds=2.0 * shape.matrix_parameters * work.prompt_tokens / rate,
        train_seconds=train_seconds(shape, work, setup, device),
        write_seconds=sum(part.seconds for part in way if part.is_on_trainer),
        load_seconds=sum(part.seconds for part in way if not part.is_on_trainer),
    )


def planned_servers(
    shape: ModelShape, work: Work, setup: Setup, device: Device, fleet: FleetQuestion, *, network_gbit: float
) -> list[FleetRow]:
    """A row for each number of servers; each server and the trainer have a link of so many Gbit/s."""
    speeds = planned_speeds(shape, work, setup, device)
    rate = network_gbit / 8 * GB
    size = sync_bytes(shape, replace(setup, placement="disaggregated", sampler_devices=max(1, setup.sampler_devices)))
    own = rate if fleet.server_gbit is None else fleet.server_gbit / 8 * GB
    network = Network(sync_bytes=size, server_rate=own, trainer_rate=rate, has_relay=fleet.has_relay)
    layout = FleetLayout(
        servers=1,
        prompts=work.prompts,
        group_size=work.group_size,
        max_rows=work.max_rows,
        lengths=cut_lognormal(work.mean_completion_tokens, fleet.spread, float(work.completion_tokens)),
        steps=fleet.steps,
        losses=Losses(per_hour=fleet.losses_per_hour) if fleet.losses_per_hour else None,
    )
    return [
        FleetRow(count, *(simulate(replace(layout, servers=count, staleness=late), speeds, network) for late in (0, 1)))
        for count in fleet.counts
    ]


def read_counts(text: str) -> tuple[int, ...]:
    """Numbers of servers: ``4``, ``1,2,8``, or ``1..64``, which doubles from the first to the last.

    >>> read_counts("1..10")
    (1, 2, 4, 8, 10)

    Raises ConfigError for anything else.
    """
    first, is_range, last = text.partition("..")
    words = [first, last] if is_range else text.split(",")
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= MOST_SERVERS for word in words):
        raise ConfigError(f"--servers {text}: write numbers from 1 to {MOST_SERVERS}, such as 4, 1,2,8 or 1..64")
    numbers = [int(word) for word in words]
    if is_range:
        low, high = numbers
        if low > high:
            raise ConfigError(f"--servers {text}: the first is more than the last")
        numbers = [low * 2**power for power in range(high.bit_length()) if low * 2**power < high] + [high]
    return tuple(sorted(set(numbers)))


def servers_text(
    rows: Sequence[FleetRow], *, setup: Setup, fleet: FleetQuestion, size: float, network_gbit: float
) -> str:
    """The table for people."""
    devices = max(1, setup.sampler_devices)
    whole = "all weights" if setup.delta_rate is None else "what changed of the weights"
    kind = whole if setup.method == "full" else "the adapter"
    lost = f"; each is preempted {fleet.losses_per_hour:g} times per hour" if fleet.losses_per_hour else ""
    lines = [
        "",
        f"rollout servers of {devices} device{'s' * (devices > 1)} each, simulated for {fleet.steps} steps: "
        f"{kind}, {size / GB:.3g} GB, from one trainer to each",
        f"over links of {network_gbit:g} Gbit/s; standard deviation of lengths {fleet.spread:g} of the mean{lost}",
        f"  {'':8}{'rollouts.staleness 0':^36}{'rollouts.staleness 1':^36}",
        f"  {'servers':8}" + f"{'step':>9}{'trainer idle':>14}{'servers':>8}     " * 2,
    ]
    for row in rows:
        cells = "".join(
            f"{one.seconds:>7.3g} s{one.trainer_idle_fraction:>13.0%} {one.server_idle_fraction:>7.0%}     "
            for one in (row.in_step, row.one_ahead)
        )
        lines.append(f"  {row.servers:<8}{cells}".rstrip())
    for name, key in (("0", "in_step"), ("1", "one_ahead")):
        lines.append(f"  {_best(rows, name, key)}")
    return "\n".join(lines)


def _best(rows: Sequence[FleetRow], name: str, key: str) -> str:
    """The fewest servers whose step is as good as the shortest, and what a step waits for there."""
    found = {row.servers: row.in_step if key == "in_step" else row.one_ahead for row in rows}
    shortest = min(one.seconds for one in found.values())
    count = min(servers for servers, one in found.items() if one.seconds <= NEAR * shortest)
    one, steps = found[count], len(found[count].step_seconds)
    waits = {
        "completions": sum(one.wait_seconds) / steps,
        "weights": sum(one.sync_seconds) / steps,
    }
    training = one.seconds - sum(waits.values())
    parts = ", ".join(f"{seconds:.2g} s for {what}" for what, seconds in waits.items())
    return f"staleness {name}: {count} of these are enough; a step trains {training:.2g} s and waits {parts}"


def servers_data(rows: Sequence[FleetRow]) -> list[dict[str, Any]]:
    """The table for programs: seconds, and shares of the time."""

    def data(one: Simulated) -> dict[str, Any]:
        kept = {key: value for key, value in asdict(one).items() if not isinstance(value, list)}
        return {
            "step_seconds": one.seconds,
            "trainer_idle_fraction": one.trainer_idle_fraction,
            "server_idle_fraction": one.server_idle_fraction,
            **kept,
        }

    return [
        {"servers": row.servers, "staleness_0": data(row.in_step), "staleness_1": data(row.one_ahead)} for row in rows
    ]


def fleet(
    recipe: str,
    overrides: Sequence[str],
    question: FleetQuestion,
    *,
    network_gbit: float = 100.0,
    as_json: bool = False,
    **asked: Any,
) -> str:
    """The table of a recipe as text or JSON; what is ``asked`` is that of ``oncurve plan``."""
    found = plan_inputs(find_recipe(recipe), overrides, **asked)
    shape, setup = found.shape, found.setup
    rows = planned_servers(shape, found.work, setup, found.device, question, network_gbit=network_gbit)
    if as_json:
        return json.dumps(servers_data(rows), indent=2)
    size = sync_bytes(shape, replace(setup, placement="disaggregated", sampler_devices=1))
    return servers_text(rows, setup=setup, fleet=question, size=size, network_gbit=network_gbit)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--servers", default="1..64", help="4, 1,2,8 or 1..64")
    parser.add_argument("--spread", type=float, default=LENGTH_SPREAD)
    parser.add_argument("--losses", type=float, default=0.0)
    parser.add_argument("--server-bandwidth", type=float, help="Gbit/s of each server's link, as of a home network")
    parser.add_argument("--relay", action="store_true", help="one server gives weights to the others")
    parser.add_argument("--gpu")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--placement", default="colocated")
    parser.add_argument("--sampler-gpus", type=int, default=0)
    parser.add_argument("--bandwidth", type=float, default=100.0, help="Gbit/s")
    parser.add_argument("--mean-tokens", type=float)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_intermixed_args()
    question = FleetQuestion(
        counts=read_counts(asked.servers),
        spread=asked.spread,
        losses_per_hour=asked.losses,
        has_relay=asked.relay,
        server_gbit=asked.server_bandwidth,
    )
    text = fleet(
        asked.recipe,
        asked.overrides,
        question,
        network_gbit=asked.bandwidth,
        as_json=asked.json,
        gpu=asked.gpu,
        gpus=asked.gpus,
        placement=asked.placement,
        sampler_gpus=asked.sampler_gpus,
        mean_tokens=asked.mean_tokens,
    )
    print(text)


if __name__ == "__main__":
    main()
