"""Do servers get what changed of the weights, sample from nothing else, and help themselves where something is lost?"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from served import Listener, LocalServer, make_server_sampler

from oncurve.core.errors import SamplerError
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.prefetch import Prefetch
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.settings import Deadlines, DeltaSettings
from oncurve.fleet.weights import delta_copy, delta_store
from oncurve.fleet.weights.delta_store import DeltaStore
from oncurve.fleet.weights.weight_manifest import WeightFile
from oncurve.policy.trained_policy import TrainedPolicy

PARAMS = SamplingParams(max_completion_tokens=4)
PATIENT = Deadlines(silent_seconds=60.0, push_seconds=100.0, gone_seconds=200.0)


@pytest.fixture
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


@pytest.fixture
def servers(policy: TrainedPolicy) -> Iterator[list[LocalServer]]:
    made = [LocalServer(policy) for _ in range(2)]
    yield made
    for server in made:
        server.close()


@torch.no_grad()
def train_a_little(policy: TrainedPolicy) -> None:
    for parameter in policy.model.parameters():
        parameter.add_(1e-6 * torch.randn_like(parameter))


def prompts(policy: TrainedPolicy, count: int = 3) -> list[Prompt]:
    ids = tuple(policy.tokenizer("a b")["input_ids"])
    return [Prompt("a b", ids, index, {}) for index in range(count)]


def assert_has(server: LocalServer, policy: TrainedPolicy) -> None:
    """The server has the policy's weights as they are published: matrices in half width."""
    found = server.server.sampling.policy.model.state_dict()
    for name, weight in policy.model.state_dict().items():
        expected = weight.bfloat16().float() if weight.dim() > 1 else weight
        assert torch.equal(found[name].float(), expected), name


def make(servers: list[LocalServer], folder: Path, **settings: object) -> ServerSampler:
    address = settings.pop("address", None)
    return make_server_sampler(
        PARAMS,
        urls=[server.url for server in servers],
        weights_folder=folder,
        weights_address=address,  # type: ignore[arg-type]
        deadlines=PATIENT,
        deltas=DeltaSettings(**settings),  # type: ignore[arg-type]
    )


@pytest.mark.proves("F72")
@pytest.mark.parametrize("way", ["folder", "http", "url"])
def test_a_step_costs_a_small_share_of_the_bytes_and_servers_sample_from_the_result(
    policy: TrainedPolicy, servers: list[LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    listener, address, fetched, usual = Listener(), None, list[tuple[str, int]](), delta_copy.fetch_file

    def fetch_one(message: Mapping[str, Any], label: str, file: WeightFile, folder: Path) -> Path:
        fetched.append((label, file.size))
        return usual(message, label, file, folder)

    monkeypatch.setattr(delta_copy, "fetch_file", fetch_one)
    if way == "url":
        app = web.Application()
        app.router.add_static("/bucket", tmp_path)
        address = f"{listener.listen(app)}/bucket"
    elif way == "http":
        address = "127.0.0.1:0"
    sampler = make(servers, tmp_path, address=address)
    try:
        for version in range(4):
            train_a_little(policy)
            sampler.load_weights(policy, version)
            groups = sampler.sample(SamplingRequest(prompts(policy), 2, step=version))
            assert {one.policy_version for group in groups for one in group.completions} == {version}
            while len(sampler.pool.ready) < len(servers):
                time.sleep(0.01)
            for server in servers:
                assert_has(server, policy)
        store = sampler._store
        assert isinstance(store, DeltaStore)
        last = store.last
        assert last is not None
        assert 0 < last.changed_fraction < 0.1
        assert last.bytes < 0.1 * last.whole_bytes
        newest = [size for label, size in fetched if label == store.published[-1].label]
        assert sum(newest) == len(servers) * last.bytes, "what they fetched is the difference"
    finally:
        sampler.close()
        if way == "url":
            listener.close()
        else:
            listener.loop.close()


def test_a_damaged_difference_is_repaired_without_anybody_asking(
    policy: TrainedPolicy, servers: list[LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make(servers, tmp_path)
    try:
        sampler.load_weights(policy, 0)
        store = sampler._store
        usual = store.publish_shipment

        def damage(shipment: object) -> object:
            manifest = usual(shipment)  # type: ignore[arg-type]
            for path in Path(manifest.folder).glob("*.delta"):
                path.write_bytes(path.read_bytes()[:-1])
            for path in store.root.glob("*:0:*/*.safetensors"):
                path.unlink()
            return manifest

        monkeypatch.setattr(store, "publish_shipment", damage)
        train_a_little(policy)
        sampler.load_weights(policy, 1)
        sampler.sample(SamplingRequest(prompts(policy), 2, step=1))
        assert sampler.pool.counts["repaired"] >= 1
        assert any(server.server.sampling.label.split(":")[1] == "1" for server in servers)
        for server in servers:
            if server.server.sampling.label.split(":")[1] == "1":
                assert_has(server, policy)
    finally:
        sampler.close()


def test_weights_are_coded_and_sent_while_training_changes_them(
    policy: TrainedPolicy, servers: list[LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is of one moment; servers hear of it once it is whole, and load no other."""
    sampler, gate = make(servers[:1], tmp_path), threading.Event()
    ahead = Prefetch(sampler, lambda step: prompts(policy), total_steps=9, prepare=sampler.prepare)  # type: ignore[arg-type]
    usual = delta_store.encode
    monkeypatch.setattr(delta_store, "encode", lambda *words: gate.wait(200) and usual(*words))
    try:
        ahead.load_weights(policy, 0)
        ahead.sample(SamplingRequest(prompts(policy), 2, step=0))
        for step in range(1, 4):
            gate.clear()
            ahead._ahead[step].future.result()
            train_a_little(policy)
            given = copy.deepcopy(policy)
            ahead.load_weights(policy, step)
            request = SamplingRequest(prompts(policy), 2, step=step)
            groups = ahead.sample(request)  # comes back before the weights are coded
            train_a_little(policy)
            assert {one.policy_version for group in groups for one in group.completions} == {max(0, step - 1)}
            assert servers[0].server.sampling.label.split(":")[1] == str(step - 1)
            gate.set()
            ahead.sample(SamplingRequest(prompts(policy, 1), 2, step=step, params=PARAMS))  # waits for them
            assert_has(servers[0], given)
    finally:
        gate.set()
        ahead.close()


def test_a_failure_of_coding_ends_the_run_with_a_reason(
    policy: TrainedPolicy, servers: list[LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object) -> None:
        raise MemoryError

    sampler = make(servers[:1], tmp_path)
    ahead = Prefetch(sampler, lambda step: prompts(policy), total_steps=9, prepare=sampler.prepare)  # type: ignore[arg-type]
    try:
        ahead.load_weights(policy, 0)
        ahead.sample(SamplingRequest(prompts(policy), 2, step=0))
        monkeypatch.setattr(delta_store, "encode", fail)
        ahead.load_weights(policy, 1)
        ahead.sample(SamplingRequest(prompts(policy), 2, step=1))
        with pytest.raises(SamplerError, match=r"step 1 cannot be published .* MemoryError.*oncurve resume"):
            ahead.sample(SamplingRequest(prompts(policy), 2, step=2))
        assert servers[0].server.sampling.label.split(":")[1] == "0", "nobody heard of what was not published"
    finally:
        ahead.close()


def test_a_server_behind_a_slow_link_keeps_no_other_waiting(
    policy: TrainedPolicy, servers: list[LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, gate = make(servers, tmp_path), threading.Event()
    slow = servers[1].server.update.fetcher
    usual = slow.fetch
    monkeypatch.setattr(slow, "fetch", lambda message: gate.wait(200) and usual(message))
    try:
        for version in range(3):
            train_a_little(policy)
            sampler.load_weights(policy, version)
            groups = sampler.sample(SamplingRequest(prompts(policy), 2, step=version))
            assert {one.policy_version for group in groups for one in group.completions} == {version}
            assert [server.url for server in sampler.pool.ready] == [servers[0].url]
            assert sampler.weight_metrics()["weights/late_servers"] == 1
        gate.set()
        while len(sampler.pool.ready) < 2:
            sampler.load_weights(policy, version)
        assert_has(servers[1], policy)
    finally:
        gate.set()
        sampler.close()


def test_weights_that_were_not_sent_do_not_get_their_name(
    policy: TrainedPolicy, servers: list[LocalServer], tmp_path: Path
) -> None:
    """An end of an update that comes late, after another update was begun."""
    sampler = make(servers[:1], tmp_path)
    server = servers[0]
    try:
        sampler.load_weights(policy, 0)
        manifest = sampler._manifest
        assert manifest is not None
        server.server.update.stage(manifest.message(address=None, token=None))

        async def finish(label: str) -> int:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{server.url}{protocol.FINISH}", json={"weight_version": label}) as answer,
            ):
                return answer.status

        assert server.listener.loop.call(finish("run:9:another")) == 500
        assert server.server.sampling.label == manifest.label
    finally:
        sampler.close()
