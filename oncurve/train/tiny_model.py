"""How is a small language model with its own tokenizer made from nothing, as an ordinary Hugging Face checkpoint?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

WORDS = r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+ ?|\s+"
"""Where text is cut before byte pairs merge: one digit at a time, a word with its space, marks with theirs."""


def tiny_tokenizer(texts: Iterable[str], *, num_merges: int = 330) -> PreTrainedTokenizerFast:
    """Byte-level byte-pair encoding whose digits are single tokens.

    The four tags are tokens that decoding keeps; the end and the pad token are special. There is no chat template and
    no token is added on its own, so that the tokens of a text are those of its parts.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=len(alphabet) + num_merges, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator((_without_tags(text) for text in texts), trainer)
    tokenizer.add_special_tokens([PAD_TOKEN, END_TOKEN])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerFast,
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
        rope_theta=10_000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _without_tags(text: str) -> str:
    for tag in TAGS:
        text = text.replace(tag, " ")
    return text
