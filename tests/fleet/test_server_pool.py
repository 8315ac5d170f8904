"""Is every completion made once, by the right weights, whatever happens to the servers?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from served import FAST, Gate, Listener, Puppet, fail, make_server_sampler

from oncurve.core.errors import SamplerError
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.servers import client, protocol
from oncurve.fleet.servers.pending_group import PendingGroup
from oncurve.fleet.servers.registry import register
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.policy.trained_policy import TrainedPolicy

MakeSampler = Callable[..., ServerSampler]
PARAMS = SamplingParams(max_completion_tokens=8, seed=3)


@pytest.fixture
def puppets() -> Iterator[Callable[[], Puppet]]:
    made: list[Puppet] = []

    def make() -> Puppet:
        made.append(Puppet())
        return made[-1]

    yield make
    for puppet in made:
        puppet.close()


@pytest.fixture
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


@pytest.fixture
def sampler_of(tmp_path: Path) -> Iterator[MakeSampler]:
    made: list[ServerSampler] = []

    def make(*puppets: Puppet, **options: Any) -> ServerSampler:
        options = {"urls": [puppet.url for puppet in puppets], "deadlines": FAST} | options
        made.append(make_server_sampler(PARAMS, weights_folder=tmp_path / "weights", **options))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


@pytest.fixture
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    return make_prompts("a b", "c", "d e f", "g h")


def tokens(groups: list[Group]) -> set[int]:
    """The different tokens of all completions: puppets write the version plus one."""
    return {token for group in groups for completion in group.completions for token in completion.token_ids}


def assert_whole(groups: list[Group], *, version: int, size: int = 4, prompts: int = 4) -> None:
    assert [len(group.completions) for group in groups] == [size] * prompts
    assert tokens(groups) == {version + 1}
    assert {completion.policy_version for group in groups for completion in group.completions} == {version}


def wait_for(is_so: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def state_of(sampler: ServerSampler, puppet: Puppet) -> str:
    return next(server.state for server in sampler.pool.servers if server.url == puppet.url)


@pytest.mark.proves("F64", "D3")
def test_prompts_are_spread_and_every_completion_is_stamped(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    one, other = puppets(), puppets()
    sampler = sampler_of(one, other)
    for version in range(3):
        sampler.load_weights(policy, version=version)
        assert_whole(sampler.sample(SamplingRequest(prompts, 4, step=version)), version=version)
    assert len(one.asked) + len(other.asked) == 12
    assert min(len(one.asked), len(other.asked)) >= 4


@pytest.mark.proves("F64")
def test_a_prompt_goes_to_the_server_with_the_least_to_do_and_waits_when_all_are_full(
    puppets: Callable[[], Puppet],
    sampler_of: MakeSampler,
    policy: TrainedPolicy,
    make_prompts: Callable[..., list[Prompt]],
) -> None:
    slow, fast = puppets(), puppets()
    gate = Gate(slow.listener)
    slow.behave[protocol.GENERATE] = gate
    sampler = sampler_of(slow, fast, max_rows=4)
    sampler.load_weights(policy, version=0)

    def open_when_the_others_are_done(request: web.Request) -> Any:
        async def look() -> None:
            if len(fast.asked) == 8:
                gate.open()

        return look()

    fast.behave[protocol.GENERATE] = open_when_the_others_are_done
    assert_whole(sampler.sample(SamplingRequest(make_prompts(*"abcdefghij"), 4)), version=0, prompts=10)
    assert (len(slow.asked), len(fast.asked)) == (1, 9)


def test_what_a_server_cannot_do_goes_to_another(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    broken, well = puppets(), puppets()
    broken.behave[protocol.GENERATE] = fail(500)
    sampler = sampler_of(broken, well)
    sampler.load_weights(policy, version=1)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=1)
    assert broken.asked == []
    assert sampler.pool.counts["failed"] >= 1


def test_only_missing_completions_are_asked_for_again(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    puppet = puppets()

    async def cut_some_off(request: web.Request) -> web.Response | None:
        body = await request.json()
        if puppet.asked:
            return None
        puppet.asked.append(body)
        return puppet.answer(body, reasons=["stop", "abort", "length", "abort"])

    puppet.behave[protocol.GENERATE] = cut_some_off
    sampler = sampler_of(puppet)
    sampler.load_weights(policy, version=0)
    groups = sampler.sample(SamplingRequest(prompts[:1], 4))
    assert_whole(groups, version=0, prompts=1)
    assert [one.finish_reason for one in groups[0].completions] == ["stop", "stop", "length", "stop"]
    first, second = (body["sampling_params"] for body in puppet.asked)
    assert second["n"] == 2
    keys = first["extra_args"][protocol.KEYS]
    assert second["extra_args"][protocol.KEYS] == [keys[1], keys[3]]


def test_a_server_that_falls_silent_is_left_and_what_it_says_later_is_not_taken(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    stopped, well = puppets(), puppets()
    sampler = sampler_of(stopped, well)
    sampler.load_weights(policy, version=0)
    gate = Gate(stopped.listener)

    async def answer_late(request: web.Request) -> web.Response:
        body = await request.json()
        await gate(request)
        return stopped.answer(body, label="another:41:weights")

    stopped.behave |= {protocol.GENERATE: answer_late, protocol.HEALTH: gate}
    started = time.monotonic()
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    assert time.monotonic() - started < FAST.request_seconds
    assert state_of(sampler, stopped) == "down"
    gate.open()
    wait_for(lambda: state_of(sampler, stopped) == "ready")
    stopped.behave.clear()
    assert_whole(sampler.sample(SamplingRequest(prompts, 4, step=1)), version=0)


@pytest.mark.proves("D52")
@pytest.mark.parametrize("wrong", ["request_id", "version"])
def test_an_answer_to_something_else_is_not_taken(
    wrong: str, puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    confused, well = puppets(), puppets()

    async def mistake(request: web.Request) -> web.Response:
        body = await request.json()
        if wrong == "request_id":
            return confused.answer(body | {"request_id": "of somebody else"}, label="x:76:y")
        return confused.answer(body, label="x:76:y")

    confused.behave[protocol.GENERATE] = mistake
    sampler = sampler_of(confused, well)
    sampler.load_weights(policy, version=0)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    assert sampler.pool.counts["failed" if wrong == "request_id" else "foreign"] > 0


def test_a_request_that_is_refused_is_our_mistake_and_is_told_with_its_text(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    puppet = puppets()
    puppet.behave[protocol.GENERATE] = fail(400)
    sampler = sampler_of(puppet)
    sampler.load_weights(policy, version=0)
    with pytest.raises(SamplerError, match=f"{puppet.url}.*refuses with 400.*as told"):
        sampler.sample(SamplingRequest(prompts, 4))


def test_a_prompt_that_fails_everywhere_ends_with_the_servers_words(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    puppet = puppets()
    puppet.behave[protocol.GENERATE] = fail(500)
    sampler = sampler_of(puppet)
    sampler.load_weights(policy, version=0)
    with pytest.raises(SamplerError, match=r"failed 6 times.*as told"):
        sampler.sample(SamplingRequest(prompts[:1], 4))


def test_a_server_with_another_token_is_told_at_once(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy
) -> None:
    puppet = puppets()
    puppet.behave[protocol.WEIGHT_INFO] = fail(401)
    with pytest.raises(SamplerError, match="ONCURVE_SERVER_TOKEN"):
        sampler_of(puppet).load_weights(policy, version=0)


@pytest.mark.proves("F67", "D4")
def test_a_server_that_was_started_again_serves_nothing_before_it_has_the_current_weights(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    one, other = puppets(), puppets()
    sampler = sampler_of(one, other)
    sampler.load_weights(policy, version=4)
    one.calls.clear()
    one.start_again()
    for step in range(3):
        assert_whole(sampler.sample(SamplingRequest(prompts, 4, step=step)), version=4)
    wait_for(lambda: protocol.FINISH in one.calls)
    wait_for(lambda: state_of(sampler, one) == "ready")
    assert one.label == other.label


@pytest.mark.proves("F62", "D4")
def test_a_server_that_missed_an_update_gets_it_when_it_is_back(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    away, well = puppets(), puppets()
    sampler = sampler_of(away, well)
    sampler.load_weights(policy, version=0)
    away.listener.go_away()
    sampler.load_weights(policy, version=1)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=1)
    away.asked.clear()
    away.listener.listen(away.app())
    wait_for(lambda: state_of(sampler, away) == "ready")
    assert_whole(sampler.sample(SamplingRequest(prompts, 4, step=1)), version=1)
    assert away.asked
    assert away.label == well.label


def test_weights_that_cannot_be_sent_leave_a_server_out_and_running(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    unlucky, well = puppets(), puppets()
    unlucky.behave[protocol.UPDATE] = fail(500)
    sampler = sampler_of(unlucky, well)
    sampler.load_weights(policy, version=0)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    assert unlucky.asked == []
    assert not unlucky.is_paused
    assert unlucky.label == "default"
    unlucky.behave.clear()
    wait_for(lambda: state_of(sampler, unlucky) == "ready")


def test_a_server_that_failed_in_the_middle_of_loading_is_not_used_until_it_is_started_again(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    poisoned, well = puppets(), puppets()
    restarted: list[str] = []
    poisoned.behave[protocol.FINISH] = fail(500)
    sampler = sampler_of(poisoned, well)
    sampler.pool._restart = restarted.append
    sampler.load_weights(policy, version=0)
    poisoned.behave.clear()
    assert state_of(sampler, poisoned) == "poisoned"
    for version in (0, 1):
        sampler.load_weights(policy, version=version)
        assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=version)
    assert state_of(sampler, poisoned) == "poisoned"
    assert poisoned.asked == []
    assert poisoned.calls.count(protocol.FINISH) == 1
    assert restarted == [poisoned.url]
    poisoned.start_again()
    wait_for(lambda: state_of(sampler, poisoned) == "ready")


def test_when_all_are_away_for_a_while_nothing_is_lost(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    one, other = puppets(), puppets()
    sampler = sampler_of(one, other)
    sampler.load_weights(policy, version=0)
    for puppet in (one, other):
        puppet.listener.go_away()
    clock = Listener()

    async def come_back() -> None:
        import asyncio

        await asyncio.sleep(0.8)
        for puppet in (one, other):
            asyncio.run_coroutine_threadsafe(puppet.listener._listen(puppet.app()), puppet.listener.loop._loop)

    import asyncio

    asyncio.run_coroutine_threadsafe(come_back(), clock.loop._loop)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    clock.loop.close()


def test_when_all_are_gone_the_end_is_clear_and_in_time(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    one, other = puppets(), puppets()
    sampler = sampler_of(one, other, deadlines=FAST.model_copy(update={"gone_seconds": 1.0}))
    sampler.load_weights(policy, version=0)
    for puppet in (one, other):
        puppet.listener.go_away()
    started = time.monotonic()
    with pytest.raises(SamplerError, match=f"no rollout server was ready.*{one.url} is down.*oncurve resume"):
        sampler.sample(SamplingRequest(prompts, 4))
    assert time.monotonic() - started < 30
    for puppet in (one, other):
        puppet.listener.listen(puppet.app())


def test_a_server_joins_while_the_run_goes_on(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt], tmp_path: Path
) -> None:
    said: list[str] = []
    sampler = sampler_of(puppets(), registry=tmp_path / "registry", notify=said.append)
    sampler.load_weights(policy, version=2)
    newcomer = puppets()
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "half.json").write_text("{")
    register(tmp_path / "registry", newcomer.url)
    wait_for(lambda: any(server.url == newcomer.url for server in sampler.pool.ready))
    assert any(f"{newcomer.url} joins" in text for text in said)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=2)
    assert newcomer.asked


def test_a_server_that_is_ending_finishes_what_it_has_and_gets_nothing_new(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    ending, well = puppets(), puppets()
    sampler = sampler_of(ending, well)
    sampler.load_weights(policy, version=0)

    async def drain(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": ending.label, "instance": ending.instance, "is_draining": True})

    ending.behave[protocol.WEIGHT_INFO] = drain
    wait_for(lambda: state_of(sampler, ending) == "stale")
    ending.asked.clear()
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    assert ending.asked == []


def test_a_server_that_takes_no_keys_gets_none_and_no_seed(
    puppets: Callable[[], Puppet], sampler_of: MakeSampler, policy: TrainedPolicy, prompts: list[Prompt]
) -> None:
    puppet = puppets()

    async def plain(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": puppet.label})

    puppet.behave[protocol.WEIGHT_INFO] = plain
    sampler = sampler_of(puppet)
    sampler.load_weights(policy, version=0)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    assert all("extra_args" not in body["sampling_params"] for body in puppet.asked)
    assert all("seed" not in body["sampling_params"] for body in puppet.asked)


def test_long_answers_are_read_in_another_thread_as_short_ones_are(
    puppets: Callable[[], Puppet],
    sampler_of: MakeSampler,
    policy: TrainedPolicy,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, read = set[str](), protocol.read_response

    def read_there(body: Any, *, request_id: str, count: int) -> list[protocol.GeneratedCompletion]:
        threads.add(threading.current_thread().name)
        return read(body, request_id=request_id, count=count)

    monkeypatch.setattr(protocol, "read_response", read_there)
    one, other = puppets(), puppets()
    sampler = sampler_of(one, other)
    sampler.load_weights(policy, version=0)
    assert_whole(sampler.sample(SamplingRequest(prompts, 4)), version=0)
    [of_the_loop] = threads
    monkeypatch.setattr(client, "LONG", 0)
    one.behave[protocol.GENERATE] = lambda request: web.json_response({"request_id": "of another"})
    assert_whole(sampler.sample(SamplingRequest(prompts, 4, step=1)), version=0)
    assert sampler.pool.counts["failed"] > 0, "what one answers is wrong, and the other is asked"
    assert of_the_loop not in threads - {of_the_loop}
    assert len(threads) > 1


def test_a_token_without_a_probability_is_no_answer() -> None:
    """vLLM writes -9999 in the place of what is no number, with a model that is broken or with speculative decoding."""
    sampled = [protocol.GeneratedCompletion([5, 6], [-1.0, -9999.0], "stop", ("run:0",))]
    body = protocol.response_body("mine", sampled)
    with pytest.raises(ValueError, match=r"-9999, .*optimizer\.learning_rate.*--speculative-config"):
        protocol.read_response(body, request_id="mine", count=1)
    sampled[0].logprobs[1] = -80.0  # type: ignore[index]
    [read] = protocol.read_response(protocol.response_body("mine", sampled), request_id="mine", count=1)
    assert read.logprobs == (-1.0, -80.0)


def test_a_completion_of_two_versions_is_of_other_weights() -> None:
    job = PendingGroup("run:1", (5,), [0, 1], PARAMS, ())
    of = [protocol.GeneratedCompletion([6], [-1.0], "stop", versions) for versions in (("run:1",), ("run:0", "run:1"))]
    assert job.fill([0, 1], of) == (0, 1)
    assert job.missing == [1]
