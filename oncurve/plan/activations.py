"""Activation memory of a forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.model.context import whole_tokens
from oncurve.plan import constants
from oncurve.plan.planned_run import PlannedRun


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


def largest_microbatch(run: PlannedRun) -> Microbatch:
    """Rows of full length that ``tokens_per_microbatch`` holds, one at least.

        packed:  rows = completions of whole prompts that fit, N = prompts S + rows (T - 1), rounded up a little
        padded:  rows = budget / (S + T),                      N = rows (S + T)

    Source: ``Batch.plan_microbatches``, ``policy/packed_attention.py``. With several ranks each has its share of the
    prompts.
    """
    prompt, completion = run.lengths.prompt_tokens, run.longest_tokens
    rows_per_update = max(1, run.completions_per_update // max(run.layout.ranks, 1))
    if not run.policy.packing:
        whole = prompt + completion
        rows = max(1, min(rows_per_update, run.policy.tokens_per_microbatch // whole))
        tokens = rows * whole
        return Microbatch(tokens, rows * completion, tokens, tokens, 0, rows_per_update // rows)
    rows, prompts, used = 0, 0, 0
    while rows < rows_per_update:
        begins = run.config.algorithm.num_groups(rows) == prompts
        more = completion + (prompt if begins else 0)
        if rows and used + more > run.policy.tokens_per_microbatch:
            break
        rows, prompts, used = rows + 1, prompts + begins, used + more
    tokens = prompts * prompt + rows * (completion - 1)
    masked = rows * (completion - 1) * (prompt + completion - 1)
    return Microbatch(
        tokens=whole_tokens(tokens) if run.has_own_layers else tokens,
        trained_tokens=rows * completion,
        queries=tokens,
        keys=prompts * prompt + rows * (prompt + completion - 1),
        mask_entries=masked,
        repeats=rows_per_update // rows,
    )


def layer_bytes(run: PlannedRun, batch: Microbatch) -> float:
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
    if run.has_own_layers:
        return _own_layer_bytes(run, batch)
    width = run.width
    inputs = constants.SAVED_INPUTS_FULL_WIDTH if width == 4 else constants.SAVED_INPUTS_HALF_WIDTH
    wide = constants.SAVED_WIDE_HIDDEN_FROZEN if run.trains_adapter else constants.SAVED_WIDE_HIDDEN
    linear = batch.tokens * (constants.SAVED_MLP * run.shape.mlp + inputs * run.shape.hidden + run.shape.query_size)
    if run.has_flash_kernel:
        attention = batch.tokens * (run.shape.query_size + 2 * run.shape.kv_size + 4 * run.shape.heads / width)
    else:
        copies = constants.SAVED_QUERIES_PACKED if run.policy.packing else constants.SAVED_QUERIES_PADDED
        attention = (
            copies * batch.queries * run.shape.query_size + 2 * batch.keys * run.shape.kv_size + batch.mask_entries
        )
    adapter = 0.0
    if run.policy.lora is not None:
        layers = len(run.adapter_targets or run.shape.layer_matrices)
        adapter = layers * run.policy.lora.rank * batch.tokens * width
    return width * (linear + attention) + 4 * wide * batch.tokens * run.shape.hidden + adapter


def _own_layer_bytes(run: PlannedRun, batch: Microbatch) -> float:
    """Bytes that a layer of ``model/forward_backward.py`` keeps: ``Kept``."""
    attention = 2 * run.shape.query_size + 2 * run.shape.kv_size
    if run.width == 4:
        values = constants.OWN_MLP * run.shape.mlp + attention + constants.OWN_WIDE_HIDDEN * run.shape.hidden
        return 4 * batch.tokens * (values + run.shape.heads)
    values = constants.OWN_MLP * run.shape.mlp + attention + run.shape.hidden
    return batch.tokens * (run.width * values + 4 * (run.shape.hidden + run.shape.heads))


def saved_bytes(run: PlannedRun, batch: Microbatch) -> float:
    """Bytes that autograd keeps at the end of the forward pass.

        without checkpointing:  layers x layer_bytes
        with checkpointing:     layers x 4 N H, the inputs of the layers; + c N H in our own layers, whose residual
                                comes in two parts
        both:                   + 4 N (2 H + 2 D) + c M H      D: width of a head; M: trained tokens;
                                4 (2 M H + N D) in our own layers

    Offloaded activations leave two layers on the device, one in work and one on its way.
    Source of checkpointing: arXiv:1604.06174, one checkpoint per layer.
    """
    per_layer = 4 * batch.tokens * run.shape.hidden
    if run.has_own_layers:
        last = 4 * (2 * batch.trained_tokens * run.shape.hidden + batch.tokens * run.shape.head_size)
        inputs = run.shape.layers * per_layer + (run.shape.layers - 1) * per_layer * run.width / 4
    else:
        last = 4 * batch.tokens * (constants.SAVED_LAST * run.shape.hidden + 2 * run.shape.head_size)
        last += run.width * batch.trained_tokens * run.shape.hidden
        inputs = run.shape.layers * per_layer
    layers = min(2, run.shape.layers) if run.policy.offload_activations else run.shape.layers
    if run.policy.gradient_checkpointing:
        return inputs * layers / run.shape.layers + last
    return layers * layer_bytes(run, batch) + last


def layer_buffers(run: PlannedRun, batch: Microbatch) -> float:
    """Buffers while a layer runs backward: gradients of activations; with checkpointing the layer again.

    In the modules of transformers the product that the MLP's last matrix reads, c N MLP, is gone when the three
    gradients are there.
    """
    if not run.policy.gradient_checkpointing:
        return backward_bytes(run, batch)
    gone = 0.0 if run.has_own_layers else run.width * batch.tokens * run.shape.mlp
    return layer_bytes(run, batch) - gone + backward_bytes(run, batch)


def backward_bytes(run: PlannedRun, batch: Microbatch) -> float:
    """Gradients of activations that are alive while one layer runs backward: c N 3 MLP + 4 N 3 H. Source: counted.

    Our own layers in half width make the residual before the MLP again: 4 N H more.
    """
    mlp, hidden = constants.BACKWARD_MLP, constants.BACKWARD_HIDDEN
    if run.has_own_layers and run.width == 2:
        hidden += 1
    return batch.tokens * (run.width * mlp * run.shape.mlp + 4 * hidden * run.shape.hidden)


def head_bytes(run: PlannedRun, batch: Microbatch) -> float:
    """The head's buffers in its backward pass, where logits exist for a chunk of tokens only: 1,024, 256 on a CPU.

        4 x copies x chunk x V       the logits and the terms of their gradient in float32: 4, 2 by compiled kernels
        + V H (4 + 4)                the gradient of the head's weights, and a chunk's product before it is added;
                                     in half width V H (2 + 4 + 2 + 4) with the weights' copy; frozen: the copy alone

    Source: ``algorithm/logprobs.py``, counted with torch's memory profiler. All logits at once would be N V (4 + c)
    at the least: 5 GB for 8,192 tokens and a vocabulary of 151,936 in float32.
    """
    most = constants.HEAD_CHUNK_TOKENS if run.layout.is_gpu else constants.HEAD_CHUNK_TOKENS_CPU
    chunk = min(most, batch.trained_tokens)
    copies = constants.HEAD_COPIES_NATIVE if run.has_own_layers else constants.HEAD_COPIES
    logits = 4 * copies * chunk * run.shape.vocabulary
    copy = 0 if run.width == 4 else 2
    gradient = 0 if run.trains_adapter else (8 if run.width == 4 else 10)
    return logits + (copy + gradient) * run.shape.head_parameters
