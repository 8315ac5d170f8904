"""Activation memory of a forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.model.length_rounding import whole_tokens
from oncurve.plan import constants
from oncurve.plan.setup import Setup, Work
from oncurve.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The largest microbatch of a step."""

    tokens: float
    """Tokens computed, N."""
    trained_tokens: float
    """Completion tokens, whose logits are needed."""
    queries: float
    """Tokens that attention works on as queries."""
    keys: float
    """Tokens that it gathers as keys: with packing, the prompt once more for every row."""
    mask_entries: float
    """Entries of the masks that say who sees whom; 0 where attention is plainly causal."""
    repeats: int
    """Whole microbatches of this size in an update."""


def largest_microbatch(work: Work, setup: Setup) -> Microbatch:
    """Rows of full length that ``tokens_per_microbatch`` holds, one at least.

        packed:  rows = completions of whole prompts that fit, N = prompts S + rows (T - 1), rounded up a little
        padded:  rows = budget / (S + T),                      N = rows (S + T)

    Source: ``Batch.plan_microbatches``, ``policy/packed_attention.py``. With several ranks each has its share of the
    prompts.
    """
    prompt, completion = work.prompt_tokens, work.longest_tokens
    rows_per_update = max(1, work.completions_per_update // max(setup.ranks, 1))
    if not setup.packed:
        whole = prompt + completion
        rows = max(1, min(rows_per_update, setup.tokens_per_microbatch // whole))
        tokens = rows * whole
        return Microbatch(tokens, rows * completion, tokens, tokens, 0, rows_per_update // rows)
    rows, prompts, used = 0, 0, 0
    while rows < rows_per_update:
        begins = rows % work.group_size == 0
        more = completion + (prompt if begins else 0)
        if rows and used + more > setup.tokens_per_microbatch:
            break
        rows, prompts, used = rows + 1, prompts + begins, used + more
    tokens = prompts * prompt + rows * (completion - 1)
    masked = rows * (completion - 1) * (prompt + completion - 1)
    return Microbatch(
        tokens=whole_tokens(tokens) if setup.has_own_layers else tokens,
        trained_tokens=rows * completion,
        queries=tokens,
        keys=prompts * prompt + rows * (prompt + completion - 1),
        mask_entries=masked,
        repeats=rows_per_update // rows,
    )


def layer_bytes(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """Bytes that one decoder layer keeps for its backward pass.

    Through the modules of transformers, where autograd keeps what it likes:

        c N (4 MLP + i H + Q) + 4 N w H          c: bytes of the compute type; i: 2 in float32, 5 under autocast;
        + c (q Nq Q + 2 Nk KV + mask)            w: 4, or 2 where the norms are frozen; Q, KV: width of queries, keys;
                                                 q: 2 packed, 1 padded
        flash kernel: + c N (Q + 2 KV) + 4 N heads instead, without a mask or copies of keys

    The mask is turned into numbers of the compute type once per layer, and kept. With an adapter, each of its layers
    keeps a product of rank numbers per token. Through our own layers, ``model/forward_backward.py``:

        float32:     4 N (2 MLP + 2 Q + 2 KV + 2 H + heads)      of attention only the logarithms of its sums
        half width:  2 N (2 MLP + 2 Q + 2 KV + H) + 4 N (H + heads)      the residual before the MLP is made again

    Source: counted, ``constants.py``.
    """
    if setup.has_own_layers:
        return _own_layer_bytes(shape, setup, batch)
    width = setup.width
    inputs = constants.SAVED_INPUTS_FULL_WIDTH if width == 4 else constants.SAVED_INPUTS_HALF_WIDTH
    frozen = setup.method == "lora"
    wide = constants.SAVED_WIDE_HIDDEN_FROZEN if frozen else constants.SAVED_WIDE_HIDDEN
    linear = batch.tokens * (constants.SAVED_MLP * shape.mlp + inputs * shape.hidden + shape.query_size)
    if setup.has_flash_kernel:
        attention = batch.tokens * (shape.query_size + 2 * shape.kv_size + 4 * shape.heads / width)
    else:
        copies = constants.SAVED_QUERIES_PACKED if setup.packed else constants.SAVED_QUERIES_PADDED
        attention = copies * batch.queries * shape.query_size + 2 * batch.keys * shape.kv_size + batch.mask_entries
    adapter = len(setup.targets or shape.layer_matrices) * setup.rank * batch.tokens * width if frozen else 0
    return width * (linear + attention) + 4 * wide * batch.tokens * shape.hidden + adapter


def _own_layer_bytes(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """Bytes that a layer of ``model/forward_backward.py`` keeps: ``Kept``."""
    attention = 2 * shape.query_size + 2 * shape.kv_size
    if setup.width == 4:
        values = constants.OWN_MLP * shape.mlp + attention + constants.OWN_WIDE_HIDDEN * shape.hidden
        return 4 * batch.tokens * (values + shape.heads)
    values = constants.OWN_MLP * shape.mlp + attention + shape.hidden
    return batch.tokens * (setup.width * values + 4 * (shape.hidden + shape.heads))


def kept_bytes(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """Bytes that autograd keeps at the end of the forward pass.

        without checkpointing:  layers x layer_bytes
        with checkpointing:     layers x 4 N H, the inputs of the layers; + c N H in our own layers, whose residual
                                comes in two parts
        both:                   + 4 N (2 H + 2 D) + c M H      D: width of a head; M: trained tokens;
                                4 (2 M H + N D) in our own layers

    Offloaded activations leave two layers on the device, one in work and one on its way.
    Source of checkpointing: arXiv:1604.06174, one checkpoint per layer.
    """
    one = 4 * batch.tokens * shape.hidden
    if setup.has_own_layers:
        last = 4 * (2 * batch.trained_tokens * shape.hidden + batch.tokens * shape.head_size)
        inputs = shape.layers * one + (shape.layers - 1) * one * setup.width / 4
    else:
        last = 4 * batch.tokens * (constants.SAVED_LAST * shape.hidden + 2 * shape.head_size)
        last += setup.width * batch.trained_tokens * shape.hidden
        inputs = shape.layers * one
    layers = min(2, shape.layers) if setup.offloads_activations else shape.layers
    if setup.checkpointing:
        return inputs * layers / shape.layers + last
    return layers * layer_bytes(shape, setup, batch) + last


def layer_buffers(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """Buffers while a layer runs backward: gradients of activations; with checkpointing the layer again.

    In the modules of transformers the product that the MLP's last matrix reads, c N MLP, is gone when the three
    gradients are there.
    """
    if not setup.checkpointing:
        return backward_bytes(shape, setup, batch)
    gone = 0.0 if setup.has_own_layers else setup.width * batch.tokens * shape.mlp
    return layer_bytes(shape, setup, batch) - gone + backward_bytes(shape, setup, batch)


def backward_bytes(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """Gradients of activations that are alive while one layer runs backward: c N 3 MLP + 4 N 3 H. Source: counted.

    Our own layers in half width make the residual before the MLP again: 4 N H more.
    """
    mlp, hidden = constants.BACKWARD_MLP, constants.BACKWARD_HIDDEN
    if setup.has_own_layers and setup.width == 2:
        hidden += 1
    return batch.tokens * (setup.width * mlp * shape.mlp + 4 * hidden * shape.hidden)


def head_bytes(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """The head's buffers in its backward pass, where logits exist for a chunk of tokens only: 1,024, 256 on a CPU.

        4 x copies x chunk x V       the logits and the terms of their gradient in float32: 4, 2 by compiled kernels
        + V H (4 + 4)                the gradient of the head's weights, and a chunk's product before it is added;
                                     in half width V H (2 + 4 + 2 + 4) with the weights' copy; frozen: the copy alone

    Source: ``algorithm/logprobs.py``, counted with torch's memory profiler. All logits at once would be N V (4 + c)
    at the least: 5 GB for 8,192 tokens and a vocabulary of 151,936 in float32.
    """
    most = constants.HEAD_CHUNK_TOKENS if setup.is_gpu else constants.HEAD_CHUNK_TOKENS_CPU
    chunk = min(most, batch.trained_tokens)
    copies = constants.HEAD_COPIES_NATIVE if setup.has_own_layers else constants.HEAD_COPIES
    logits = 4 * copies * chunk * shape.vocabulary
    copy = 0 if setup.width == 4 else 2
    gradient = 0 if setup.method == "lora" else (8 if setup.width == 4 else 10)
    return logits + (copy + gradient) * shape.head_parameters
