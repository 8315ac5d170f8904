"""Seconds of a step and of a weight sync: nominal rates of the device times the share of them that is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from oncurve.constants import GB
from oncurve.observe.ahead import block_steps
from oncurve.plan import constants
from oncurve.plan.hardware import Device
from oncurve.plan.memory import samples_by_modules
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.utilization import Mfu, training_mfu
from oncurve.plan.weight_transfer import Part, sync_bytes, transfer_parts


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by what happens."""

    sample: float
    train: float
    sync: float
    sampled_tokens: float
    trained_tokens: float
    """Completion tokens, in each pass over the step once."""
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
        """Completion tokens per second of training."""
        return self.trained_tokens / self.train


def step_time(run: PlannedRun, device: Device, *, network_gbit: float) -> StepTime:
    """Seconds of a step on a device."""
    sends = not run.is_supervised
    compute = train_seconds(run, device)
    beside, after = exchange_seconds(run, device, network_gbit=network_gbit)
    waits = max(0.0, beside - compute) + after
    transfer = transfer_parts(run, device, network_gbit=network_gbit) if sends else ()
    time = StepTime(
        sample=0.0 if run.is_supervised else sample_seconds(run, device),
        train=compute + waits,
        network=waits,
        sync=sum(part.seconds for part in transfer),
        sampled_tokens=run.config.completions_per_step * run.lengths.completion_tokens,
        trained_tokens=run.trained_tokens,
        sync_bytes=sync_bytes(run) if sends else 0.0,
        wait=wait_seconds(run),
        read_again_tokens=run.config.completions_per_step * run.read_again_tokens,
        way=transfer,
    )
    if not run.rollouts.staleness or not run.layout.sampler_devices or run.is_supervised:
        return time
    return replace(time, ahead=seconds_ahead(run, device, time))


def seconds_ahead(run: PlannedRun, device: Device, time: StepTime) -> float:
    """Seconds of a step where other devices sample up to ``rollouts.staleness`` steps ahead, once that is under way.

        in blocks of b steps   max( training + held / b , (sampling of b steps at once + weight sync) / b )
        in flight              max( training + held , weight sync , prompts + tokens of a step over all rows ,
                                    the longest completion / staleness ), the last two at most the sampling of a step,
                                    which completions with tools take

    Held: the trainer's part of the weight sync. Of b steps, the rows of all fill the places that the longest of one
    would leave free. Completions with tools are sampled one step after the other.
    """
    devices, blocked_seconds = run.layout.sampler_devices, sum(part.seconds for part in time.way if part.holds)
    if run.rollouts.in_flight and run.turn_limit > 1:
        return max(time.train + blocked_seconds, time.sync, time.sample)
    if run.rollouts.in_flight:
        ahead = _with_steps(run, run.rollouts.staleness + 1)
        rows = -(-ahead.rows_at_once // devices)
        step_seconds = _step_seconds(run, device, rows)
        tokens = run.config.completions_per_step * run.lengths.completion_tokens / devices / rows
        stream = _prompt_seconds(run, device, devices) + tokens * step_seconds
        longest = run.written_tokens * step_seconds / run.rollouts.staleness
        return max(time.train + blocked_seconds, time.sync, min(time.sample, max(stream, longest)))
    steps = 1 if run.turn_limit > 1 else block_steps(run.rollouts.staleness)
    block = _with_steps(run, steps)
    return max(time.train + blocked_seconds / steps, (sample_seconds(block, device) + time.sync) / steps)


def _with_steps(run: PlannedRun, steps: int) -> PlannedRun:
    """The run whose step has the prompts of so many."""
    return run.with_keys("run", {"prompts_per_step": steps * run.config.run.prompts_per_step})


def planned_mfu(run: PlannedRun, device: Device, time: StepTime) -> Mfu:
    """MFU of the training of a step on all devices that train."""
    passes, lengths = run.config.run.passes_per_step, run.lengths
    return training_mfu(
        run.shape,
        completion_tokens=passes * run.config.completions_per_step * run.mean_tokens,
        prompt_tokens=passes * run.config.completions_per_step * lengths.mean_prompt_tokens,
        group_size=1 if run.is_supervised else run.config.algorithm.group_size,
        row_tokens=lengths.mean_prompt_tokens + run.mean_tokens,
        trains_adapter=run.trains_adapter,
        peak_operations=time.train * run.layout.ranks * device.matrix_rate,
    )


def flops_per_token(run: PlannedRun) -> float:
    """Operations of training on one token.

        forward 2 N, backward 4 N, or 2 N where the weights are frozen; checkpointing adds a forward pass;
        all of it for each pass over the step;  each pass without a gradient adds 2 N;  N: matrix parameters
        attention adds 4 layers Q (mean row length / 2) to each forward pass's worth of 2 N

    Source: arXiv:2001.08361, section 2.1; PaLM, arXiv:2204.02311, appendix B.
    """
    backward = 2 if not run.trains_adapter else 1
    passes = 1 + backward + (1 if run.policy.gradient_checkpointing else 0)
    passes = run.config.run.passes_per_step * passes + run.extra_passes
    row = run.lengths.mean_prompt_tokens + run.mean_tokens
    return passes * (2.0 * run.shape.matrix_parameters + 4.0 * run.shape.layers * run.shape.query_size * row / 2)


def train_seconds(run: PlannedRun, device: Device) -> float:
    """Tokens x ( operations / (rate x share) + bytes between products / bandwidth ) / devices.

        bytes   passes x ( layers (H + MLP) c + V d ), of which a backward pass counts as two

    A share of the rate that was measured on the device has both in it. Rows without a signal are not left out here.
    """
    tokens = run.step_tokens / run.layout.ranks
    operations = flops_per_token(run) / device.matrix_rate
    if device.train_utilization is not None:
        return tokens * operations / device.train_utilization
    passes = 3 + (1 if run.policy.gradient_checkpointing else 0)
    passes = run.config.run.passes_per_step * passes + run.extra_passes
    layers = run.shape.layers * (run.shape.hidden + run.shape.mlp) * constants.LAYER_PASS_BYTES
    traffic = passes * (layers + run.shape.vocabulary * constants.HEAD_PASS_BYTES) / (device.bandwidth * GB)
    return tokens * (operations / constants.TRAIN_MATRIX_UTILIZATION + traffic)


def exchange_bytes(run: PlannedRun) -> tuple[float, float]:
    """Bytes over each connection between devices in the training of a step, in rings: beside computing, and after it.

    zero3, each microbatch: weights for the forward pass, again for the backward pass, and their gradients in 4 B;
    each pass without a gradient: weights once
    otherwise, each update: gradients in 4 B, added up and given back; with rows of devices that each have all weights
    (HSDP) the parts of those of a machine, over one connection
    """
    if run.layout.ranks == 1:
        return 0.0, 0.0
    matrices = float(run.shape.num_parameters)
    trained = 4.0 * run.trained_parameters
    after = 2.0 * trained * run.config.updates_per_step
    if run.layout.shard != "zero3":
        return 0.0, after
    together = min(run.parts, constants.GPUS_PER_MACHINE) if run.layout.ranks > constants.GPUS_PER_MACHINE else 1
    after *= together / run.parts if run.parts < run.layout.ranks else 0.0
    tokens = run.step_tokens / run.layout.ranks
    passes = run.config.run.passes_per_step
    microbatches = max(run.config.updates_per_step, math.ceil(tokens * passes / run.policy.tokens_per_microbatch))
    weights = run.width * matrices
    reads = math.ceil(microbatches / passes) * run.extra_passes
    return microbatches * (2 * weights + trained) + reads * weights, after


def exchange_seconds(run: PlannedRun, device: Device, *, network_gbit: float) -> tuple[float, float]:
    """Seconds of both over the slowest connection; machines have eight devices each.

    Where weights are cut, the next layers are on their way while one is computed; gradients alone go after the last.
    """
    link = device.link * GB * constants.LINK_SHARE
    network = min(link, network_gbit / 8 * GB)
    beside, after = exchange_bytes(run)
    parts, ranks = (link if count <= constants.GPUS_PER_MACHINE else network for count in (run.parts, run.layout.ranks))
    return beside / parts, after / ranks


def decode_share(run: PlannedRun, device: Device) -> float:
    """Share of the memory's bandwidth that decoding reaches: the engine's as measured or estimated, vLLM's estimate."""
    if run.has_servers:
        return constants.SERVER_BANDWIDTH_UTILIZATION
    return device.sample_utilization or constants.SAMPLE_BANDWIDTH_UTILIZATION


def sample_seconds(run: PlannedRun, device: Device) -> float:
    """Reading the prompts, then decoding: a row that ends makes room for one that waits, until none does.

        steps while rows wait   = rows that wait x mean length / rows, all of which run
        steps afterwards        = tokens of the longest completion     rows x mean length / limit run
        decoding step           = max( (weights + keys and values of the running rows) / bandwidth , 2 N rows / rate )

    Decoding is bound by memory until the batch is large: arXiv:2211.05102. Half-width weights on a GPU; those of a
    server that are cut over its devices are read once by all of them, which exchange two results for each layer.
    A recorded step of the engine adds the time of its small kernels. Through transformers' modules a step takes at
    least what starting their kernels takes, and a batch waits for its longest row.
    """
    devices = run.layout.sampler_devices or run.layout.ranks
    own, rows = (-(-count // devices) for count in (run.config.completions_per_step, run.rows_at_once))
    ending = max(1.0, rows * run.lengths.completion_tokens / run.written_tokens)
    prompts = _prompt_seconds(run, device, devices)
    last = run.written_tokens * _step_seconds(run, device, ending)
    if samples_by_modules(run):
        return prompts + -(-own // rows) * last + wait_seconds(run)
    steps = (own - rows) * run.lengths.completion_tokens / rows
    return prompts + steps * _step_seconds(run, device, rows) + last + wait_seconds(run)


def _prompt_seconds(run: PlannedRun, device: Device, devices: int) -> float:
    """Reading the prompts of a step, and again what tools answered."""
    reads = run.config.run.prompts_per_step * run.lengths.mean_prompt_tokens
    reads += run.config.completions_per_step * run.read_again_tokens
    rate = device.matrix_rate * constants.SAMPLE_COMPUTE_UTILIZATION
    return 2.0 * run.shape.matrix_parameters * reads / (rate * devices)


def _step_seconds(run: PlannedRun, device: Device, running: float) -> float:
    """One token of each running row of a device."""
    rate = device.matrix_rate * constants.SAMPLE_COMPUTE_UTILIZATION
    bandwidth = device.bandwidth * GB * decode_share(run, device)
    length = run.lengths.mean_prompt_tokens + run.mean_tokens / 2
    cut = (run.server_devices or run.layout.sampler_devices) or 1
    read = run.width * (
        run.shape.parameters_read(running * cut) / cut + running * length * run.shape.kv_numbers_per_token
    )
    products = 2.0 * run.shape.matrix_parameters * running / rate
    if samples_by_modules(run):
        return max(
            read / bandwidth, products, run.shape.layers * constants.MODULE_LAYER_SECONDS[run.policy.quantization]
        )
    small = 0.0
    if cut > 1:
        exchanged = 2 * 2 * run.shape.layers * running * cut * run.shape.hidden * run.width
        small = exchanged / (device.link * GB * constants.LINK_SHARE)
    if run.layout.is_gpu and device.sample_utilization is None and not run.has_servers:
        small = run.shape.layers * (constants.ENGINE_LAYER_SECONDS + running * constants.ENGINE_ROW_SECONDS)
    return max(read / bandwidth + small, products)


def wait_seconds(run: PlannedRun) -> float:
    """Time in which a step waits for tools and nothing is left to decode.

        max( batches of rows x (turn limit - 1) x seconds of an answer , all answers x seconds / threads )

    While a completion waits, the others are decoded; the longest one of a batch is waited for.
    """
    completions, seconds = run.config.completions_per_step, run.lengths.answer_seconds
    batches = -(-completions // run.rows_at_once)
    all_answers = completions * (run.lengths.turns - 1)
    threads = run.rollouts.episodes.threads
    return max(batches * (run.turn_limit - 1) * seconds, all_answers * seconds / threads)
