"""Seconds of a step and of a weight sync: nominal rates of the device times the share of them that is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from oncurve.constants import GB
from oncurve.observe.ahead import block_steps
from oncurve.plan import constants
from oncurve.plan.hardware import Device
from oncurve.plan.memory import samples_by_modules, trained_parameters
from oncurve.plan.setup import Setup, Work
from oncurve.plan.shape import ModelShape
from oncurve.plan.weight_transfer import Part, sync_bytes, way_of_weights


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by what happens."""

    sample: float
    train: float
    sync: float
    sampled_tokens: float
    trained_tokens: float
    sync_bytes: float
    wait: float = 0.0
    """Part of the sampling time in which nothing can be decoded until tools answer."""
    read_again_tokens: float = 0.0
    """Tokens that are read again after answers."""
    way: tuple[Part, ...] = ()
    """The parts of the weight sync."""
    network: float = 0.0
    """Part of the training time in which weights and gradients move between devices and nothing is computed."""
    ahead: float | None = None
    """Time of a whole step where other devices sample while this one trains; None: one after the other."""

    @property
    def total(self) -> float:
        """Seconds from a step to the next."""
        return self.sample + self.train + self.sync if self.ahead is None else self.ahead

    @property
    def sampled_per_second(self) -> float:
        """Completion tokens sampled per second of sampling."""
        return self.sampled_tokens / self.sample

    @property
    def trained_per_second(self) -> float:
        """Prompt and completion tokens per second of training."""
        return self.trained_tokens / self.train


def step_time(shape: ModelShape, work: Work, setup: Setup, device: Device, *, network_gbit: float) -> StepTime:
    """Seconds of a step on a device."""
    trained = work.tokens(completion_tokens=work.mean_tokens, packed=setup.packed)
    sends = not work.is_supervised
    compute = train_seconds(shape, work, setup, device)
    beside, after = exchange_seconds(shape, work, setup, device, network_gbit=network_gbit)
    waits = max(0.0, beside - compute) + after
    way = way_of_weights(shape, setup, device, network_gbit=network_gbit) if sends else ()
    time = StepTime(
        sample=0.0 if work.is_supervised else sample_seconds(shape, work, setup, device),
        train=compute + waits,
        network=waits,
        sync=sum(part.seconds for part in way),
        sampled_tokens=work.completions * work.mean_completion_tokens,
        trained_tokens=trained,
        sync_bytes=sync_bytes(shape, setup) if sends else 0.0,
        wait=wait_seconds(work),
        read_again_tokens=work.completions * work.read_again_tokens,
        way=way,
    )
    if not setup.staleness or not setup.sampler_devices or work.is_supervised:
        return time
    return replace(time, ahead=seconds_ahead(shape, work, setup, device, time))


def seconds_ahead(shape: ModelShape, work: Work, setup: Setup, device: Device, time: StepTime) -> float:
    """Seconds of a step where other devices sample up to ``setup.staleness`` steps ahead, once that is under way.

        in blocks of b steps   max( training + held / b , (sampling of b steps at once + weight sync) / b )
        in flight              max( training + held , weight sync , prompts + tokens of a step over all rows ,
                                    the longest completion / staleness ), the last two at most the sampling of a step,
                                    which completions with tools take

    Held: the trainer's part of the weight sync. Of b steps, the rows of all fill the places that the longest of one
    would leave free. Completions with tools are sampled one step after the other.
    """
    devices, held = setup.sampler_devices, sum(part.seconds for part in time.way if part.holds)
    if setup.in_flight and work.turns.limit > 1:
        return max(time.train + held, time.sync, time.sample)
    if setup.in_flight:
        ahead = replace(work, prompts=work.prompts * (setup.staleness + 1))
        rows = -(-ahead.rows_at_once // devices)
        each = _step_seconds(shape, work, setup, device, rows)
        tokens = work.completions * work.mean_completion_tokens / devices / rows
        stream = _prompt_seconds(shape, work, device, devices) + tokens * each
        longest = work.completion_tokens * each / setup.staleness
        return max(time.train + held, time.sync, min(time.sample, max(stream, longest)))
    steps = 1 if work.turns.limit > 1 else block_steps(setup.staleness)
    block = replace(work, prompts=work.prompts * steps)
    return max(time.train + held / steps, (sample_seconds(shape, block, setup, device) + time.sync) / steps)


def flops_per_token(shape: ModelShape, work: Work, setup: Setup) -> float:
    """Operations of training on one token.

        forward 2 N, backward 4 N, or 2 N where the weights are frozen; checkpointing adds a forward pass;
        all of it for each pass over the step;  each pass without a gradient adds 2 N;  N: matrix parameters
        attention adds 4 layers Q (mean row length / 2) to each forward pass's worth of 2 N

    Source: arXiv:2001.08361, section 2.1; PaLM, arXiv:2204.02311, appendix B.
    """
    backward = 2 if setup.method == "full" else 1
    passes = work.passes * (1 + backward + (1 if setup.checkpointing else 0)) + work.extra_passes
    row = work.prompt_tokens + work.mean_tokens
    return passes * (2.0 * shape.matrix_parameters + 4.0 * shape.layers * shape.query_size * row / 2)


def train_seconds(shape: ModelShape, work: Work, setup: Setup, device: Device) -> float:
    """Tokens x ( operations / (rate x share) + bytes between products / bandwidth ) / devices.

        bytes   passes x ( layers (H + MLP) c + V d ), of which a backward pass counts as two

    A share of the rate that was measured on the device has both in it. Rows without a signal are not left out here.
    """
    tokens = work.tokens(completion_tokens=work.mean_tokens, packed=setup.packed) / setup.ranks
    operations = flops_per_token(shape, work, setup) / (device.bf16 * 1e12)
    if device.train_utilization is not None:
        return tokens * operations / device.train_utilization
    passes = work.passes * (3 + (1 if setup.checkpointing else 0)) + work.extra_passes
    layers = shape.layers * (shape.hidden + shape.mlp) * constants.LAYER_PASS_BYTES
    traffic = passes * (layers + shape.vocabulary * constants.HEAD_PASS_BYTES) / (device.bandwidth * GB)
    return tokens * (operations / constants.TRAIN_MATRIX_UTILIZATION + traffic)


def exchange_bytes(shape: ModelShape, work: Work, setup: Setup) -> tuple[float, float]:
    """Bytes over each connection between devices in the training of a step, in rings: beside computing, and after it.

    zero3, each microbatch: weights for the forward pass, again for the backward pass, and their gradients in 4 B;
    each pass without a gradient: weights once
    otherwise, each update: gradients in 4 B, added up and given back; with rows of devices that each have all weights
    (HSDP) the parts of those of a machine, over one connection
    """
    if setup.ranks == 1:
        return 0.0, 0.0
    matrices = float(shape.num_parameters)
    trained = 4.0 * trained_parameters(shape, setup)
    after = 2.0 * trained * work.updates
    if setup.shard != "zero3":
        return 0.0, after
    together = min(setup.parts, constants.GPUS_PER_MACHINE) if setup.ranks > constants.GPUS_PER_MACHINE else 1
    after *= together / setup.parts if setup.parts < setup.ranks else 0.0
    tokens = work.tokens(completion_tokens=work.mean_tokens, packed=setup.packed) / setup.ranks
    microbatches = max(work.updates, math.ceil(tokens * work.passes / setup.tokens_per_microbatch))
    weights = setup.width * matrices
    reads = math.ceil(microbatches / work.passes) * work.extra_passes
    return microbatches * (2 * weights + trained) + reads * weights, after


def exchange_seconds(
    shape: ModelShape, work: Work, setup: Setup, device: Device, *, network_gbit: float
) -> tuple[float, float]:
    """Seconds of both over the slowest connection; machines have eight devices each.

    Where weights are cut, the next layers are on their way while one is computed; gradients alone go after the last.
    """
    link = device.link * GB * constants.LINK_SHARE
    network = min(link, network_gbit / 8 * GB)
    beside, after = exchange_bytes(shape, work, setup)
    parts, ranks = (link if count <= constants.GPUS_PER_MACHINE else network for count in (setup.parts, setup.ranks))
    return beside / parts, after / ranks


def decode_share(setup: Setup, device: Device) -> float:
    """Share of the memory's bandwidth that decoding reaches: the engine's as measured or estimated, vLLM's estimate."""
    if setup.has_servers:
        return constants.SERVER_BANDWIDTH_UTILIZATION
    return device.sample_utilization or constants.SAMPLE_BANDWIDTH_UTILIZATION


def sample_seconds(shape: ModelShape, work: Work, setup: Setup, device: Device) -> float:
    """Reading the prompts, then decoding: a row that ends makes room for one that waits, until none does.

        steps while rows wait   = rows that wait x mean length / rows, all of which run
        steps afterwards        = tokens of the longest completion     rows x mean length / limit run
        decoding step           = max( (weights + keys and values of the running rows) / bandwidth , 2 N rows / rate )

    Decoding is bound by memory until the batch is large: arXiv:2211.05102. Half-width weights on a GPU; those of a
    server that are cut over its devices are read once by all of them, which exchange two results for each layer.
    A recorded step of the engine adds the time of its small kernels. Through transformers' modules a step takes at
    least what starting their kernels takes, and a batch waits for its longest row.
    """
    devices = setup.sampler_devices or setup.ranks
    own, rows = (-(-count // devices) for count in (work.completions, work.rows_at_once))
    ending = max(1.0, rows * work.mean_completion_tokens / work.completion_tokens)
    prompts = _prompt_seconds(shape, work, device, devices)
    last = work.completion_tokens * _step_seconds(shape, work, setup, device, ending)
    if samples_by_modules(shape, setup):
        return prompts + -(-own // rows) * last + wait_seconds(work)
    steps = (own - rows) * work.mean_completion_tokens / rows
    return prompts + steps * _step_seconds(shape, work, setup, device, rows) + last + wait_seconds(work)


def _prompt_seconds(shape: ModelShape, work: Work, device: Device, devices: int) -> float:
    """Reading the prompts of a step, and again what tools answered."""
    reads = work.prompts * work.prompt_tokens + work.completions * work.read_again_tokens
    rate = device.bf16 * 1e12 * constants.SAMPLE_COMPUTE_UTILIZATION
    return 2.0 * shape.matrix_parameters * reads / (rate * devices)


def _step_seconds(shape: ModelShape, work: Work, setup: Setup, device: Device, running: float) -> float:
    """One token of each running row of a device."""
    rate = device.bf16 * 1e12 * constants.SAMPLE_COMPUTE_UTILIZATION
    bandwidth = device.bandwidth * GB * decode_share(setup, device)
    length = work.prompt_tokens + work.mean_tokens / 2
    cut = (setup.server_devices or setup.sampler_devices) or 1
    read = setup.width * (shape.parameters_read(running * cut) / cut + running * length * shape.kv_numbers_per_token)
    products = 2.0 * shape.matrix_parameters * running / rate
    if samples_by_modules(shape, setup):
        return max(read / bandwidth, products, shape.layers * constants.MODULE_LAYER_SECONDS[setup.quantization])
    small = 0.0
    if cut > 1:
        exchanged = 2 * 2 * shape.layers * running * cut * shape.hidden * setup.width
        small = exchanged / (device.link * GB * constants.LINK_SHARE)
    if setup.is_gpu and device.sample_utilization is None and not setup.has_servers:
        small = shape.layers * (constants.ENGINE_LAYER_SECONDS + running * constants.ENGINE_ROW_SECONDS)
    return max(read / bandwidth + small, products)


def wait_seconds(work: Work) -> float:
    """Time in which a step waits for tools and nothing is left to decode.

        max( batches of rows x (turn limit - 1) x seconds of an answer , all answers x seconds / threads )

    While a completion waits, the others are decoded; the longest one of a batch is waited for.
    """
    turns = work.turns
    batches = -(-work.completions // work.rows_at_once)
    all_answers = work.completions * (turns.mean - 1)
    return max(batches * (turns.limit - 1) * turns.seconds, all_answers * turns.seconds / turns.threads)
