"""A plan as text for people and as plain data for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from oncurve.constants import GIB
from oncurve.model.decode_memory import OWN_FAMILIES
from oncurve.plan.constants import GPU_MARGIN, MEMORY_ERROR
from oncurve.plan.cost import (
    DiskUse,
    FailureCost,
    Price,
    TrainerCost,
    compare_trainers,
    cost_of_failure,
    disk_use,
    fits,
    price,
)
from oncurve.plan.fit import SMALL_MICROBATCH, Advice, Fit, advise, fit_devices, is_tight
from oncurve.plan.hardware import Device
from oncurve.plan.memory import (
    PHASES,
    Memory,
    Need,
    plan_memory,
    samples_by_modules,
)
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.step_time import StepTime, planned_mfu, seconds_ahead, step_time
from oncurve.plan.token_lengths import TokenLengths
from oncurve.plan.weight_transfer import sent_share
from oncurve.policy.settings import LoraSettings
from oncurve.tables import aligned
from oncurve.wording import counted

MAX_ADVICE = 6
MODULES = "the model's modules"
STALENESS = (1, 2, 4, 8)
"""Values of ``rollouts.staleness`` that a plan compares with 0."""
_FIT_KEYS = ("fits", "fits_alone", "devices_needed", "devices_needed_lora")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is known before a run."""

    run: PlannedRun
    device: Device
    network_gbit: float
    memory: Memory
    time: StepTime
    devices: list[Fit]
    advice: list[Advice]
    trainers: list[TrainerCost]
    trainers_checkpointed: bool = False
    """They are planned with gradient checkpointing, because the run does not fit without."""

    @property
    def hours(self) -> float:
        """Steps x seconds; measuring, loading and saving are not in it."""
        return self.time.total * self.run.steps / 3600

    @property
    def steps_per_hour(self) -> dict[str, float]:
        """By ``rollouts.staleness``, where other devices sample than those that train; empty elsewhere."""
        if not self.run.layout.sampler_devices or self.run.is_supervised:
            return {}
        plain = replace(self.time, ahead=None)
        rates = {"0": 3600 / plain.total}
        for in_flight in (False, True):
            for staleness in STALENESS:
                ahead = self.run.with_keys("rollouts", {"staleness": staleness, "in_flight": in_flight})
                rates[f"{staleness}{' in flight' * in_flight}"] = 3600 / seconds_ahead(ahead, self.device, plain)
        return rates

    @property
    def failure(self) -> FailureCost:
        """The cost of a machine that is taken away."""
        return cost_of_failure(self.run, self.time, self.device)

    @property
    def disk(self) -> DiskUse:
        """The run's folder at its end."""
        return disk_use(self.run)

    @property
    def fits(self) -> bool:
        """The device has room for every step."""
        return fits(self.memory, self.device)

    @property
    def loads(self) -> bool:
        """It has room for what lies there once, before the first."""
        return self.memory.load_bytes <= self.device.memory_bytes * (1 - GPU_MARGIN)


def make_plan(run: PlannedRun, device: Device, *, devices: Mapping[str, Device], network_gbit: float) -> Plan:
    """Memory, time, price, and what to change where the device is too small."""
    memory = plan_memory(run)
    too_large = run.layout.is_gpu and not run.policy.gradient_checkpointing and not fits(memory, device)
    thrifty = run.with_keys("policy", {"gradient_checkpointing": True}) if too_large else run
    return Plan(
        run=run,
        device=device,
        network_gbit=network_gbit,
        memory=memory,
        time=step_time(run, device, network_gbit=network_gbit),
        devices=fit_devices(run, devices) if run.layout.is_gpu else [],
        advice=[] if fits(memory, device) else advise(run, device)[:MAX_ADVICE],
        trainers=compare_trainers(thrifty, device, network_gbit=network_gbit),
        trainers_checkpointed=too_large,
    )


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON types: bytes, seconds, USD."""
    needs = [
        {
            "role": need.role,
            "devices": need.devices,
            "peak_bytes": round(need.peak_bytes),
            "peak_phase": need.peak_phase,
            "live_bytes": {phase: round(need.live_bytes(phase)) for phase in PHASES},
            "phases": {
                phase: {part.name: round(part.bytes) for part in need.components if phase in part.phases}
                for phase in PHASES
            },
        }
        for need in plan.memory.needs
    ]
    return {
        "model": {**asdict(plan.run.shape), "num_parameters": plan.run.shape.num_parameters},
        "trained_parameters": plan.run.trained_parameters,
        "work": _work(plan.run),
        "setup": _setup(plan.run),
        "device": plan.device.model_dump(mode="json"),
        "fits": plan.fits,
        "loads": plan.loads,
        "load_bytes": round(plan.memory.load_bytes),
        "memory": needs,
        "host_bytes": round(plan.memory.host_bytes),
        "devices": [
            {"name": row.device.name} | {key: value for key, value in asdict(row).items() if key in _FIT_KEYS}
            for row in plan.devices
        ],
        "advice": [
            {
                "overrides": list(entry.overrides),
                "peak_bytes": round(entry.peak_bytes),
                "fits": entry.fits,
                "is_tight": entry.is_tight,
            }
            for entry in plan.advice
        ],
        "seconds": {**asdict(plan.time), "step": plan.time.total},
        "mfu": asdict(planned_mfu(plan.run, plan.device, plan.time)) if plan.run.layout.is_gpu else None,
        "steps_per_hour": plan.steps_per_hour,
        "hours": plan.hours,
        "disk": asdict(plan.disk),
        "failure": asdict(plan.failure),
        "usd": asdict(price(plan.run.layout, plan.device, hours=plan.hours)),
        "trainers": [
            {
                "name": entry.name,
                "devices": entry.run.layout.ranks + entry.run.layout.sampler_devices,
                "fits": entry.fits,
                "step_seconds": entry.step_seconds,
                "usd_per_hour": asdict(entry.per_hour),
                "usd_per_run": asdict(entry.per_run),
            }
            for entry in plan.trainers
        ],
    }


def _work(run: PlannedRun) -> dict[str, Any]:
    """The work of a step, as JSON types."""
    section, lengths = run.config.run, run.lengths
    return {
        "prompts": section.prompts_per_step,
        "group_size": run.config.algorithm.group_size,
        "prompt_tokens": lengths.prompt_tokens,
        "mean_prompt_tokens": lengths.mean_prompt_tokens,
        "prompts_from": lengths.prompts_from,
        "completion_tokens": run.written_tokens,
        "mean_completion_tokens": lengths.completion_tokens,
        "updates": run.config.updates_per_step,
        "passes": section.passes_per_step,
        "extra_passes": run.extra_passes,
        "max_rows": run.max_rows,
        "steps": run.steps,
        "save_every_steps": section.save_every_steps,
        "keep_checkpoints": section.keep_checkpoints,
        "keep_every_steps": section.keep_every_steps,
        "records_all": section.record == "all",
        "turns": {
            "limit": run.turn_limit,
            "mean": lengths.turns,
            "answer_limit": run.answer_limit,
            "mean_answer": lengths.answer_tokens,
            "seconds": lengths.answer_seconds,
            "threads": run.rollouts.episodes.threads,
            "cached": run.keeps_cache,
        },
        "context_tokens": lengths.context_tokens,
        "is_supervised": run.is_supervised,
        "epochs": run.uncounted_epochs,
    }


def _setup(run: PlannedRun) -> dict[str, Any]:
    """The method and the devices of training, as JSON types."""
    policy, layout = run.policy, run.layout
    return {
        "method": "lora" if run.trains_adapter else "full",
        "rank": (policy.lora or LoraSettings()).rank,
        "targets": run.adapter_targets,
        "quantization": policy.quantization,
        "compute": run.compute,
        "is_gpu": layout.is_gpu,
        "packed": policy.packing,
        "checkpointing": policy.gradient_checkpointing,
        "offloads_activations": policy.offload_activations,
        "optimizer": run.config.optimizer.type,
        "tokens_per_microbatch": policy.tokens_per_microbatch,
        "has_reference": run.has_reference,
        "teacher": None if run.teacher is None else asdict(run.teacher),
        "records_decoding": run.rollouts.cuda_graphs,
        "ranks": layout.ranks,
        "shard": layout.shard,
        "degree": policy.shard_degree,
        "loads_by_parts": run.loads_by_parts,
        "offloads_optimizer": layout.offloads_optimizer,
        "placement": layout.placement,
        "sampler_devices": layout.sampler_devices,
        "server_devices": run.server_devices,
        "transfer": "nccl" if run.sends_by_nccl else "fetch",
        "delta_rate": run.delta_rate,
        "staleness": run.rollouts.staleness,
        "in_flight": run.rollouts.in_flight,
        "has_server_beside": run.has_server_beside,
    }


def as_text(plan: Plan) -> str:
    """The plan for people: memory by phase, what fits, what to change, time, price."""
    return "\n".join([*_head(plan), *_memory(plan), *_fit(plan), *_time(plan), *_cost(plan), *_failure(plan)])


def _head(plan: Plan) -> Iterator[str]:
    run, shape = plan.run, plan.run.shape
    kind = "all weights" if run.policy.lora is None else f"LoRA, rank {run.policy.lora.rank},"
    if run.policy.quantization:
        kind += f" over {run.policy.quantization}"
    yield f"{shape.name}: {_count(shape.num_parameters)} parameters, {kind} trained ({_count(run.trained_parameters)})"
    unit = "rows" if run.is_supervised else f"prompts x {run.config.algorithm.group_size} completions"
    assumed = " (assumed: --mean-tokens)" if run.lengths.is_mean_assumed else ""
    yield (
        f"a step: {run.config.run.prompts_per_step} {unit}, prompts of {_prompts(run.lengths)}, completions of "
        f"{run.lengths.completion_tokens:g} on average{assumed} "
        f"and {run.written_tokens} at most"
    )
    if run.turn_limit > 1:
        lengths = run.lengths
        yield (
            f"in turns: {lengths.turns:g} on average and {run.turn_limit} at most; answers of "
            f"{lengths.answer_tokens:g} tokens on average and {run.answer_limit} at most, after "
            f"{lengths.answer_seconds:g} s "
            f"(--mean-turns, --answer-tokens, --tool-seconds)"
        )
    parts = f", state sharded with {run.layout.shard}" if run.layout.ranks > 1 else ""
    samplers = (
        f", {run.layout.sampler_devices} to sample ({run.layout.placement})" if run.layout.sampler_devices else ""
    )
    yield f"on {run.layout.ranks} x {plan.device.name} to train{parts}{samplers}; arithmetic in {run.compute}"
    if shape.counted is not None:
        yield (
            f"the weights of {shape.family!r} are counted on transformers' modules; activations are those of an "
            f"ordinary decoder of its widths, a guess for layers of other kinds"
        )
    yield _backends(run)
    if warning := run.row_warning():
        yield f"warning: {warning}"


def _prompts(lengths: TokenLengths) -> str:
    """Tokens of the prompts, and who says so."""
    if lengths.prompts_from == "measured":
        return f"{lengths.mean_prompt_tokens:.0f} tokens on average and {lengths.prompt_tokens} at most (your rows)"
    source = "assumed: --prompt-tokens" if lengths.prompts_from == "assumed" else lengths.prompts_from
    return f"{lengths.prompt_tokens} tokens ({source})"


def _backends(run: PlannedRun) -> str:
    """The ways of training and sampling, as far as the model's configuration tells."""
    shape = run.shape
    if shape.counted is None and shape.family in OWN_FAMILIES and shape.is_plain:
        trained = f"packed rows through {'our own layers' if run.has_own_layers else MODULES}"
        sampled = f"through {MODULES if samples_by_modules(run) else 'our own layers'}"
    elif shape.counted is not None and shape.counted.ways is not None:
        trained, sampled = shape.counted.ways
    else:
        return "how the model is trained and sampled is found when it is loaded"
    if not run.policy.packing:
        trained = f"padded rows through {MODULES}"
    if run.has_servers:
        sampled = "by rollout servers"
    text = f"trained with {trained}" + (f"; sampled {sampled}" if sampled else "")
    return f"{text} (by its configuration; each way is proven when the model is loaded)"


def _memory(plan: Plan) -> Iterator[str]:
    for need in plan.memory.needs:
        yield ""
        room = plan.device.memory_bytes / GIB
        verdict = _verdict(plan, need)
        yield f"memory of a {need.role}, GiB: peak {_gib(need.peak_bytes)} of {room:.1f}, {verdict}"
        if need.role == "trainer" and not plan.loads:
            yield (
                f"warning: the model cannot be loaded: before its weights are cut, each trainer holds all of them, "
                f"{_gib(plan.memory.load_bytes)} GiB with copies"
            )
        names = {"sample": "evaluate"} if plan.run.is_supervised else {}
        rows = [["", *(names.get(phase, phase) for phase in PHASES)]]
        for name in dict.fromkeys(part.name for part in need.components):
            rows.append([name, *(_cell(need, name, phase) for phase in PHASES)])
        rows.append(["sum", *(_gib(need.phase_bytes(phase)) for phase in PHASES)])
        yield from aligned(rows, 28, 10, indent="  ")
    if plan.memory.host_bytes:
        yield f"CPU memory: {_gib(plan.memory.host_bytes)} GiB for master weights and optimizer moments"


def _verdict(plan: Plan, need: Need) -> str:
    """Whether a device has room, and whether the plan's own error decides that."""
    if need.peak_bytes > plan.device.memory_bytes * (1 - GPU_MARGIN):
        return "does NOT fit"
    tight = is_tight(plan.run, Memory((need,)), plan.device)
    return f"tight: fits, but {MEMORY_ERROR:.0%} more would not" if tight else "fits"


def _cell(need: Need, name: str, phase: Any) -> str:
    size = sum(part.bytes for part in need.components if part.name == name and phase in part.phases)
    return _gib(size) if size else ""


def _fit(plan: Plan) -> Iterator[str]:
    if plan.devices:
        yield ""
        yield "GPUs needed for training (several: weights and optimizer state sharded with ZeRO-3; -: more than 64)"
        rows = [
            ["", "as written", "gradient", "gradient checkpointing,"],
            ["", "", "checkpointing", f"LoRA, {SMALL_MICROBATCH}-token batches"],
        ]
        for row in plan.devices:
            name = f"{row.device.name:14}{row.device.memory_bytes / GIB:7.1f} GiB"
            needed = (row.devices_needed, row.devices_needed_lora)
            rows.append(
                [name, "1" if row.fits_alone else "-", *("-" if count is None else str(count) for count in needed)]
            )
        yield from aligned(rows, 26, 12, 16, 26, indent="  ")
    if plan.advice:
        yield ""
        fitting = plan.advice[0].fits
        yield (
            "what to change, the recommended first:"
            if fitting
            else "no three changes make it fit; those that save most:"
        )
        for advice in plan.advice:
            yield "  " + " ".join(_quoted(text) for text in advice.overrides)
            costs = "; ".join(dict.fromkeys(change.what for change in advice.changes))
            tight = ", tight" if advice.fits and advice.is_tight else ""
            yield f"      peak {_gib(advice.peak_bytes)} GiB{tight}{_spent(plan, advice)}; cost: {costs}"
        if not fitting:
            yield "  or use more GPUs, as in the table above"


def _spent(plan: Plan, advice: Advice) -> str:
    """Hours and price of a run that fits after a change."""
    if not advice.fits:
        return ""
    hours = step_time(advice.run, plan.device, network_gbit=plan.network_gbit).total * advice.run.steps / 3600
    usd = price(advice.run.layout, plan.device, hours=hours)
    return f", {_hours(hours)}" + (f", {_usd(usd, 'on_demand')} USD" if usd.on_demand is not None else "")


def _time(plan: Plan) -> Iterator[str]:
    time = plan.time
    yield ""
    if plan.run.is_supervised:
        yield f"a step: about {_seconds(time.train)} of training, {time.trained_per_second:,.0f} completion tokens/s"
        yield from _mfu(plan)
        yield _speeds(plan.device)
        return
    parts = [f"sampling {_seconds(time.sample)}", f"training {_seconds(time.train)}"]
    parts += [f"weight sync {_seconds(time.sync)}"] if time.sync_bytes else []
    if time.ahead is None:
        yield f"a step: about {_seconds(time.total)} = {' + '.join(parts)}"
    else:
        overlap = f"at the same time, with rollouts.staleness {plan.run.rollouts.staleness}"
        yield f"a step: about {_seconds(time.total)}: {', '.join(parts)} {overlap}"
    yield (
        f"  {time.sampled_per_second:,.0f} completion tokens/s in sampling, {time.trained_per_second:,.0f} in training"
    )
    yield from _mfu(plan)
    if time.network >= 0.05 * time.train:
        yield f"  {_seconds(time.network)} of training waits for the weights and gradients of other devices"
    if plan.run.turn_limit > 1:
        yield from _turns(plan)
    if time.sync_bytes:
        parts = ", ".join(f"{part.name} {_seconds(part.seconds)}" for part in time.way)
        transfer = f"rollouts.transfer {'nccl' if plan.run.sends_by_nccl else 'fetch'}"
        if plan.run.delta_rate is not None:
            transfer = (
                f"{sent_share(plan.run.delta_rate, plan.run.shape.num_parameters):.2g} of all weights: rollouts.deltas"
            )
        yield f"  weight sync: {time.sync_bytes / 1e9:.3g} GB after every step ({transfer})"
        yield f"    {parts}"
    if rates := plan.steps_per_hour:
        lengths = f"lengths of {plan.run.lengths.completion_tokens:g} on average and {plan.run.written_tokens} at most"
        yield f"  steps per hour by rollouts.staleness, for {lengths}:"
        yield "    " + ", ".join(f"{name}: {_rate(rate)}" for name, rate in rates.items())
    yield _speeds(plan.device)


def _mfu(plan: Plan) -> Iterator[str]:
    """The share of a GPU's nominal rate that training reaches by the plan."""
    if plan.run.layout.is_gpu:
        yield f"  in training {planned_mfu(plan.run, plan.device, plan.time)}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _speeds(device: Device) -> str:
    """The source of the seconds."""
    if device.train_utilization is not None:
        return f"  from measured speeds of {device.name} in training; the rest is estimated"
    share = "training by shares measured on an H100, the rest is estimated: expect up to a factor of two either way"
    return f"  from nominal speeds of {device.name}; {share}"


def _turns(plan: Plan) -> Iterator[str]:
    """The cost of tools, and its assumptions."""
    time = plan.time
    what = (
        "read in answers (what came before is kept)"
        if plan.run.keeps_cache
        else "read again after answers, with all before them"
    )
    yield f"  {time.read_again_tokens:,.0f} tokens {what}"
    answers = counted(plan.run.turn_limit - 1, "answer")
    yield f"  {_seconds(time.wait)} of sampling waits for tools: the longest completion of a batch for {answers}"
    yield (
        f"  memory is for {plan.run.longest_tokens} tokens of a completion with every answer at its limit; answers "
        f"are read in training too, and not learned from"
    )


def _cost(plan: Plan) -> Iterator[str]:
    yield ""
    yield f"the run: {counted(plan.run.steps, 'step')}, about {_hours(plan.hours)} without evaluation and checkpoints"
    disk = plan.disk
    record = f" and {_gib(disk.record_bytes)} GiB of recorded steps (run.record)" if disk.record_bytes else ""
    checkpoints = f"{counted(disk.checkpoints, 'checkpoint')} of {_gib(disk.checkpoint_bytes)} GiB"
    yield f"  on the disk at the end: {checkpoints}{record}"
    if (epochs := plan.run.uncounted_epochs) is not None:
        yield f"  steps of run.steps; sft.epochs={epochs:g} sets other ones once the rows have been counted"
    if plan.device.on_demand is None and plan.device.spot is None:
        if plan.device.is_gpu:
            yield f"  no price known for {plan.device.name}; give yours with --usd-per-gpu-hour"
        return
    dated = f", {plan.device.priced}" if plan.device.priced else ""
    yield f"  USD, price of {plan.device.name} from {plan.device.source or 'an unnamed source'}{dated}:"
    rows = [["", "devices", "per hour", "on spot", "per run", "on spot"]]
    for trainer in plan.trainers:
        if not trainer.fits:
            rows.append([trainer.name, "> 64", *"----"])
            continue
        count = str(trainer.run.layout.ranks + trainer.run.layout.sampler_devices)
        rows.append(
            [
                trainer.name,
                count,
                *(_usd(x, kind) for x in (trainer.per_hour, trainer.per_run) for kind in ("on_demand", "spot")),
            ]
        )
    yield from aligned(rows, 10, 9, 12, 10, 12, 10, indent="  ")
    if plan.trainers_checkpointed:
        yield "  with policy.gradient_checkpointing=true, since the recipe as written does not fit"
    if not plan.run.is_supervised:
        yield "  for the same number of steps, not the same quality; DPO also needs preference pairs"


def _failure(plan: Plan) -> Iterator[str]:
    lost = plan.failure
    rows = "rows" if plan.run.is_supervised else "completions"
    worth = f", ${_usd(lost.usd, 'on_demand')}" if lost.usd.on_demand is not None else ""
    yield ""
    yield (
        f"if the trainer is preempted, you lose at most {counted(lost.steps, 'step')} (run.save_every_steps), half of "
        f"that on average: {lost.completions:,} {rows}, {lost.tokens:,.0f} tokens, {_seconds(lost.seconds)}{worth}"
    )
    if plan.run.layout.sampler_devices:
        yield f"if a rollout server is preempted, you lose at most {lost.sampler_tokens:,.0f} tokens; the run continues"


def _usd(amount: Price, kind: str) -> str:
    value = amount.spot if kind == "spot" else amount.on_demand
    return "-" if value is None else f"{value:,.2f}"


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}" if gib >= 0.1 else f"{gib:.3f}"


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.0f} minutes" if hours >= 1 / 30 else _seconds(hours * 3600)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _quoted(override: str) -> str:
    return f"'{override}'" if " " in override or "{" in override else override
