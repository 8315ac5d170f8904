"""Do requests that come and go get what each of them would get alone, token by token from the whole sequence?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from decode_ways import WAYS, take_way
from lanes import gate
from sampled_groups import ending

from oncurve.core.decoder import ModuleDecoders
from oncurve.core.draw import draw, stream_keys, uniforms
from oncurve.core.errors import SamplerError
from oncurve.core.records import DecodeCall, SamplingParams
from oncurve.core.requests import BufferSizes, Request, RowState, Sampled
from oncurve.core.sampler import end_token_ids
from oncurve.core.scheduler import RowScheduler, _double_until
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.layer_decoders import LayerDecoders
from oncurve.model.row_budget import RowBudget
from oncurve.policy.trained_policy import TrainedPolicy

MakePolicy = Callable[..., TrainedPolicy]
PARAMS = SamplingParams(seed=5)
ways = pytest.mark.parametrize("way", WAYS)


@dataclass(frozen=True)
class Wanted:
    """A request and when it comes."""

    text: str
    count: int
    limit: int
    turn: int


ARRIVALS = (
    Wanted("3 + 4 =", 5, 30, 0),
    Wanted("a longer prompt, so that rows are ragged", 2, 12, 0),
    Wanted("the an", 1, 40, 3),
    Wanted("x", 4, 1, 5),
    Wanted("Hi, who is there?", 3, 25, 9),
    Wanted("7", 6, 17, 12),
)


def alone(policy: TrainedPolicy, ids: tuple[int, ...], key: int, params: SamplingParams) -> Sampled:
    """The slow reference: the whole sequence through the model for every token, and its whole text for stop strings."""
    ends, written, logprobs = end_token_ids(policy.model, policy.tokenizer), [], []
    while len(written) < params.max_completion_tokens:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*ids, *written]]), use_cache=False).logits[:, -1]
        number = torch.from_numpy(uniforms(np.array([key], dtype=np.uint64), np.array([len(written)])))
        early = len(written) < params.min_completion_tokens
        token, logprob = draw(logits, number, params, forbidden=list(ends) if early else [])
        written.append(int(token))
        logprobs.append(float(logprob))
        before, text = policy.tokenizer.decode(written[:-1]), policy.tokenizer.decode(written)
        is_new = any(text.rfind(stop) > before.rfind(stop) for stop in params.stop)
        if written[-1] in ends or (is_new and len(written) >= params.min_completion_tokens):
            return written, logprobs, "stop"
    return written, logprobs, "length"


def requests_of(policy: TrainedPolicy, params: SamplingParams) -> tuple[list[Request], dict[tuple[int, int], Sampled]]:
    """The requests of ``ARRIVALS``, and where their completions are put down by request and place."""
    found: dict[tuple[int, int], Sampled] = {}
    made = []
    for number, wanted in enumerate(ARRIVALS):
        numbers = np.full(wanted.count, number)
        made.append(
            Request(
                tuple(policy.tokenizer(wanted.text)["input_ids"]),
                stream_keys(params.seed, 2, numbers, np.arange(wanted.count)),
                replace(params, max_completion_tokens=wanted.limit),
                end_token_ids(policy.model, policy.tokenizer),
                on_row=lambda place, sampled, number=number: found.update({(number, place): sampled}),
            )
        )
    return made, found


def sampled_as_they_come(scheduler: RowScheduler, requests: list[Request]) -> None:
    left = sorted(zip(ARRIVALS, requests, strict=True), key=lambda one: one[0].turn)
    turn = 0
    while left or scheduler.has_work:
        while left and left[0][0].turn <= turn:
            scheduler.add(left.pop(0)[1])
        scheduler.turn()
        turn += 1


def assert_as_alone(
    policy: TrainedPolicy, requests: list[Request], found: dict[tuple[int, int], Sampled], way: str
) -> None:
    assert len(found) == sum(wanted.count for wanted in ARRIVALS)
    for (number, place), (ids, logprobs, reason) in found.items():
        request = requests[number]
        expected = alone(policy, request.token_ids, int(request.keys[place]), request.params)
        assert (ids, reason) == (expected[0], expected[2]), f"request {number}, completion {place}, {way}"
        np.testing.assert_allclose(logprobs, expected[1], atol=1e-4)


@ways
@pytest.mark.parametrize(("rows", "stops"), gate(product((4, 64), (False, True)), (4, True)), ids=str)
def test_requests_that_come_and_go_get_what_they_would_get_alone(
    rows: int, stops: bool, way: str, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"stop": ("a", "1", " t"), "min_completion_tokens": 4} if stops else {}
    take_way(way, monkeypatch)
    policy = ending(make_policy())
    policy.model.eval()
    requests, found = requests_of(policy, replace(PARAMS, **changes))
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(rows)))
    sampled_as_they_come(scheduler, requests)
    assert_as_alone(policy, requests, found, way)
    assert {reason for _, _, reason in found.values()} == {"stop", "length"}


def test_a_step_starts_before_the_tokens_of_the_last_one_are_read(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where requests come later; and a row that enters where another has left does not get its token."""
    take_way("recorded", monkeypatch)
    events: list[str] = []
    right = RecordedLayers.draw

    class Late:
        """Tokens that are not there before they are asked for."""

        def __init__(self, drawn: object) -> None:
            self.drawn = drawn

        def get(self) -> tuple[np.ndarray, np.ndarray]:
            events.append("read")
            return self.drawn.get()  # type: ignore[attr-defined]

    def started(self: RecordedLayers, *given: object, **options: object) -> Late:
        events.append("start")
        return Late(right(self, *given, **options))  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedLayers, "draw", started)
    policy = ending(make_policy())
    policy.model.eval()
    requests, found = requests_of(policy, PARAMS)
    sampled_as_they_come(RowScheduler(policy, LayerDecoders(RowBudget(64))), requests)
    ahead = [before + "," + after for before, after in pairwise(events)]
    assert ahead.count("start,start") + ahead.count("read,start") > ahead.count("read,read")
    assert events[:3] == ["start", "start", "read"]
    assert_as_alone(policy, requests, found, "recorded")


def test_what_is_cut_off_while_a_step_is_under_way_keeps_the_tokens_that_were_drawn(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_way("recorded", monkeypatch)
    policy = make_policy()
    policy.model.eval()
    requests, found = requests_of(policy, replace(PARAMS, min_completion_tokens=0))
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(64)))
    scheduler.add(requests[0])
    for _ in range(6):
        scheduler.turn()
    scheduler.cut(lambda request: True)
    assert not scheduler.has_work
    request = requests[0]
    assert {place for _, place in found} == set(range(5))
    for (_, place), (ids, _, reason) in found.items():
        assert (reason, len(ids)) == ("abort", 7) or reason == "stop"
        params = replace(request.params, max_completion_tokens=len(ids))
        assert ids == alone(policy, request.token_ids, int(request.keys[place]), params)[0]


def test_the_budget_of_positions_holds_for_requests_that_come_later(make_policy: MakePolicy) -> None:
    policy = ending(make_policy())
    requests, found = requests_of(policy, PARAMS)
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(64, kv_tokens=4 * (64 + 64))))
    scheduler.add(requests[0])
    scheduler.turn()
    assert scheduler._batch is not None
    assert scheduler._batch.sizes.rows == 4
    scheduler.run()
    assert len(found) == 5


def asked(policy: TrainedPolicy, count: int, limit: int, *, text: str = "3 + 4 =", **options: Any) -> Request:
    """A request whose completions are as long as the limit."""
    params = replace(PARAMS, max_completion_tokens=limit, min_completion_tokens=99)
    ids = options.pop("ids", tuple(policy.tokenizer(text)["input_ids"]))
    keys = stream_keys(7, 0, np.arange(count), np.zeros(count, dtype=np.int64))
    return Request(ids, keys, params, options.pop("ends", (policy.tokenizer.eos_token_id,)), **options)


def running(scheduler: RowScheduler) -> int:
    assert scheduler._batch is not None
    return len(scheduler._batch.rows.running)


@pytest.mark.parametrize(
    ("slots", "first", "later", "enters"), [(8, 6, 2, True), (8, 7, 2, False), (8, 7, 1, False), (2, 1, 1, True)]
)
def test_waiting_rows_enter_beside_others_when_a_quarter_of_the_slots_is_free(
    slots: int, first: int, later: int, enters: bool, make_policy: MakePolicy
) -> None:
    policy = make_policy()
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(slots)))
    scheduler.add(asked(policy, first, 4))
    scheduler.turn()
    scheduler.add(asked(policy, later, 9, text="7"))
    scheduler.turn()
    assert running(scheduler) == first + later * enters
    for _ in range(3):
        scheduler.turn()
    assert running(scheduler) == later, "nobody is left who could be in the way"
    scheduler.run()
    assert not scheduler.has_work


def test_who_joins_a_batch_and_who_is_cut_off_or_broken(make_policy: MakePolicy) -> None:
    policy, told = make_policy(), list[tuple[int, int, Sampled]]()
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(8)))
    assert scheduler.broken() == []
    assert not scheduler._fits(asked(policy, 1, 4))
    scheduler.expect(10, 6)
    first = asked(policy, 2, 4, on_row=lambda index, sampled: told.append((1, index, sampled)))
    scheduler.add(first)
    scheduler.turn()
    assert scheduler._batch is not None
    sizes = scheduler._batch.sizes
    assert (sizes.rows, sizes.prompt_tokens, sizes.completion_tokens) == (8, 10, 6)

    def other(limit: int = 4, tokens: int = 3, ends: tuple[int, ...] | None = None, **changes: Any) -> Request:
        made = asked(policy, 1, limit, ids=(5,) * tokens, **({} if ends is None else {"ends": ends}))
        made.params = replace(made.params, **changes)
        return made

    for joining, fits in (
        (other(), True), (other(limit=6), True), (other(limit=7), False), (other(tokens=10), True),
        (other(tokens=11), False), (other(temperature=0.5), False), (other(seed=1), False), (other(ends=(1,)), False),
    ):  # fmt: skip
        assert scheduler._fits(joining) is fits
    waiting = asked(policy, 2, 9, on_row=lambda index, sampled: told.append((2, index, sampled)))
    kept = asked(policy, 1, 4)
    for request in (waiting, kept):
        scheduler.add(request)
    scheduler.cut(lambda request: request is waiting)
    assert told == [(2, 0, ([], [], "abort")), (2, 1, ([], [], "abort"))]
    assert scheduler.broken() == [first]
    assert scheduler.broken() == [kept]
    assert not scheduler.has_work
    assert [_double_until(64, needed) for needed in (1, 64, 65, 128, 200)] == [64, 64, 128, 128, 256]


def test_a_row_that_goes_on_has_the_stream_of_its_turn_and_hears_of_each_token(make_policy: MakePolicy) -> None:
    policy, row, found, heard = make_policy(), RowState(), list[Sampled](), list[int]()
    policy.model.eval()
    ends = end_token_ids(policy.model, policy.tokenizer)
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(8)))
    ids: tuple[int, ...] = (5, 6, 7)
    for turn in range(3):
        first = asked(
            policy, 1, 4, ids=ids, rows=(row,), keeps=True, ends=ends,
            on_row=lambda index, sampled: found.append(sampled), on_tokens=lambda tokens: heard.append(len(tokens)),
        )  # fmt: skip
        scheduler.add(first)
        scheduler.add(asked(policy, 1, 6, text="b", ends=ends))
        scheduler.run()
        tokens, logprobs, reason = alone(policy, ids, int(first.keys[0]), first.params)
        assert (found[turn][0], found[turn][2]) == (tokens, reason)
        np.testing.assert_allclose(found[turn][1], logprobs, atol=1e-4)
        ids = (*ids, *tokens, 8 + turn)
    assert heard == [1, 2, 3, 4] * 3


def test_each_token_is_known_by_the_weights_that_sampled_it(make_policy: MakePolicy) -> None:
    policy = make_policy()
    scheduler = RowScheduler(policy, LayerDecoders(RowBudget(8)), version="1")
    first, later = asked(policy, 2, 8), asked(policy, 1, 4, text="7")
    scheduler.add(first)
    for _ in range(2):
        scheduler.turn()
    scheduler.renew("2")
    scheduler.turn()
    for version in ("3", "4"):
        scheduler.renew(version)
    scheduler.add(later)
    scheduler.run()
    assert first.versions == {row: [(0, "1"), (3, "2"), (4, "4")] for row in (0, 1)}
    assert (later.versions, later.read_under) == ({0: [(0, "4")]}, "4")


def test_decoders_of_the_models_own_pass_halve_their_rows_where_memory_runs_out() -> None:
    call = DecodeCall(num_prompts=4, group_size=3, prompt_tokens=5, completion_tokens=6)
    decoders: ModuleDecoders = ModuleDecoders(8)
    policy: Any = None

    def sizes() -> BufferSizes:
        return decoders.plan(policy, call, (), is_shared=False, version=None).sizes

    assert sizes() == BufferSizes(8, 4, 5, 6)
    decoders.shrink(5, "full", call, key="k")
    assert sizes() == BufferSizes(2, 3, 5, 6)
    assert (decoders.most_rows, decoders.is_exact) == (8, False)
    with pytest.raises(SamplerError, match=r"one completion of up to 6 tokens behind a prompt of 5 \(full\)"):
        decoders.shrink(1, "full", call, key="k")
    decoders.forget_limit()
    assert sizes().rows == 8
    assert ModuleDecoders(40).plan(policy, call, (), is_shared=False, version=None).sizes.rows == 12
