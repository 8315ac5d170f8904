"""A model whose logits are more than its last hidden states times a matrix: found when it is loaded, and then right."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from oncurve.core.batch import Batch
from oncurve.core.errors import ConfigError, SamplerError, TrainingError
from oncurve.core.logprobs import join_rows
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model.context import context_of
from oncurve.observe.tokens import token_lengths
from oncurve.policy.lora import Adapter
from oncurve.policy.scoring_path import example_batch, find_scoring_path
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.guards import Guards
from oncurve.sample.engine import InProcessEngine

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": 260,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family whose weights are large enough for its peculiarities to show."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=draw)
    return model.eval()


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    """Row by row by the model's own forward pass."""
    found = torch.zeros(batch.mask.shape)
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, :prompt], batch.completion_ids[row, :length]])
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        found[row, :length] = logprobs[prompt - 1 : -1].gather(1, batch.completion_ids[row, :length, None])[:, 0]
    return found


def gradient(logprobs: Tensor, model: Any) -> Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(logprobs.sum(), weights, allow_unused=True)
    return torch.cat([one.flatten() for one in found if one is not None])


@pytest.mark.parametrize(
    ("kind", "changes", "is_own"),
    [
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, False),
        ("Qwen3_5Text", LINEAR, False),
        ("Qwen3Next", {**LINEAR, **EXPERTS}, False),
        ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, False),
        ("Mamba", {"state_size": 8}, False),
        ("Bamba", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}, False),
        ("Gemma3nText", GEMMA3N, False),
        ("Qwen2", {}, False),
        ("Granite", {"logits_scaling": 4.0}, False),
        ("Cohere", {"logit_scale": 0.1}, False),
        ("HyperCLOVAX", {"logits_scaling": 2.0}, True),
        ("ModernBertDecoder", {"cls_token_id": 1, "sep_token_id": 2}, True),
        ("MiniCPM3", {**MLA, "dim_model_base": 16}, False),
    ],
)
def test_trainer_and_sampler_compute_the_model_and_not_what_they_know_of_its_head(
    kind: str,
    changes: dict[str, Any],
    is_own: bool,
    make_policy: Callable[..., TrainedPolicy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of(kind, **changes)
    with caplog.at_level(logging.INFO):
        policy = make_policy(model)
    assert ("own forward pass" in policy.scoring_path.method) is is_own
    assert str(policy.scoring_path) in caplog.text
    batch = example_batch(model)
    wanted, found = plain_logprobs(model, batch), policy.logprobs(batch)[0]
    assert (found - wanted)[batch.mask].abs().max() < 2e-5
    exact = gradient(wanted, model)
    assert (gradient(found, model) - exact).norm() < 1e-4 * exact.norm()
    engine = InProcessEngine(SamplingParams(max_completion_tokens=8))
    engine.load_weights(policy, version=0)
    groups = engine.sample(SamplingRequest([Prompt("", (5, 6, 7), 0), Prompt("", (8, 9, 10, 11, 12, 13), 1)], 4))
    for completion in (one for group in groups for one in group.completions):
        ids, start = torch.tensor([*completion.prompt_ids, *completion.token_ids]), len(completion.prompt_ids)
        own = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        sampled = own[start - 1 : -1].gather(1, ids[start:, None])[:, 0].detach()
        assert torch.allclose(torch.tensor(completion.sampler_logprobs), sampled, atol=2e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's word to transformers
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_head_or_embedding_is_sampled_as_it_is_trained(
    target: str, make_policy: Callable[..., TrainedPolicy]
) -> None:
    inner = model_of("Qwen2", tie_word_embeddings=False)
    peft = get_peft_model(inner, LoraConfig(r=4, target_modules=["q_proj", target], init_lora_weights=False))
    policy = make_policy(inner)
    batch = example_batch(inner)
    with torch.no_grad():
        wanted = plain_logprobs(peft, batch)
        assert (policy.logprobs(batch)[0] - wanted)[batch.mask].abs().max() < 2e-5
    engine = InProcessEngine(SamplingParams(max_completion_tokens=6))
    engine.load_weights(policy, version=0)
    [group] = engine.sample(SamplingRequest([Prompt("", (5, 6, 7), 0)], 4))
    for completion in group.completions:
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        with torch.no_grad():
            own = peft(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        sampled = own[2:-1].gather(1, ids[3:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.sampler_logprobs), sampled, atol=2e-5)


def test_layers_that_carry_a_state_and_attention_by_an_index_are_not_packed(
    make_policy: Callable[..., TrainedPolicy],
) -> None:
    assert not make_policy(model_of("Lfm2", layer_types=["conv", "full_attention"])).is_packed
    assert make_policy(model_of("Llama")).is_packed


def test_rows_stay_below_the_length_from_which_their_neighbours_would_matter() -> None:
    from transformers import LlamaConfig, Phi3Config, Qwen2Config

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope: dict[str, Any] = {"rope_theta": 1e4, "factor": 2.0}
    longrope = {**rope, "rope_type": "longrope", **factors}
    assert context_of(Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=longrope)) == 64
    assert context_of(LlamaConfig(**SIZES, rope_parameters={**rope, "rope_type": "dynamic"})) == 128
    assert context_of(Qwen2Config(**SIZES)) == 128


def test_tokens_that_were_added_to_the_tokenizer_alone_are_refused(make_policy: Callable[..., TrainedPolicy]) -> None:
    engine = InProcessEngine(SamplingParams(max_completion_tokens=2))
    engine.load_weights(make_policy(model_of("Qwen2")), version=0)
    with pytest.raises(SamplerError, match=r"token 300 is beyond the model's embedding, which has 260 rows"):
        engine.sample(SamplingRequest([Prompt("", (5, 300), 0)], 1))


def test_a_step_whose_sampler_computed_another_model_is_not_trained() -> None:
    guards = Guards(watches_mismatch=True)
    guards.before_first_update([0.001, math.nan])
    with pytest.raises(TrainingError, match=r"differ by 0\.9 nats.*Nothing was trained"):
        guards.before_first_update([0.001, 0.9])
    guards.before_first_update([0.1])
    guards.is_exact = True
    guards.before_first_update([0.005])
    with pytest.raises(TrainingError, match="differ by"):
        guards.before_first_update([0.1])


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_on_the_head_of_a_tied_model_is_not_merged(tmp_path: Path) -> None:
    inner = model_of("Qwen2", tie_word_embeddings=True)
    adapted = get_peft_model(inner, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    with pytest.raises(ConfigError, match="both are one matrix"):
        Adapter(adapted).merge()  # type: ignore[arg-type]


def test_bytes_that_spell_no_text_do_not_end_a_run_that_records_them() -> None:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    symbols = ["<0x0A>", "<0xF0>", "a"]
    tokenizer = Tokenizer(BPE(vocab={symbol: place for place, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert token_lengths(tokenizer, [0, 1, 2], tokenizer.decode([0, 1, 2])) is None
    assert token_lengths(tokenizer, [2, 2], "aa") == [1, 1]


def test_rounding_that_a_token_for_padding_makes_larger_is_no_look_ahead() -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, _ = join_rows(example_batch(model))
    config.pad_token_id = model.config.pad_token_id = next(one for one in range(3, 260) if one not in ids)
    seen: list[Tensor] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: seen.append(given[0]))

    def shake(_: Any, given: Any, hidden: Tensor) -> Tensor:
        """Behind such a token the last digits of a float32 become the third."""
        behind = (seen[-1] == config.pad_token_id).cumsum(1).gt(0)[..., None]
        return torch.where(behind, hidden + 1e-3 * (1e7 * hidden).sin(), hidden)

    model.model.norm.register_forward_hook(shake)
    assert find_scoring_path(model).is_packed
