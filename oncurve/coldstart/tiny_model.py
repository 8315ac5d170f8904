"""A small language model with its own tokenizer and random weights, as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    AddedToken,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def tiny_tokenizer(
    texts: Iterable[str], *, num_merges: int = 400, more_tags: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Byte-level byte-pair encoding, learned from some texts, whose digits are single tokens.

    The four tags, and ``more_tags``, are tokens that decoding keeps; the end and the pad token are special. There is no
    chat template, and nothing is added to the tokens of a text.

    The text is cut into words as Qwen2 does it: AutoTokenizer gives every checkpoint of that architecture Qwen2's own
    rule, whatever its files say.
    """
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    learned = Tokenizer(BPE())
    learned.normalizer, learned.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=len(alphabet) + num_merges, initial_alphabet=alphabet, show_progress=False)
    tags = (*TAGS, *more_tags)
    learned.train_from_iterator((_without_tags(text, tags) for text in texts), trainer)
    state = json.loads(learned.to_str())["model"]
    merges: Any = [tuple(pair) for pair in state["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=state["vocab"],
        merges=merges,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    for tag in tags:
        tokenizer.add_tokens(AddedToken(tag, special=False, normalized=False))
    return tokenizer


def tiny_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    hidden_size: int = 192,
    num_layers: int = 4,
    num_heads: int = 4,
    mlp_size: int = 512,
    max_tokens: int = 512,
    init_std: float = 0.06,
) -> Qwen2ForCausalLM:
    """A random model of the Qwen2 architecture in float32: 1.7 million parameters as it stands, tied embeddings.

    ``init_std`` is three times the usual one: at 0.02 a model of this size never learned to copy the numbers of a
    question.
    """
    end_id: Any = tokenizer.eos_token_id
    pad_id: Any = tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=mlp_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        max_position_embeddings=max_tokens,
        initializer_range=init_std,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=end_id, pad_token_id=pad_id)
    return model


def _without_tags(text: str, tags: Sequence[str]) -> str:
    for tag in tags:
        text = text.replace(tag, " ")
    return text
