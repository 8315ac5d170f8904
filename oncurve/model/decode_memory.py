"""The memory that decoding takes, in bytes: the rule by which rows are chosen, and by which they are planned.

It knows numbers alone, no tensors, so that the planner can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.core.records import DecodeCall

OWN_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Families that our own layers compute, by ``model_type``, with their class in transformers; see ``weights.py``."""
BLOCK = 32
"""Buffers hold a multiple of so many positions: kernels read whole blocks."""
GROWTH = 128
"""Positions by which the buffers of completions grow at least on a CPU; they double as long as that is more. A GPU
reserves all at once: what it has recorded writes to where they are."""
NEWEST = -1
"""Instead of a token: the one that was drawn last for this slot, which the device holds."""
PREFILL_TOKENS = 4096
"""Prompt tokens computed at one time."""
MOST_ROWS = 1024
"""Rows that a GPU computes at one time where nothing says how many: more gain little and wait long for the last."""
USED_SHARE = 0.9
"""Share of the free memory that is counted on: the allocator leaves gaps."""
RECORDING_BYTES = 2**28
"""Guessed. What recorded steps keep besides: instantiated graphs, and the largest step's tensors once more."""
DRAW_BYTES, CUT_DRAW_BYTES = 36, 68
"""Counted. Per row and word while a token is drawn: float32 logits, scaled, probabilities, float64 and its sums; with
top-k, top-p or min-p those of a sort besides."""
FIRST_BYTES = 8
"""Per prompt and word: logits of the first token, and those of one reading before they are joined with others."""


def whole_blocks(positions: int) -> int:
    """Positions, rounded up to whole blocks."""
    return -(-positions // BLOCK) * BLOCK


def grown(capacity: int, needed: int, limit: int) -> int:
    """Positions of the buffers of completions after they have grown to hold ``needed`` of at most ``limit``."""
    return whole_blocks(min(max(needed, capacity + GROWTH, 2 * capacity), limit))


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The widths of a model, in numbers and bytes."""

    layers: int
    hidden: int
    mlp: int
    qkv: int
    """Numbers of queries, keys and values of a token."""
    kv: int
    """Numbers of its keys and values."""
    vocabulary: int
    kv_bytes: int
    """Bytes of one number of the keys and values."""
    compute_bytes: int
    """Bytes of one number in the arithmetic."""
    heads_per_kv: int = 1
    """Query heads that read one key head."""

    @property
    def position_bytes(self) -> int:
        """Keys and values of one position in one layer."""
        return self.kv * self.kv_bytes

    @property
    def token_bytes(self) -> int:
        """Guessed. Widest tensors of a token in one layer: the residual in float32, qkv, gate and up."""
        return 4 * 4 * self.hidden + self.compute_bytes * (3 * self.qkv + 4 * self.mlp)


def cache_bytes(widths: Widths, *, rows: int, prompts: int, prompt_tokens: int, completion_tokens: int) -> int:
    """Keys and values of a decoder when they take most: completions grow layer by layer, so that the last layer's
    buffer is there twice, as it was and as it becomes."""
    capacity = before = 0
    while capacity < whole_blocks(completion_tokens):
        before, capacity = capacity, grown(capacity, capacity + 1, completion_tokens)
    own = rows * (widths.layers * capacity + before)
    return widths.position_bytes * (widths.layers * prompts * whole_blocks(prompt_tokens) + own)


def drawing_bytes(widths: Widths, call: DecodeCall, *, rows: int, prompts: int) -> int:
    """Logits of all rows, and what is made of them to draw a token each."""
    by_row = CUT_DRAW_BYTES if call.cuts else DRAW_BYTES
    return widths.vocabulary * (rows * by_row + prompts * FIRST_BYTES)


def decoding_bytes(widths: Widths, call: DecodeCall, rows: int) -> int:
    """All that so many rows at a time take, where the engine knows the layers, besides weights."""
    prompts = call.prompts(rows)
    cache = cache_bytes(
        widths,
        rows=rows,
        prompts=prompts,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
    )
    reading = max(min(PREFILL_TOKENS, prompts * call.prompt_tokens), call.prompt_tokens, rows) * widths.token_bytes
    return cache + reading + drawing_bytes(widths, call, rows=rows, prompts=prompts)


def module_bytes(widths: Widths, call: DecodeCall, rows: int) -> int:
    """The same through the model's own module: each row has a copy of its prompt, and room for all of its tokens.

    When rows leave, one layer's buffer is there twice; where several heads share keys, attention repeats them.
    """
    prompts = call.groups(rows)
    positions = call.prompt_tokens + call.completion_tokens
    repeated = widths.kv * widths.compute_bytes * (widths.heads_per_kv if widths.heads_per_kv > 1 else 0)
    cache = rows * positions * (widths.position_bytes * (widths.layers + 1) + repeated)
    reading = max(prompts * call.prompt_tokens, rows) * widths.token_bytes
    return cache + reading + drawing_bytes(widths, call, rows=rows, prompts=prompts)


def most_rows(
    widths: Widths, call: DecodeCall, free_bytes: float, *, most: int = MOST_ROWS, by_module: bool = False
) -> int:
    """Completions at a time that fit into free memory, at most ``most`` and never less than one."""
    rule = module_bytes if by_module else decoding_bytes
    low, high = 1, max(1, min(call.rows, most))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rule(widths, call, middle) <= USED_SHARE * free_bytes else (low, middle - 1)
    return low
