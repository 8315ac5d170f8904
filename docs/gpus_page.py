"""What fits on which GPU: the table of the page, from the planner's arithmetic."""

from __future__ import annotations

from oncurve.plan.cost import fits
from oncurve.plan.find_shape import find_shape
from oncurve.plan.hardware import find_device, load_devices
from oncurve.plan.layout import make_layout
from oncurve.plan.memory import plan_memory, rows_that_fit
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.step_time import step_time
from oncurve.plan.token_lengths import guess_lengths
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config

MODELS = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
MACHINES = (("RTX-3070", 1), ("RTX-4090", 1), ("A100-80GB", 1), ("H100", 1), ("H100", 8))
CHECKPOINTING = "policy.gradient_checkpointing=true"
SMALL = "policy.tokens_per_microbatch=2048"
WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("all weights", (CHECKPOINTING, SMALL)),
    ("LoRA", (CHECKPOINTING, SMALL, "policy.lora.rank=16", "optimizer.learning_rate=1e-5")),
    (
        "QLoRA",
        (CHECKPOINTING, SMALL, "policy.lora.rank=16", "policy.quantization=nf4", "optimizer.learning_rate=1e-5"),
    ),
)
"""From the most that is trained to the least memory."""


def table() -> str:
    """Models by machines: what can be trained, its peak memory, and an estimate of the time."""
    head = "| model | " + " | ".join(f"{count} x {name}" if count > 1 else name for name, count in MACHINES) + " |"
    lines = [head, "|---" * (len(MACHINES) + 1) + "|"]
    for size in MODELS:
        cells = [_cell(f"Qwen/Qwen2.5-{size}", name, count) for name, count in MACHINES]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(model: str, name: str, count: int) -> str:
    """The first way that fits, with peak memory and hours."""
    shape, device = find_shape(model), find_device(name, load_devices(None))
    for way, overrides in WAYS:
        if count > 1 and way == "QLoRA":  # FSDP cuts no weights of few bits
            continue
        config = load_config(find_recipe("gsm8k"), [f"model={model}", *overrides])
        layout = make_layout(gpus=count)
        run = PlannedRun(config=config, shape=shape, layout=layout, lengths=guess_lengths(config))
        run = run.with_room_for(rows_that_fit(run, memory_bytes=device.memory_bytes))
        memory = plan_memory(run)
        if fits(memory, device):
            hours = step_time(run, device, network_gbit=100).total * run.steps / 3600
            time = f"{hours:.1f}&nbsp;h" if hours >= 1 else f"{hours * 60:.0f}&nbsp;min"
            return f"**{way}**<br>{memory.trainer.peak_bytes / 2**30:.0f}&nbsp;GiB<br>{time}"
    return "-"
