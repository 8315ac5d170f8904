"""The learning rate of a run that goes on with another number of updates than its schedule was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from oncurve.core.errors import ConfigError
from oncurve.policy.settings import Extension, OptimizerSettings
from oncurve.recipe.schema import Config
from oncurve.wording import counted

MEANING: Mapping[Extension, str] = {
    "stretch": "the schedule of a run of that length from the beginning",
    "restart": "the warm-up and the schedule again, over the new updates",
    "hold": "the rate of the last update that was planned",
}
DRAWN = 6
"""Updates whose rates are shown."""


def extended(config: Config, manifest: Mapping[str, Any], *, decides: bool) -> Config:
    """The recipe of a run that goes on, with the ends of the schedules that it had.

    ``manifest`` is that of the checkpoint; its recipe was the run's so far. A run that was given more updates than its
    schedule goes over needs ``optimizer.extension``; without ``decides``, as of a script, it is stretch.

    Raises ConfigError, with the rates of each choice, where nobody chose.
    """
    was = Config.model_validate(manifest["config"])
    before, now = _updates(was), _updates(config)
    ends = was.optimizer.planned_updates
    optimizer = config.optimizer.model_copy(update={"planned_updates": ends})
    if now > before and config.optimizer.schedule != "constant":
        if config.optimizer.extension is None and decides:
            raise ConfigError(_choices(optimizer, before, now, _done(was, manifest)))
        if config.optimizer.extension in ("restart", "hold"):
            optimizer = optimizer.model_copy(update={"planned_updates": (*ends, before)})
    return config.model_copy(update={"optimizer": optimizer})


def rate_differences(config: Config, manifest: Mapping[str, Any]) -> list[str]:
    """Lines on the learning rates to come, where they are others than the run would have had."""
    was = Config.model_validate(manifest["config"])
    done, before, now = _done(was, manifest), _updates(was), _updates(config)
    old, new = ([rate.rate(update, total) for update in range(done, min(before, now))] for rate, total in (
        (was.optimizer, before), (config.optimizer, now)
    ))  # fmt: skip
    if old == new and (now <= before or config.optimizer.schedule == "constant"):
        return []
    last = was.optimizer.rate(done - 1, before) if done else 0.0
    so_far = f"{last:.3g} at update {done}" if done else "nothing yet"
    return [f"the learning rate: {so_far}, then {drawn(config.optimizer, done, now)}"]


def drawn(optimizer: OptimizerSettings, first: int, total: int) -> str:
    """The rates of some updates from the ``first`` on, counted from 0, the first and the last among them."""
    left = total - first
    chosen = sorted({first + round(part * (left - 1) / (DRAWN - 1)) for part in range(DRAWN)}) if left > 1 else [first]
    rates = ", ".join(f"{optimizer.rate(update, total):.3g}" for update in chosen)
    return f"{rates} at update{'s' if len(chosen) > 1 else ''} {', '.join(str(update + 1) for update in chosen)}"


def _updates(config: Config) -> int:
    return config.run.steps * config.updates_per_step


def _done(was: Config, manifest: Mapping[str, Any]) -> int:
    return int(manifest["step"]) * was.updates_per_step


def _choices(optimizer: OptimizerSettings, before: int, now: int, done: int) -> str:
    lines = [
        f"optimizer.schedule is {optimizer.schedule}, made for {counted(before, 'update')}, and the run is to have "
        f"{now} now. Say how the learning rate goes on, with optimizer.extension:"
    ]
    for name in get_args(Extension):
        ends = (*optimizer.planned_updates, before) if name != "stretch" else optimizer.planned_updates
        chosen = optimizer.model_copy(update={"extension": name, "planned_updates": ends})
        lines.append(f"  {name}: {MEANING[name]}: {drawn(chosen, done, now)}")
    return "\n".join(lines)
