"""Does real vLLM sample as before after it slept, and go on with files where it has no GPU?

Needs an environment with vLLM and ONCURVE_VLLM_PYTHON, as test_vllm.py does. A CPU server answers the calls and gives
no memory back. It is started as users start theirs, and is no fork.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from needs import NEEDS_VLLM
from served import make_server_sampler

from oncurve.core.records import Completion, Group, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.data.prompts import render_prompts
from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.servers.nccl_group import GroupPush
from oncurve.fleet.settings import Deadlines, ServerKeys
from oncurve.fleet.weights.weight_stream import Shipment
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import load_model
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = [
    NEEDS_VLLM,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
GREEDY = SamplingParams(temperature=0.0, max_completion_tokens=24)


class NoEnd:
    """The trainer's side of a transfer that no server of these takes part in."""

    def version(self) -> list[int] | None:
        return [2, 27, 5]

    def join(self, address: str, port: int, size: int) -> None:
        """The server refuses."""

    def send(self, shipment: Shipment) -> None:
        raise AssertionError("nobody joined")

    def leave(self) -> None:
        """Nothing was joined."""


def transfers() -> Iterator[GroupPush | None]:
    """Both ways."""
    yield None
    yield GroupPush(NoEnd)


def is_sleeping(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/is_sleeping", timeout=10) as answer:
        return bool(json.loads(answer.read())["is_sleeping"])


def completions(groups: list[Group]) -> list[Completion]:
    return [one for group in groups for one in group.completions]


@torch.no_grad()
def most_likely(model: PreTrainedModel, one: Completion) -> torch.Tensor:
    ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
    return model(ids).logits[0, len(one.prompt_ids) - 1 : -1].argmax(dim=1)


@torch.no_grad()
def move(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.005)


@pytest.mark.proves("F60")
def test_completions_after_sleep_are_those_before_and_what_needs_a_gpu_is_left_for_files(tmp_path: Path) -> None:
    model, tokenizer = load_model("embedded")
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings())
    rows = [{"question": f"Tom has {n} apples and buys {n + 3} more. How many has he?", "answer": ""} for n in range(4)]
    prompts = render_prompts(rows, tokenizer, template="think_answer")[0]  # type: ignore[arg-type]
    logs = tmp_path / "logs"
    servers = VllmServers(
        str(EMBEDDED), ServerKeys.model_construct(vllm_servers=1, sleep=True), dtype="float32", on_cpu=True, logs=logs
    )
    [url] = servers.urls
    said: list[str] = []
    try:
        for push in transfers():
            sleeps = push is None
            limits = Deadlines(gone_seconds=300.0)
            options: dict[str, Any] = {"push": push, "sleep": sleeps, "deadlines": limits}
            options["notify"] = said.append
            sampler = make_server_sampler(GREEDY, urls=servers.urls, weights_folder=tmp_path, **options)
            for version in range(3):
                sampler.load_weights(policy, version=version)
                before = sampler.sample(SamplingRequest(prompts, 1))
                assert is_sleeping(url) == sleeps
                after = sampler.sample(SamplingRequest(prompts, 1))
                assert [one.token_ids for one in completions(after)] == [one.token_ids for one in completions(before)]
                for one in completions(after):
                    assert one.policy_version == version
                    assert torch.equal(most_likely(model, one), torch.tensor(one.token_ids))
                move(model)
            sampler.close()
    finally:
        servers.close()
    reasons = [text for text in said if "no CUDA device" in text]
    assert any("over nccl" in text for text in reasons)
