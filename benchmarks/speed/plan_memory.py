"""The planner's peak memory beside the peak of a real step on a CPU.

Each configuration gets a process of its own, which loads a random checkpoint and takes real steps: the engine samples,
the reward is a coin, the policy trains. Its peak resident memory, over what the imports took, is held against what
``oncurve.plan`` says. Memory does not depend on what else the machine does, so one thread is enough.

    python benchmarks/bench.py plan_memory                        all configurations, a few minutes
    python benchmarks/bench.py plan_memory --only S-packed        one of them
    python benchmarks/bench.py plan_memory --live                 count tensors: no allocator in between
    python benchmarks/bench.py plan_memory --missing              go on where the published result stops
    python benchmarks/bench.py plan_memory --again --output benchmarks/results     after a change of the planner
    python benchmarks/bench.py plan_memory --page                 the table of benchmarks/results/evidence.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, Record

from oncurve.core.sampler import SamplingRequest
from oncurve.observe.terminal import LIBRARY_OPTIONS
from oncurve.plan.activations import head_bytes, largest_microbatch, layer_buffers, saved_bytes
from oncurve.plan.layout import DeviceLayout
from oncurve.plan.memory import plan_memory
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.shape import ModelShape, shape_of_config
from oncurve.plan.token_lengths import TokenLengths
from oncurve.recipe.load import parse_config

MIB = 2**20
RESULT, PAGE = RESULTS / "plan_memory.json", RESULTS / "evidence.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


@dataclass(frozen=True)
class Setting:
    """One configuration."""

    name: str
    model: str
    packed: bool = True
    checkpointing: bool = False
    reference: bool = False
    lora_rank: int = 0
    prompts: int = 4
    group_size: int = 8
    prompt_tokens: int = 48
    new_tokens: int = 64
    tokens_per_microbatch: int = 2048
    steps: int = 2


def settings() -> list[Setting]:
    """All configurations: sizes x checkpointing x packed and padded x reference, LoRA, long prompts, wide head.

    "Many" are 16 prompts and four steps: what the allocator holds grows with both.
    """
    many: list[Setting] = []
    for model, size in (("S", {}), ("M", {"prompts": 2, "new_tokens": 48, "tokens_per_microbatch": 1024})):
        for packed in (True, False):
            for checkpointing in (False, True):
                way = ("packed" if packed else "padded") + ("-checkpointing" if checkpointing else "")
                one = Setting(f"{model}-{way}", model, packed, checkpointing, **size)
                many += [one, replace(one, name=f"{one.name}-reference", reference=True)]
        one = Setting(f"{model}-lora", model, lora_rank=16, **size)
        many += [one, replace(one, name=f"{one.name}-checkpointing-reference", checkpointing=True, reference=True)]
    many += [
        Setting("S-packed-4k", "S", tokens_per_microbatch=4096, prompts=6),
        Setting("S-packed-long-prompt", "S", prompt_tokens=384, new_tokens=32, tokens_per_microbatch=4096),
        Setting("S-padded-long-prompt", "S", packed=False, prompt_tokens=384, new_tokens=32),
        Setting("S-packed-many", "S", prompts=16, steps=4),
        Setting("S-packed-many-checkpointing", "S", checkpointing=True, prompts=16, steps=4),
        Setting("S-padded-many", "S", packed=False, prompts=16, steps=4),
        Setting("S-padded-many-checkpointing", "S", packed=False, checkpointing=True, prompts=16, steps=4),
        Setting("W-packed", "W"),
        Setting("W-packed-checkpointing-reference", "W", checkpointing=True, reference=True),
    ]
    return many


def build_checkpoint(setting: Setting, folder: Path) -> Path:
    """The random model of a configuration on disk; its completions never end by themselves."""
    from models import SHAPES, Shape, build

    shapes = {**SHAPES, "W": Shape(hidden=256, layers=4, heads=4, kv_heads=2, mlp=688, vocabulary=32_768)}
    return build(folder, shapes[setting.model], mean_tokens=None, max_length=1024)


class Peak:
    """The most memory that this process held since it was last asked."""

    def __init__(self) -> None:
        self.baseline = self.now("VmRSS")
        self.peaks: dict[str, int] = {}

    @staticmethod
    def now(field: str) -> int:
        """A field of /proc/self/status in bytes."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")

    def note(self, phase: str) -> None:
        """Put the peak since the last call down to a phase."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.now("VmHWM") - self.baseline)
        Path("/proc/self/clear_refs").write_text("5")


def measure(setting: Setting, folder: Path) -> dict[str, int]:
    """Peak bytes over the import baseline in each phase of real steps, in this process."""
    import copy

    import torch

    from oncurve.algorithm.presets import build as build_algorithm
    from oncurve.core.batch import collate, stack_rewards
    from oncurve.core.records import Prompt, Reward, SamplingParams
    from oncurve.model.allocator import keep_freed_memory
    from oncurve.policy.lora import add_adapter
    from oncurve.policy.model_folder import load_model
    from oncurve.policy.settings import LoraSettings, OptimizerSettings, PolicySection
    from oncurve.policy.trained_policy import TrainedPolicy
    from oncurve.sample.engine import InProcessEngine

    peak = Peak()
    peak.note("imports")
    keep_freed_memory(always=not setting.checkpointing)
    model, tokenizer = load_model(str(folder))
    rank = setting.lora_rank
    adapter = add_adapter(model, LoraSettings(rank=rank), base=str(folder)) if rank else None
    copied = setting.reference and adapter is None  # with an adapter, the base under it is the reference
    reference = copy.deepcopy(model).requires_grad_(False) if copied else None
    policy = TrainedPolicy(
        model,
        tokenizer,
        optimizer=OptimizerSettings(),
        section=PolicySection(
            tokens_per_microbatch=setting.tokens_per_microbatch,
            gradient_checkpointing=setting.checkpointing,
            packing=setting.packed,
        ),
        reference=reference,
        adapter=adapter,
    )
    engine = InProcessEngine(SamplingParams(max_completion_tokens=setting.new_tokens))
    coefficient = {"kl_coef": 0.04} if setting.reference else {}
    algorithm = build_algorithm(
        "grpo", group_size=setting.group_size, max_completion_tokens=setting.new_tokens, **coefficient
    )
    words = torch.randint(300, model.config.vocab_size, (setting.prompts, setting.prompt_tokens)).tolist()
    prompts = [Prompt(str(place), tuple(ids), place) for place, ids in enumerate(words)]
    peak.note("load")
    for step in range(setting.steps):
        engine.load_weights(policy, version=step)
        groups = engine.sample(SamplingRequest(prompts, setting.group_size, step=step))
        peak.note("sample")
        graded = [[Reward(float(completion.index % 2)) for completion in group.completions] for group in groups]
        batch = collate(groups, algorithm.advantages(stack_rewards(groups, graded)))
        batch = policy.annotate(batch, old=False, entropy=False, reference=setting.reference)
        peak.note("annotate")
        for microbatch in policy.microbatches(batch):
            logprobs, entropy = policy.logprobs(microbatch)
            loss, _ = algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
            policy.backward(loss)
        peak.note("train")
        policy.update()
        peak.note("update")
    return peak.peaks


def live(setting: Setting, folder: Path) -> dict[str, int]:
    """Bytes of tensors that one forward pass leaves alive, and the most that are alive in it and the backward pass.

    Torch's memory profiler counts every allocation, so that no allocator's gaps are in these numbers.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from oncurve.core.batch import Batch, Size
    from oncurve.policy.lora import add_adapter
    from oncurve.policy.model_folder import load_model
    from oncurve.policy.settings import LoraSettings, OptimizerSettings, PolicySection
    from oncurve.policy.trained_policy import TrainedPolicy

    model, tokenizer = load_model(str(folder))
    rank = setting.lora_rank
    policy = TrainedPolicy(
        model,
        tokenizer,
        optimizer=OptimizerSettings(),
        section=PolicySection(gradient_checkpointing=setting.checkpointing, packing=setting.packed),
        adapter=add_adapter(model, LoraSettings(rank=rank), base=str(folder)) if rank else None,
    )
    batch = largest_microbatch(planned_run(setting, folder))
    rows = round(batch.trained_tokens / setting.new_tokens)
    groups = torch.arange(setting.prompts).repeat_interleave(setting.group_size)[:rows]
    prompts = torch.randint(300, model.config.vocab_size, (setting.prompts, setting.prompt_tokens))[groups]
    lengths = torch.full((rows,), setting.prompt_tokens), torch.full((rows,), setting.new_tokens)
    completions = torch.randint(300, model.config.vocab_size, (rows, setting.new_tokens))
    mask = torch.ones(rows, setting.new_tokens, dtype=torch.bool)
    size = Size(rows, int(mask.sum()), len(groups.unique()))
    ones, zeros = torch.ones(rows), torch.zeros(mask.shape)
    packed = Batch(prompts, lengths[0], completions, mask, lengths[1], groups, ones, zeros, size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logprobs, _ = policy.logprobs(packed)
        with record_function("backward begins"):
            logprobs.sum().backward()
    events = profiler.profiler.kineto_results.events()
    begins = next(event.start_ns() for event in events if event.name() == "backward begins")
    alive = peak = kept = 0
    for time, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        alive += change
        peak = max(peak, alive)
        kept = alive if time < begins else kept
    return {"kept": kept, "peak": peak}


def planned_run(setting: Setting, folder: Path) -> PlannedRun:
    """A configuration as the planner sees it."""
    overrides = [
        f"run.prompts_per_step={setting.prompts}",
        f"algorithm={{group_size: {setting.group_size}, kl_coef: {0.04 if setting.reference else 0}}}",
        f"rollouts.max_completion_tokens={setting.new_tokens}",
        f"policy.packing={setting.packed}",
        f"policy.gradient_checkpointing={setting.checkpointing}",
        f"policy.tokens_per_microbatch={setting.tokens_per_microbatch}",
        *([f"policy.lora.rank={setting.lora_rank}"] if setting.lora_rank else []),
    ]
    return PlannedRun(
        config=parse_config("{model: random, data: {type: gsm8k}}", overrides),
        shape=read_shape(setting, folder),
        layout=DeviceLayout(is_gpu=False),
        lengths=TokenLengths(
            prompt_tokens=setting.prompt_tokens,
            mean_prompt_tokens=setting.prompt_tokens,
            completion_tokens=setting.new_tokens,
        ),
    )


def read_shape(setting: Setting, folder: Path) -> ModelShape:
    """The shape of a checkpoint on disk."""
    return shape_of_config(json.loads((folder / "config.json").read_text()), name=setting.model)


def predict(setting: Setting, folder: Path) -> dict[str, float]:
    """What the planner says: the peak of the process, and of the tensors of one forward and backward pass."""
    run = planned_run(setting, folder)
    batch = largest_microbatch(run)
    kept, buffers = saved_bytes(run, batch), layer_buffers(run, batch)
    own = 4.0 * run.trained_parameters
    return {
        "process": plan_memory(run).trainer.peak_bytes,
        "kept": kept,
        "peak": max(kept + max(head_bytes(run, batch), buffers), buffers + own),
    }


def in_fresh_process(name: str, folder: Path, what: str) -> dict[str, int]:
    """What a configuration takes in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "plan_memory", "--child", name, str(folder), what]
    environment = {**LIBRARY_OPTIONS, **os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def describe(rows: list[dict[str, Any]]) -> str:
    """Predicted beside measured, and how many are within 15 %."""
    lines = [f"{'configuration':42}{'measured':>10}{'planned':>10}{'error':>8}   MiB over the imports"]
    for row in rows:
        measured, planned = row["measured_bytes"] / MIB, row["planned_bytes"] / MIB
        lines.append(f"{row['name']:42}{measured:10.0f}{planned:10.0f}{row['error']:8.1%}")
    close = sum(abs(row["error"]) <= 0.15 for row in rows)
    return "\n".join([*lines, f"{close} of {len(rows)} within 15 %"])


def page_with(rows: list[dict[str, Any]], page: str) -> str:
    """The page of measurements with a row for every model."""
    lines = ["| model | configurations | measured, MiB | planned less measured |", "|---|---|---|---|"]
    models: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(row["name"].split("-")[0], []).append(row)
    for model, found in models.items():
        sizes, errors = [row["measured_bytes"] / MIB for row in found], [row["error"] for row in found]
        span = f"{min(sizes):.0f} to {max(sizes):.0f} | {min(errors):+.1%} to {max(errors):+.1%}"
        lines.append(f"| {model} | {len(found)} | {span} |")
    close = sum(abs(row["error"]) <= 0.15 for row in rows)
    before, rest = page.split(BEGIN)
    table, said = "\n".join(lines), f"{close} of {len(rows)} are within 15 %: `benchmarks/results/plan_memory.json`."
    return f"{before}{BEGIN}\n\n{table}\n\n{said}\n\n{END}{rest.split(END)[1]}"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="names of configurations")
    parser.add_argument("--live", action="store_true", help="count tensors instead of the process's memory")
    parser.add_argument("--again", action="store_true", help="plan again for the published measurements")
    parser.add_argument("--page", action="store_true", help="write the published ones into results/evidence.md")
    parser.add_argument("--missing", action="store_true", help="only configurations that are not published yet")
    parser.add_argument("--child", nargs=3, metavar=("NAME", "FOLDER", "WHAT"), help=argparse.SUPPRESS)


def bench(asked: argparse.Namespace, record: Record) -> None:
    by_name = {setting.name: setting for setting in settings()}
    if asked.child:
        name, folder, what = asked.child
        print(json.dumps((measure if what == "process" else live)(by_name[name], Path(folder))))
        return
    published = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    if asked.page:
        PAGE.write_text(page_with(published, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    known = {row["name"]: row for row in published if row["name"] in by_name}
    kept = known if asked.again or asked.missing else {}
    chosen = [by_name[name] for name in asked.only or by_name]
    chosen = [
        one for one in chosen if not ((asked.again and one.name not in kept) or (asked.missing and one.name in kept))
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, setting in enumerate(chosen, start=1):
            place = Path(folder) / setting.model
            if not place.exists():
                build_checkpoint(setting, place)
            if asked.live:
                show_live(setting, place)
                continue
            peaks = kept[setting.name]["peaks"] if asked.again else in_fresh_process(setting.name, place, "process")
            kept[setting.name] = compared(setting, place, peaks)
            print(describe([kept[setting.name]]).splitlines()[1], flush=True)
            record.rows = [kept[name] for name in by_name if name in kept]
            record.save()
            record.progress(number, len(chosen))
    if not asked.live:
        print(describe(record.rows))


def show_live(setting: Setting, place: Path) -> None:
    """Bytes of tensors, as counted and as planned."""
    planned = predict(setting, place)
    for what, size in in_fresh_process(setting.name, place, "live").items():
        error = planned[what] / size - 1
        print(f"{setting.name:42}{what:6}{size / MIB:10.1f}{planned[what] / MIB:10.1f}{error:8.1%}")


def compared(setting: Setting, place: Path, peaks: dict[str, int]) -> dict[str, Any]:
    """A row: what was measured beside what the planner says."""
    measured, planned = max(peaks.values()), predict(setting, place)["process"]
    return {
        "name": setting.name,
        "setting": asdict(setting),
        "shape": asdict(read_shape(setting, place)),
        "peaks": peaks,
        "measured_bytes": measured,
        "planned_bytes": round(planned),
        "error": planned / measured - 1,
    }
