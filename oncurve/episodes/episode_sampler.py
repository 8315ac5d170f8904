"""The sampler of episodes: the policy writes, tools and environments answer, and the policy goes on.

Around a sampler that can go on from tokens. Everything that belongs to an episode happens in the thread that samples;
tools and environments run in threads of their own meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from oncurve.chat_messages import messages_of
from oncurve.core.draw import stream_keys
from oncurve.core.errors import Failure, SamplerError, attempt
from oncurve.core.records import Completion, EpisodeEnd, FinishReason, Group, Reward, SamplingParams
from oncurve.core.sampler import PolicyView, SamplingRequest, end_token_ids
from oncurve.episodes.dialects import Dialect
from oncurve.episodes.environments import Environment, Kind, close_all, close_now, has_died, reward_of
from oncurve.episodes.episode import Episode
from oncurve.episodes.episode_loop import EpisodeLoop
from oncurve.episodes.episode_setup import EpisodeSetup
from oncurve.episodes.tools import CallRequest, calling, opened
from oncurve.episodes.workers import Calls, Workers
from oncurve.model.context import context_of
from oncurve.sample.turn_keys import turn_key
from oncurve.sample.turns import Ask, Sampled, TurnSampler
from oncurve.user_code import contained

BOUND = {
    "can only be used in that same thread": "open the connection with check_same_thread=False, or in each call",
    "signal only works in main thread": "limit the seconds with rollouts.episodes.tool_seconds instead",
}
"""Errors of code that is bound to one thread, and the remedy of each."""
MAX_CALLS = 16
"""Calls of one turn that are answered; more are not looked at."""


class EpisodeSampler:
    """A sampler whose completions are episodes."""

    def __init__(self, sampler: TurnSampler, params: SamplingParams, setup: EpisodeSetup) -> None:
        self.sampler, self.params, self.setup = sampler, params, setup
        self.on_group: Callable[[Group], None] | None = None
        self.staleness = 0
        """Steps sampled ahead of training. Environments stay open, for reward functions that ask for them, until
        staleness + 1 further steps are sampled."""
        self._policy: PolicyView | None = None
        self._version = 0
        self._dialect: Dialect | None = None
        self._lock = threading.Lock()
        self._environments: list[tuple[int | None, list[Any]]] = []
        """Environments that are open, with their step; None where something is measured."""
        self._workers = Workers(setup.limits.threads)
        self._left: list[Calls] = []
        """Calls of samplings that failed, whose environments are to be closed."""

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Sample from these weights from now on."""
        self.sampler.load_weights(policy, version)
        self._policy, self._version = policy, version
        if self._dialect is None:
            self._dialect = self.setup.make_dialect(policy.tokenizer)
            self._dialect.end_ids = end_token_ids(policy.model, policy.tokenizer)
            self.setup = replace(self.setup, context_tokens=context_of(policy.model.config))

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group of episodes per prompt, in order.

        Raises SamplerError where sampling itself fails. What fails in a tool or an environment stays in its episode.
        """
        if self._policy is None or self._dialect is None:
            raise SamplerError("the sampler has no weights yet; call load_weights before sample")
        step = None if request.params is not None else request.step
        self._close_finished(step)
        if not request.prompts:
            return []
        environments_of_step: tuple[int | None, list[Any]] = (step, [])
        with self._lock:  # the next step may be sampled in another thread
            self._environments.append(environments_of_step)
        params = request.params or self.params
        params = replace(params, stop=tuple(dict.fromkeys((*params.stop, *self._dialect.stop))))
        loop = EpisodeLoop(self._policy, params, self._version, self.on_group)
        run = _Run(self, loop, self._dialect, environments=environments_of_step[1])
        loop.turns = self.sampler.turns(params, step=request.step, post=run.calls.post)
        try:
            with contained("tools or environments"):
                return run.all_groups(request)
        finally:
            loop.turns.close()
            run.is_over = True
            with self._lock:
                self._left.append(run.calls)

    def close(self) -> None:
        """Close environments, end threads, give back what the sampler took."""
        self._close(self._environments)
        self._workers.close()
        for tool in self.setup.tools.values():
            if tool.close is not None:
                tool.close()
        self.sampler.close()

    def _close_finished(self, step: int | None) -> None:
        """Close environments of measurements, and those of steps whose grading is over when ``step`` is sampled."""
        last = self.staleness
        self._close(
            [
                entry
                for entry in self._environments
                if entry[0] is None or (step is not None and abs(entry[0] - step) > last)
            ]
        )

    def _close(self, closing: list[tuple[int | None, list[Any]]]) -> None:
        with self._lock:
            self._environments = [entry for entry in self._environments if all(entry is not other for other in closing)]
            left, self._left = self._left, []
        for calls in left:
            calls.collect(wait=False)
        with self._lock:
            self._left += [calls for calls in left if not calls.is_idle]
        environments = [made for _, environments_of_step in closing for made in environments_of_step]
        close_all(environments, Calls(self._workers), self.setup.limits.environment_seconds)


class _Run:
    """One call of ``sample``."""

    def __init__(self, owner: EpisodeSampler, loop: EpisodeLoop, dialect: Dialect, *, environments: list[Any]) -> None:
        """``environments`` takes those that are to be closed."""
        self.setup, self.limits, self.calls = owner.setup, owner.setup.limits, Calls(owner._workers)
        self.loop, self.params, self.dialect, self.environments = loop, loop.params, dialect, environments
        self.is_over = False
        """Nothing that comes later is listened to."""
        self._ended: list[Episode] = []
        """Ended episodes whose rows are freed when a round begins: which rows make room must not depend on time."""

    def all_groups(self, request: SamplingRequest) -> list[Group]:
        """Every episode from beginning to end."""
        for position, prompt, keys in self.loop.keys(request):
            tools, kind = self.setup.tools_of(prompt.row), self.setup.kind_of(prompt.row)
            episodes = [
                Episode(position, index, prompt, key, opened(tools), kind, prompt.prompt_ids)
                for index, key in enumerate(keys)
            ]
            if kind is None:
                self._ask(episodes)
            else:
                number, first = np.array([prompt.index]), np.zeros(1, dtype=np.int64)
                seed = turn_key(int(stream_keys(self.params.seed, request.step, number, first)[0]), 1)
                for episode in episodes:
                    self._begin(episode, kind, int(seed % 2**31))
        return self.loop.run(is_ready=self._is_round_over, collect=lambda wait: self.calls.collect(wait=wait))

    def _is_round_over(self, is_busy: bool) -> bool:
        """Nobody writes and nobody is answered."""
        if is_busy or not self.calls.is_idle:
            return False
        for episode in self._ended:
            episode.cache.end()
        self._ended.clear()
        return True

    def _begin(self, episode: Episode, kind: Kind, seed: int) -> None:
        """Reset the episode's environment, and ask for the first turn behind its words."""

        def begun(result: Any, seconds: float) -> None:
            if isinstance(result, Failure):
                self._fail(episode, result, "reset")
                return
            environment, observation = result
            if any(other is environment.inner for other in self.environments):
                raise SamplerError(
                    f"environment {kind.name}: its factory gave one and the same object for two episodes, which would "
                    f"play in it together. Let it make a new one at each call"
                )
            episode.environment = environment
            self.environments.append(environment.inner)
            if observation:
                text, ids = self.setup.rerender(self.loop.tokenizer, episode.prompt, observation)
                episode.own_prompt, episode.prompt_ids, episode.observation = text, ids, observation
            self._ask([episode])

        def forget(result: Any) -> None:
            if not isinstance(result, Failure):
                close_now(result[0].inner)

        begin = partial(Environment.begin, kind, episode.prompt.source_row, seed)
        self._call(episode, begin, begun, is_environment=True, late=forget)

    def _call(
        self,
        episode: Episode,
        call: Callable[[], Any],
        deliver: Callable[[Any, float], None],
        *,
        is_environment: bool,
        limit: float | None = None,
        late: Callable[[Any], None] | None = None,
    ) -> None:
        """Run somebody's code beside sampling. What it gives when nobody waits any more goes to ``late``."""

        def back(result: Any, seconds: float) -> None:
            episode.waiting_seconds += seconds
            if not self.is_over:
                deliver(result, seconds)
            elif late is not None:
                late(result)

        usual = self.limits.environment_seconds if is_environment else self.limits.tool_seconds
        self.calls.submit(call, limit_seconds=limit or usual, deliver=back, late=late)

    def _ask(self, episodes: list[Episode]) -> None:
        """The next turn of episodes that have read the same so far."""
        first = episodes[0]
        first.started = first.started or time.monotonic()
        room = self.params.room(first.num_written)
        if self.setup.context_tokens is not None:
            room = min(room, self.setup.context_tokens - len(first.read_ids))
        if room < 1:
            for episode in episodes:
                self._end(episode, "context")
            return
        for episode in episodes:
            episode.started = first.started
        keys = tuple(turn_key(episode.key, episode.num_turns) for episode in episodes)
        rows = tuple(episode.cache for episode in episodes)

        def deliver(index: int, sampled: Sampled, spans: Sequence[tuple[int, int]] = ()) -> None:
            self._took(episodes[index], sampled, spans, room)

        ask = Ask(first.read_ids, keys, room, deliver, rows)
        if self.setup.is_deterministic:
            self.loop.hold((first.position, first.index), ask)
        else:
            self.loop.turns.ask(ask)

    def _took(self, episode: Episode, sampled: Sampled, spans: Sequence[tuple[int, int]], room: int) -> None:
        """The policy wrote a turn."""
        reason, text = sampled[2], self.loop.took(episode.prompt, sampled)
        episode.add_turn(sampled, text, spans)
        if reason != "stop":
            is_full = reason == "length" and self.params.room(episode.num_written) > 0
            self._end(episode, "context" if is_full else reason)
            return
        environment = episode.environment
        if environment is not None and environment.kind.has_steps:
            self._call(
                episode,
                partial(environment.step, text),
                lambda result, seconds: self._stepped(episode, result),
                is_environment=True,
            )
            return
        episode.pending = self.dialect.read(text, episode.tools)[:MAX_CALLS]
        episode.answers = []
        if not episode.pending:
            self._end(episode, "stop")
        elif environment is None and episode.num_turns >= self.limits.max_turns:
            self._end(episode, "turns")
        else:
            self._next_call(episode)

    def _stepped(self, episode: Episode, result: Any) -> None:
        """An environment with steps has answered a turn."""
        if isinstance(result, Failure):
            self._fail(episode, result, "step")
        elif episode.environment is not None and episode.environment.is_done:
            self._end(episode, "done")
        else:
            self._go_on(episode, partial(self.dialect.encode_observation, result))

    def _next_call(self, episode: Episode) -> None:
        """The next call of a turn; after the last one, the next turn."""
        environment = episode.environment
        if environment is not None and environment.is_done:
            self._end(episode, "done")
            return
        if not episode.pending:
            if episode.num_malformed >= self.limits.max_malformed_calls:
                self._end(episode, "malformed")
            else:
                self._go_on(episode, partial(self.dialect.encode_answers, episode.answers))
            return
        request = episode.pending.pop(0)
        tool = episode.tools.get(request.name) if request.name is not None else None
        if tool is None:
            self._refuse(episode, request)
            return
        if problem := tool.mismatch(request.arguments):
            episode.add_call(request, f"error: {problem}", "bad_arguments", 0.0)
            self._next_call(episode)
            return
        is_own = environment is not None and request.name in environment.tools
        function = environment.tools[tool.name].call if environment is not None and is_own else tool.call
        self._call(
            episode,
            partial(calling, function, request.arguments),
            lambda result, seconds: self._answered(episode, request, result, seconds, is_own=is_own),
            is_environment=is_own,
            limit=tool.limit_seconds,
        )

    def _refuse(self, episode: Episode, request: CallRequest) -> None:
        """A call that cannot be read, or of a tool that is not there: the policy is told so."""
        if request.name is None:
            episode.num_malformed += 1
            episode.add_call(request, f"error: {request.problem}", "malformed", 0.0)
        else:
            known = ", ".join(episode.tools)
            episode.add_call(request, f"error: there is no tool {request.name[:60]}; use {known}", "unknown_tool", 0.0)
        self._next_call(episode)

    def _answered(self, episode: Episode, request: CallRequest, result: Any, seconds: float, *, is_own: bool) -> None:
        """A tool has given something, or failed. What it raised is the policy's to read; a dead environment is not."""
        if isinstance(result, Failure):
            _require_any_thread(result, request.name or "")
            if is_own and (result.error == "timeout" or has_died(result)):
                self._fail(episode, result, request.name or "")
                return
            error = "timeout" if result.error == "timeout" else "raised"
            episode.add_call(request, f"error: {result.detail}", error, seconds)
        else:
            episode.add_call(request, result, None, seconds)
        if episode.environment is not None:
            looked = attempt(episode.environment.note_done)
            if isinstance(looked, Failure):
                self._fail(episode, looked, "done")
                return
        self._next_call(episode)

    def _go_on(self, episode: Episode, encode: Callable[..., tuple[list[int], str]]) -> None:
        """Tell the policy, and let it write another turn, if a limit does not end the episode here."""
        limits, context = self.limits, self.setup.context_tokens
        if episode.num_turns >= limits.max_turns:
            self._end(episode, "turns")
        elif self.params.room(episode.num_written) <= 0:
            self._end(episode, "length")
        elif limits.max_seconds is not None and time.monotonic() - episode.started > limits.max_seconds:
            self._end(episode, "seconds")
        else:
            ended = bool(episode.token_ids) and episode.token_ids[-1] in self.loop.end_ids
            ids, text = encode(ended=ended, limit=limits.max_answer_tokens)
            if context is not None and len(episode.read_ids) + len(ids) >= context:
                self._end(episode, "context")
                return
            episode.add_read(ids, text)
            self._ask([episode])

    def _end(self, episode: Episode, reason: FinishReason | EpisodeEnd) -> None:
        """The last word was said; what remains is the environment's reward."""
        episode.ended = reason
        environment = episode.environment
        if environment is None or not environment.kind.gives_reward or reason == "abort":
            self._whole(episode)
            return

        def rewarded(result: Any, seconds: float) -> None:
            reward = result if isinstance(result, Failure) else attempt(lambda: reward_of(result))
            if isinstance(reward, Failure):
                self._fail(episode, reward, "get_reward")
            else:
                episode.reward = reward
                self._whole(episode)

        def messages() -> list[dict[str, Any]]:
            return messages_of(self._completion(episode))

        self._call(episode, partial(environment.reward, messages), rewarded, is_environment=True)

    def _fail(self, episode: Episode, failure: Failure, where: str) -> None:
        """The environment is at fault: nothing can be said of what the policy did."""
        _require_any_thread(failure, where)
        kind = "timeout" if failure.error == "timeout" else "crashed"
        if has_died(failure):
            kind = "died"
        episode.failure = Failure(f"environment_{kind}", f"{where}: {failure.detail}")
        episode.reward = Reward(value=None, error=f"environment_{kind}", detail=failure.detail)
        episode.ended = "failed"
        self._whole(episode)

    def _whole(self, episode: Episode) -> None:
        """The episode is over."""
        if self.setup.is_deterministic:
            self._ended.append(episode)
        else:
            episode.cache.end()
        self.loop.end(episode.position, episode.index, self._completion(episode))

    def _completion(self, episode: Episode) -> Completion:
        return episode.completion(self.loop.text(episode.token_ids), self.loop.version)


def _require_any_thread(failure: Failure, where: str) -> None:
    """Raises SamplerError for code that runs in one thread alone: each of its calls would fail, whatever the policy
    does."""
    for phrase, remedy in BOUND.items():
        if phrase in failure.detail:
            raise SamplerError(f"{where}: {failure.detail} Tools and environments run in threads: {remedy}")
