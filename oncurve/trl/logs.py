"""Metrics of a step under the names that TRL logs them by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from torch import nn

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import collate, stack_rewards
from oncurve.core.records import Group, Reward
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.builder import make_algorithm
from oncurve.run.step_log import Step
from oncurve.run.trainer import Trainer
from oncurve.trl.grpo_config import plain

SAME = {
    "policy/loss": "loss",
    "sft/loss": "loss",
    "policy/gradient_norm": "grad_norm",
    "policy/learning_rate": "learning_rate",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "time/step_seconds": "step_time",
}
"""Ours to theirs, where both are the same number."""


def step_logs(step: Step, names: Sequence[tuple[str, str]], loss_type: str) -> dict[str, Any]:
    """TRL's log of a step, and beside it our own metrics. ``names`` are those of rewards, there and here."""
    logs = {theirs: step.metrics[ours] for ours, theirs in SAME.items() if ours in step.metrics}
    logs |= clip_logs(step.metrics, loss_type)
    return {**logs, **rollout_logs(step.groups, step.rewards, names), **step.metrics}


def clip_logs(metrics: Mapping[str, float], loss_type: str) -> dict[str, float]:
    """The share of tokens that a loss clips or caps, and on which side; of single completions it is known where it is
    none."""
    both, high = (metrics.get(f"policy/clip_{name}", 0.0) for name in ("fraction", "high_fraction"))
    if loss_type == "cispo":  # there of good completions alone
        return {"cispo_clip_ratio": high}
    means = {"region_mean": both, "low_mean": both - high, "high_mean": high}
    extremes = {} if both else {"low_min": 0.0, "high_max": 0.0}
    return {f"clip_ratio/{name}": value for name, value in {**means, **extremes}.items()}


LATEST = ("grad_norm", "learning_rate", "num_tokens", "policy/gradient_norm", "policy/learning_rate")
"""Metrics of which a row of several steps has the last value; of the others it has the mean."""
OF_AN_UPDATE = ("loss", "grad_norm", "learning_rate")
"""Keys that transformers' trainer logs by itself; TRL adds the rest."""


class LogWindow:
    """Logs of the steps since the last row, of which a script hears once in ``logging_steps`` updates."""

    def __init__(self, args: Any, max_steps: int) -> None:
        every = args.logging_steps
        self.strategy = str(plain(args.logging_strategy))
        self.has_first = bool(args.logging_first_step)
        self.every = max(math.ceil(every * max_steps) if every < 1 else int(every), 1)
        """Updates from row to row."""
        self.rows: list[dict[str, float]] = []
        self.updates = 0
        """Number of updates at the last step."""

    def add(
        self, logs: dict[str, float], *, updates: int, ends_epoch: bool, is_requested: bool
    ) -> dict[str, float] | None:
        """The row that is due after a step, with which ``updates`` are made in all; None before it is."""
        self.rows.append(logs)
        crossed = updates // self.every > self.updates // self.every or (self.has_first and not self.updates)
        due = {"steps": crossed, "epoch": ends_epoch}.get(self.strategy, False)
        self.updates = updates
        return self._row() if due or is_requested else None

    def rest(self) -> dict[str, float]:
        """TRL's additions to the last row: the steps that no row was due for, without what the optimizer says."""
        return {name: value for name, value in self._row().items() if name not in OF_AN_UPDATE}

    def _row(self) -> dict[str, float]:
        values_by_name: dict[str, list[float]] = {}
        for row in self.rows:
            for name, value in row.items():
                values_by_name.setdefault(name, []).append(value)
        self.rows = []
        return {name: values[-1] if name in LATEST else fmean(values) for name, values in values_by_name.items()}


def rollout_logs(
    groups: Sequence[Group], rewards: Sequence[Sequence[Reward]], names: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """Rewards, lengths and tool calls of some groups. Of two rewards of one name the logs hold the mean, as in TRL."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    ended = [len(completion.token_ids) for completion in completions if not completion.is_truncated] or [0]
    logs: dict[str, float] = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(completion.is_truncated for completion in completions),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }
    if any(completion.segments for completion in completions):  # episodes; a call that cannot be read is none in TRL
        errors = [call.error for completion in completions for call in completion.calls if call.error != "malformed"]
        logs["tools/call_frequency"] = len(errors) / len(completions)
        logs["tools/failure_frequency"] = sum(error is not None for error in errors) / max(len(errors), 1)
    graded = [[reward.value for reward in row if reward.value is not None] for row in rewards]
    if values := [value for row in graded for value in row]:
        spreads = [_spread(row) for row in graded]
        logs["reward"] = fmean(values)
        logs["reward_std"] = fmean(spreads)
        logs["frac_reward_zero_std"] = fmean(spread == 0 for spread in spreads)
    moments: dict[str, list[tuple[float, float]]] = {}
    for name, part in names:
        if parts := [reward.parts[part] for row in rewards for reward in row if part in reward.parts]:
            moments.setdefault(name, []).append((fmean(parts), _spread(parts)))
    for name, pairs in moments.items():
        means, spreads = zip(*pairs, strict=True)
        logs |= {f"rewards/{name}/mean": fmean(means), f"rewards/{name}/std": fmean(spreads)}
    return logs


def measured_loss(
    policy: TrainedPolicy,
    algorithm: Algorithm,
    groups: Sequence[Group],
    rewards: Sequence[Sequence[Reward]],
    loss_type: str,
) -> dict[str, float]:
    """The loss of completions under the current weights, and their mean entropy; what TRL's evaluation measures."""
    stacked = stack_rewards(groups, rewards)
    batch = collate(groups, algorithm.advantages(stacked))
    asks = algorithm.needs_reference and (policy.reference is not None or policy.adapter is not None)
    if algorithm.needs_reference and not asks:
        return {}
    batch = policy.annotate(batch, old=True, entropy=True, reference=asks)
    batch = algorithm.prepare(batch, stacked)
    assert batch.old_logprobs is not None
    assert batch.old_entropy is not None
    loss, statistics = algorithm.loss(batch.old_logprobs, batch.old_entropy, batch.to(batch.old_logprobs.device))
    logs = {"loss": float(loss), "entropy": statistics["policy/entropy"].value}
    if "policy/clip_fraction" in statistics:
        logs |= clip_logs({name: statistics[name].value for name in statistics}, loss_type)
    return {**logs, **({"kl": statistics["policy/kl"].value} if "policy/kl" in statistics else {})}


def idle_logs(trainer: Trainer, step: Step, rate: float, args: Any) -> dict[str, float]:
    """Logs of a step whose completions have no signal, so that nothing was trained on; TRL measures them all the same.

    Entropy and KL are measured where one process has all completions.
    """
    logs: dict[str, float] = {}
    if args.world_size == 1:
        logs = measured_loss(trainer.policy, make_algorithm(trainer.config), step.groups, step.rewards, args.loss_type)
    return {**logs, "grad_norm": 0.0, "learning_rate": rate}


def speeds(prefix: str, seconds: float, *, samples: int, steps: int) -> dict[str, float]:
    """Seconds and speeds under the names of transformers."""
    per_second = {"samples_per_second": samples, "steps_per_second": steps}
    rates = {f"{prefix}_{name}": round(count / max(seconds, 1e-9), 3) for name, count in per_second.items()}
    return {f"{prefix}_runtime": round(seconds, 4), **rates}


def num_tokens(groups: Sequence[Group]) -> int:
    """Tokens of prompts and completions together, each prompt as often as it was completed."""
    return sum(len(c.prompt_ids) + len(c.token_ids) for group in groups for c in group.completions)


def training_flops(model: nn.Module, tokens: int) -> float:
    """Floating point operations of forward and backward passes over some tokens, as transformers estimates them.

    6 * tokens * parameters without those of embeddings. TRL's GRPOTrainer counts no tokens and logs 0.
    """
    embedded = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    return 6.0 * tokens * sum(part.numel() for part in model.parameters() if id(part) not in embedded)


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


class ScriptLogs:
    """The part of a trainer that logs. A script may replace `log`, and reads and adds to ``_metrics``."""

    state: Any
    _callbacks: Any
    _in_mode: Any
    _mode: str
    """"train" or "eval"."""
    _metrics: dict[str, dict[str, list[float]]]
    """Numbers of the next row of logs, of training and of evaluation."""
    _extra: dict[str, list[Any]]

    def _say(self, logs: dict[str, Any]) -> None:
        """Log as TRL does: what is beside loss and rate is in ``_metrics`` when `log` is called."""
        if self._mode == "train":
            self._metrics["train"].update({name: [logs[name]] for name in logs if name not in OF_AN_UPDATE})
        with self._in_mode():
            self.log(logs)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Put a row into ``state.log_history``, with what is in ``_metrics``, and show it to callbacks."""
        kind = "eval_" if self._mode == "eval" else ""
        logs.update({f"{kind}{name}": value for name, value in self._take_means(self._mode).items()})
        row = {**logs, "epoch": self.state.epoch or 0.0, "step": self.state.global_step}
        self.state.log_history.append(row)
        self._callbacks.call("on_log", {"logs": row})

    def _log_metric(self, name: str, value: float) -> None:
        self._metrics[self._mode][name].append(float(value))

    def _take_means(self, mode: str) -> dict[str, float]:
        """Means of what was added since the last row."""
        means = {name: fmean(values) for name, values in self._metrics[mode].items() if values}
        self._metrics[mode].clear()
        return means

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self._extra[column].extend(values)
