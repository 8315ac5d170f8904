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

from oncurve.core.draw import draw, stream_keys, uniforms
from oncurve.core.records import SamplingParams
from oncurve.core.requests import Request, Sampled
from oncurve.core.sampler import end_token_ids
from oncurve.core.scheduler import RowScheduler
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
