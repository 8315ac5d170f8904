"""What fits on which GPU: the table of the page, from the planner's arithmetic."""

from __future__ import annotations

from oncurve.plan.cost import price
from oncurve.plan.find_shape import find_shape
from oncurve.plan.fit import recommended
from oncurve.plan.hardware import find_device, load_devices
from oncurve.plan.layout import make_layout
from oncurve.plan.planned_run import PlannedRun
from oncurve.plan.step_time import step_time
from oncurve.plan.token_lengths import guess_lengths
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config

MODELS = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
MACHINES = (
    ("RTX-3070", 1),
    ("RTX-3090", 1),
    ("RTX-4090", 1),
    ("L4", 1),
    ("A10G", 1),
    ("A100-80GB", 1),
    ("H100", 1),
    ("H100", 8),
)


def table() -> str:
    """Models by machines: what can be trained, its peak memory, and an estimate of the time."""
    head = "| model | " + " | ".join(f"{count} x {name}" if count > 1 else name for name, count in MACHINES) + " |"
    lines = [head, "|---" * (len(MACHINES) + 1) + "|"]
    for size in MODELS:
        cells = [_cell(f"Qwen/Qwen2.5-{size}", name, count) for name, count in MACHINES]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(model: str, name: str, count: int) -> str:
    """What `oncurve plan` recommends, with peak memory and hours."""
    device, config = find_device(name, load_devices(None)), load_config(find_recipe("gsm8k"), [f"model={model}"])
    layout = make_layout(gpus=count)
    run = PlannedRun(config=config, shape=find_shape(model), layout=layout, lengths=guess_lengths(config))
    if (found := recommended(run, device)) is None:
        return "-"
    hours = step_time(found.run, device, network_gbit=100).total * run.steps / 3600
    time = f"{hours:.1f}&nbsp;h" if hours >= 1 else f"{hours * 60:.0f}&nbsp;min"
    tight = ", tight" if found.is_tight else ""
    usd = price(layout, device, hours=hours).on_demand
    money = "" if usd is None else f"<br>${usd:.2f}"
    return f"**{found.method}**<br>{found.memory.trainer.peak_bytes / 2**30:.0f}&nbsp;GiB{tight}<br>{time}{money}"
