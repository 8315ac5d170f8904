"""Tiny models with a tokenizer of bytes, made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
MERGES = (("a", "n"), ("<", "/"), ("Ġ", "t"))
"""Tokens of two bytes, so that a stop string can begin and end inside a token."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level byte pairs: every text has tokens, a few tokens have two bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    made = Tokenizer(BPE(vocab={symbol: place for place, symbol in enumerate(symbols)}, merges=list(MERGES)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([PAD, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def model_config(architecture: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Two layers of 32 numbers; weights large enough for a distribution that depends on the context."""
    from transformers import Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config

    ends: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.25,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    match architecture:
        case "qwen2":
            return Qwen2Config(**ends, **sizes, tie_word_embeddings=True)
        case "llama":
            return LlamaConfig(**ends, **sizes, tie_word_embeddings=False)
        case "gpt2":
            return GPT2Config(**ends, n_embd=32, n_layer=2, n_head=4, n_positions=256)
        case "gemma2":  # soft caps on attention and logits, a window in every other layer, dropout left at 0
            return Gemma2Config(**ends, **sizes, head_dim=8, final_logit_softcapping=2.0, sliding_window=16)
    raise ValueError(architecture)


def make_model(config: Any, *, seed: int = 0) -> PreTrainedModel:
    """A random model of a configuration, the same for the same seed, ready for use."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)  # not the process's own, of which a thread of an earlier test may draw
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=config.initializer_range, generator=draw)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model.eval()


def make_trained_policy(model: Any, tokenizer: Any, **options: Any) -> Any:
    """A policy; keys of the recipe's section ``policy`` among the options go into that section."""
    from oncurve.policy.settings import OptimizerSettings, PolicySection
    from oncurve.policy.trained_policy import TrainedPolicy

    keys = PolicySection.model_fields.keys() - {"compute_type"}
    section = PolicySection(**{name: options.pop(name) for name in keys & options.keys()})
    return TrainedPolicy(model, tokenizer, **{"optimizer": OptimizerSettings(), "section": section} | options)
