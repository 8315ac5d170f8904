"""The training loop: GRPO in the order of the paper, on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, collate, stack_rewards
from oncurve.core.grading import RewardFunction, grading, replace_silent, score
from oncurve.core.order import PromptSource
from oncurve.core.policy import DevicePolicy
from oncurve.core.records import Group, Mean, Reward, mean_of
from oncurve.core.sampler import Sampler, SamplingRequest


def train(
    policy: DevicePolicy,
    sampler: Sampler,
    data: PromptSource,
    reward_function: RewardFunction,
    algorithm: Algorithm,
    run: Observer,
) -> Iterator[int]:
    """Run every step that is left: sample groups, grade them, move the policy toward the better completions.

    Yields the number of each step after it, so that the caller can look, plot, or stop between two steps.
    """
    schedule = run.schedule
    for step in run.steps():
        schedule.seed_step(step)
        sampler.load_weights(policy, version=step)  # pi_old <- pi_theta

        prompts = data.at(step)  # q ~ P(Q), a function of (seed, step)
        with run.timed("sample"), grading(sampler, reward_function) as early:  # full groups are graded early
            groups = sampler.sample(SamplingRequest(prompts, algorithm.group_size, step))  # o_1 ... o_G ~ pi_old(. | q)
        with run.timed("grade"):
            graded = score(groups, reward_function, early)  # a reward, or an error, for every completion
        run.observe(step, groups, graded)  # before any filter
        data.observe(groups, graded, step=step)
        if schedule.refill_rounds:  # DAPO: other groups in the place of those without a signal
            with run.timed("refill"):
                rounds = schedule.refill_rounds
                groups, graded = replace_silent(
                    groups, graded, data, sampler, reward_function, step=step, rounds=rounds
                )

        rewards = stack_rewards(groups, graded)  # r_i    [P, G]
        advantages = algorithm.advantages(rewards)  # A_i    [P, G]
        run.observe(step, groups, graded, advantages)  # what is trained on

        with run.timed("train"):
            batch = collate(groups, advantages, mask_truncated=schedule.mask_truncated)  # [B, T], B >= P * G
            batch = policy.annotate(  # only what is asked for: log pi_old, its entropy, log pi_ref
                batch,
                old=algorithm.needs_old(schedule.updates_per_step),
                entropy=algorithm.needs_entropy,
                reference=algorithm.needs_reference,
            )
            batch = algorithm.prepare(batch, rewards)  # a KL in the reward, a choice of tokens

            for update in schedule.updates(batch):  # one or more optimizer updates on this batch of rollouts
                trained = update if algorithm.needs_every_row else update.with_signal()  # the others have gradient 0
                # the gradient over all microbatches; then clip it, set the learning rate, step the optimizer
                run.update(policy, trained, partial(add_gradient, policy, algorithm))

        statistics = run.add_up()  # over all processes
        policy.move_reference(algorithm.reference_share(step))  # 0 while it is frozen
        algorithm.entropy.adapt(statistics.get("policy/entropy", Mean(0, 0)).value)
        run.end_step(step)  # log, save, evaluate: each knows when it is due
        yield step


def add_gradient(policy: DevicePolicy, algorithm: Algorithm, microbatch: Batch) -> dict[str, Mean]:
    """Add the gradient of a microbatch to that of its update; (sum, count) pairs, exact over microbatches.

    A function of its own: if memory runs out in it, nothing that it made is left, and the caller may try smaller parts.
    """
    logprobs, entropy = policy.logprobs(microbatch)  # log pi_theta(o_t | q, o_<t)   [b, T]
    loss, statistics = algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
    policy.backward(loss)
    return statistics


@dataclass(eq=False)
class StepSchedule:
    """The steps of a run, and the optimizer updates of a step."""

    _: KW_ONLY
    total_steps: int
    completions_per_step: int
    completions_per_update: int
    passes_per_step: int = 1
    """Times that the completions of a step are trained on."""
    mask_truncated: bool = False
    """Learn nothing from completions that never ended."""
    refill_rounds: int = 0
    """Rounds of further prompts in the place of groups without a signal."""
    seed: int = 0
    steps_done: int = 0

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch of rollouts."""
        return self.completions_per_step // self.completions_per_update * self.passes_per_step

    def updates(self, batch: Batch) -> Iterator[Batch]:
        """The rows of every optimizer update on a batch of rollouts: all rows in parts, as often as passes are made."""
        for _ in range(self.passes_per_step):
            yield from batch.split(self.completions_per_update)

    def seed_step(self, step: int) -> None:
        """Make every random number that no stream of its own covers, such as those of dropout, one of (seed, step)."""
        torch.manual_seed((self.seed * 1_000_003 + step) % 2**63)


class Observer(Protocol):
    """The services of a run: they make its updates, record its statistics, evaluate, save, and decide when it ends."""

    @property
    def schedule(self) -> StepSchedule:
        """The steps of the run."""
        ...

    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 0."""
        ...

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """The surroundings of a phase of the step: sample, grade, refill, train."""
        ...

    def observe(
        self,
        step: int,
        groups: Sequence[Group],
        graded: Sequence[Sequence[Reward]],
        advantages: Float[Tensor, "P G"] | None = None,
    ) -> None:
        """Look at everything that was sampled, and once more, with advantages, at what is trained on."""

    def update(self, policy: DevicePolicy, rows: Batch, add_gradient: Callable[[Batch], Mapping[str, Mean]]) -> None:
        """Make an optimizer update on these rows, microbatch by microbatch, and note its statistics."""

    def add_up(self) -> Mapping[str, Mean]:
        """The statistics of the step, over all its microbatches, updates and processes."""
        ...

    def end_step(self, step: int) -> None:
        """Do what is due after a step."""


class History:
    """The plainest observer: it keeps the statistics of every step."""

    def __init__(self, schedule: StepSchedule) -> None:
        self.schedule = schedule
        self.rows: list[dict[str, float]] = []
        """Means of each step by their names, such as ``reward/mean`` and ``policy/entropy``."""
        self._sums: dict[str, Mean] = {}

    def steps(self) -> Iterator[int]:
        """The steps that are left."""
        for step in range(self.schedule.steps_done, self.schedule.total_steps):
            self._sums = {}
            yield step
            self.schedule.steps_done = step + 1

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Nothing is timed."""
        return nullcontext()

    def observe(
        self,
        step: int,
        groups: Sequence[Group],
        graded: Sequence[Sequence[Reward]],
        advantages: Float[Tensor, "P G"] | None = None,
    ) -> None:
        """Note the mean reward of all that was sampled, and the share of completions that could not be graded."""
        if advantages is not None:
            return
        rewards = [reward for row in graded for reward in row]
        self.add({"reward/mean": mean_of([reward.value for reward in rewards if reward.value is not None])})
        self.add({"reward/error_fraction": mean_of([float(reward.is_failure) for reward in rewards])})

    def update(self, policy: DevicePolicy, rows: Batch, add_gradient: Callable[[Batch], Mapping[str, Mean]]) -> None:
        """Add up the gradient over microbatches, and move the policy."""
        for microbatch in policy.microbatches(rows):
            self.add(add_gradient(microbatch))
        self.add(policy.update())

    def add(self, statistics: Mapping[str, Mean]) -> None:
        """Add statistics to those of the step."""
        for key, mean in statistics.items():
            self._sums[key] = self._sums[key] + mean if key in self._sums else mean

    def add_up(self) -> Mapping[str, Mean]:
        """The statistics of the step."""
        return self._sums

    def end_step(self, step: int) -> None:
        """Keep the row of the step."""
        self.rows.append({key: mean.value for key, mean in self._sums.items()})
