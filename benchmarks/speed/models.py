"""Random models of the benchmarks, the lengths of their completions, and their prompts.

Timing does not depend on what a model knows, so random weights do. What matters is how long completions get: the weight
of the end token reads a hidden dimension that is nearly constant, which gives it a fixed probability per token.
"""

from __future__ import annotations

import itertools
import string
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from roofline import TokenWork
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from oncurve.core.records import Completion, Prompt, Reward

MEAN_TOKENS = 40.0
"""Mean length of a completion that nothing cuts off, in ragged cases."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2 shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the seven matrices of a layer."""
        width = self.hidden // self.heads
        query, kv = self.heads * width, self.kv_heads * width
        feed_forward = [*[(self.hidden, self.mlp)] * 2, (self.mlp, self.hidden)]
        return [(self.hidden, query), *[(self.hidden, kv)] * 2, (query, self.hidden), *feed_forward]

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with: those of the layers and of the head."""
        layer = sum(inputs * outputs for inputs, outputs in self.layer_matrices)
        return self.layers * layer + self.hidden * self.vocabulary

    def products(self, tokens: int, predicted: int) -> list[tuple[int, int, int, int]]:
        """(tokens, inputs, outputs, how often) of every matrix; ``predicted`` tokens pass through the head."""
        rows = [(tokens, inputs, outputs, self.layers) for inputs, outputs in self.layer_matrices]
        return [*rows, (predicted, self.hidden, self.vocabulary, 1)]

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token leaves in the cache."""
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads)

    def size(self, number_bytes: int, *, lora_rank: int | None = None) -> TokenWork:
        """What the least work of a token depends on, with all weights trained, or adapters on every matrix."""
        width, head = self.hidden // self.heads, self.hidden * self.vocabulary
        query, kv = self.heads * width, self.kv_heads * width
        inner = self.matrix_parameters - head
        thin = self.layers * (lora_rank or 0) * sum(a + b for a, b in self.layer_matrices)
        biases_norms_embedding = self.layers * (query + 2 * kv + 2 * self.hidden) + self.hidden + head
        return TokenWork(
            matrix_weights=inner + thin,
            trained_matrix_weights=thin or inner,
            head_weights=head,
            trained_head_weights=0 if thin else head,
            trained_weights=thin or inner + head + biases_norms_embedding,
            layers=self.layers,
            query_size=query,
            kv_numbers=self.kv_numbers,
            number_bytes=number_bytes,
        )


SHAPES = {
    "S": Shape(hidden=256, layers=6, heads=4, kv_heads=2, mlp=688, vocabulary=1024),
    "M": Shape(hidden=512, layers=12, heads=8, kv_heads=2, mlp=1408, vocabulary=4096),
    "135M": Shape(hidden=576, layers=30, heads=9, kv_heads=3, mlp=1536, vocabulary=49152),
    "0.5B": Shape(hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocabulary=151936),
    "1.5B": Shape(hidden=1536, layers=28, heads=12, kv_heads=2, mlp=8960, vocabulary=151936),
}
"""S and M are those of this project; the others have the shapes of SmolLM2 and Qwen2.5, with untied heads."""
END = 0
"""Token id of the end token."""
FIRST_WORD = 258 + 26
"""Tokens from here on are whole words of two letters or more; before them stand the end, the pad, bytes and letters."""


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
        for layer in model.model.layers:  # which deep models would overwrite
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END] = 0.0
        model.lm_head.weight[END, 0] = calibrate(model, mean_tokens)
    model.save_pretrained(folder)
    word_tokenizer(shape.vocabulary).save_pretrained(folder)
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


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """A Qwen2 tokenizer of a given size: the end, the pad, all bytes, then words of letters after a space."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<end>", "<pad>", *sorted(ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in itertools.islice(_words(), max(vocabulary - len(tokens), 0)):
        tokens.append(f"Ġ{word}")
        merges.append((f"Ġ{word[:-1]}", word[-1]))
    return Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        unk_token=None,
        eos_token="<end>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def _words() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


def make_prompts(tokenizer: PreTrainedTokenizerBase, *, count: int, num_tokens: int) -> list[Prompt]:
    """Prompts of random words, one token each, none like another."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(FIRST_WORD, len(tokenizer), (count, num_tokens), generator=generator).tolist()
    prompts = []
    for index, ids in enumerate(rows):
        text = str(tokenizer.decode(ids))
        if tokenizer(text)["input_ids"] != ids:
            raise ValueError(f"prompt {index} of the benchmark is not read back as the tokens that it was made of")
        prompts.append(Prompt(text, tuple(ids), index, {"question": text, "answer": "0"}))
    return prompts


def draw_lengths(case: str, *, count: int, limit: int, seed: int = 0) -> list[int]:
    """Completion lengths as the models give them: all at the limit ("full"), or geometric and cut at it ("ragged")."""
    if case == "full":
        return [limit] * count
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn = torch.floor(torch.log1p(-uniform) / torch.log1p(torch.tensor(-1.0 / MEAN_TOKENS, dtype=torch.float64))) + 1
    return [int(length) for length in drawn.clamp(max=limit)]


def coin(text: str) -> float:
    """A reward that is 0 or 1 with equal chance, fixed by the text."""
    return float(zlib.crc32(text.encode()) & 1)


class CoinReward:
    """The same reward for oncurve."""

    name = "coin"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [Reward(coin(completion.text)) for completion in completions]

    def close(self) -> None:
        """Nothing to give back."""
