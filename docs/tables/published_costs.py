"""Published numbers on the memory and cost of GRPO beside those that we compute.

``python docs/tables/published_costs.py benchmarks/results/evidence.md`` writes the tables anew; a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oncurve.plan.cost import fewest_ranks, fits, method_memory
from oncurve.plan.find_shape import find_shape
from oncurve.plan.hardware import load_devices
from oncurve.plan.layout import DeviceLayout
from oncurve.plan.memory import plan_memory
from oncurve.plan.planned_run import PlannedRun, Trainer
from oncurve.plan.token_lengths import TokenLengths
from oncurve.plan.weight_transfer import sync_bytes
from oncurve.recipe.load import parse_config

GB = 1e9
ONE_GPU = DeviceLayout()
BEGIN, END = "<!-- published:begin -->", "<!-- published:end -->"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row of somebody's table, and the same planned here."""

    source: str
    what: str
    said: str
    """As it was published."""
    model: str
    overrides: tuple[str, ...]
    """Of ``RECIPE``."""
    layout: DeviceLayout = ONE_GPU
    completion_tokens: int = 1024
    error: str = ""
    """What is wrong with the published number; "" where it is right."""

    @property
    def run(self) -> PlannedRun:
        """The same run, planned here."""
        return planned_run(self.model, self.overrides, self.layout, completion_tokens=self.completion_tokens)


RECIPE = """
data: {type: gsm8k}
algorithm: {group_size: 8, kl_coef: 0}
rollouts: {max_rows: 8}
policy: {gradient_checkpointing: true, tokens_per_microbatch: 2048}
run: {prompts_per_step: 8}
"""


def planned_run(
    model: str, overrides: tuple[str, ...], layout: DeviceLayout, *, completion_tokens: int = 1024
) -> PlannedRun:
    """Eight prompts of 256 tokens in a step, of which one with its group is sampled at a time: the guides count no
    more."""
    limit = f"rollouts.max_completion_tokens={completion_tokens}"
    return PlannedRun(
        config=parse_config(RECIPE, (f"model={model}", limit, *overrides)),
        shape=find_shape(model),
        layout=layout,
        lengths=TokenLengths(prompt_tokens=256, mean_prompt_tokens=256, completion_tokens=completion_tokens / 2),
    )


LEAN: tuple[str, ...] = ()
FULL = ("algorithm.kl_coef=0.1",)
LORA = ("policy.lora.rank=64",)
LORA_16 = ("policy.lora.rank=16",)
QLORA = (*LORA, "policy.quantization=nf4")
APART = DeviceLayout(placement="disaggregated", sampler_devices=1)
TWO = DeviceLayout(ranks=2, shard="zero2")

MEMORY: tuple[PublishedRow, ...] = (
    PublishedRow(
        "Spheron",
        "7B, GRPO on one node, G=8, T=512",
        "32-40 GB",
        "Qwen/Qwen2.5-7B",
        FULL,
        completion_tokens=512,
        error="all weights need four times that: gradients are left out; the range is that of LoRA",
    ),
    PublishedRow("Spheron", "the same with LoRA", "-", "Qwen/Qwen2.5-7B", LORA_16, completion_tokens=512),
    PublishedRow(
        "Spheron",
        "32B, GRPO on one node, by its formula: 2 x 64 + 384 GB",
        "512 GB, then 'H200 (141 GB) or larger'",
        "Qwen/Qwen2.5-32B",
        FULL,
        error="the sum fits no H200; gradients are missing from it; logits are written as G x T x 2 bytes = 16 KB",
    ),
    PublishedRow(
        "Spheron",
        "32B, GRPO on one node, by its table",
        "100-120 GB",
        "Qwen/Qwen2.5-32B",
        LORA,
        error="holds for an adapter over 16-bit weights alone",
    ),
    PublishedRow("Spheron", "the same over 4-bit weights", "-", "Qwen/Qwen2.5-32B", QLORA),
    PublishedRow(
        "Spheron",
        "32B, trainer alone, samplers on other machines",
        "64-80 GB",
        "Qwen/Qwen2.5-32B",
        FULL,
        APART,
        error="16-bit weights alone are 65.5 GB; master weights, gradients and moments stay with the trainer",
    ),
    PublishedRow(
        "Spheron",
        "70B, trainer alone on one H200",
        "140-160 GB",
        "meta-llama/Meta-Llama-3-70B",
        FULL,
        APART,
        error="16-bit weights alone fill the card",
    ),
    PublishedRow(
        "Lambda",
        "1.5B, training phase",
        "12 GB",
        "Qwen/Qwen2.5-Math-1.5B",
        LEAN,
        DeviceLayout(placement="split", sampler_devices=1),
        error="3 + 6 + (2 to 4) GB leaves out the gradients, 3 GB there; and in pure bfloat16 most updates are lost, "
        "so that master weights in float32 are needed",
    ),
    PublishedRow(
        "Lambda",
        "1.5B, colocated: 'cannot share an 80 GB GPU'",
        "> 80 GB",
        "Qwen/Qwen2.5-Math-1.5B",
        LEAN,
        error="it can: the cache of an engine is as large as it is told to be, and activations do not grow with the "
        "square of the length",
    ),
    PublishedRow(
        "1.5B ladder",
        "full fine-tuning",
        "24 GB",
        "Qwen/Qwen2.5-1.5B",
        LEAN,
        error="near 16 bytes per weight without copies, activations and logits",
    ),
    PublishedRow("1.5B ladder", "+ LoRA", "16 GB", "Qwen/Qwen2.5-1.5B", LORA_16, error="too much"),
    PublishedRow(
        "1.5B ladder",
        "+ ZeRO-2 (two GPUs)",
        "12 GB",
        "Qwen/Qwen2.5-1.5B",
        LORA_16,
        TWO,
        error="ZeRO-2 cuts gradients and moments, which an adapter hardly has",
    ),
    PublishedRow(
        "1.5B ladder",
        "+ CPU offload",
        "8 GB",
        "Qwen/Qwen2.5-1.5B",
        LORA_16,
        replace(TWO, offloads_optimizer=True),
        error="the same: there is little to offload; 4-bit weights and smaller chunks of logits help",
    ),
    PublishedRow(
        "1.5B ladder",
        "'3B model, GRPO ~12 GB' next to '1.5B full 24 GB'",
        "12 GB",
        "Qwen/Qwen2.5-3B",
        LEAN,
        error="contradicts its own ladder",
    ),
)


def memory_table() -> Iterator[str]:
    """Published and planned peaks per training device, in GB as the guides count."""
    yield "| guide | what | published | ours, GB | fits | what is wrong |"
    yield "|---|---|---|---|---|---|"
    devices = load_devices()
    order = sorted((each for each in devices.values() if each.is_gpu), key=lambda each: each.memory_bytes)
    for row in MEMORY:
        run = row.run
        memory = plan_memory(run)
        alone = next((device.name for device in order if fits(memory, device)), None)
        if alone is None:
            alone = f"{fewest_ranks(run, devices['H200']).layout.ranks} x H200 (ZeRO-3)"
        peak = memory.trainer.peak_bytes / GB
        yield f"| {row.source} | {row.what} | {row.said} | {peak:.0f} | {alone} | {row.error or '-'} |"


def sync_table() -> Iterator[str]:
    """How much travels to the samplers after a step, and how long it takes."""
    yield "| model | published | ours | at 10 Gbit/s | 100 Gbit/s | 400 Gbit/s |"
    yield "|---|---|---|---|---|---|"
    cases = (
        ("Qwen/Qwen2.5-32B", "200-300 MB (Spheron)", LEAN, "all weights"),
        ("Qwen/Qwen2.5-32B", "-", LORA, "adapter of rank 64"),
        ("Qwen/Qwen2.5-7B", "-", LEAN, "all weights"),
        ("Qwen/Qwen2.5-1.5B", "-", LEAN, "all weights"),
    )
    for model, said, overrides, what in cases:
        size = sync_bytes(planned_run(model, overrides, APART))
        times = " | ".join(f"{size / (rate / 8 * GB):.2g} s" for rate in (10, 100, 400))
        yield f"| {model}, {what} | {said} | {size / GB:.3g} GB | {times} |"


def cost_table() -> Iterator[str]:
    """A day of each method for a 32B model at the guide's own prices, on the devices that hold it."""
    yield "| method | published devices | on demand / spot | ours: devices | on demand | spot | what is wrong |"
    yield "|---|---|---|---|---|---|---|"
    h200 = load_devices()["H200"]
    assert h200.on_demand is not None
    assert h200.spot is not None
    two_samplers = replace(APART, sampler_devices=2)
    cases: tuple[tuple[str, str, str, Trainer, tuple[str, ...], DeviceLayout, str], ...] = (
        ("DPO", "1 x H200", "$95.04 / $28.56", "DPO", FULL, ONE_GPU, "holds for an adapter only"),
        ("DPO, LoRA over 4 bits", "-", "-", "DPO", QLORA, ONE_GPU, "-"),
        (
            "PPO",
            "2 x H200",
            "$190.08 / $190.08",
            "PPO",
            FULL,
            DeviceLayout(),
            "two sets of weights, gradients and moments",
        ),
        (
            "GRPO, one node",
            "1 x H200",
            "$95.04 / none",
            "GRPO",
            FULL,
            DeviceLayout(),
            "see above; a run that resumes may use spot",
        ),
        ("GRPO, LoRA over 4 bits", "-", "-", "GRPO", QLORA, ONE_GPU, "-"),
        (
            "GRPO, samplers apart",
            "1 + 2 x H200",
            "$285.12 / $152.16",
            "GRPO",
            FULL,
            two_samplers,
            "$285 is dearer than PPO's $190, which the text calls the most expensive",
        ),
    )
    for name, theirs, said, trainer, overrides, layout, error in cases:
        run = fewest_ranks(replace(planned_run("Qwen/Qwen2.5-32B", overrides, layout), trainer=trainer), h200)
        chosen, enough = run.layout, fits(method_memory(run), h200)
        samplers = f" + {chosen.sampler_devices}" if chosen.sampler_devices else ""
        count = f"{chosen.ranks}{samplers} x H200" if enough else "more than 64"
        total = chosen.ranks + chosen.sampler_devices
        mixed = 24 * (chosen.ranks * h200.on_demand + chosen.sampler_devices * h200.spot)
        spot = f"${mixed:,.2f} (samplers)" if chosen.sampler_devices else f"${24 * total * h200.spot:,.2f}"
        yield f"| {name} | {theirs} | {said} | {count} | ${24 * total * h200.on_demand:,.2f} | {spot} | {error} |"


def tables() -> str:
    """All tables of benchmarks/results/evidence.md."""
    parts = [
        "### Memory of one training device\n",
        *memory_table(),
        "\n### Weight sync after every step\n",
        *sync_table(),
        f"\n### A day with a 32B model, prices of {load_devices()['H200'].source}, {load_devices()['H200'].priced}\n",
        *cost_table(),
    ]
    return "\n".join(parts)


def renewed(page: str) -> str:
    """The page with its tables computed anew. Raises ValueError if the marks are not there."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(renewed(target.read_text(encoding="utf-8")), encoding="utf-8")
