"""Grading of groups while others are still being sampled, with the results of grading them all afterwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Group, Prompt, Reward

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
