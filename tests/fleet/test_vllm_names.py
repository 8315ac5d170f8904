"""Does real vLLM take weights and adapters of models whose files name them in their own way?

These tests need an environment with vLLM, as those of test_vllm.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from needs import NEEDS_VLLM
from served import make_server_sampler
from test_another_model import FORMS, policy_of, renamed
from test_vllm import teacher_forced
from tiny_models import make_model
from transformers import AutoConfig

from oncurve.core.errors import SamplerError
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.settings import Deadlines, ServerKeys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

pytestmark = [
    NEEDS_VLLM,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
PARAMS = SamplingParams(max_completion_tokens=12)
WIDE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
"""Sizes that vLLM's kernels for CPUs have."""


def check(sampler: ServerSampler, policy: Any, version: int) -> None:
    """What is sampled has the log-probabilities of the weights that were sent."""
    sampler.load_weights(policy, version)
    prompts = [Prompt("", tuple(range(5 + n, 12 + n)), n, {}) for n in range(3)]
    found = [one for group in sampler.sample(SamplingRequest(prompts, 2)) for one in group.completions]
    assert len(found) == 6
    for one in found:
        ours = teacher_forced(policy.model, one).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.sampler_logprobs), ours, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["gpt_neox, tables", "gpt2, no prefix", "qwen3_moe, split", "mixtral, split"])
def test_vllm_samples_from_weights_and_adapters_whatever_its_files_call_them(
    kind: str, vllm_python: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    family, own, change = FORMS[kind]
    config = AutoConfig.for_model(family, **WIDE, vocab_size=len(tokenizer), **own)
    config.initializer_range = 0.2
    place = tmp_path / "model"
    make_model(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    renamed(place, change)
    servers = VllmServers(
        str(place),
        ServerKeys.model_construct(vllm_servers=1, vllm_python=vllm_python),
        dtype="float32",
        on_cpu=True,
        logs=tmp_path / "logs",
    )
    deadlines = Deadlines(gone_seconds=300.0)
    samplers = [
        make_server_sampler(PARAMS, urls=servers.urls, weights_folder=tmp_path, deadlines=deadlines, adapter="merged")
        for _ in range(3)
    ]
    try:
        check(samplers[0], policy_of(place, tokenizer, lora=True), 0)
        check(samplers[1], policy_of(place, tokenizer), 1)
        other = policy_of(place, tokenizer)
        other.model.config.update({"hidden_act": "relu"})
        with pytest.raises(SamplerError, match=r"hidden_act is .* there and relu here"):
            samplers[2].load_weights(other, 2)
    finally:
        for sampler in samplers:
            sampler.close()
        servers.close()
