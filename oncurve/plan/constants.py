"""Constants of the planner: counted, measured or guessed, each with its source.

Counted: read off what the code does. To count again after a change of the forward pass, run
``python benchmarks/bench.py plan_memory --live``, which holds the planner's numbers against every allocation of a pass.

Measured: from real steps. To measure again, run ``python benchmarks/bench.py plan_memory``, which prints the planner's
error for every configuration; the CPU constants are the ones that bring it down.

Guessed: nobody has measured it here. The plan says so wherever a guess decides.
"""

from __future__ import annotations

SAVED_WIDE_HIDDEN = 4
"""Counted. Tensors [N, H] in float32 that a layer keeps: both residual inputs, and both after normalizing."""
SAVED_WIDE_HIDDEN_FROZEN = 2
"""Counted. The same where the norms' weights are frozen: what was normalized is not kept."""
SAVED_INPUTS_FULL_WIDTH = 2
"""Counted. Inputs [N, H] of linear layers that a layer keeps in float32: one for q, k, v and one for gate, up."""
SAVED_INPUTS_HALF_WIDTH = 5
"""Counted. The same under autocast, which makes a half-width copy for each of q, k, v, gate and up."""
SAVED_MLP = 4
"""Counted. Tensors [N, MLP]: gate, its SiLU, up, their product."""
SAVED_QUERIES_PACKED = 2
"""Counted. Tensors as wide as the queries that attention keeps: queries and outputs, both in the order of blocks."""
SAVED_QUERIES_PADDED = 1
"""Counted. The same without packing: the outputs are the input of the next linear layer, which is counted there."""
SAVED_LAST = 2
"""Counted. Tensors [N, H] in float32 after the last layer: before and after normalizing."""

BACKWARD_MLP = 3
"""Counted. Tensors [N, MLP] alive while a layer's gated MLP runs backward: gradients of product, gate and up."""
BACKWARD_HIDDEN = 3
"""Counted. Tensors [N, H] in float32 alive at the same time: gradients of the residual stream and of the input."""

HEAD_CHUNK_TOKENS = 1024
"""Counted. Tokens whose logits exist at one time on a GPU: ``oncurve.algorithm.chunked_head.CHUNK_TOKENS``."""
HEAD_CHUNK_TOKENS_CPU = 256
"""Counted. The same on a CPU: ``oncurve.algorithm.chunked_head.CPU_CHUNK_TOKENS``."""
HEAD_COPIES = 4
"""Counted. Tensors [chunk, V] in float32 alive in the head: scaled, softmax and their product forward; logits, log p, p
and the gradient of the chunk before backward."""
HEAD_COPIES_NATIVE = 2
"""Counted. The same with compiled kernels, which work in place: logits, and the gradient of the chunk before."""

OWN_WIDE_HIDDEN = 2
"""Counted. Tensors [N, H] in float32 that a layer of ``oncurve.model`` keeps: the residual before attention and MLP."""
OWN_MLP = 2
"""Counted. Tensors [N, MLP] that it keeps: gate and up."""
SAMPLING_LOGIT_COPIES = 4
"""Counted. Tensors [rows, V] in float32 while a token is drawn: logits, scaled, probabilities, their cumulative sum."""

NF4_BYTES = 0.516
"""Counted. Bytes per weight in NF4 with double quantization: 4 bits, and 0.127 for the constants; QLoRA,
arXiv:2305.14314, section 3."""
INT8_BYTES = 1.004
"""Counted. Bytes per weight in 8 bits, with a float32 constant per row of some thousand."""

CPU_LIBRARIES_BYTES = 28 * 2**20
"""Measured. What a process on a CPU takes beyond its imports and its tensors: the code of the kernels that it touches
for the first time, and the libraries' own buffers. It is the peak of a model of 30,000 weights."""
CPU_FRAGMENTATION = {
    "own": (0.18, 0.18),
    "own checkpointing": (0.1, 0.1),
    "modules": (0.28, 0.95),
    "modules checkpointing": (0.24, 0.42),
    "modules lora": (0.8, 0.95),
}
"""Measured, with large pages. What the C library's allocator holds on top of what is in use, as a share of what all
layers together allocate and free in a pass (what is kept for the backward pass, and the gradients there); in updates of
one microbatch, and of several. Freed blocks below 32 MiB stay with the process, and where small tensors that live on
stand between them, the next large one finds no place: the thin products of an adapter do that, and gradients. It grows
over the first steps. With checkpointing it goes back between sampling and training."""
CPU_MMAP_BYTES = 32 * 2**20
"""Documented. Blocks of this size leave no gaps: the C library gives them back at once (mallopt(3), M_MMAP_THRESHOLD),
or keeps them for the next microbatch, which has as many (measured at 0.5B: 18.0 GiB after nine steps, 18.7 planned)."""
GPU_CONTEXT_BYTES = 600 * 2**20
"""Guessed. CUDA context, loaded kernels and cuBLAS workspaces of one process."""
GPU_FRAGMENTATION = 0.06
"""Guessed. Share of activations and buffers that the caching allocator reserves on top."""
GPU_MARGIN = 0.03
"""Guessed. Share of a GPU's memory that a plan leaves free."""

MEMORY_ERROR = 0.15
"""Share by which a step's peak differed from its plan at most, on a CPU: benchmarks/results/evidence.md."""

NCCL_BUFFER_BYTES = 2 * 2**28
"""Counted. Packed weight transfer over NCCL: BUFFER_BYTES x NUM_BUFFERS of ``fleet/weights/endpoints.py``,
on each side; vLLM's own default would be four times as much."""
ENGINE_OVERHEAD_BYTES = 2 * 2**30
"""Guessed. Buffers and captured graphs of an inference engine beside its weights and its cache."""
BESIDE_MARGIN_BYTES = 4 * 2**30
"""Guessed. What is left free for a trainer beside a server on its GPU: contexts, workspaces, what torch keeps."""

TRAIN_MATRIX_UTILIZATION = 0.7
"""Measured on an H100 with 1.5B parameters. Share of a device's nominal matrix rate that products reach in training."""
LAYER_PASS_BYTES, HEAD_PASS_BYTES = 73.0, 33.0
"""Measured on an H100 with 0.5B and 1.5B parameters. Bytes of memory traffic between the products of a token's forward
pass, of which a backward pass has twice as many: for each number that a layer makes (hidden size and MLP), and for each
word of the head."""
SAMPLE_BANDWIDTH_UTILIZATION = 0.5
"""Estimated. Share of a device's memory bandwidth at which a decoding step of the engine reads what it reads."""
ENGINE_LAYER_SECONDS, ENGINE_ROW_SECONDS = 5.9e-5, 4.9e-7
"""Measured, with that share, on an H100 with 1.5B parameters, 128 and 256 rows. What the small kernels of a layer take
in a recorded decoding step, and what each row adds to that."""
SERVER_BANDWIDTH_UTILIZATION = 0.45
"""Estimated, not measured. Share of it that a vLLM server reaches, small kernels and all."""
MODULE_LAYER_SECONDS = {None: 7.6e-4, "nf4": 1.5e-3, "int8": 3.5e-3}
"""The first measured on an H100, the others estimated. What one layer takes at least in a decoding step through
transformers' modules, whose small kernels are started one by one, by the type of quantized weights. Published: LLM.int8
decodes 2.5 to 3.7 times slower than float16 (models of 0.5B on a T4)."""
GPUS_PER_MACHINE = 8
"""Guessed. Devices that are connected faster than machines are."""
SAMPLE_COMPUTE_UTILIZATION = 0.3
"""Guessed. Share of a device's nominal matrix rate that decoding many rows reaches."""

FILES_AT_A_TIME = 8
"""Counted. Threads that write, sum and check files: ``fleet/weights/weight_manifest.py``, SIDE_BY_SIDE."""
TO_HOST_RATE = 6e9
"""Estimated, not measured. Bytes per second from a GPU into ordinary, not locked, memory of the machine."""
WRITE_RATE = 4e9
"""Estimated, not measured. Bytes per second into files in memory, by all threads; a disk takes a tenth of it."""
SUM_RATE = 1.15e9
"""Measured, on one core of a 2-core machine, which others used as well. Bytes per second of SHA-256 in one thread."""
LOAD_RATE = 2e9
"""Estimated, not measured. Bytes per second from files in memory into the weights of a vLLM server."""
SENT_SHARES = (
    (1.74e6, ((1e-6, 0.0067), (1e-5, 0.0247), (1e-4, 0.0743))),
    (3.8e7, ((1e-6, 0.0082), (1e-5, 0.0347), (1e-4, 0.1138))),
)
"""Measured in runs of 50 steps (``benchmarks/results/weight_deltas.json``). Weights of a model, learning rates, and the
bytes of what a step changed in bfloat16 as a share of all. Larger models have smaller weights, of which more change."""
CODE_RATE = 2e8
"""Measured, on one core of a 2-core machine, which others used as well. Bytes per second of weights that are compared
with the last version and coded, in one thread."""
PATCH_RATE = 5e8
"""Measured, likewise. Bytes per second of weights to which a difference is applied, in one thread."""
DEVICE_LOAD_RATE = 20e9
"""Estimated, not measured. Bytes per second from a buffer on a GPU into the weights of a server there."""
LINK_SHARE = 0.5
"""Guessed. Share of the nominal rate between two GPUs that a broadcast reaches."""
MEAN_LENGTH_SHARE = 0.5
"""Guessed. Mean length of a completion as a share of the limit, where nobody said."""
MEAN_TURNS = 3.0
"""Guessed. Turns of a completion with tools, where nobody said and the limit is not lower."""
MEAN_ANSWER_SHARE = 0.25
"""Guessed. Mean tokens of an answer as a share of the limit, where nobody said."""
TOOL_SECONDS = 0.1
"""Guessed. Until a tool or an environment has answered, where nobody said."""
RECORD_BYTES = 5.0
"""Measured: 3.4 to 5.2. Bytes of ``run.record=all`` per sampled token, with texts and prompts; log-probabilities take 4
of them, less where the policy is sure of itself."""
