"""Does a server sample for many callers what each would get alone, and change its weights only as a whole?"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from served import FAST, LocalServer, ThroughServers, make_server_sampler, move

from oncurve.algorithm.precision import key_of, narrow, use_dither
from oncurve.core.decoder import ModuleDecoder
from oncurve.core.errors import ConfigError, SamplerError
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.servers import protocol
from oncurve.fleet.serving.http_app import check_host
from oncurve.fleet.serving.sampling import Paused, Sampling
from oncurve.fleet.settings import DeltaSettings
from oncurve.fleet.weights.shards import write_weights
from oncurve.fleet.weights.store import Contents, WeightStore
from oncurve.fleet.weights.weight_manifest import describe_files
from oncurve.fleet.weights.weight_stream import make_shipment
from oncurve.model import decode_proof as proof
from oncurve.model.decoding import LayerDecoder
from oncurve.observe.manifest import FileSum
from oncurve.policy.lora import add_adapter
from oncurve.policy.settings import LoraSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARAMS = SamplingParams(max_completion_tokens=20)


@pytest.fixture
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


@pytest.fixture
def local(policy: TrainedPolicy) -> Iterator[LocalServer]:
    made = LocalServer(policy)
    yield made
    made.close()


@pytest.fixture
def sampling(policy: TrainedPolicy) -> Iterator[Sampling]:
    made = Sampling(policy, max_rows=8)
    yield made
    made.close()


def asked(
    prompt: str, *, count: int = 3, first_key: int = 0, tokens: int = 20, **changes: Any
) -> protocol.GenerateRequest:
    ids = tuple(ord(letter) for letter in prompt)
    keys = tuple(range(first_key, first_key + count))
    params = replace(PARAMS, max_completion_tokens=tokens, **changes)
    return protocol.GenerateRequest("name", ids, count, params, (200, 201, 202, 203), keys)


def result(sampling: Sampling, request: protocol.GenerateRequest) -> list[protocol.GeneratedCompletion]:
    return sampling.submit(request).future.result(180)


def post(url: str, route: str, body: Any = None, *, token: str | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url + route, data=data, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def get(url: str, route: str) -> Any:
    with urllib.request.urlopen(url + route, timeout=20) as answer:
        return json.loads(answer.read())


def test_a_completion_is_the_same_alone_and_among_others_that_come_and_go(sampling: Sampling) -> None:
    requests = [asked("abcdefghijk"[:size], first_key=10 * size, tokens=5 + 3 * size) for size in range(1, 11)]
    alone = [result(sampling, request) for request in requests]
    futures = [sampling.submit(request).future for request in requests]  # more rows than there are slots
    for one, future in zip(alone, futures, strict=True):
        together = future.result(180)
        assert [row.token_ids for row in together] == [row.token_ids for row in one]
        assert [row.finish_reason for row in together] == [row.finish_reason for row in one]
        for row, other in zip(together, one, strict=True):
            np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)


def test_requests_with_other_settings_wait_for_their_turn_and_get_them(sampling: Sampling) -> None:
    sharp = [asked("ab", temperature=temperature) for temperature in (1.0, 0.0, 1.0, 0.3)]
    alone = [result(sampling, request) for request in sharp]
    futures = [sampling.submit(request).future for request in sharp]
    assert [[row.token_ids for row in future.result(180)] for future in futures] == [
        [row.token_ids for row in one] for one in alone
    ]
    greedy = alone[1]
    assert greedy[0].token_ids == greedy[1].token_ids


def test_what_is_cut_off_says_so_and_the_rest_goes_on(sampling: Sampling) -> None:
    long, other = asked("abc", tokens=200), asked("xyz", first_key=50, tokens=150)
    alone = result(sampling, other)
    request, kept = sampling.submit(long), sampling.submit(other)
    sampling.drop(request)
    cut = request.future.result(180)
    assert {row.finish_reason for row in cut} <= {"abort", "stop", "length"}
    assert [row.token_ids for row in kept.future.result(180)] == [row.token_ids for row in alone]


def test_a_pause_cuts_off_or_waits_and_takes_nothing(sampling: Sampling) -> None:
    request = sampling.submit(asked("abc", tokens=200, min_completion_tokens=200))
    sampling.pause(abort=True)
    cut = request.future.result(0)
    assert {row.finish_reason for row in cut} == {"abort"}
    assert max(len(row.token_ids) for row in cut) < 200
    with pytest.raises(Paused):
        sampling.submit(asked("abc"))
    sampling.resume()
    request = sampling.submit(asked("abc", tokens=60, min_completion_tokens=60))
    sampling.pause(abort=False)
    assert {row.finish_reason for row in request.future.result(0)} == {"length"}
    assert sampling.num_running == 0


def test_weights_change_only_while_nothing_runs(sampling: Sampling) -> None:
    with pytest.raises(SamplerError, match="pause it first"):
        sampling.change(lambda: None, "new")
    sampling.pause(abort=True)
    sampling.change(lambda: None, "new")
    sampling.resume()
    assert {row.versions for row in result(sampling, asked("abc"))} == {("new",)}


def test_a_caller_that_goes_away_frees_its_place(local: LocalServer) -> None:
    body = protocol.request_body(
        (1, 2),
        request_id="x",
        keys=range(4),
        params=replace(PARAMS, max_completion_tokens=250),
        end_ids=(),
        takes_keys=True,
    )
    data = json.dumps(body).encode()
    request = urllib.request.Request(local.url + protocol.GENERATE, data=data, method="POST")
    turns = local.server.sampling._turn

    def slowly(*args: Any) -> None:
        time.sleep(0.1)
        turns(*args)

    local.server.sampling._turn = slowly  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(request, timeout=0.2)
    end = time.monotonic() + 15  # all tokens would take 25 seconds
    while get(local.url, protocol.WEIGHT_INFO)["running"]:
        assert time.monotonic() < end


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "no JSON"),
        ([], "must be an object"),
        ({"token_ids": [1]}, "sampling_params"),
        ({"token_ids": [], "sampling_params": {}}, "there must be a prompt"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 4000}}, "at most 256"),
        ({"token_ids": ["a"], "sampling_params": {}}, "token numbers"),
        ({"token_ids": [1, 10**6], "sampling_params": {}}, "token 1000000 is none of the model's"),
        ({"token_ids": [1, 10**6], "sampling_params": {"prompt_logprobs": 0}}, "embedding has the tokens 0 to"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "at least 1"),
        ({"token_ids": [1], "sampling_params": {"n": 2, "extra_args": {protocol.KEYS: [1]}}}, "1 stream keys"),
    ],
)
def test_a_request_that_is_wrong_is_refused_with_the_reason(local: LocalServer, body: Any, says: str) -> None:
    status, answer = post(local.url, protocol.GENERATE, body)
    assert status == 400
    assert says in answer["error"]


def test_who_has_no_token_learns_only_that_the_server_is_well(policy: TrainedPolicy) -> None:
    local = LocalServer(policy, token="secret")
    try:
        assert get(local.url, protocol.HEALTH) == {}
        for route in (protocol.GENERATE, protocol.UPDATE, protocol.PAUSE):
            assert post(local.url, route)[0] == 401
            assert post(local.url, route, token="guess")[0] == 401
        assert post(local.url, protocol.RESUME, token="secret")[0] == 200
    finally:
        local.close()


def test_other_machines_are_let_in_only_with_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_host(host, None)
    check_host("0.0.0.0", "secret")
    for host in ("0.0.0.0", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="ONCURVE_SERVER_TOKEN"):
            check_host(host, None)


def publish(policy: TrainedPolicy, folder: Path, version: int = 1) -> dict[str, Any]:
    store = WeightStore(folder, run="test", keep=5)
    shipment = make_shipment(policy, "test", version, matrix_type=None)
    manifest = store.publish(version, lambda place: write_weights(shipment, place))
    return manifest.message(address=None, token=None)


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "another model", "part"])
def test_weights_that_are_not_whole_change_nothing(
    damage: str, local: LocalServer, policy: TrainedPolicy, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in local.server.update.model.state_dict().items()}
    message = publish(policy, tmp_path)
    path = Path(message["folder"]) / message["files"][0]["name"]
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "bit":
        data = bytearray(path.read_bytes())
        data[-7] ^= 4
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    else:
        from safetensors.torch import load_file, save_file

        weights = load_file(path)
        if damage == "part":
            del weights["model.norm.weight"]
        else:
            weights["model.norm.weight"] = torch.ones(7)
        save_file(weights, path)
        message["files"] = [{"name": path.name, **FileSum.of(path).entry()}]
    post(local.url, protocol.PAUSE)
    post(local.url, protocol.START)
    status, answer = post(local.url, protocol.UPDATE, {"update_info": message})
    assert (status, "keeps the weights default" in answer["error"]) == (
        409 if damage in ("another model", "part") else 500,
        True,
    )
    assert post(local.url, protocol.FINISH, {"weight_version": message["label"]})[0] == 500
    assert get(local.url, protocol.WEIGHT_INFO)["weight_version"] == "default"
    for name, tensor in local.server.update.model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.proves("F62")
def test_servers_that_do_not_see_the_disk_fetch_weights_with_a_token(
    policy: TrainedPolicy, make_policy: Callable[..., TrainedPolicy], tiny_model: Callable[..., PreTrainedModel],
    make_prompts: Callable[..., list[Prompt]], tmp_path: Path,
) -> None:  # fmt: skip
    local = LocalServer(policy)
    sampler = make_server_sampler(
        PARAMS, urls=[local.url], weights_folder=tmp_path, weights_address="127.0.0.1:0", deadlines=FAST
    )
    other = make_policy(tiny_model("qwen2", seed=5))
    engine, prompts = InProcessEngine(PARAMS), make_prompts("a b", "c")
    engine.load_weights(other, version=3)
    try:
        sampler.load_weights(other, version=3)
        got, expected = sampler.sample(SamplingRequest(prompts, 3)), engine.sample(SamplingRequest(prompts, 3))
        assert [[one.token_ids for one in group.completions] for group in got] == [
            [one.token_ids for one in group.completions] for group in expected
        ]
        address = sampler.pool.address
        [manifest] = sampler._store.published
        for place, status in ((f"/{manifest.label}/{manifest.files[0].name}", 401), ("/x/../../etc/passwd", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{address}{place}")
            assert refused.value.code in (status, 401)
            refused.value.close()
    finally:
        sampler.close()
        local.close()


def test_an_adapter_reaches_servers_that_had_whole_weights_of_its_base(
    make_policy: Callable[..., TrainedPolicy],
    tiny_model: Callable[..., PreTrainedModel],
    make_prompts: Callable[..., list[Prompt]],
) -> None:
    plain = make_policy()
    model = tiny_model()
    adapter = add_adapter(model, LoraSettings(rank=2), base="tiny")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    policy, prompts = make_policy(model, adapter=adapter), make_prompts("a b", "c")
    greedy = replace(PARAMS, temperature=0.0)
    through, engine = ThroughServers(greedy, count=1), InProcessEngine(greedy)
    try:
        through.load_weights(plain, version=0)
        first = through.sample(SamplingRequest(prompts, 1))
        through.load_weights(policy, version=1)
        engine.load_weights(policy, version=1)
        got, expected = through.sample(SamplingRequest(prompts, 1)), engine.sample(SamplingRequest(prompts, 1))
        assert [group.completions[0].token_ids for group in got] == [
            group.completions[0].token_ids for group in expected
        ]
        assert [group.completions[0].token_ids for group in first] != [group.completions[0].token_ids for group in got]
    finally:
        ThroughServers.close_all()


def test_a_store_keeps_the_newest_and_removes_what_the_dead_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dead = tmp_path / f"weights-{socket.gethostname()}-999999999-old"
    foreign = tmp_path / "weights-another-machine-1-old"
    for folder in (dead, foreign):
        folder.mkdir()
    store = WeightStore(Path("."), run="now", keep=2)
    assert store.root.is_absolute(), "servers have other working folders"
    assert not dead.exists()
    assert foreign.exists()

    def write(folder: Path) -> Contents:
        (folder / "a.safetensors").write_bytes(HEADER)
        return describe_files(folder)

    labels = [store.publish(version, write).label for version in range(4)]
    assert store.publish(3, write).label == labels[3]
    assert sorted(path.name for path in store.root.iterdir()) == sorted(labels[2:])
    store.close()
    assert not store.root.exists()


HEADER = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""


@pytest.mark.parametrize("way", ["backbone", "module"])
@pytest.mark.parametrize("calls", [(1,), (3, 6)])
def test_where_memory_runs_out_callers_get_the_same_from_fewer_rows(
    calls: tuple[int, ...], way: str, policy: TrainedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: Any = (LayerDecoder, "hidden")
    if way == "module":
        monkeypatch.setattr(proof, "backbone_of", lambda model: None)
        where = (ModuleDecoder, "_logits")
    requests = [asked(text, first_key=10 * place, count=4) for place, text in enumerate(("1 + 1 =", "a", "b c"))]
    sampling = Sampling(policy, max_rows=8)
    expected = [result(sampling, request) for request in requests]
    sampling.close()
    right, seen = getattr(*where), []

    def fails(*given: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return right(*given, **options)

    monkeypatch.setattr(*where, fails)
    tight = Sampling(policy, max_rows=8)
    handed = [tight.submit(request) for request in requests]
    found = [one.future.result(180) for one in handed]
    tight.close()
    assert tight.scheduler.decoders.budget.limit == 8 // 2 ** len(calls)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


@pytest.mark.parametrize("way", ["backbone", "module"])
def test_a_request_that_does_not_fit_alone_is_refused_and_the_next_one_is_served(
    way: str, policy: TrainedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: Any = (LayerDecoder, "prefill")
    if way == "module":
        monkeypatch.setattr(proof, "backbone_of", lambda model: None)
        where = (ModuleDecoder, "prefill")
    right = getattr(*where)

    def fails(self: Any, ids: Any, *given: Any) -> Any:
        if max(len(row) for row in ids) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return right(self, ids, *given)

    sampling = Sampling(policy, max_rows=8)
    expected = result(sampling, asked("1 + 1 ="))
    monkeypatch.setattr(*where, fails)
    with pytest.raises(SamplerError, match=r"^there is not enough memory to sample one completion of up to"):
        result(sampling, asked("x" * 120))
    found = result(sampling, asked("1 + 1 ="))
    sampling.close()
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("deltas", [None, DeltaSettings()], ids=["files", "differences"])
def test_a_server_samples_from_the_trainers_dithered_copies(
    deltas: DeltaSettings | None,
    make_policy: Callable[..., TrainedPolicy],
    make_prompts: Callable[..., list[Prompt]],
    tmp_path: Path,
) -> None:
    """With weights between the numbers of bfloat16, and in that arithmetic: the tokens of the process that trains."""
    policy = make_policy("llama", compute_type="bfloat16")
    local = LocalServer(policy)
    use_dither(policy.model, 7)
    params = SamplingParams(max_completion_tokens=16, seed=3)
    servers = make_server_sampler(params, urls=[local.url], weights_folder=tmp_path, deadlines=FAST, deltas=deltas)
    engine = InProcessEngine(params)
    try:
        for version in (1, 2):
            move(policy)
            found = []
            for sampler in (servers, engine):
                sampler.load_weights(policy, version)
                groups = sampler.sample(SamplingRequest(make_prompts("one and", "2+"), 4, step=version))
                found.append([(one.token_ids, one.sampler_logprobs) for group in groups for one in group.completions])
            tokens = [[one[0] for one in side] for side in found]
            pairs = [
                pair for sides in zip(*found, strict=True) for pair in zip(*(one[1] for one in sides), strict=False)
            ]
            gap = max(abs(one - other) for one, other in pairs)
            if deltas is None:
                assert tokens[0] == tokens[1]
                assert gap == 0
            own = dict(local.server.sampling.policy.model.named_parameters())
            for name, weight in policy.model.named_parameters():
                key = key_of(7, name)
                assert torch.equal(narrow(own[name], torch.bfloat16, key), narrow(weight, torch.bfloat16, key)), name
    finally:
        servers.close()
        local.close()
