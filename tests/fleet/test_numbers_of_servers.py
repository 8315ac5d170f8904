"""Do the parts of sampling over servers count, order and refuse as they say, each asked alone?"""

from __future__ import annotations

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from oncurve.core.errors import SamplerError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.launch import local
from oncurve.fleet.launch.local import ProcessSupervisor
from oncurve.fleet.launch.placement import Machine
from oncurve.fleet.prefetch import Prefetch, _matching
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.client import Backoff, Report, ServerClient, ServerFailed, ServerLost, ServerSlow
from oncurve.fleet.servers.pending_group import PendingGroup
from oncurve.fleet.servers.rollout_server import RolloutServer
from oncurve.fleet.servers.server_pool import ServerPool
from oncurve.fleet.serving.http_app import SamplingServer
from oncurve.fleet.settings import Deadlines
from oncurve.fleet.settle import placement_of, trainers_here
from oncurve.fleet.weights.delta import Region, _cover, _read, _unpack, _vary, encode
from oncurve.recipe.load import parse_config

PARAMS = SamplingParams(max_completion_tokens=8, seed=3)
LIMITS = Deadlines(connect_seconds=1.0, push_seconds=5.0, silent_seconds=12.0, gone_seconds=5.0)


@pytest.mark.parametrize(
    ("takes_keys", "has_adapter", "more", "sampling", "model"),
    [
        (True, True, {"stop": ("x",)}, {"include_stop_str_in_output": True, "extra_args": {protocol.KEYS: [7, 8]}},
         None),
        (False, True, {}, {"detokenize": False}, protocol.ADAPTER_MODEL),
        (False, False, {"top_p": 0.5}, {"detokenize": False, "top_p": 0.5}, None),
    ],
)  # fmt: skip
def test_a_request_is_what_our_servers_read_and_vllm_takes(
    takes_keys: bool, has_adapter: bool, more: dict[str, Any], sampling: dict[str, Any], model: str | None
) -> None:
    params = SamplingParams(temperature=0.5, max_completion_tokens=9, min_completion_tokens=2, **more)
    body = protocol.request_body(
        (1, 2), request_id="r", keys=[7, 8], params=params, end_ids=(3,), takes_keys=takes_keys, has_adapter=has_adapter
    )
    assert body.get("model") == model
    usual = {
        "n": 2, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 9, "min_tokens": 2,
        "stop": list(params.stop), "stop_token_ids": [3], "logprobs": 0,
    }  # fmt: skip
    assert body["sampling_params"] == usual | sampling
    read = protocol.read_request(body)
    assert (read.request_id, read.token_ids, read.count, read.end_ids) == ("r", (1, 2), 2, (3,))
    assert (read.params, read.keys) == (params, (7, 8) if takes_keys else None)
    assert (read.is_scored, read.without_adapter) == (False, False)


def test_a_bare_request_has_the_defaults_of_vllm_and_fits_up_to_the_context() -> None:
    read = protocol.read_request({"token_ids": [1, 2], "sampling_params": {"stop": "x"}})
    assert read.params == SamplingParams(temperature=1.0, max_completion_tokens=16, stop=("x",))
    assert (read.count, read.keys, read.end_ids, read.request_id) == (1, None, (), "")
    read.check_lengths(18)
    with pytest.raises(ValueError, match="at most 17"):
        read.check_lengths(17)
    for adapter, model in ((True, protocol.ADAPTER_MODEL), (False, None), (None, None)):
        body = protocol.score_body([1, 2, 3], request_id="r", adapter=adapter)
        scored = protocol.read_request(body)
        assert (scored.is_scored, scored.without_adapter, body.get("model")) == (True, adapter is False, model)
        assert (body["sampling_params"]["max_tokens"], body["sampling_params"]["prompt_logprobs"]) == (1, 0)
        scored.check_lengths(3)
    with pytest.raises(ValueError, match="there must be a prompt"):
        protocol.read_request({"sampling_params": {}}).check_lengths(99)
    answer = protocol.scores_body("r", [1, 2, 3], [-0.5, -1.5])
    assert answer["prompt_logprobs"] == [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": -1.5}}]
    assert protocol.read_scores(answer, [1, 2, 3]) == [-0.5, -1.5]
    for wrong in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="and it gives 3 log-prob"):
            protocol.read_scores(answer, wrong)
    with pytest.raises(ValueError, match="and it gives 0"):
        protocol.read_scores([], [1])


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"n": 0}, "n is 0"), ({"n": "1"}, "n is '1'"), ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": -1}, "min_tokens is -1"), ({"speed": 1}, "speed is not known"),
        ({"n": 2, "extra_args": {protocol.KEYS: [1]}}, "n is 2, but there are 1 stream keys"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be"), ({"stop_token_ids": 3}, "stop_token_ids must be"),
        (None, "the body must be an object"),
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused(sampling: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        protocol.read_request({"token_ids": [1], "sampling_params": sampling})


def test_an_answer_is_read_by_place_with_where_each_version_begins() -> None:
    first = protocol.GeneratedCompletion([5, 6, 7], [-1.0, -2.0, -3.0], "stop", ("a", "b"), (0, 2))
    empty = protocol.GeneratedCompletion([], [], "length", ("a",))
    body = protocol.response_body("r", [first, empty])
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}]
    assert body["choices"][0]["weight_versions"] == spans
    body["choices"].reverse()
    read = protocol.read_response({**body, "request_id": "cmpl-r"}, request_id="r", count=2)
    assert [(list(one.token_ids), list(one.logprobs), one.finish_reason) for one in read] == [
        ([5, 6, 7], [-1.0, -2.0, -3.0], "stop"), ([], [], "length"),
    ]  # fmt: skip
    assert (read[0].versions, read[0].starts) == (("a", "b"), (0, 2))
    assert read[0].dated({"a": 3, "b": 4}) == [(0, 3), (2, 4)]
    for change, says in (
        ({"request_id": "x"}, "another request"), ({"choices": body["choices"][:1]}, r"the places \[1\]"),
        ({"choices": [{**body["choices"][1], "finish_reason": "why"}, body["choices"][0]]}, "the reason 'why'"),
        ({"choices": [{**body["choices"][1], "weight_versions": None}, body["choices"][0]]}, "weight versions None"),
        ({"choices": [{**body["choices"][1], "token_ids": [5]}, body["choices"][0]]}, "of 1 tokens has 3 log-prob"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            protocol.read_response({**body, **change}, request_id="r", count=2)


def test_a_group_takes_whole_answers_of_weights_that_are_young_enough() -> None:
    job = PendingGroup("run:1", (5, 6), [1, 2, 3], PARAMS, (), num_failures=4)
    assert (job.missing, job.cost_tokens) == ([0, 1, 2], 2 + 3 * 8)
    made = [
        protocol.GeneratedCompletion([6], [-1.0], reason, (label,))  # type: ignore[arg-type]
        for reason, label in (("stop", "run:1"), ("abort", "run:1"), ("stop", "run:0"))
    ]
    assert job.fill([0, 1, 2], made) == (1, 1)
    assert (job.missing, job.cost_tokens, job.num_failures) == ([1, 2], 2 + 2 * 8, 0)
    other = protocol.GeneratedCompletion([7], [-2.0], "stop", ("run:1",))
    assert job.fill([0, 2], [other, other]) == (0, 0)
    assert job.completions == [made[0], other], "the first answer for a place stays"
    mixed = PendingGroup("run:3", (5,), [1], PARAMS, (), labels={"a": 1, "b": 2, "c": 3}, oldest=2)
    allowed = [mixed.allows(versions) for versions in (("b",), ("a",), ("c", "b"), ("c", "a"), ("x",), ())]
    assert allowed == [True, False, True, False, False, False]


def test_pauses_between_attempts_double_up_to_the_longest() -> None:
    pauses = Backoff(first=1.0, longest=3.0)
    for _ in range(2):
        for limit in (1.0, 2.0, 3.0, 3.0):
            assert limit / 2 <= pauses.next() <= limit
        pauses.reset()
    usual = Backoff()
    assert 0.1 <= usual.next() <= 0.2
    for _ in range(9):
        usual.next()
    assert 2.5 <= usual.next() <= 5.0


class Session:
    """Gives one answer, or fails."""

    def __init__(self, status: int, text: str = "{}", error: Exception | None = None) -> None:
        self.status, self.words, self.error, self.asked = status, text, error, list[Any]()

    def request(self, method: str, url: str, **options: Any) -> Session:
        self.asked.append((method, url, options))
        return self

    async def __aenter__(self) -> Session:
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def text(self) -> str:
        return self.words


@pytest.mark.parametrize(
    ("session", "kind", "says"),
    [
        (Session(499), SamplerError, "refuses with 499"), (Session(500), ServerFailed, "answers 500"),
        (Session(429), ServerFailed, "answers 429"), (Session(401), SamplerError, protocol.TOKEN_VARIABLE),
        (Session(403), SamplerError, protocol.TOKEN_VARIABLE), (Session(404), SamplerError, "lacks this route"),
        (Session(200, "{"), ServerFailed, "answers no JSON"),
        (Session(0, error=TimeoutError()), ServerSlow, "within 3 s"),
        (Session(0, error=aiohttp.ClientError("no line")), ServerLost, "is lost: no line"),
        (Session(0, error=OSError()), ServerLost, "is lost: OSError"),
    ],
)  # fmt: skip
def test_every_kind_of_answer_is_told_apart(session: Session, kind: type[Exception], says: str) -> None:
    client = ServerClient("http://a:1/", session, token="secret", connect_seconds=1.0)  # type: ignore[arg-type]
    with pytest.raises(kind, match=says) as caught:
        asyncio.run(client.resume(within=3.0))
    assert type(caught.value) is kind
    [(method, url, options)] = session.asked
    assert (method, url) == ("POST", "http://a:1/resume")
    assert options["headers"] == {"Authorization": "Bearer secret"}
    assert (options["timeout"].total, options["timeout"].sock_connect) == (3.0, 1.0)


def test_each_call_of_a_server_is_its_route_with_its_words() -> None:
    def asked(call: str, *words: Any, **more: Any) -> list[Any]:
        session = Session(200, more.pop("text", "{}"))
        client = ServerClient("http://a:1", session, token=None, connect_seconds=9.0)  # type: ignore[arg-type]
        given = asyncio.run(getattr(client, call)(*words, within=3.0, **more))
        assert session.asked[0][2]["headers"] == {}
        assert session.asked[0][2]["timeout"].sock_connect == 3.0
        return [given, *((url.removeprefix("http://a:1"), options["json"]) for _, url, options in session.asked)]

    assert asked("pause") == [None, ("/pause?mode=abort&clear_cache=true", None)]
    assert asked("pause", keeps=True) == [None, ("/pause?mode=keep&clear_cache=false", None)]
    assert asked("sleep", 2) == [None, ("/sleep?level=2", None)]
    assert asked("wake", "weights") == [None, ("/wake_up?tags=weights", None)]
    assert asked("is_sleeping", text='{"is_sleeping": 1}')[0] is True
    assert asked("num_workers", text='{"world_size": 2}')[0] == 2
    assert asked("tokenize", "x", text='{"tokens": [4]}')[::1] == [
        [4], ("/tokenize", {"prompt": "x", "add_special_tokens": False}),
    ]  # fmt: skip
    assert asked("start_update")[1:] == [
        ("/init_weight_transfer_engine", {"init_info": {}}), ("/start_weight_update", None),
    ]  # fmt: skip
    assert asked("send_update", {"a": 1})[1:] == [("/update_weights", {"update_info": {"a": 1}})]
    assert asked("finish_update", "l")[1:] == [("/finish_weight_update", {"weight_version": "l"})]
    assert asked("choose_transfer", "w", {"b": 2})[1:] == [
        ("/init_weight_transfer_engine", {"init_info": {"way": "w", "settings": {"b": 2}}})
    ]
    told = '{"weight_version": "l", "takes_keys": true, "is_draining": true, "instance": "i"}'
    assert asked("report", text=told)[0] == Report("l", True, "i", True)
    assert asked("report", text="{}")[0] == Report("None", False, None, False)
    assert asked("model_config", takes_keys=True, text='{"model": {"a": 1}}') == [
        {"a": 1},
        ("/weight_info?model=1", None),
    ]
    assert asked("model_config", takes_keys=False, text='{"results": [{"a": 2}]}') == [
        {"a": 2}, ("/collective_rpc", {"method": "tell_model"}),
    ]  # fmt: skip


class Calls:
    """A client that notes its calls; some fail."""

    url = "http://a:1"

    def __init__(self, **failing: Exception) -> None:
        self.failing, self.calls = failing, list[Any]()

    def __getattr__(self, name: str) -> Any:
        async def call(*words: Any, within: float, **more: Any) -> Any:
            self.calls.append((name, *words, *more.values()))
            if name in self.failing:
                raise self.failing[name]
            return {} if name == "model_config" else None

        return call


class Fleet:
    """A pool of one server, with one version."""

    deadlines, in_flight = LIMITS, False

    def __init__(self, adapter: Any = None) -> None:
        self.labels, self.told = {"old": 0, "new": 1}, list[str]()
        self.target: Any = SimpleNamespace(label="new", adapter=adapter)
        self.why_another = lambda config: None

    def current(self) -> Any:
        return self.target

    async def message(self, manifest: Any) -> dict[str, object]:
        return {"label": manifest.label}

    async def repair(self, manifest: Any) -> None:
        self.told.append("repaired")

    def proof(self, label: str) -> None:
        return None

    def moved(self, server: RolloutServer, old: str, why: str) -> None:
        self.told.append(f"{old}>{server.state}")

    def refused(self, server: RolloutServer, why: str) -> None:
        self.told.append(f"refused: {why}")


def server_of(state: Any = "ready", *, fleet: Fleet | None = None, **failing: Exception) -> tuple[RolloutServer, Any]:
    made = RolloutServer(Calls(**failing), fleet or Fleet())  # type: ignore[arg-type]
    made.state, made.takes_keys, made.label = state, True, "old"
    return made, made.client


def report(label: str = "old", *, is_draining: bool = False, instance: str = "i", takes_keys: bool = True) -> Report:
    return Report(label, takes_keys, instance, is_draining)


def test_a_server_takes_weights_in_this_order_and_samples_only_then() -> None:
    server, client = server_of("stale")
    assert asyncio.run(server._follow(report())) == 0.0
    update = [("start_update",), ("send_update", {"label": "new"}), ("finish_update", "new"), ("resume",)]
    assert client.calls == [("model_config", True), ("pause",), *update]
    assert (server.label, server.state, server.life) == ("new", "syncing", 1)
    assert asyncio.run(server._follow(report("new"))) == 3.0
    assert (server.state, server._is_paused) == ("ready", False)
    server.fleet.target = None
    assert asyncio.run(server._follow(report("new"))) == 3.0
    assert server.state == "stale"
    server, client = server_of("ready")
    assert asyncio.run(server._follow(report("new", is_draining=True))) == 3.0
    assert (server.state, client.calls) == ("stale", [])
    server, client = server_of("ready")
    server._is_paused = True
    asyncio.run(server._follow(report("new")))
    assert client.calls == [("resume",)]


def test_weights_under_rows_stop_our_servers_last_and_vllm_first() -> None:
    fleet = Fleet()
    fleet.in_flight = True
    update = [("start_update",), ("send_update", {"label": "new"})]
    for takes_keys, order in ((True, [*update, ("pause", True)]), (False, [("pause", True), *update])):
        server, client = server_of(fleet=fleet)
        server.takes_keys = takes_keys
        assert asyncio.run(server._follow(report())) == 0.0
        assert client.calls == [*order, ("finish_update", "new"), ("resume",)]
        assert (server.label, server.state, server._is_paused) == ("new", "ready", False)
        assert 0 <= server.stood_seconds <= server.sync_seconds
    goes = [server_of(state, fleet=fleet)[0]._goes_on(*labels) for state, labels in (
        ("ready", ("old", "new")), ("stale", ("old", "new")), ("ready", ("new", "new")), ("ready", ("x", "new")),
    )]  # fmt: skip
    assert goes == [True, False, False, False]
    server, client = server_of(fleet=fleet, finish_update=ServerFailed("no"))
    asyncio.run(server._follow(report()))
    assert server.state == "poisoned"
    server, client = server_of(fleet=fleet, send_update=ServerFailed("no"))
    server.takes_keys = False
    assert asyncio.run(server._follow(report())) > 0
    assert client.calls[-1] == ("resume",)
    assert (server.state, fleet.told.count("repaired")) == ("stale", 1)


def test_a_failed_update_is_taken_back_before_the_weights_are_touched_and_poisons_after() -> None:
    server, client = server_of("stale", send_update=ServerFailed("no"))
    assert 0.1 <= asyncio.run(server._follow(report())) <= 0.2
    assert client.calls[-1] == ("resume",)
    assert (server.state, server.fleet.told[-2:]) == ("stale", ["repaired", "syncing>stale"])
    server, client = server_of("stale", finish_update=ServerSlow("no"))
    asyncio.run(server._follow(report()))
    assert (server.state, server.label) == ("poisoned", "old")
    assert ("resume",) not in client.calls
    assert asyncio.run(server._follow(report("old"))) == 3.0
    assert server.state == "poisoned"
    asyncio.run(server._follow(report("new")))
    assert server.state == "ready", "another label: it was started again"
    fleet = Fleet()
    fleet.why_another = lambda config: "other heads"
    server, client = server_of("stale", fleet=fleet, model_config=SamplerError("another model"))
    asyncio.run(server._follow(report()))
    assert (server.state, server.is_refused) == ("down", True)
    assert [told for told in fleet.told if told.startswith("refused")] == ["refused: another model"]
    asyncio.run(server._follow(report()))
    assert len([told for told in fleet.told if told.startswith("refused")]) == 1, "it is said once"


@pytest.mark.parametrize(("adapter", "level"), [(None, 2), ("a", 1)])
def test_a_server_sleeps_while_its_gpu_trains_and_wakes_in_two_parts(adapter: Any, level: int) -> None:
    server, client = server_of(fleet=Fleet(adapter))
    asyncio.run(server.rest_until_needed())
    assert client.calls == [("pause",), ("sleep", level)]
    assert (server.state, server.is_asleep, server.is_needed) == ("asleep", True, False)
    client.calls.clear()
    assert asyncio.run(server._follow(report())) == 3.0
    asyncio.run(server.rest_until_needed())
    assert client.calls == [], "it stays asleep until it is needed"
    server.is_needed = server._is_compared = True
    asyncio.run(server._follow(report("new")))
    assert client.calls == [
        ("wake", "weights"), ("start_update",), ("send_update", {"label": "new"}), ("finish_update", "new"),
        ("wake", "kv_cache"), ("resume",),
    ]  # fmt: skip
    assert not server.is_asleep
    asyncio.run(server.release("why"))
    assert (client.calls[-1], server.state) == (("resume",), "stale")


def test_a_server_that_was_started_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = server_of()
    server._know(report())
    assert (server.life, server.state) == (0, "ready")
    server._know(report("new"))
    assert (server.life, server.label) == (1, "new")
    server._know(report("new", instance="j"))
    assert (server.life, server.state, server.fleet.told) == (2, "down", ["ready>down"])
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    server.reserve(2, 20)
    now[0] += 3
    server.reserve(1, 5)
    assert (server.outstanding_rows, server.outstanding_tokens) == (3, 25)
    server.reserve(-3, -25)
    now[0] += 10
    assert server.take_busy_seconds() == 3
    server.reserve(1, 1)
    now[0] += 2
    assert [server.take_busy_seconds(), server.take_busy_seconds()] == [2, 0]
    assert not server.is_resting
    seconds = server.rest()
    assert (0.1 <= seconds <= 0.2, server.is_resting) == (True, True)
    assert 0.2 <= server.rest() <= 0.4
    server.has_done_well()
    assert 0.1 <= server.rest() <= 0.2
    now[0] += 0.4
    assert not server.is_resting
    pool = ServerPool([], deadlines=LIMITS)
    idle, _ = server_of()
    lost, _ = server_of("down")
    server.state = "ready"
    server.take_busy_seconds()
    pool.servers = [server, idle, lost]
    pool._counted_since = now[0]
    now[0] += 4
    assert asyncio.run(pool.idle_fraction()) == 0.5
    server.reserve(-1, -1)
    now[0] += 4
    assert asyncio.run(pool.idle_fraction()) == 1.0


def test_a_slow_server_is_left_when_it_was_silent_for_so_long() -> None:
    server, client = server_of(report=ServerSlow("slow"))
    server._last_sign = time.monotonic()
    assert (asyncio.run(server._look()), server.state) == (0.0, "ready")
    server._last_sign -= 13.0
    assert asyncio.run(server._look()) > 0
    assert (server.state, server.why, server.is_refused) == ("down", "slow", False)
    server, client = server_of(report=SamplerError("token"))
    asyncio.run(server._look())
    assert (server.state, server.is_refused) == ("down", True)
    assert client.calls == [("report",)]


def test_the_server_with_the_least_to_do_is_given_and_earlier_steps_first() -> None:
    async def given() -> list[Any]:
        pool = ServerPool([], deadlines=LIMITS, max_rows=4)
        pool.servers = [server_of()[0] for _ in range(4)]
        for server, rows, tokens in zip(pool.servers, (3, 2, 1, 4), (50, 20, 20, 0), strict=True):
            server.reserve(rows, tokens)
        loop = asyncio.get_running_loop()
        waiting = [loop.create_future() for _ in range(2)]
        for future, order in zip(waiting, (2, 1), strict=True):
            pool._waiting.append((future, PendingGroup("x", (1,), [1], PARAMS, (), order=order)))
        pool._hand_out()
        assert [future.done() for future in waiting] == [False, True]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [pool.servers.index(future.result()) for future in waiting]

    assert asyncio.run(given()) == [2, 2]


@pytest.mark.parametrize(
    ("mode", "called"),
    [
        ("abort", ("pause", True)),
        ("wait", ("pause", False)),
        ("keep", ("freeze",)),
        (None, ("pause", True)),
        ("x", None),
    ],
)
def test_a_pause_of_our_server_aborts_waits_or_keeps(mode: str | None, called: Any) -> None:
    calls: list[Any] = []
    server = object.__new__(SamplingServer)
    server._control = asyncio.Lock()
    server.sampling = SimpleNamespace(  # type: ignore[assignment]
        pause=lambda abort: calls.append(("pause", abort)), freeze=lambda: calls.append(("freeze",))
    )
    request: Any = SimpleNamespace(query={} if mode is None else {"mode": mode})
    if called is None:
        with pytest.raises(ValueError, match="mode x is not offered"):
            asyncio.run(server.pause(request))
    else:
        asyncio.run(server.pause(request))
    assert calls == [] if called is None else [called]


@pytest.mark.parametrize(
    ("count", "code", "is_requested", "said"),
    [(1, -9, False, 0), (2, -9, False, 1), (2, -9, True, 0), (2, 7, False, 0), (2, 0, False, 0)],
)
def test_only_one_of_several_processes_is_said_to_be_killed(
    count: int, code: int, is_requested: bool, said: int
) -> None:
    told: list[str] = []
    crew = ProcessSupervisor([], count, stop_seconds=5.0, notify=told.append)
    crew._members = [SimpleNamespace(poll=lambda: code), SimpleNamespace(poll=lambda: None)]  # type: ignore[list-item]
    crew._is_requested = is_requested
    begin = time.monotonic()
    assert (crew._has_ended(0), crew._has_ended(1)) == (True, False)
    assert told == [f"process 0 of 2 was killed by {signal.Signals(9).name}"] * said
    assert (crew._deadline is None) == (code == 0)
    assert crew._deadline is None or 19 < crew._deadline - begin < 30
    assert crew._code() == {0: 0, 7: 7, -9: 75}[code]
    crew._failed = [(0, 75), (1, -9), (2, 7), (3, 2)]
    assert crew._code() == 7


def test_each_process_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(local.subprocess, "Popen", lambda words, env, **_: started.append(env))
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for count, rank in ((1, 0), (3, 2), (16, 1)):
        ProcessSupervisor([], count, stop_seconds=5.0, notify=print)._start(rank, 1234)
    assert [env.get("OMP_NUM_THREADS") for env in started] == [None, "2", "1"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    assert [started[1][name] for name in names] == ["2", "2", "3", "3", "1234"]


def test_a_placement_asks_for_the_model_only_where_servers_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config("{model: no/such-model, data: {type: word_problems}}", ["rollouts.sleep=true"])
    assert placement_of(config, Machine("cuda", (8e10,), has_vllm=False)).sampler == "engine"
    config = parse_config("{model: embedded, data: {type: word_problems}}", [])
    assert "no environment with vLLM is named" in placement_of(config, Machine("cuda", (8e10,) * 2)).why
    assert trainers_here(4) == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert "2 GPUs, all of which train" in placement_of(config, Machine("cuda", (8e10,) * 2)).why
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert trainers_here(4) == 4


def test_numbers_of_variable_length_and_the_places_between_tensors() -> None:
    values = [0, 1, 127, 128, 16383, 16384, 2**63, 2**64 - 1]
    for some in ([], values[:3], values):
        coded = _vary(np.array(some, np.uint64))
        assert _read(coded.tobytes(), len(some)).tolist() == some
    assert bytes(_vary(np.array(values[2:6], np.uint64))) == b"\x7f\x80\x01\xff\x7f\x80\x80\x01"
    for data, count in ((b"\x01\x80", 1), (b"\x01\x01", 1), (b"\x01", 2), (b"\x80" * 10 + b"\x01", 1), (b"\x01", 0)):
        with pytest.raises(ValueError, match="the difference has"):
            _read(data, count)
    covered = list(_cover([Region(2, 6, 2), Region(6, 9, 2), Region(9, 9, 4), Region(10, 16, 3)], 18))
    parts = [(0, 2, 1), (2, 6, 2), (6, 9, 1), (9, 10, 1), (10, 16, 1), (16, 18, 1)]
    assert covered == [Region(*part) for part in parts]
    import zlib

    packed = zlib.compress(b"abcd")
    assert (_unpack(packed, 4), _unpack(packed, 5), _unpack(packed, 4, exactly=True)) == (b"abcd",) * 3
    for limit, exactly in ((3, False), (5, True)):
        with pytest.raises(ValueError, match="cut off"):
            _unpack(packed, limit, exactly=exactly)
    base = np.zeros(8, np.uint8)
    new = base.copy()
    new[[0, 5, 6]] = 1
    assert (encode(base, new, [Region(0, 4, 4)]).changed, encode(base, new, [Region(0, 8, 4)]).changed) == (3, 2)
    assert (encode(base, new, [Region(0, 4, 4)]).total, encode(base, base, []).total) == (5, 8)


def test_stored_groups_are_taken_where_they_are_whole_of_these_tokens_and_not_too_old() -> None:
    def group(index: int, ids: tuple[int, ...] = (1,), size: int = 2, version: int = 3) -> Group:
        completion = Completion(ids, (2,), "", (-1.0,), "stop", version, 0)
        return Group(Prompt("", ids, index), (completion,) * size)

    request = SamplingRequest([Prompt("", (1,), 7), Prompt("", (1,), 8), Prompt("", (1,), 8)], 2, step=4)
    assert list(_matching(request, [group(7)])) == [0]
    assert list(_matching(request, [group(7, size=1), group(9), group(8)])) == []
    assert list(_matching(request, [group(8), group(8)])) == [1, 2]
    assert list(_matching(request, [group(7, ids=(2,))])) == []
    made = Prefetch(SimpleNamespace(close=lambda: None), lambda step: [], total_steps=9, staleness=2)  # type: ignore[arg-type]
    made.restore({4: [group(1, version=version) for version in (1, 2, 4, 5)]})
    assert [kept.completions[0].policy_version for kept in made.finished(4)[4]] == [2, 4]
    assert made.finished(5) == {}
    made.close()
