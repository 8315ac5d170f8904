"""The reward function of a recipe's list of rewards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.rewards.mathematics import Mathematics
from oncurve.rewards.section import UNKNOWN_LENGTH, RewardSection, RunLength, Surroundings
from oncurve.rewards.user_functions import CustomReward, EnvironmentSection, PythonReward
from oncurve.rewards.weighted_sum import Term, WeightedSum

_CLOSE_AGAIN_SECONDS = 0.1


class PipelinedRewards:
    """A reward function that may be given the groups of a step one after another, in a thread of its own.

    Only for functions whose rewards of a group depend on no other group of the call, and that run in any thread: those
    of this package, and functions of others in processes of their own.

    One call at a time, whoever makes it. The thread lives until ``close()``, which ends a call that is under way.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.function, self.name = function, function.name
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread: ThreadPoolExecutor | None = None

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        with self._lock:
            if self._is_closing:
                raise RuntimeError(f"{self.name} was closed while it graded")
            return self.function(prompts, completions)

    def begin(self) -> PipelinedGrading:
        """The grading of one step."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        return PipelinedGrading(self, self._thread)

    def close(self) -> None:
        """End what is being graded, the function's processes and the thread."""
        thread, self._thread = self._thread, None
        self._is_closing = True
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        while not self._lock.acquire(timeout=_CLOSE_AGAIN_SECONDS):
            self.function.close()  # again, for the next function of a sum would start after the one that was ended
        self._lock.release()
        if thread is not None:
            thread.shutdown()
        self.function.close()
        self._is_closing = False


class PipelinedGrading:
    """The groups of one step on their way to their rewards.

    Consumes groups by ``take`` from any thread; ``finish`` waits for their rewards, and is unblocked by the thread of
    the reward function, which it owns the work of.
    """

    def __init__(self, function: PipelinedRewards, thread: ThreadPoolExecutor) -> None:
        self._function, self._thread = function, thread
        self._pending: dict[int, tuple[Group, Future[list[Reward]]]] = {}
        """By the identity of the group, which is kept alive here."""

    def take(self, group: Group) -> None:
        """Grade a group when its turn comes."""
        self._pending[id(group)] = group, self._thread.submit(_rewards, self._function, [group])

    def finish(self, groups: Sequence[Group]) -> list[list[Reward]]:
        """The rewards of every completion of every group, in their order.

        Groups whose turn has not come are graded together, so that a function has all of its processes busy.
        """
        started = {key: future for key, (_, future) in self._pending.items() if not future.cancel()}
        rest = [group for group in groups if id(group) not in started]
        others = self._thread.submit(_rewards, self._function, rest) if rest else None
        rewards = iter(others.result() if others is not None else ())
        graded: list[list[Reward]] = []
        for group in groups:
            early = started.get(id(group))
            graded.append(early.result() if early is not None else [next(rewards) for _ in group.completions])
        return graded

    def abandon(self) -> None:
        """Begin nothing more: the step is left."""
        for _, future in self._pending.values():
            future.cancel()


def _rewards(function: RewardFunction, groups: Sequence[Group]) -> list[Reward]:
    completions = [completion for group in groups for completion in group.completions]
    return grade(function, [group.prompt for group in groups for _ in group.completions], completions)


def make_reward_function(
    rewards: Sequence[RewardSection],
    *,
    seed: int = 0,
    objects: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
    length: RunLength = UNKNOWN_LENGTH,
) -> RewardFunction:
    """The weighted sum of a recipe's rewards; those that rotate are one term of it, those held out are only logged.

    Raises ConfigError if nothing is left to train on, the rotating ones do not fit together, or a function of the
    user's asks for something that is not among ``columns``.
    """
    if all(reward.held_out for reward in rewards):
        raise ConfigError("rewards: every one of them is held_out, so all completions get 0. Train on at least one")
    if all(reward.weight == 0 for reward in rewards if not reward.held_out):
        raise ConfigError(
            "rewards: every reward has weight 0, so all completions get 0. Give at least one a weight above 0"
        )
    around = Surroundings(objects or {}, columns, length)
    total: RewardFunction = WeightedSum(_terms(rewards, seed, around))
    watched: set[str] = set()
    for reward in rewards:
        if reward.held_out:
            from oncurve.rewards.rotation import HeldOut  # lazy

            function = reward.make(around)
            name = reward.name or function.name
            if name in watched:
                raise ConfigError(f"rewards: two that are held out are named {name!r}. Give one of them another name")
            watched.add(name)
            total = HeldOut(total, function, part=f"held_out/{name}")
    return total


def with_early_grading(function: RewardFunction, rewards: Sequence[RewardSection]) -> RewardFunction:
    """The function, able to grade groups while others are sampled, unless code of somebody else's is called here.

    Such code may look at all completions of a step, or count on being called from the main thread.
    """
    return function if any(reward.runs_on_main_thread() for reward in rewards) else PipelinedRewards(function)


def _terms(rewards: Sequence[RewardSection], seed: int, around: Surroundings) -> list[Term]:
    """The rewards that pay, in their order; all that rotate stand where the first of them does."""
    terms: list[Term] = []
    rotating, deciding = rotating_rewards(rewards), deciding_reward(rewards)
    for reward in rewards:
        if reward.held_out or (reward in rotating and reward is not rotating[0]):
            continue
        function = _make_rotating(rotating, seed, around) if reward in rotating else reward.make(around)
        name = None if reward in rotating else reward.name
        terms.append(
            Term(
                function,
                weight=reward.weight,
                weight_by_step=reward.weight_by_step or (),
                name=name,
                only_if_correct=reward.only_if_correct,
                decides=reward is deciding,
                correct_at=deciding.correct_at if deciding is not None and reward is deciding else None,
                is_limited=reward.limited,
            )
        )
    return terms


Deciding = CustomReward | PythonReward | EnvironmentSection


def deciding_reward(rewards: Sequence[RewardSection]) -> Deciding | None:
    """The reward of the user's whose value says what is correct: the first with ``correct_at``, else the first of all;
    None where a reward of the package says so."""
    paid = [reward for reward in rewards if not reward.held_out]
    if any(reward.says_correct() for reward in paid):
        return None
    theirs = [reward for reward in paid if isinstance(reward, Deciding)]
    return next((reward for reward in theirs if reward.correct_at is not None), theirs[0] if theirs else None)


def describe_correct(rewards: Sequence[RewardSection]) -> str:
    """The meaning of "correct" beside these rewards, in a few words."""
    deciding = deciding_reward(rewards)
    if deciding is None:
        names = [reward.key for reward in rewards if reward.says_correct()]
        return f"{' and '.join(names)} says so" if names else "a reward says so"
    bound = "1" if deciding.correct_at is None else f"{deciding.correct_at:g} or more"
    return f"{deciding.key} gives {bound}"


def rotating_rewards(rewards: Sequence[RewardSection]) -> list[RewardSection]:
    """The rewards that take turns. Raises ConfigError if it is one alone or if they are paid differently."""
    rotating = [reward for reward in rewards if reward.rotate_every_steps is not None]
    if len(rotating) == 1:
        raise ConfigError("rewards: only one of them has rotate_every_steps. Give it to those that take turns with it")
    for key in ("rotate_every_steps", "weight", "only_if_correct"):
        values = [reward.model_dump()[key] for reward in rotating]
        if len(set(values)) > 1:
            raise ConfigError(
                f"rewards: those that rotate have {key} {', '.join(map(str, values))}. Give all of them the same, so "
                f"that a turn changes what is looked at and not what it pays"
            )
    return rotating


def _make_rotating(rotating: Sequence[RewardSection], seed: int, around: Surroundings) -> RewardFunction:
    """One term in which the rewards take turns; all of them are graded and logged at every step."""
    from oncurve.rewards.rotation import Rotating  # lazy

    functions = [reward.make(around) for reward in rotating]
    for function, reward in zip(functions, rotating, strict=True):
        function.name = reward.name or function.name
    return Rotating(functions, every_steps=rotating[0].rotate_every_steps or 1, seed=seed)


def have_right_answer(rewards: Sequence[RewardSection], objects: Mapping[str, Any] | None = None) -> bool:
    """Whether some reward looks at the answer of a row, so that a right completion is one that it pays for."""
    return any(reward.reads_answer(Surroundings(objects or {})) for reward in rewards)


def part_weights(rewards: Sequence[RewardSection]) -> dict[str, float]:
    """The parts of the reward that pay, by their names in the metrics, and what each of them weighs."""
    weights: dict[str, float] = {}
    for reward in rewards:
        if not reward.held_out:
            weights["rotating" if reward.rotate_every_steps else reward.key] = reward.weight
    return weights


def describe_rewards(rewards: Sequence[RewardSection], *, is_default: bool = False) -> list[str]:
    """A line for each reward that is trained on or only watched; none if the recipe's every reward pays in every
    step. ``is_default``: the recipe names none."""
    lines = ["rewards: none are named, so r1_zero is taken: the right answer in <answer> tags"] if is_default else []
    rotating = rotating_rewards(rewards)
    if rotating:
        names = ", ".join(reward.key for reward in rotating)
        every = rotating[0].rotate_every_steps
        lines.append(f"rewards: {names} take turns of {every} steps; all are logged at every step, one pays")
    for reward in rewards:
        if reward.held_out:
            lines.append(f"rewards: {reward.key} is held out: logged as reward/held_out/{reward.key}, never trained on")
        if reward.weight_by_step:
            parts = ", ".join(f"{part:g} at step {step}" for step, part in reward.weight_by_step)
            lines.append(f"rewards: on the weight of {reward.key}, {reward.weight:g}, the factor is {parts}")
    return [*lines, *_describe_limit(rewards)]


def _describe_limit(rewards: Sequence[RewardSection]) -> Iterator[str]:
    """The most that terms without a notion of right and wrong may give, where it is less than their weights."""
    paid = [reward for reward in rewards if not reward.held_out]
    knowing = [reward for reward in paid if reward.says_correct()]
    limited = [reward for reward in paid if reward.limited and not reward.may_say_correct()]
    limit = sum(abs(reward.weight) for reward in knowing)
    may_exceed = sum(abs(reward.weight) for reward in limited) > limit or any(
        reward.has_any_value for reward in limited
    )
    if limit and limited and may_exceed:
        names, others = (", ".join(term.key for term in some) for some in (limited, knowing))
        yield (
            f"rewards: {names} can together add or take at most {limit:g}, the weight of {others}. To let one of them "
            f"pay in full, set its key limited to false"
        )


def make_lenient_reward() -> RewardFunction:
    """Correctness whatever the format: the second number of an evaluation."""
    return Mathematics(answer_from="prose")
