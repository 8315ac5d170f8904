"""Memory of each device in each phase of a step, and what it is for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from oncurve.model import decode_memory
from oncurve.plan import constants
from oncurve.plan.activations import (
    Microbatch,
    backward_bytes,
    head_bytes,
    largest_microbatch,
    layer_buffers,
    layer_bytes,
    saved_bytes,
)
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.shape import ModelShape

Phase = Literal["sample", "train", "sync"]
PHASES: tuple[Phase, ...] = ("sample", "train", "sync")
ROOM = ("KV cache", "sampling buffers")
"""Parts that the engine's rule for memory counts."""


@dataclass(frozen=True, slots=True)
class Component:
    """One use of memory."""

    name: str
    bytes: float
    phases: tuple[Phase, ...]
    """The phases of a step in which it is held."""
    is_buffer: bool = False
    """It comes and goes within a phase, so that an allocator leaves gaps around it."""
    is_allowance: bool = False
    """No tensor: what an allocator keeps on top, and what libraries take for themselves."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of one kind of device, by component."""

    role: Literal["trainer", "sampler"]
    devices: int
    components: tuple[Component, ...]

    def phase_bytes(self, phase: Phase) -> float:
        """Everything that is there in a phase."""
        return sum(component.bytes for component in self.components if phase in component.phases)

    def live_bytes(self, phase: Phase) -> float:
        """Bytes of tensors in a phase, without what allocators and libraries take on top."""
        parts = (part for part in self.components if phase in part.phases and not part.is_allowance)
        return sum(part.bytes for part in parts)

    @property
    def peak_bytes(self) -> float:
        """The most that is there at one time."""
        return max(self.phase_bytes(phase) for phase in PHASES)

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most."""
        return max(PHASES, key=self.phase_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all devices, and of the machine that holds them."""

    needs: tuple[Need, ...]
    host_bytes: float = 0.0
    """Bytes moved from the devices into the CPU's memory, all ranks together."""
    load_bytes: float = 0.0
    """Bytes that a training device holds while loading, if that is more than its part of the weights."""

    @property
    def trainer(self) -> Need:
        """The devices that train."""
        return self.needs[0]


def plan_memory(run: PlannedRun) -> Memory:
    """Peak memory of a run by device, phase and component.

    The peak of a phase is the sum of what is alive in it, and an allowance for fragmentation on what comes and goes.
    """
    parts = [*weight_parts(run), *training_parts(run)]
    if run.layout.placement == "colocated":
        parts += sampling_parts(run)
        need = Need("trainer", run.layout.ranks, _finish(parts, run))
        return Memory((need,), _host_bytes(run), load_bytes(run))
    parts.append(Component("weight-sync buffers", sync_buffer_bytes(run), ("sync",), is_buffer=True))
    trainer = Need("trainer", run.layout.ranks, _finish(parts, run))
    sampler = Need("sampler", run.layout.sampler_devices, tuple(server_parts(run)))
    return Memory((trainer, sampler), _host_bytes(run), load_bytes(run))


def sync_buffer_bytes(run: PlannedRun) -> float:
    """Bytes of the buffers on a trainer's device while weights leave it.

    nccl   two buffers of 256 MiB: ``fleet/weights/endpoints.py``
    fetch  bf16 copies of the matrices that are on their way: the head, and an MLP's for each other thread;
           none where weights are cut, whose whole copy is in the machine's memory, and none of an adapter
    """
    if run.sends_by_nccl:
        return float(constants.NCCL_BUFFER_BYTES)
    if not run.layout.is_gpu or run.width == 4 or is_cut(run) or run.trains_adapter:
        return 0.0
    return 2.0 * (run.shape.head_parameters + (constants.FILES_AT_A_TIME - 1) * run.shape.hidden * run.shape.mlp)


def moment_bytes(run: PlannedRun) -> float:
    """AdamW keeps two numbers per trained weight, of 4 B or of 1 B; Muon keeps one for a matrix of the layers."""
    trained = run.trained_parameters
    if run.config.optimizer.type == "adamw_8bit":
        return 2.0 * trained
    if run.config.optimizer.type == "adamw":
        return 8.0 * trained
    matrices = trained if run.trains_adapter else run.shape.layers * run.shape.layer_matrix_parameters
    return 4.0 * matrices + 8.0 * (trained - matrices)


def frozen_bytes(run: PlannedRun) -> float:
    """Weights under an adapter: float32, or the linear layers in few bits or half width and the rest in float32."""
    if not run.trains_adapter:
        return 0.0
    if run.policy.quantization is not None:
        per_weight = constants.NF4_BYTES if run.policy.quantization == "nf4" else constants.INT8_BYTES
        linear = run.shape.layers * run.shape.layer_matrix_parameters
        return per_weight * linear + 4.0 * (run.shape.num_parameters - linear)
    return half_width_bytes(run.shape) if run.halves_frozen else 4.0 * run.shape.num_parameters


def half_width_bytes(shape: ModelShape) -> float:
    """All weights, the matrices of linear layers in bfloat16 and the rest in float32."""
    linear = shape.layers * shape.layer_matrix_parameters + (0 if shape.is_tied else shape.head_parameters)
    return 2.0 * linear + 4.0 * (shape.num_parameters - linear)


def weight_parts(run: PlannedRun) -> Iterable[Component]:
    """Components for every trained or frozen weight, cut into n parts as ZeRO does (arXiv:1910.02054, section 5).

        master weights 4 B / n (stage 3), moments 8 B / n (stages 1, 2, 3), see ``moment_bytes``
        frozen weights 4 B, 2 B on a GPU with bfloat16 arithmetic (for a checkpoint of that type), or 0.52 B in NF4;
        / n (stage 3)
        bf16 copies of weights 2 B of each matrix under autocast, from the forward to the end of the backward pass;
        with checkpointing they go at the end of the forward pass

    With the optimizer in the CPU's memory (ZeRO-Offload, arXiv:2101.06840) the device keeps bf16 weights and
    gradients, 2 B each. With stage 3 two layers are whole at a time, embedding and head in float32 from the forward to
    the backward pass; and every device that samples as well, or sends weights over NCCL, has a whole copy, matrices of
    2 B under autocast.
    """
    trained = run.trained_parameters
    cut = {name: run.parts if run.layout.shard in stages else 1 for name, stages in _STAGES.items()}
    if frozen := frozen_bytes(run):
        yield Component("frozen weights", frozen / cut["weights"], PHASES)
    weight = 2 if run.layout.offloads_optimizer else 4
    name = "bf16 weights" if run.layout.offloads_optimizer else "weights, float32 (master)"
    yield Component(name, weight * trained / cut["weights"], PHASES)
    if not run.layout.offloads_optimizer:
        yield Component("optimizer moments", moment_bytes(run) / cut["moments"], PHASES)
    if copies_reference(run):
        yield Component("reference", 4.0 * run.shape.num_parameters / cut["weights"], PHASES)
    if run.teacher is not None:
        yield Component("teacher", 4.0 * run.teacher.num_parameters / cut["weights"], PHASES)
    if is_cut(run):
        yield Component("unsharded weights to decode", copy_bytes(run), PHASES)
        yield Component(
            "all-gathered layers", run.width * 2 * run.shape.layer_parameters, ("sample", "train"), is_buffer=True
        )
        ends = run.shape.head_parameters * (1 if run.shape.is_tied else 2)
        yield Component("all-gathered embedding and head", 4.0 * ends, ("train",), is_buffer=True)
    elif run.width == 2 and not (run.layout.offloads_optimizer or run.policy.quantization or run.halves_frozen):
        layers = 1 if run.policy.gradient_checkpointing and run.trains_adapter else run.shape.layers
        copies = 2.0 * layers * run.shape.layer_matrix_parameters
        yield Component("bf16 copies of weights", copies, ("sample", "train"), is_buffer=True)


def is_cut(run: PlannedRun) -> bool:
    """Every device keeps a part of each weight."""
    return run.layout.shard == "zero3" and run.layout.ranks > 1


def copies_reference(run: PlannedRun) -> bool:
    """The reference is a model of its own, not the base under an adapter."""
    return run.has_reference and not run.trains_adapter


def copy_bytes(run: PlannedRun) -> float:
    """The whole copy to sample or to send from, where weights are cut; files are written from the machine's memory."""
    if run.layout.placement != "colocated" and not run.sends_by_nccl:
        return 0.0
    return half_width_bytes(run.shape) if run.width == 2 else 4.0 * run.shape.num_parameters


def load_bytes(run: PlannedRun) -> float:
    """Bytes while a model is loaded; not read by parts, each device holds all: 4 B a weight, reference and copy too."""
    if not is_cut(run) or run.loads_by_parts:
        return 0.0
    whole = 4.0 * run.shape.num_parameters * (2 if copies_reference(run) else 1)
    whole += 4.0 * run.teacher.num_parameters if run.teacher is not None else 0.0
    return whole + copy_bytes(run) + (constants.GPU_CONTEXT_BYTES if run.layout.is_gpu else 0.0)


_STAGES: Mapping[str, tuple[str, ...]] = {
    "weights": ("zero3",),
    "gradients": ("zero2", "zero3"),
    "moments": ("zero1", "zero2", "zero3"),
}


def training_parts(run: PlannedRun) -> Iterable[Component]:
    """Components of the passes over one microbatch.

        backward begins:  what is kept + max(head, buffers of a layer) + gradients of earlier microbatches
        backward ends:    buffers of a layer + all gradients

    The peak is the larger of the two. In an update of one microbatch there are no earlier gradients, and they grow as
    activations go: the component says what of them is there at the peak.
    """
    batch = largest_microbatch(run)
    saved, buffers = saved_bytes(run, batch), layer_buffers(run, batch)
    head = head_bytes(run, batch)
    gradient = (2 if run.layout.offloads_optimizer else 4) * run.trained_parameters
    gradients = gradient / (run.parts if run.layout.shard in _STAGES["gradients"] else 1)
    begins = saved + max(head, buffers)
    if batch.repeats < 2 and not run.layout.offloads_optimizer:
        gradients = max(gradients + buffers, begins) - begins if begins else gradients
    yield Component("gradients", gradients, ("train",))
    yield Component("activations", saved, ("train",), is_buffer=True)
    yield Component("LM head and logits", head, ("train",), is_buffer=True)
    if buffers > head:  # the head runs backward first and lets go before the layers begin
        yield Component("buffers of a layer", buffers - head, ("train",), is_buffer=True)
    if not run.layout.is_gpu:
        yield Component("fragmentation", cpu_fragmentation(run, batch), ("train",), is_allowance=True)


def cpu_fragmentation(run: PlannedRun, batch: Microbatch) -> float:
    """Overhead of the C library's allocator: a share of what all layers allocate and free. Measured.

    Tensors [N, MLP] of 32 MiB and more are given back at once and leave no gaps.
    """
    if 4 * batch.tokens * run.shape.mlp >= constants.CPU_MMAP_BYTES:
        return 0.0
    kind = "own" if run.has_own_layers else "modules"
    if run.policy.gradient_checkpointing:
        kind += " checkpointing"
    elif run.trains_adapter and not run.has_own_layers:
        kind += " lora"
    single, several = constants.CPU_FRAGMENTATION[kind]
    churn = run.shape.layers * (layer_bytes(run, batch) + backward_bytes(run, batch))
    return (single if batch.repeats < 2 else several) * churn


def sampling_parts(run: PlannedRun) -> Iterable[Component]:
    """Components of the engine in this process: it samples from the policy's own weights.

    KV cache, logits of the next token, what reading prompts takes:
        on a GPU the rule by which the engine chooses its rows, ``model/decode_memory.py``
        on a CPU rows x (S + T) x 2 layers KV c; 4 x 4 x rows x V; one layer's widest tensors, and one layer's keys and
        values repeated for all heads                    rows: whole groups, at most rollouts.max_rows
    our own layers: their matrices and the head once more in the order of the kernels, c each; and the layers' rounded,
    or with the adapter added, until the last prompt was read: where all rows run at once, that is before completions
    have a cache
    our own decode step on a GPU: attention's matrices in its order and the head, unless it is in half width already
    """
    cache, buffers = (gpu_room if run.layout.is_gpu else cpu_room)(run)
    yield Component("KV cache", cache, ("sample",), is_buffer=True)
    yield Component("sampling buffers", buffers, ("sample",), is_buffer=True)
    if run.has_own_layers:
        matrices = float(run.width * run.shape.layers * run.shape.layer_matrix_parameters)
        head = float(run.width * run.shape.head_parameters)
        yield Component("weights repacked to decode", matrices + head, ("sample",), is_buffer=True)
        if run.trains_adapter or run.width == 2:
            again = max(0.0, matrices - (cache if run.rows_at_once == run.config.completions_per_step else 0.0))
            yield Component("weights repacked to prefill", again, ("sample",), is_buffer=True)
    elif run.records_copies and run.shape.family in decode_memory.OWN_FAMILIES:
        attention = sum(math.prod(run.shape.layer_matrices[name]) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        has_head = run.halves_frozen and not run.shape.is_tied
        again = run.shape.layers * attention + (0 if has_head else run.shape.head_parameters)
        yield Component("weights repacked to decode", 2.0 * again, ("sample",), is_buffer=True)
        yield Component("CUDA graphs", decode_memory.RECORDING_BYTES, ("sample",), is_allowance=True)


def samples_by_modules(run: PlannedRun) -> bool:
    """A GPU samples through transformers' modules, not through our own decode step or a server."""
    return (
        run.layout.is_gpu
        and not run.has_servers
        and not (run.records_copies and run.shape.family in decode_memory.OWN_FAMILIES)
    )


def cpu_room(run: PlannedRun) -> tuple[float, float]:
    """Keys and values, and buffers, of the engine on a CPU."""
    rows = -(-run.rows_at_once // run.layout.ranks)
    length = run.lengths.prompt_tokens + run.longest_tokens
    logits = 4.0 * constants.SAMPLING_LOGIT_COPIES * rows * run.shape.vocabulary
    prompts = rows * run.groups_at_once / run.rows_at_once * run.lengths.prompt_tokens
    reading = run.width * prompts * 3 * run.shape.mlp
    repeated = 2.0 * run.width * rows * length * run.shape.query_size if run.shape.heads != run.shape.kv_heads else 0.0
    return kv_bytes(run, rows * length), logits + max(reading, repeated)


def gpu_room(run: PlannedRun) -> tuple[float, float]:
    """The same on a GPU, by the engine's own rule."""
    widths, call, by_module = room_of(run)
    rows = -(-run.rows_at_once // run.layout.ranks)
    everything = (decode_memory.module_bytes if by_module else decode_memory.decoding_bytes)(widths, call, rows)
    prompts, length = call.prompts(rows), run.lengths.prompt_tokens + run.longest_tokens
    if by_module:
        cache = rows * length * widths.position_bytes * (widths.layers + 1)
    else:
        cache = decode_memory.cache_bytes(
            widths,
            rows=rows,
            prompts=prompts,
            prompt_tokens=run.lengths.prompt_tokens,
            completion_tokens=run.resident_tokens,
        )
    return float(cache), float(everything - cache)


def room_of(run: PlannedRun) -> tuple[decode_memory.Widths, decode_memory.DecodeCall, bool]:
    """Memory that the engine's own rule asks for, and whether it samples through the model's own module."""
    widths = decode_memory.Widths(
        layers=run.shape.layers,
        hidden=run.shape.hidden,
        mlp=run.shape.mlp,
        qkv=run.shape.query_size + 2 * run.shape.kv_size,
        kv=2 * run.shape.kv_size,
        vocabulary=run.shape.vocabulary,
        kv_bytes=run.width,
        compute_bytes=run.width,
        heads_per_kv=run.shape.heads // run.shape.kv_heads,
    )
    by_module = run.shape.family not in decode_memory.OWN_FAMILIES or run.policy.quantization is not None
    return widths, run.decode_call, by_module


def rows_that_fit(run: PlannedRun, *, memory_bytes: float) -> int:
    """Completions that are sampled at a time on GPUs where ``rollouts.max_rows`` is auto, on all of them together.

    An engine takes as many as its memory does; the others wait.
    """
    if run.layout.placement != "colocated":
        occupied = sum(part.bytes for part in server_parts(run) if part.name not in ROOM)
        free = max(memory_bytes * (1 - constants.GPU_MARGIN) - occupied, 0.0)
        row = kv_bytes(run, run.lengths.prompt_tokens + run.longest_tokens)
        return min(run.config.completions_per_step, int(free / row) * max(run.layout.sampler_devices, 1))
    parts = [*weight_parts(run), *sampling_parts(run)]
    occupied = sum(part.bytes for part in parts if "sample" in part.phases and part.name not in ROOM)
    free = memory_bytes * (1 - constants.GPU_MARGIN) - constants.GPU_CONTEXT_BYTES - occupied
    widths, call, by_module = room_of(run)
    return run.layout.ranks * decode_memory.most_rows(widths, call, max(free, 0.0), by_module=by_module)


def server_parts(run: PlannedRun) -> Iterable[Component]:
    """Components on a device of a separate engine: bf16 weights cut over its devices, and a cache for its rows.

    One server is ``run.server_devices`` large; where nobody says, all devices are one.

    A server takes as much more cache as its settings allow; here stands what the step's rows can fill.
    """
    devices = max(run.layout.sampler_devices, 1)
    rows = -(-run.rows_at_once // devices)
    length = run.lengths.prompt_tokens + run.longest_tokens
    weights = 2.0 * run.shape.num_parameters / min(run.server_devices or devices, devices)
    yield Component("engine's weights", weights, PHASES)
    yield Component("KV cache", kv_bytes(run, rows * length), ("sample",))
    yield Component("engine's buffers", constants.ENGINE_OVERHEAD_BYTES, PHASES, is_allowance=True)
    if run.sends_by_nccl:
        yield Component("weight-sync buffers", constants.NCCL_BUFFER_BYTES, ("sync",))
    yield Component("device context", constants.GPU_CONTEXT_BYTES, PHASES, is_allowance=True)


def kv_bytes(run: PlannedRun, tokens: float) -> float:
    """Keys and values of some tokens: 2 x layers x KV numbers each, in the compute type."""
    return float(run.width * run.shape.kv_numbers_per_token * tokens)


def _finish(parts: Iterable[Component], run: PlannedRun) -> tuple[Component, ...]:
    """The parts with the allowance for fragmentation in each phase, and what the libraries take."""
    components = [part for part in parts if part.bytes > 0]
    for phase in PHASES if run.layout.is_gpu else ():
        buffers = sum(part.bytes for part in components if part.is_buffer and phase in part.phases)
        if buffers:
            components.append(
                Component("fragmentation", constants.GPU_FRAGMENTATION * buffers, (phase,), is_allowance=True)
            )
    if run.layout.is_gpu:
        components.append(Component("device context", constants.GPU_CONTEXT_BYTES, PHASES, is_allowance=True))
    else:
        components.append(Component("libraries", constants.CPU_LIBRARIES_BYTES, PHASES, is_allowance=True))
    return tuple(components)


def _host_bytes(run: PlannedRun) -> float:
    """Master weights, moments and a float32 gradient in the CPU's memory: 16 B per trained weight, of all ranks."""
    return 16.0 * run.trained_parameters if run.layout.offloads_optimizer else 0.0
