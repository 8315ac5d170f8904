"""Do real weights go over real NCCL into real vLLM? These tests have not yet run anywhere.

They need CUDA devices, ONCURVE_VLLM_PYTHON for the servers and vLLM in this environment as well.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from needs import NEEDS_VLLM
from served import make_server_sampler

from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.data.prompts import render_prompts
from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.servers.nccl_group import GroupPush
from oncurve.fleet.settings import Deadlines, ServerKeys
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import load_model
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    NEEDS_VLLM,
    pytest.mark.nightly,
]
PARAMS = SamplingParams(max_completion_tokens=40)
SMALL = ("--gpu-memory-utilization", "0.3", "--enforce-eager")


def make_policy() -> tuple[TrainedPolicy, list[Prompt]]:
    model, tokenizer = load_model("embedded")
    policy = TrainedPolicy(model.to("cuda:0"), tokenizer, optimizer=OptimizerSettings())  # type: ignore[arg-type]
    rows = [{"question": f"Tom has {n} apples and buys {n + 3} more. How many has he?", "answer": ""} for n in range(6)]
    return policy, render_prompts(rows, tokenizer, template="think_answer")[0]  # type: ignore[arg-type]


def check(policy: TrainedPolicy, one: Completion) -> None:
    """The log-probabilities that the server reports are those of the policy."""
    ids = torch.tensor([[*one.prompt_ids, *one.token_ids]], device="cuda:0")
    with torch.no_grad():
        logits = policy.model(ids).logits[0, len(one.prompt_ids) - 1 : -1].float()
    ours = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(one.prompt_ids) :, None])[:, 0].cpu()
    torch.testing.assert_close(torch.tensor(one.sampler_logprobs), ours, atol=1e-2, rtol=0)


def follow(push: GroupPush, servers: VllmServers, folder: Path) -> set[str]:
    """Three versions through a way; the versions that were written as files."""
    policy, prompts = make_policy()
    limits = Deadlines(gone_seconds=300.0)
    options = {"urls": [], "weights_folder": folder, "deadlines": limits, "local": servers}
    sampler = make_server_sampler(PARAMS, push=push, **options)  # type: ignore[arg-type]
    try:
        for version in range(3):
            sampler.load_weights(policy, version=version)
            end = time.monotonic() + 300
            while len(sampler.pool.ready) < len(sampler.pool.servers):
                assert time.monotonic() < end
                time.sleep(0.1)
            for group in sampler.sample(SamplingRequest(prompts, 4)):
                for one in group.completions:
                    assert one.policy_version == version
                    check(policy, one)
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        return {path.name.split(":")[1] for path in folder.glob("weights-*/*:*")}
    finally:
        sampler.close()


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment")
def test_a_server_on_the_second_gpu_samples_from_weights_that_came_over_nccl(tmp_path: Path) -> None:
    servers = VllmServers(
        str(EMBEDDED),
        ServerKeys.model_construct(vllm_servers=1, vllm_options=SMALL),
        dtype="float32",
        on_cpu=False,
        logs=tmp_path,
        devices=["1"],
    )
    push = GroupPush()
    assert follow(push, servers, tmp_path / "weights") == {"0"}
