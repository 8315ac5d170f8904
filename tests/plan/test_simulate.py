"""Does the simulation keep its completions, its limits, and what queueing theory knows?"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from oncurve.errors import ConfigError
from oncurve.plan.find_shape import find_shape
from oncurve.plan.hardware import find_device, load_devices
from oncurve.plan.setup import Setup, Work
from oncurve.plan.step_time import sample_seconds, step_time

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from fleet import FleetQuestion, fleet, planned_servers, planned_speeds, read_counts
from fleet_simulation import FleetLayout, Losses, Network, Simulated, Speeds, cut_lognormal, simulate

SPEEDS = Speeds(turn_seconds=0.01, row_seconds=1e-4, prompt_seconds=0.02, train_seconds=2.0, load_seconds=0.1)
LAYOUT = FleetLayout(servers=4, prompts=16, group_size=4, max_rows=16, lengths=cut_lognormal(100, 0.8, 400), steps=6)
DEVICE = find_device("H100", load_devices())
SHAPE = find_shape("Qwen/Qwen2.5-1.5B")


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("servers", [1, 3, 64])
def test_no_completion_is_lost_or_made_twice_when_servers_vanish(servers: int, staleness: int) -> None:
    losses = Losses(per_hour=200.0, notice_seconds=1.0, back_seconds=5.0)
    layout = replace(LAYOUT, servers=servers, staleness=staleness)
    calm, stormy = simulate(layout, SPEEDS), simulate(replace(layout, losses=losses), SPEEDS)
    assert stormy.losses > 0
    assert calm.completions == stormy.completions == 6 * 16 * 4
    assert calm.tokens == stormy.tokens
    assert stormy.seconds > calm.seconds
    if servers == 1:
        assert stormy.sampled_again > 0


def test_the_same_arguments_give_the_same_run_and_another_seed_another() -> None:
    layout = replace(LAYOUT, losses=Losses(per_hour=60.0))
    assert simulate(layout, SPEEDS) == simulate(layout, SPEEDS)
    assert simulate(layout, SPEEDS).tokens != simulate(replace(layout, seed=1), SPEEDS).tokens
    assert simulate(replace(LAYOUT, servers=9), SPEEDS).tokens == simulate(LAYOUT, SPEEDS).tokens


@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_that_take_no_time_never_let_the_trainer_wait(staleness: int) -> None:
    found = simulate(replace(LAYOUT, staleness=staleness), Speeds(turn_seconds=0.0, train_seconds=2.0))
    assert found.trainer_idle_fraction == 0.0
    assert found.server_idle_fraction == 1.0
    assert found.seconds == pytest.approx(2.0)


def test_a_trainer_that_takes_no_time_is_always_waiting() -> None:
    found = simulate(LAYOUT, replace(SPEEDS, train_seconds=0.0))
    assert found.trainer_idle_fraction == pytest.approx(1.0)


def test_within_the_step_times_add_and_one_step_ahead_the_longer_counts() -> None:
    still = replace(LAYOUT, lengths=lambda random: 100.0, servers=1, prompts=4)
    speeds = Speeds(turn_seconds=0.03, train_seconds=2.0)
    assert simulate(still, speeds).seconds == pytest.approx(3.0 + 2.0)
    assert simulate(replace(still, staleness=1), speeds).seconds == pytest.approx(3.0)
    assert simulate(replace(still, staleness=1), replace(speeds, train_seconds=5.0)).trainer_idle_fraction == 0.0


def test_jobs_on_servers_that_do_one_at_a_time_take_as_long_as_theory_says() -> None:
    """n exponential jobs on c servers, handed out as servers get free: E = mean ((n - c) / c + 1 + 1/2 + ... + 1/c)."""
    count, servers = 24, 4
    layout = FleetLayout(
        servers=servers,
        prompts=count,
        group_size=1,
        max_rows=1,
        lengths=lambda random: random.expovariate(1.0),
        steps=3000,
    )
    expected = (count - servers) / servers + sum(1 / k for k in range(1, servers + 1))
    assert simulate(layout, Speeds(turn_seconds=1.0)).seconds == pytest.approx(expected, rel=0.01)


def test_rows_that_run_together_share_a_turn() -> None:
    drawn = itertools.cycle([10.0, 30.0])
    layout = FleetLayout(servers=1, prompts=1, group_size=2, max_rows=2, lengths=lambda random: next(drawn), steps=2)
    found = simulate(layout, Speeds(turn_seconds=1.0, row_seconds=0.5))
    assert found.seconds == pytest.approx(10 * 2.0 + 20 * 1.5)


def test_two_threads_on_one_core_take_twice_as_long() -> None:
    layout = replace(LAYOUT, servers=2, prompts=2, group_size=1, lengths=lambda random: 50.0)
    speeds = Speeds(turn_seconds=0.1)
    assert simulate(layout, speeds).seconds == pytest.approx(5.0)
    assert simulate(replace(layout, shared_cores=1), speeds).seconds == pytest.approx(10.0)
    assert simulate(replace(layout, shared_cores=2, beside=0.8), speeds).seconds == pytest.approx(5.0 / 0.8)


def test_weights_from_one_trainer_take_longer_for_more_servers() -> None:
    network = Network(sync_bytes=1e9, server_rate=1e9, trainer_rate=2e9)

    def waits(servers: int) -> float:
        found: Simulated = simulate(replace(LAYOUT, servers=servers), SPEEDS, network)
        return sum(found.sync_seconds) / len(found.sync_seconds)

    assert waits(2) == pytest.approx(1.0 + SPEEDS.load_seconds)
    assert waits(8) == pytest.approx(4.0 + SPEEDS.load_seconds)
    network = Network(sync_bytes=1e9, server_rate=1e9, trainer_rate=1e8)
    assert waits(4) == pytest.approx(40.0 + SPEEDS.load_seconds)
    network = replace(network, has_relay=True)
    assert waits(4) == pytest.approx(10.0 + 3.0 + SPEEDS.load_seconds), "the trainer's link carries them once"
    assert waits(1) == pytest.approx(10.0 + SPEEDS.load_seconds)


@pytest.mark.parametrize(("mean", "spread", "limit"), [(100.0, 0.5, 400.0), (300.0, 2.0, 512.0), (90.0, 0.0, 96.0)])
def test_ragged_lengths_have_the_mean_that_was_asked_for(mean: float, spread: float, limit: float) -> None:
    random, draw = Random(0), cut_lognormal(mean, spread, limit)
    drawn = [draw(random) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    assert max(drawn) <= limit
    assert (min(drawn) < max(drawn)) == (spread > 0)


def test_equal_lengths_on_one_server_take_what_the_plan_says() -> None:
    work = Work(prompts=16, group_size=8, prompt_tokens=256, completion_tokens=512, mean_completion_tokens=512)
    setup = Setup(placement="disaggregated", sampler_devices=1)
    row = planned_servers(SHAPE, work, setup, DEVICE, FleetQuestion(counts=(1,), spread=0.0), network_gbit=100)[0]
    assert sum(row.in_step.wait_seconds) / len(row.in_step.wait_seconds) == pytest.approx(
        sample_seconds(SHAPE, work, setup, DEVICE)
    )
    planned = step_time(SHAPE, work, setup, DEVICE, network_gbit=100)
    speeds = planned_speeds(SHAPE, work, setup, DEVICE)
    assert speeds.write_seconds + speeds.load_seconds < planned.sync, "the network is simulated on its own"
    assert row.in_step.seconds == pytest.approx(planned.total)


def test_the_command_shows_servers_in_rows_and_as_json() -> None:
    question = FleetQuestion(counts=(1, 2, 64), steps=4)
    text = fleet("gsm8k", [], question)
    assert "rollout servers of 1 device each" in text
    assert "all weights, 3.09 GB" in text
    assert "staleness 1:" in text
    data = json.loads(fleet("gsm8k", ["policy.lora.rank=8"], question, as_json=True))
    assert [row["servers"] for row in data] == [1, 2, 64]
    assert all(0 <= row["staleness_1"]["trainer_idle_fraction"] < 1 for row in data)


def test_numbers_of_servers_are_read_or_refused() -> None:
    assert read_counts("1..64") == (1, 2, 4, 8, 16, 32, 64)
    assert read_counts("3,1") == (1, 3)
    for text in ("0", "4..2", "many", "1..99999", ""):
        with pytest.raises(ConfigError, match="--servers"):
            read_counts(text)
