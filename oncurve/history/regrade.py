"""A finished run under another reward: what it would have paid, and what it would have taught."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Group, Reward
from oncurve.history.past import PastRun, PastStep, advantages_under
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.recipe.messages import explain
from oncurve.recipe.schema import Config
from oncurve.rewards.custom import from_function
from oncurve.rewards.section import RewardSection, RunLength
from oncurve.rewards.weighted_sum import check_any_graded
from oncurve.run.builder import make_rewards
from oncurve.wording import counted

NUM_EXAMPLES = 20
FLAT = 1e-6
"""Advantages nearer to 0 than this have no sign, and rewards of a group nearer to each other give no signal."""


@dataclass(frozen=True)
class Disagreement:
    """A completion that the two rewards see differently."""

    step: int
    prompt_index: int
    prompt: str
    text: str
    was: Reward
    now: Reward
    advantage_was: float
    advantage_now: float

    @property
    def damage(self) -> float:
        """The distance by which its advantage moves."""
        return abs(self.advantage_now - self.advantage_was)


@dataclass
class StepChange:
    """The changes in one step; counts are of completions graded under both rewards, unless they say otherwise."""

    step: int
    num_completions: int = 0
    num_errors_was: int = 0
    num_errors_now: int = 0
    changed: int = 0
    """Other values."""
    num_judged: int = 0
    """Completions of which both rewards say whether they are right, by the part "correct"."""
    became_right: int = 0
    became_wrong: int = 0
    flipped: int = 0
    """Completions whose advantage changes its sign."""
    num_groups: int = 0
    gained_signal: int = 0
    lost_signal: int = 0
    """Groups whose rewards differ under one of the two alone."""
    mean_was: float = math.nan
    mean_now: float = math.nan
    correlations: list[float] = field(default_factory=list)
    """Pearson's correlation of the two rewards inside each group in which both vary."""


@dataclass
class Regrade:
    """The comparison of a run's rewards with others."""

    run: str
    reward: str
    """The reward that graded again, in words."""
    steps: list[StepChange] = field(default_factory=list)
    examples: list[Disagreement] = field(default_factory=list)
    """The worst ones first."""
    damage: dict[int, float] = field(default_factory=dict)
    """By prompt: the sum of the distances that advantages move."""
    prompts: dict[int, str] = field(default_factory=dict)
    agreement: dict[str, int] = field(default_factory=dict)
    """Completions by "verdict then, verdict now", such as "right, wrong"."""
    cosines: dict[int, float] = field(default_factory=dict)
    """By step: cosine of the gradient that was taken and the one that the new reward asks for."""
    notes: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A count of ``StepChange`` over all steps."""
        return sum(getattr(step, name) for step in self.steps)

    @property
    def correlation(self) -> float:
        """Mean over groups of the correlation of both rewards; NaN where no group has one."""
        values = [value for step in self.steps for value in step.correlations]
        return sum(values) / len(values) if values else math.nan

    @property
    def worst_prompts(self) -> list[tuple[int, float]]:
        """Prompts by damage."""
        damaged = [(index, damage) for index, damage in self.damage.items() if damage > 0]
        return sorted(damaged, key=lambda pair: (-pair[1], pair[0]))

    def summary(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        names = [name for name in StepChange.__dataclass_fields__ if name != "correlations"]
        return {
            "run": self.run,
            "reward": self.reward,
            "correlation_in_groups": self.correlation,
            "totals": {name: self.total(name) for name in names if name not in ("step", "mean_was", "mean_now")},
            "agreement": self.agreement,
            "steps": [{name: getattr(step, name) for name in names} for step in self.steps],
            "cosines": {str(step): value for step, value in self.cosines.items()},
            "prompts": [
                {"index": index, "damage": damage, "prompt": self.prompts[index]}
                for index, damage in self.worst_prompts[:100]
            ],
            "examples": [
                {
                    "step": example.step,
                    "prompt_index": example.prompt_index,
                    "prompt": example.prompt,
                    "completion": example.text,
                    "reward_was": example.was.value,
                    "reward_now": example.now.value,
                    "detail_was": example.was.detail,
                    "detail_now": example.now.detail,
                    "error_now": example.now.error,
                    "advantage_was": example.advantage_was,
                    "advantage_now": example.advantage_now,
                }
                for example in self.examples
            ],
            "notes": self.notes,
        }


def rewards_of(run: PastRun, other: str | Callable[..., Any] | None) -> tuple[RewardFunction, Config, str]:
    """A reward function, the run's recipe with its reward, and its description.

    ``other`` is a function, ``file.py:name``, the name of a type, or a recipe whose rewards are meant; None: the run's
    own rewards, as their code stands now.

    Raises ConfigError.
    """
    config = run.config
    if other is None:
        if any(reward.model_dump()["type"] == "given" for reward in config.rewards):
            raise ConfigError(
                f"{run.path}: its reward was a Python object, which is not in the folder. Name one: --with file.py:name"
            )
        return (
            make_rewards(config),
            config,
            "its own reward, as it is now",
        )
    if callable(other):
        name = getattr(other, "__name__", type(other).__name__)
        return from_function(other, name=name, length=RunLength(config.run.steps)), config, name
    sections = _sections(config, other)
    changed = config.model_copy(update={"rewards": sections})
    return make_rewards(changed), changed, other


def _sections(config: Config, other: str) -> list[RewardSection]:
    """The sections of a reward that is named in one word."""
    if ":" in other:
        section: dict[str, Any] = {"type": "custom", "function": other}
    elif other.endswith((".yaml", ".yml")) or "/" in other:
        return list(load_config(find_recipe(other), ()).rewards)
    else:
        section = {"type": other}
    tree = {"model": config.model, "data": {"type": "word_problems"}, "rewards": [section]}
    try:
        return list(Config.model_validate(tree).rewards)
    except ValidationError as error:
        what = "\n".join(explain(error))
        if "union_tag_invalid" not in {problem["type"] for problem in error.errors()}:
            raise ConfigError(f"{other}: {what}\nA reward with settings is written in a recipe; name that") from None
    try:
        return list(load_config(find_recipe(other), ()).rewards)
    except ConfigError as missing:
        raise ConfigError(f"{what}\nOr name a function (file.py:name) or a recipe: {missing}") from None


def regrade(
    run: PastRun | str | os.PathLike[str],
    other: str | Callable[..., Any] | None = None,
    *,
    steps: Sequence[int] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Regrade:
    """Grade the recorded completions of a run again with another reward, and compare.

    ``other`` is a function, ``file.py:name``, the name of a type, or a recipe whose rewards are meant; None: the run's
    own rewards, as their code stands now. No weights are needed. Advantages are those of the run's algorithm under
    either reward.

    Raises ConfigError for a reward that cannot be made; DataError if no step is recorded.
    """
    run = run if isinstance(run, PastRun) else PastRun(run)
    numbers = [step for step in run.steps if steps is None or step in set(steps)]
    if not numbers:
        raise DataError(f"{run.path}: none of the steps asked for is recorded. Recorded: {run.steps or 'none'}")
    function, changed, described = rewards_of(run, other)
    regraded = Regrade(str(run.path), described)
    try:
        for number_done, number in enumerate(numbers):
            _add_step(regraded, run, run.step(number), function, changed)
            if on_progress is not None:
                on_progress(number_done + 1, len(numbers))
    finally:
        function.close()
    regraded.examples = sorted(regraded.examples, key=lambda example: -example.damage)[:NUM_EXAMPLES]
    missing = (run.metrics[-1]["step"] if run.metrics else 0) - len(numbers)
    if steps is None and missing > 0:
        regraded.notes.append(
            f"{counted(missing, 'step')} {'has' if missing == 1 else 'have'} no record, and no part in this; "
            f"run.record=all records every step of a run"
        )
    return regraded


def _add_step(regraded: Regrade, run: PastRun, step: PastStep, function: RewardFunction, changed: Config) -> None:
    prompts = [group.prompt for group in step.groups for _ in group.completions]
    completions = [completion for group in step.groups for completion in group.completions]
    flat = grade(function, prompts, completions)
    if not regraded.steps:
        check_any_graded(flat, where=f"reward {regraded.reward}, step {step.number}")
    graded, rest = [], iter(flat)
    for group in step.groups:
        graded.append([next(rest) for _ in group.completions])
    before = advantages_under(run.config, step.groups, step.rewards).double().numpy()
    after = advantages_under(changed, step.groups, graded).double().numpy()
    regraded.steps.append(_change(step, graded, before, after))
    for index, group in enumerate(step.groups):
        _add_group(regraded, step, group, index, (step.rewards[index], graded[index]), (before[index], after[index]))


def _add_group(
    regraded: Regrade,
    step: PastStep,
    group: Group,
    group_index: int,
    rewards: tuple[Sequence[Reward], ...],
    weights: Any,
) -> None:
    index = group.prompt.index
    regraded.prompts[index] = group.prompt.text
    for completion, was, now, weight_was, weight_now in zip(group.completions, *rewards, *weights, strict=True):
        key = f"{_verdict(was)}, {_verdict(now)}"
        regraded.agreement[key] = regraded.agreement.get(key, 0) + 1
        regraded.damage[index] = regraded.damage.get(index, 0.0) + abs(float(weight_now - weight_was))
        if was.value != now.value:
            regraded.examples.append(
                Disagreement(
                    step.number, index, group.prompt.text, completion.text, was, now,
                    float(weight_was), float(weight_now),
                )
            )  # fmt: skip
    if len(regraded.examples) > 100 * NUM_EXAMPLES:
        regraded.examples = sorted(regraded.examples, key=lambda weight_was: -weight_was.damage)[:NUM_EXAMPLES]


def _verdict(reward: Reward) -> str:
    """Right or wrong where the reward says so, the quarter in which a graded value lies, or the error."""
    if reward.value is None:
        return str(reward.error)
    value, correct = reward.value + 0.0, reward.parts.get("correct")
    low = math.floor(4 * value) / 4
    band = f"{value:.2g}" if abs(value) >= 1 or value == 0 else f"{low:g} to {low + 0.25:g}"
    if correct is None:
        return band
    word = "right" if correct >= 1 else "wrong"
    return word if value in (-1.0, 0.0, 1.0) else f"{band} ({word})"


def _change(step: PastStep, graded: Sequence[Sequence[Reward]], before: Any, after: Any) -> StepChange:
    pairs = [pair for was, now in zip(step.rewards, graded, strict=True) for pair in zip(was, now, strict=True)]
    both = [(was, now) for was, now in pairs if was.value is not None and now.value is not None]
    judged = [(was.parts["correct"] >= 1, now.parts["correct"] >= 1) for was, now in both if _both_say(was, now)]
    signs = [np.where(np.abs(values) < FLAT, 0.0, np.sign(values)) for values in (before, after)]
    spread = [[_has_spread(row) for row in rows] for rows in (step.rewards, graded)]
    return StepChange(
        step=step.number,
        num_completions=len(pairs),
        num_errors_was=sum(was.is_failure for was, _ in pairs),
        num_errors_now=sum(now.is_failure for _, now in pairs),
        changed=sum(was.value != now.value for was, now in both),
        num_judged=len(judged),
        became_right=sum(not was and now for was, now in judged),
        became_wrong=sum(was and not now for was, now in judged),
        flipped=int((signs[0] * signs[1] < 0).sum()),
        num_groups=len(graded),
        gained_signal=sum(not was_spread and now_spread for was_spread, now_spread in zip(*spread, strict=True)),
        lost_signal=sum(was_spread and not now_spread for was_spread, now_spread in zip(*spread, strict=True)),
        mean_was=_mean([was.value for was, _ in pairs]),
        mean_now=_mean([now.value for _, now in pairs]),
        correlations=list(_correlations(step.rewards, graded)),
    )


def _both_say(was: Reward, now: Reward) -> bool:
    return "correct" in was.parts and "correct" in now.parts


def _mean(values: Sequence[float | None]) -> float:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _has_spread(rewards: Sequence[Reward]) -> bool:
    values = [reward.value for reward in rewards if reward.value is not None]
    return len(values) > 1 and max(values) - min(values) > FLAT


def _correlations(was: Sequence[Sequence[Reward]], now: Sequence[Sequence[Reward]]) -> Iterator[float]:
    """The correlation inside each group in which both rewards vary."""
    for rewards_was, rewards_now in zip(was, now, strict=True):
        pairs = [
            (a.value, b.value) for a, b in zip(rewards_was, rewards_now, strict=True) if None not in (a.value, b.value)
        ]
        values = np.array(pairs, dtype=float).T if pairs else np.zeros((2, 0))
        if values.shape[1] > 1 and min(np.ptp(values[0]), np.ptp(values[1])) > FLAT:
            yield float(np.asarray(np.corrcoef(values))[0, 1])
