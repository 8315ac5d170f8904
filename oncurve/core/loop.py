"""The training loop: GRPO in the order of the paper, on one page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Mean
from oncurve.core.sampler import Sampler
from oncurve.data.collate import collate, stack_rewards
from oncurve.data.curriculum import Curriculum
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.scoring import grading, refill, score
from oncurve.run.services import Run


def train(
    policy: TrainedPolicy,
    sampler: Sampler,
    data: Curriculum,
    reward_function: RewardFunction,
    algorithm: Algorithm,
    run: Run,
) -> Iterator[int]:
    """Run every step that is left: sample groups, grade them, move the policy toward the better completions.

    Yields the number of each step after it, so that whoever trains can look, plot, or stop between two steps.
    """
    for step in run.steps():
        sampler.load_weights(policy, version=step)  # pi_old <- pi_theta

        prompts = data.at(step)  # q ~ P(Q), a function of (seed, step)
        with run.timed("sample"), grading(sampler, reward_function) as early:  # what is whole is graded meanwhile
            groups = sampler.sample(prompts, algorithm.group_size, step=step)  # o_1 ... o_G ~ pi_old(. | q)
        with run.timed("grade"):
            graded = score(groups, reward_function, early)  # a reward, or an error, for every completion
        run.log.measure(step, groups, graded)  # before any filter
        data.observe(groups, graded, step=step)
        groups, graded = refill(groups, graded, data, sampler, reward_function, run, step=step)  # if asked for: DAPO

        rewards = stack_rewards(groups, graded)  # r_i    [P, G]
        advantages = algorithm.advantages(rewards)  # A_i    [P, G]
        run.keep(step, groups, graded, advantages)

        with run.timed("train"):
            batch = collate(groups, advantages, mask_truncated=run.mask_truncated)  # [B, T], B = P * G
            batch = policy.annotate(  # only what is asked for: log pi_old, its entropy, log pi_ref
                batch,
                old=algorithm.needs_old(run.updates_per_step),
                entropy=algorithm.needs_entropy,
                reference=algorithm.needs_reference,
            )
            batch = algorithm.prepare(batch, rewards)  # a KL in the reward, a choice of tokens

            for update in run.updates(batch):  # one or more optimizer updates on this batch of rollouts
                trained = update if algorithm.needs_every_row else update.with_signal()  # the others have gradient 0
                run.accumulate(policy, trained, partial(add_gradient, policy, algorithm))  # over its microbatches
                run.end_update(policy.update())  # clip the gradient, AdamW, schedule

        run.log.add_up()  # statistics, over all processes
        policy.move_reference(algorithm.reference_share(step))  # 0 while it is frozen
        algorithm.entropy.adapt(run.log.mean("policy/entropy"))
        run.end_step(step)  # log, save, evaluate: each knows when it is due
        yield step


def add_gradient(policy: TrainedPolicy, algorithm: Algorithm, microbatch: Batch) -> dict[str, Mean]:
    """Add the gradient of a microbatch to that of its update; (sum, count) pairs, exact over microbatches.

    A function of its own: if memory runs out in it, nothing that it made is left when smaller parts are tried.
    """
    logprobs, entropy = policy.logprobs(microbatch)  # log pi_theta(o_t | q, o_<t)   [b, T]
    loss, statistics = algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
    policy.backward(loss)
    return statistics
