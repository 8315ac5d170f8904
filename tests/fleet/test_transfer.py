"""Which calls does vLLM get, in which order, when weights go from GPU to GPU, and what happens to who is lost in it?

The servers are processes that write down what they are asked. Where NCCL would send, gloo does.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from recorder import NCCL, broadcast, make_group
from served import FAST, make_server_sampler, move

from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.children import ChildServers, own_environment
from oncurve.fleet.servers.nccl_group import GroupPush
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.weights.weight_stream import Shipment, make_shipment
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from nursery import Nursery

PARAMS = SamplingParams(max_completion_tokens=8, seed=3)
LIMITS = FAST.model_copy(update={"push_seconds": 3.0, "gone_seconds": 30.0})
PAUSE = f"{protocol.PAUSE}?mode=abort&clear_cache=true"
MakeSampler = Callable[..., ServerSampler]


class GlooEnd:
    """The trainer's place in a group, over gloo; with the NCCL that it says it has."""

    def __init__(self, nccl: list[int] | None = None) -> None:
        self.nccl = nccl

    def version(self) -> list[int] | None:
        return self.nccl

    def join(self, address: str, port: int, size: int) -> None:
        self.group = make_group(address, port, 0, size)

    def send(self, shipment: Shipment) -> None:
        for _, weight in shipment:
            broadcast(self.group, weight)

    def leave(self) -> None:
        """Nothing has to be done."""


@pytest.fixture
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


@pytest.fixture
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    return make_prompts("a b", "c", "d e f", "g h")


@pytest.fixture
def servers_of(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[[int], ChildServers]]:
    made: list[ChildServers] = []

    def make(count: int) -> ChildServers:
        script = str(Path(__file__).with_name("recorder.py"))
        python = str(nursery.stand_in(tmp_path / "python"))
        environment = own_environment(count) | {"PYTHONPATH": ":".join(sys.path)}
        logs = tmp_path / "logs"
        command = lambda port: [python, script, str(port)]  # noqa: E731
        made.append(ChildServers(count, name="recorder", logs=logs, command=command, environment=environment))
        wait_for(lambda: all(answers(url) for url in made[-1].urls), 60)
        return made[-1]

    yield make
    for servers in made:
        servers.close()


@pytest.fixture
def sampler_of(tmp_path: Path) -> Iterator[MakeSampler]:
    made: list[ServerSampler] = []

    def make(servers: ChildServers, **options: Any) -> ServerSampler:
        options = {"urls": [], "deadlines": LIMITS, "local": servers, "weights_folder": tmp_path / "weights"} | options
        options |= {"matrix_type": torch.bfloat16} if "push" in options else {}
        made.append(make_server_sampler(PARAMS, **options))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


def over_nccl(nccl: list[int] | None = None) -> GroupPush:
    return GroupPush(lambda: GlooEnd(nccl), push_seconds=LIMITS.push_seconds)


def wait_for(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + protocol.HEALTH, timeout=5):
            return True
    except OSError:
        return False


def recorded(url: str) -> dict[str, Any]:
    """What a server was asked since the last time."""
    with urllib.request.urlopen(url + "/recorded", timeout=5) as answer:
        return json.loads(answer.read())


def tell(url: str, behave: Mapping[str, str]) -> None:
    urllib.request.urlopen(urllib.request.Request(url + "/behave", json.dumps(behave).encode()), timeout=5).close()


def all_ready(sampler: ServerSampler) -> bool:
    return len(sampler.pool.ready) == len(sampler.pool.servers)


def versions(groups: list[Group]) -> set[int]:
    return {completion.policy_version for group in groups for completion in group.completions}


def routes(calls: list[list[Any]]) -> list[str]:
    return [route for route, _ in calls]


def written(folder: Path) -> set[str]:
    """The versions that were written as files."""
    return {path.name.split(":")[1] for path in folder.glob("weights/weights-*/*:*")}


@pytest.mark.proves("F55")
def test_a_group_gets_every_version_over_the_device_and_no_files_after_the_first(
    servers_of: Callable[[int], ChildServers],
    sampler_of: MakeSampler,
    policy: TrainedPolicy,
    prompts: list[Prompt],
    tmp_path: Path,
) -> None:
    servers = servers_of(2)
    sampler = sampler_of(servers, push=over_nccl())
    sampler.load_weights(policy, version=0)
    wait_for(lambda: all_ready(sampler))
    for url in servers.urls:
        assert recorded(url)["calls"][0][0] == PAUSE
    for version in (1, 2):
        move(policy)
        sampler.load_weights(policy, version=version)
        shipment = make_shipment(policy, "", version, matrix_type=torch.bfloat16)
        assert all_ready(sampler)
        ranks = set()
        for url in servers.urls:
            found = recorded(url)
            calls, label = found["calls"], found["label"]
            if version == 1:
                route, body = calls.pop(0)
                settings = body["init_info"]["settings"]
                assert (route, body["init_info"]["way"]) == (protocol.INIT, "nccl")
                assert (settings["master_address"], settings["world_size"]) == ("127.0.0.1", 3)
                assert settings["packed"] is True
                ranks.add(settings["rank_offset"])
            assert calls == [
                [PAUSE, None],
                [protocol.START, None],
                [protocol.UPDATE, {"update_info": shipment.header()}],
                [protocol.FINISH, {"weight_version": label}],
                [protocol.RESUME, None],
            ]
            assert label.split(":")[1:] == shipment.label.split(":")[1:]
            assert found["sums"] == {name: float(weight.double().sum()) for name, weight in shipment}
        assert ranks == ({1, 2} if version == 1 else set())
        assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {version}
    assert written(tmp_path) == {"0"}


def test_a_server_that_cannot_join_fetches_files_and_the_others_are_a_group_at_the_next_version(
    servers_of: Callable[[int], ChildServers], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    servers = servers_of(2)
    unable, able = servers.urls
    sampler = sampler_of(servers, push=over_nccl())
    sampler.load_weights(policy, version=0)
    wait_for(lambda: all_ready(sampler))
    tell(unable, {protocol.INIT: "fail"})
    move(policy)
    waiting = time.monotonic()
    tell_later(unable, sampler)
    sampler.load_weights(policy, version=1)
    assert time.monotonic() - waiting < LIMITS.gone_seconds
    assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {1}
    wait_for(lambda: all_ready(sampler))  # who waited for the other was started again
    recorded(unable), recorded(able)
    move(policy)
    sampler.load_weights(policy, version=2)
    wait_for(lambda: all_ready(sampler))
    assert recorded(unable)["calls"][1][1] == {"init_info": {}}
    [_, joins] = recorded(able)["calls"][0]
    assert joins["init_info"]["settings"]["world_size"] == 2
    assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {2}


def test_a_server_with_another_nccl_gets_files_and_nobody_waits_for_it(
    servers_of: Callable[[int], ChildServers], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    servers = servers_of(2)
    other, alike = servers.urls
    said: list[str] = []
    sampler = sampler_of(servers, push=over_nccl(NCCL))
    sampler.notify = said.append
    sampler.load_weights(policy, version=0)
    wait_for(lambda: all_ready(sampler))
    tell(other, {"nccl": [2, 26, 2]})
    for version in (1, 2, 3):
        recorded(other), recorded(alike)
        move(policy)
        sampler.load_weights(policy, version=version)
        wait_for(lambda: all_ready(sampler))
        assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {version}
    assert [text for text in said if "gets weights as files" in text and "another NCCL" in text and other in text]
    assert not [text for text in said if "poisoned" in text or "started again" in text]
    assert recorded(alike)["sums"], "the other one is a group with the trainer"
    assert sum("another NCCL" in text for text in said) == 1


def tell_later(url: str, sampler: ServerSampler) -> None:
    """A server is itself again once it was left out of the group."""

    def hear(text: str) -> None:
        if "left out" in text:
            tell(url, {})

    sampler.notify = hear


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_member_that_is_lost_in_the_middle_costs_the_others_a_restart_and_no_hang(
    fault: str,
    servers_of: Callable[[int], ChildServers],
    sampler_of: MakeSampler,
    policy: TrainedPolicy,
    prompts: list[Prompt],
) -> None:
    servers = servers_of(2)
    sampler = sampler_of(servers, push=over_nccl())
    for version in (0, 1):
        sampler.load_weights(policy, version=version)
        wait_for(lambda: all_ready(sampler))
        move(policy)
    processes = {servers.process_of(url).pid for url in servers.urls}
    tell(servers.urls[0], {protocol.UPDATE: fault})
    sampler.load_weights(policy, version=2)
    assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {2}
    wait_for(lambda: all_ready(sampler))
    assert not processes & {servers.process_of(url).pid for url in servers.urls}
    for url in servers.urls:
        assert protocol.UPDATE in routes(recorded(url)["calls"])
    move(policy)
    sampler.load_weights(policy, version=3)
    for url in servers.urls:
        calls = recorded(url)["calls"]
        assert routes(calls)[0] == protocol.INIT
        assert calls[0][1]["init_info"]["settings"]["world_size"] == 3
    assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {3}


@pytest.mark.proves("F60")
def test_weights_as_files_wake_a_server_in_the_same_order_and_again_for_more_of_a_step(
    servers_of: Callable[[int], ChildServers], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    servers = servers_of(1)
    [url] = servers.urls
    sampler = sampler_of(servers, sleep=True)
    sampler.load_weights(policy, version=0)
    sampler.sample(SamplingRequest(prompts, 4))
    recorded(url)
    assert versions(sampler.sample(SamplingRequest(prompts, 4))) == {0}
    asleep = [PAUSE, f"{protocol.SLEEP}?level=2"]
    woken = [f"{protocol.WAKE}?tags=weights", protocol.INIT, protocol.START, protocol.UPDATE, protocol.FINISH]
    woken += [f"{protocol.WAKE}?tags=kv_cache", protocol.RESUME]
    assert routes(recorded(url)["calls"]) == [*woken, *asleep]
    for _ in range(2):  # measurements have settings of their own
        sampler.sample(SamplingRequest(prompts, 4, params=PARAMS))
    assert routes(recorded(url)["calls"]) == woken
