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
    kept_bytes,
    largest_microbatch,
    layer_buffers,
    layer_bytes,
)
from oncurve.plan.setup import Setup, Work
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
        found = (part for part in self.components if phase in part.phases and not part.is_allowance)
        return sum(part.bytes for part in found)

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


def plan_memory(shape: ModelShape, work: Work, setup: Setup) -> Memory:
    """Peak memory of a run by device, phase and component.

    The peak of a phase is the sum of what is alive in it, and an allowance for fragmentation on what comes and goes.
    """
    parts = [*weight_parts(shape, setup), *training_parts(shape, work, setup)]
    if setup.placement == "colocated":
        parts += sampling_parts(shape, work, setup)
        need = Need("trainer", setup.ranks, _finish(parts, setup))
        return Memory((need,), _host_bytes(shape, setup), load_bytes(shape, setup))
    parts.append(Component("weight-sync buffers", sync_buffer_bytes(shape, setup), ("sync",), is_buffer=True))
    trainer = Need("trainer", setup.ranks, _finish(parts, setup))
    sampler = Need("sampler", setup.sampler_devices, tuple(server_parts(shape, work, setup)))
    return Memory((trainer, sampler), _host_bytes(shape, setup), load_bytes(shape, setup))


def sync_buffer_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of the buffers on a trainer's device while weights leave it.

    nccl   two buffers of 256 MiB: ``fleet/weights/endpoints.py``
    fetch  half-width copies of the matrices that are on their way: the head, and an MLP's for each other thread;
           none where weights are cut, whose whole copy is in the machine's memory, and none of an adapter
    """
    if setup.transfer == "nccl":
        return float(constants.NCCL_BUFFER_BYTES)
    if not setup.is_gpu or setup.width == 4 or is_cut(setup) or setup.method == "lora":
        return 0.0
    return 2.0 * (shape.head_parameters + (constants.FILES_AT_A_TIME - 1) * shape.hidden * shape.mlp)


def trained_parameters(shape: ModelShape, setup: Setup) -> int:
    """Weights that the optimizer moves: all of them, or the adapter's."""
    return shape.num_parameters if setup.method == "full" else shape.lora_parameters(setup.rank, setup.targets)


def moment_bytes(shape: ModelShape, setup: Setup) -> float:
    """AdamW keeps two numbers per trained weight, of 4 B or of 1 B; Muon keeps one for a matrix of the layers."""
    trained = trained_parameters(shape, setup)
    if setup.optimizer == "adamw_8bit":
        return 2.0 * trained
    if setup.optimizer == "adamw":
        return 8.0 * trained
    matrices = trained if setup.method == "lora" else shape.layers * shape.layer_matrix_parameters
    return 4.0 * matrices + 8.0 * (trained - matrices)


def frozen_bytes(shape: ModelShape, setup: Setup) -> float:
    """Weights under an adapter: float32, or the linear layers in few bits or half width and the rest in float32."""
    if setup.method == "full":
        return 0.0
    if setup.quantization is not None:
        per_weight = constants.NF4_BYTES if setup.quantization == "nf4" else constants.INT8_BYTES
        linear = shape.layers * shape.layer_matrix_parameters
        return per_weight * linear + 4.0 * (shape.num_parameters - linear)
    return half_width_bytes(shape) if setup.halves_frozen else 4.0 * shape.num_parameters


def half_width_bytes(shape: ModelShape) -> float:
    """All weights, the matrices of linear layers in bfloat16 and the rest in float32."""
    linear = shape.layers * shape.layer_matrix_parameters + (0 if shape.is_tied else shape.head_parameters)
    return 2.0 * linear + 4.0 * (shape.num_parameters - linear)


def weight_parts(shape: ModelShape, setup: Setup) -> Iterable[Component]:
    """Components for every trained or frozen weight, cut into n parts as ZeRO does (arXiv:1910.02054, section 5).

        master weights 4 B / n (stage 3), moments 8 B / n (stages 1, 2, 3), see ``moment_bytes``
        frozen weights 4 B, 2 B on a GPU with bfloat16 arithmetic (for a checkpoint of that type), or 0.52 B in NF4;
        / n (stage 3)
        half-width copies 2 B of each matrix under autocast, alive from the forward to the end of the backward pass;
        with checkpointing they go at the end of the forward pass

    With the optimizer in the CPU's memory (ZeRO-Offload, arXiv:2101.06840) the device keeps half-width weights and
    gradients, 2 B each. With stage 3 two layers are whole at a time, embedding and head in float32 from the forward to
    the backward pass; and every device that samples as well, or sends weights over NCCL, has a whole copy, matrices of
    2 B under autocast.
    """
    trained = trained_parameters(shape, setup)
    cut = {name: setup.parts if setup.shard in stages else 1 for name, stages in _STAGES.items()}
    if frozen := frozen_bytes(shape, setup):
        yield Component("frozen weights", frozen / cut["weights"], PHASES)
    weight = 2 if setup.offloads_optimizer else 4
    name = "half-width weights" if setup.offloads_optimizer else "weights, float32 (master)"
    yield Component(name, weight * trained / cut["weights"], PHASES)
    if not setup.offloads_optimizer:
        yield Component("optimizer moments", moment_bytes(shape, setup) / cut["moments"], PHASES)
    if has_reference(setup):
        yield Component("reference", 4.0 * shape.num_parameters / cut["weights"], PHASES)
    if setup.teacher is not None:
        yield Component("teacher", 4.0 * setup.teacher.num_parameters / cut["weights"], PHASES)
    if is_cut(setup):
        yield Component("copy to sample from", copy_bytes(shape, setup), PHASES)
        yield Component(
            "gathered layers", setup.width * 2 * shape.layer_parameters, ("sample", "train"), is_buffer=True
        )
        ends = shape.head_parameters * (1 if shape.is_tied else 2)
        yield Component("gathered embedding and head", 4.0 * ends, ("train",), is_buffer=True)
    elif setup.width == 2 and not (setup.offloads_optimizer or setup.quantization or setup.halves_frozen):
        layers = 1 if setup.checkpointing and setup.method == "lora" else shape.layers
        copies = 2.0 * layers * shape.layer_matrix_parameters
        yield Component("half-width copies", copies, ("sample", "train"), is_buffer=True)


def is_cut(setup: Setup) -> bool:
    """Every device keeps a part of each weight."""
    return setup.shard == "zero3" and setup.ranks > 1


def has_reference(setup: Setup) -> bool:
    """The reference is a model of its own, not the base under an adapter."""
    return setup.has_reference and setup.method == "full"


def copy_bytes(shape: ModelShape, setup: Setup) -> float:
    """The whole copy to sample or to send from, where weights are cut; files are written from the machine's memory."""
    if setup.placement != "colocated" and setup.transfer == "fetch":
        return 0.0
    return half_width_bytes(shape) if setup.width == 2 else 4.0 * shape.num_parameters


def load_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes while a model is loaded; not read by parts, each device holds all: 4 B a weight, reference and copy too."""
    if not is_cut(setup) or setup.loads_by_parts:
        return 0.0
    whole = 4.0 * shape.num_parameters * (2 if has_reference(setup) else 1)
    whole += 4.0 * setup.teacher.num_parameters if setup.teacher is not None else 0.0
    return whole + copy_bytes(shape, setup) + (constants.GPU_CONTEXT_BYTES if setup.is_gpu else 0.0)


_STAGES: Mapping[str, tuple[str, ...]] = {
    "weights": ("zero3",),
    "gradients": ("zero2", "zero3"),
    "moments": ("zero1", "zero2", "zero3"),
}


def training_parts(shape: ModelShape, work: Work, setup: Setup) -> Iterable[Component]:
    """Components of the passes over one microbatch.

        backward begins:  what is kept + max(head, buffers of a layer) + gradients of earlier microbatches
        backward ends:    buffers of a layer + all gradients

    The peak is the larger of the two. In an update of one microbatch there are no earlier gradients, and they grow as
    activations go: the component says what of them is there at the peak.
    """
    batch = largest_microbatch(work, setup)
    kept, buffers = kept_bytes(shape, setup, batch), layer_buffers(shape, setup, batch)
    head = head_bytes(shape, setup, batch)
    gradient = (2 if setup.offloads_optimizer else 4) * trained_parameters(shape, setup)
    gradients = gradient / (setup.parts if setup.shard in _STAGES["gradients"] else 1)
    begins = kept + max(head, buffers)
    if batch.repeats < 2 and not setup.offloads_optimizer:
        gradients = max(gradients + buffers, begins) - begins if begins else gradients
    yield Component("gradients", gradients, ("train",))
    yield Component("activations", kept, ("train",), is_buffer=True)
    yield Component("head and its logits", head, ("train",), is_buffer=True)
    if buffers > head:  # the head runs backward first and lets go before the layers begin
        yield Component("buffers of a layer", buffers - head, ("train",), is_buffer=True)
    if not setup.is_gpu:
        yield Component("fragmentation", cpu_fragmentation(shape, setup, batch), ("train",), is_allowance=True)


def cpu_fragmentation(shape: ModelShape, setup: Setup, batch: Microbatch) -> float:
    """Overhead of the C library's allocator: a share of what all layers allocate and free. Measured.

    Tensors [N, MLP] of 32 MiB and more are given back at once and leave no gaps.
    """
    if 4 * batch.tokens * shape.mlp >= constants.CPU_MMAP_BYTES:
        return 0.0
    kind = "own" if setup.has_own_layers else "modules"
    if setup.checkpointing:
        kind += " checkpointing"
    elif setup.method == "lora" and not setup.has_own_layers:
        kind += " lora"
    one, several = constants.CPU_FRAGMENTATION[kind]
    churn = shape.layers * (layer_bytes(shape, setup, batch) + backward_bytes(shape, setup, batch))
    return (one if batch.repeats < 2 else several) * churn


def sampling_parts(shape: ModelShape, work: Work, setup: Setup) -> Iterable[Component]:
    """Components of the engine in this process: it samples from the policy's own weights.

    KV cache, logits of the next token, what reading prompts takes:
        on a GPU the rule by which the engine chooses its rows, ``model/decode_memory.py``
        on a CPU rows x (S + T) x 2 layers KV c; 4 x 4 x rows x V; one layer's widest tensors, and one layer's keys and
        values repeated for all heads                    rows: whole groups, at most rollouts.max_rows
    our own layers: their matrices once more in the order of the kernels, c each; and rounded, or with the adapter
    added, until the last prompt was read: where all rows run at once, that is before completions have a cache
    our own decode step on a GPU: attention's matrices in its order and the head, unless it is in half width already
    """
    cache, buffers = (gpu_room if setup.is_gpu else cpu_room)(shape, work, setup)
    yield Component("KV cache", cache, ("sample",), is_buffer=True)
    yield Component("sampling buffers", buffers, ("sample",), is_buffer=True)
    if setup.has_own_layers:
        matrices = float(setup.width * shape.layers * shape.layer_matrix_parameters)
        yield Component("matrices for sampling", matrices, ("sample",), is_buffer=True)
        if setup.method == "lora" or setup.width == 2:
            again = max(0.0, matrices - (cache if work.rows_at_once == work.completions else 0.0))
            yield Component("matrices to read prompts", again, ("sample",), is_buffer=True)
    elif setup.records_copies and shape.family in decode_memory.OWN_FAMILIES:
        attention = sum(math.prod(shape.layer_matrices[name]) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        has_head = setup.halves_frozen and not shape.is_tied
        again = shape.layers * attention + (0 if has_head else shape.head_parameters)
        yield Component("matrices for sampling", 2.0 * again, ("sample",), is_buffer=True)
        yield Component("recorded steps", decode_memory.RECORDING_BYTES, ("sample",), is_allowance=True)


def samples_by_modules(shape: ModelShape, setup: Setup) -> bool:
    """A GPU samples through transformers' modules, not through our own decode step or a server."""
    return (
        setup.is_gpu
        and not setup.has_servers
        and not (setup.records_copies and shape.family in decode_memory.OWN_FAMILIES)
    )


def cpu_room(shape: ModelShape, work: Work, setup: Setup) -> tuple[float, float]:
    """Keys and values, and buffers, of the engine on a CPU."""
    rows = -(-work.rows_at_once // setup.ranks)
    length = work.prompt_tokens + work.longest_tokens
    logits = 4.0 * constants.SAMPLING_LOGIT_COPIES * rows * shape.vocabulary
    prompts = rows / work.group_size * work.prompt_tokens
    reading = setup.width * prompts * 3 * shape.mlp
    repeated = 2.0 * setup.width * rows * length * shape.query_size if shape.heads != shape.kv_heads else 0.0
    return kv_bytes(shape, rows * length, setup), logits + max(reading, repeated)


def gpu_room(shape: ModelShape, work: Work, setup: Setup) -> tuple[float, float]:
    """The same on a GPU, by the engine's own rule."""
    widths, call, by_module = room_of(shape, work, setup)
    rows = -(-work.rows_at_once // setup.ranks)
    everything = (decode_memory.module_bytes if by_module else decode_memory.decoding_bytes)(widths, call, rows)
    prompts, length = call.prompts(rows), work.prompt_tokens + work.longest_tokens
    if by_module:
        cache = rows * length * widths.position_bytes * (widths.layers + 1)
    else:
        cache = decode_memory.cache_bytes(
            widths,
            rows=rows,
            prompts=prompts,
            prompt_tokens=work.prompt_tokens,
            completion_tokens=work.held_tokens,
        )
    return float(cache), float(everything - cache)


def room_of(shape: ModelShape, work: Work, setup: Setup) -> tuple[decode_memory.Widths, decode_memory.DecodeCall, bool]:
    """Memory that the engine's own rule asks for, and whether it samples through the model's own module."""
    widths = decode_memory.Widths(
        layers=shape.layers,
        hidden=shape.hidden,
        mlp=shape.mlp,
        qkv=shape.query_size + 2 * shape.kv_size,
        kv=2 * shape.kv_size,
        vocabulary=shape.vocabulary,
        kv_bytes=setup.width,
        compute_bytes=setup.width,
        heads_per_kv=shape.heads // shape.kv_heads,
    )
    call = decode_memory.DecodeCall(
        num_prompts=-(-work.prompts // setup.ranks),
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.held_tokens,
    )
    return widths, call, shape.family not in decode_memory.OWN_FAMILIES or setup.quantization is not None


def rows_that_fit(shape: ModelShape, work: Work, setup: Setup, *, memory_bytes: float) -> int:
    """Completions that are sampled at a time on GPUs where ``rollouts.max_rows`` is auto, on all of them together.

    An engine takes as many as its memory does; the others wait.
    """
    if setup.placement != "colocated":
        held = sum(part.bytes for part in server_parts(shape, work, setup) if part.name not in ROOM)
        free = max(memory_bytes * (1 - constants.GPU_MARGIN) - held, 0.0)
        row = kv_bytes(shape, work.prompt_tokens + work.longest_tokens, setup)
        return min(work.completions, int(free / row) * max(setup.sampler_devices, 1))
    parts = [*weight_parts(shape, setup), *sampling_parts(shape, work, setup)]
    held = sum(part.bytes for part in parts if "sample" in part.phases and part.name not in ROOM)
    free = memory_bytes * (1 - constants.GPU_MARGIN) - constants.GPU_CONTEXT_BYTES - held
    widths, call, by_module = room_of(shape, work, setup)
    return setup.ranks * decode_memory.most_rows(widths, call, max(free, 0.0), by_module=by_module)


def server_parts(shape: ModelShape, work: Work, setup: Setup) -> Iterable[Component]:
    """Components on a device of a separate engine: half-width weights cut over its devices, and a cache for its rows.

    One server is ``setup.server_devices`` large; where nobody says, all devices are one.

    A server takes as much more cache as its settings allow; here stands what the step's rows can fill.
    """
    devices = max(setup.sampler_devices, 1)
    rows = -(-work.rows_at_once // devices)
    length = work.prompt_tokens + work.longest_tokens
    weights = 2.0 * shape.num_parameters / min(setup.server_devices or devices, devices)
    yield Component("engine's weights", weights, PHASES)
    yield Component("KV cache", kv_bytes(shape, rows * length, setup), ("sample",))
    yield Component("engine's buffers", constants.ENGINE_OVERHEAD_BYTES, PHASES, is_allowance=True)
    if setup.transfer == "nccl":
        yield Component("weight-sync buffers", constants.NCCL_BUFFER_BYTES, ("sync",))
    yield Component("device context", constants.GPU_CONTEXT_BYTES, PHASES, is_allowance=True)


def kv_bytes(shape: ModelShape, tokens: float, setup: Setup) -> float:
    """Keys and values of some tokens: 2 x layers x KV numbers each, in the compute type."""
    return float(setup.width * shape.kv_numbers_per_token * tokens)


def _finish(parts: Iterable[Component], setup: Setup) -> tuple[Component, ...]:
    """The parts with the allowance for fragmentation in each phase, and what the libraries take."""
    kept = [part for part in parts if part.bytes > 0]
    for phase in PHASES if setup.is_gpu else ():
        buffers = sum(part.bytes for part in kept if part.is_buffer and phase in part.phases)
        if buffers:
            kept.append(Component("fragmentation", constants.GPU_FRAGMENTATION * buffers, (phase,), is_allowance=True))
    if setup.is_gpu:
        kept.append(Component("device context", constants.GPU_CONTEXT_BYTES, PHASES, is_allowance=True))
    else:
        kept.append(Component("libraries", constants.CPU_LIBRARIES_BYTES, PHASES, is_allowance=True))
    return tuple(kept)


def _host_bytes(shape: ModelShape, setup: Setup) -> float:
    """Master weights, moments and a float32 gradient in the CPU's memory: 16 B per trained weight, of all ranks."""
    return 16.0 * trained_parameters(shape, setup) if setup.offloads_optimizer else 0.0
