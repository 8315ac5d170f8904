"""Do rows go on under new weights, behind the keys and values that they have, and is every token told its weights?"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from oncurve.core.records import SamplingParams
from oncurve.fleet.servers.pending_group import PendingGroup
from oncurve.fleet.servers.protocol import GeneratedCompletion, GenerateRequest, read_response, response_body
from oncurve.fleet.serving.sampling import Sampling
from oncurve.recipe.load import parse_config
from oncurve.run.builder import make_policy

PROMPT = (5, 9, 12, 40, 7)
PARAMS = SamplingParams(max_completion_tokens=40, min_completion_tokens=40)


@pytest.fixture
def policy() -> Any:
    return make_policy(parse_config("{model: embedded, data: {type: word_problems}}", []), is_trained=False)


def by_module(model: Any, old: dict[str, torch.Tensor], ids: list[int], start: int) -> torch.Tensor:
    """log p of each token behind the prompt; those from ``start`` on under the weights that the model has, which read
    what the ``old`` ones had computed."""
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    row = torch.tensor([[*PROMPT, *ids]])
    known = len(PROMPT) + start - 1
    with torch.no_grad():
        model.load_state_dict(old)
        before = model(input_ids=row[:, :known], use_cache=True)
        model.load_state_dict(new)
        after = model(input_ids=row[:, known:-1], past_key_values=before.past_key_values).logits
    logits = torch.cat([before.logits[0, len(PROMPT) - 1 :], after[0]])
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_a_row_goes_on_under_new_weights_behind_its_old_keys_and_values(policy: Any) -> None:
    sampling = Sampling(policy, label="old")
    old = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    is_long, go_on = threading.Event(), threading.Event()

    def heard(tokens: list[int]) -> None:
        if len(tokens) == 12:
            is_long.set()
            assert go_on.wait(60)

    def disturb() -> None:
        draw = torch.Generator().manual_seed(1)
        for parameter in policy.model.parameters():
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=draw))

    work = sampling.submit(GenerateRequest("a", PROMPT, 1, PARAMS, (), (11,)), on_tokens=heard)
    assert is_long.wait(60)
    threading.Timer(0.05, go_on.set).start()
    sampling.freeze()
    late = sampling.submit(GenerateRequest("b", PROMPT, 1, PARAMS, (), (12,)))  # waits
    sampling.change(disturb, "new")
    sampling.resume()
    [one] = work.future.result(60)
    assert (one.versions, len(one.token_ids)) == (("old", "new"), 40)
    start = one.starts[1]
    assert 12 <= start < 40
    expected = by_module(policy.model, old, list(one.token_ids), start)
    assert np.allclose(one.logprobs, expected, atol=2e-4)
    fresh = by_module(policy.model, {**policy.model.state_dict()}, list(one.token_ids), start)
    assert not np.allclose(one.logprobs, fresh, atol=2e-3), "the keys and values are those of the new weights"
    [other] = late.future.result(60)
    assert (other.versions, other.starts) == (("new",), (0,))
    sampling.close()


def test_versions_by_token_cross_the_wire() -> None:
    sent = GeneratedCompletion([1, 2, 3], [-1.0, -2.0, -3.0], "stop", ("a", "b"), (0, 2))
    body = response_body("x", [sent])
    assert body["choices"][0]["weight_versions"] == [
        {"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3},
    ]  # fmt: skip
    [read] = read_response(body, request_id="x", count=1)
    assert (read.versions, read.starts) == (sent.versions, sent.starts)


def test_a_completion_with_a_token_of_too_old_or_strange_weights_is_not_taken() -> None:
    labels = {"v1": 1, "v2": 2, "v3": 3}
    job = PendingGroup("v3", PROMPT, [1, 2, 3], PARAMS, (), labels=labels, oldest=2)

    def answer(*versions: str) -> GeneratedCompletion:
        return GeneratedCompletion([1], [-1.0], "stop", versions)

    found = job.fill([0, 1, 2], [answer("v2", "v3"), answer("v1", "v2"), answer("v3", "of another run")])
    assert found == (0, 2)
    assert job.missing == [1, 2]
