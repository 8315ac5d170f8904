"""Which random models do the benchmarks use, and how long do they make their completions?

Timing does not depend on what a model knows, so random weights do. What matters is how long completions get: the weight
of the end token reads a hidden dimension that is nearly constant, which gives it a fixed probability per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Shape:
    """A Qwen2 shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int


SHAPES = {
    "S": Shape(hidden=256, layers=6, heads=4, kv_heads=2, mlp=688, vocabulary=1024),
    "M": Shape(hidden=512, layers=12, heads=8, kv_heads=2, mlp=1408, vocabulary=4096),
}
END = 0
"""Token id of the end token."""


def build(folder: Path, shape: Shape, *, mean_tokens: float | None, max_length: int, seed: int = 0) -> Path:
    """Save a random checkpoint whose completions end with probability 1 / mean_tokens per token; None: never."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=END + 1,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0  # dominates the hidden state, so its normalized value is constant
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END] = 0.0
        model.lm_head.weight[END, 0] = calibrate(model, mean_tokens)
    model.save_pretrained(folder)
    vocabulary = {"<end>": END, "<pad>": END + 1} | {f"w{i}": i for i in range(2, shape.vocabulary)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    from tokenizers.pre_tokenizers import WhitespaceSplit

    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def calibrate(model: Qwen2ForCausalLM, mean_tokens: float | None) -> float:
    """The weight from the constant dimension to the end token that gives it probability 1 / mean_tokens."""
    ids = torch.randint(2, model.config.vocab_size, (8, 64))
    hidden = model.model(ids).last_hidden_state.reshape(-1, model.config.hidden_size)
    level = hidden[:, 0].mean().item()
    if mean_tokens is None:
        return -50.0 / level
    others = torch.logsumexp((hidden @ model.lm_head.weight.T)[:, 1:], dim=-1).mean().item()
    return (others - torch.log(torch.tensor(mean_tokens - 1.0)).item()) / level
