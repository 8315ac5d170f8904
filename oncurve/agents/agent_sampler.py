"""The sampler of agents: each episode is a program that talks to the policy, and what the policy said is trained on.

Around a sampler that can go on from tokens. Sessions are used in the thread that samples, and nowhere else.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oncurve.agents.agent_programs import AgentTask, Stop
from oncurve.agents.agent_session import AgentSession, PendingTurn, SessionLimits, completion_of
from oncurve.agents.agent_setup import AgentSetup
from oncurve.agents.chat_request import ChatError, ChatRequest
from oncurve.agents.conversation_frames import Frames
from oncurve.core.errors import Failure, SamplerError, attempt
from oncurve.core.records import Completion, Group, Prompt, Reward, SamplingParams
from oncurve.core.sampler import PolicyView, SamplingRequest, check_finite, end_token_ids, exact_text
from oncurve.episodes.environments import reward_of
from oncurve.episodes.episode_loop import EpisodeLoop
from oncurve.model.context import context_of
from oncurve.sample.event_loop import EventLoopThread
from oncurve.sample.turn_keys import turn_key
from oncurve.sample.turns import Ask, Sampled, TurnSampler

if TYPE_CHECKING:
    from oncurve.agents.agent_endpoint import AgentEndpoint, Reply

logger = logging.getLogger(__name__)
IGNORED = (
    "the agent's requests say how tokens are to be drawn, which is ignored: rollouts.temperature and the like do. Each "
    "answer names what was ignored"
)
UNPAID = "the agent gives rewards, which nothing reads. Add {type: environment} to rewards, or let it return None"
CLOSE_SECONDS = 5.0
"""For async agents that are cancelled; with the next step a new loop begins in any case."""
LOOK_SECONDS = 0.25
"""How often it is looked whether an agent is over its limit."""


class AgentSampler:
    """A sampler whose completions are what agents made the policy say."""

    def __init__(self, sampler: TurnSampler, params: SamplingParams, setup: AgentSetup) -> None:
        self.sampler, self.params, self.setup = sampler, params, setup
        self.on_group: Callable[[Group], None] | None = None
        self._policy: PolicyView | None = None
        self._version = 0
        self._frames: Frames | None = None
        self._endpoint: AgentEndpoint | None = None
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Sample from these weights from now on."""
        self.sampler.load_weights(policy, version)
        self._policy, self._version = policy, version
        if self._frames is None:
            self._frames = self.setup.make_frames(policy.tokenizer)
            self._frames.end_ids = end_token_ids(policy.model, policy.tokenizer)

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group of episodes per prompt, in order.

        Raises SamplerError where sampling itself fails. What fails in an agent stays in its episode.
        """
        if self._policy is None or self._frames is None:
            raise SamplerError("the sampler has no weights yet; call load_weights before sample")
        if not request.prompts:
            return []
        with self._lock:  # the next step may be sampled in another thread
            if self._endpoint is None:
                from oncurve.agents.agent_endpoint import AgentEndpoint  # lazy

                self._endpoint = AgentEndpoint()
        params = request.params or self.params
        params = replace(params, stop=tuple(dict.fromkeys((*params.stop, *self._frames.stop))))
        loop = EpisodeLoop(self._policy, params, self._version, self.on_group)
        run = _Run(self, loop, self._frames, self._endpoint, context_tokens=context_of(self._policy.model.config))
        loop.turns = self.sampler.turns(params, step=request.step, post=run.post)
        try:
            return run.all_groups(request)
        finally:
            loop.turns.close()
            run.close()

    def tell(self, what: str) -> None:
        """Warn of something once."""
        if what and what not in self._reported:
            self._reported.add(what)
            logger.warning("%s", what)

    def close(self) -> None:
        """Listen no more, and give back what the sampler took."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self.sampler.close()


class _Episode:
    """One agent and its session."""

    def __init__(self, run: _Run, position: int, index: int, prompt: Prompt, key: int, session: AgentSession) -> None:
        self.run, self.position, self.index, self.prompt, self.key = run, position, index, prompt, key
        self.session = session
        self.api_key = secrets.token_urlsafe(16)
        self.stop: Stop = _nothing
        self.num_waiting = 0
        """Requests that wait for the policy."""
        self.outside = 0.0
        """Seconds that the agent took while it did not wait."""
        self.since: float | None = None
        """Start of the current time without waiting, in seconds; None while it waits or does not run."""
        self.is_over = False

    def chat(self, request: ChatRequest, give: Callable[[Reply], None]) -> Callable[[], None]:
        """Hand a request to the thread that samples."""
        waiting = _WaitingRequest(self, request, give)
        self.run.post(partial(self.run.take_request, waiting))

        def forget() -> None:
            waiting.is_gone = True
            self.run.post(partial(self.run.forgotten, waiting))

        return forget

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self.session.decode(ids)

    def seconds(self, now: float) -> float:
        """Seconds that the agent has taken so far."""
        return self.outside + (now - self.since if self.since is not None else 0.0)

    def waits(self, change: int) -> None:
        """It waits for one request more, or fewer."""
        now = time.monotonic()
        self.outside, self.num_waiting = self.seconds(now), self.num_waiting + change
        self.since = None if self.num_waiting else now


@dataclass(eq=False)
class _WaitingRequest:
    """A request on its way."""

    episode: _Episode
    request: ChatRequest
    give: Callable[[Reply], None]
    pending: PendingTurn | None = None
    ask: Ask | None = None
    """The turn that the sampler is asked for."""
    is_over: bool = False
    is_gone: bool = False
    """The client has closed the connection."""


class _Run:
    """One call of ``sample``."""

    def __init__(
        self,
        owner: AgentSampler,
        loop: EpisodeLoop,
        frames: Frames,
        endpoint: AgentEndpoint,
        *,
        context_tokens: int | None,
    ) -> None:
        self.owner, self.setup, self.loop, self.endpoint, self.frames = owner, owner.setup, loop, endpoint, frames
        self.limits = SessionLimits(
            loop.params.room(0),
            self.setup.limits.max_turns,
            context_tokens,
            self.setup.limits.forks == "rows",
        )
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._code = EventLoopThread("oncurve-agent-code")
        self._waiting: deque[_Episode] = deque()
        """Episodes that have not begun."""
        self._running: dict[_Episode, None] = {}
        self._open: dict[_WaitingRequest, None] = {}
        """Requests without an answer."""

    def post(self, event: Callable[[], None]) -> None:
        """Have something done in the thread that samples; from any thread."""
        self._events.put(event)

    def all_groups(self, request: SamplingRequest) -> list[Group]:
        """Every episode from beginning to end."""
        for position, prompt, keys in self.loop.keys(request):
            for index, key in enumerate(keys):
                session = AgentSession(self.frames, self._decode, self.loop.end_ids, self.limits)
                self._waiting.append(_Episode(self, position, index, prompt, key, session))
        self._begin()
        return self.loop.run(is_ready=self._may_ask, collect=self._collect)

    def _may_ask(self, is_busy: bool) -> bool:
        """For a deterministic agent, wait until all agents wait: the same run then has the same batches."""
        is_ready = not self.setup.agent.is_deterministic or all(episode.num_waiting for episode in self._running)
        return is_ready and self._events.empty()

    def _collect(self, wait: bool) -> None:
        self._take_events(wait=wait)
        self._end_late()
        self._begin()

    def close(self) -> None:
        """End all agents; who waits for an answer is told that there is none."""
        for waiting in list(self._open):
            waiting.give(ChatError("sampling has ended", status=503))
        for episode in list(self._running):
            episode.is_over = True
            self.endpoint.remove(episode.api_key)
            episode.stop()
        self._running.clear()
        closing = threading.Thread(target=self._code.close, name="oncurve-agent-end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)  # code that blocks the loop, or refuses to end, is left behind with it

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self.setup.limits.threads:
            episode = self._waiting.popleft()
            self._running[episode] = None
            url = self.endpoint.add(episode.api_key, episode)
            episode.since = time.monotonic()
            seed = turn_key(episode.key, 1) % 2**31
            task = AgentTask(episode.prompt.source_row, url, episode.api_key, int(seed))
            episode.stop = self.setup.agent.start(
                task, self._code, lambda result, episode=episode: self.post(partial(self._gave, episode, result))
            )

    def _take_events(self, *, wait: bool) -> None:
        """Do what other threads have asked for."""
        try:
            event = self._events.get(timeout=LOOK_SECONDS) if wait else self._events.get_nowait()
            while True:
                event()
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def take_request(self, waiting: _WaitingRequest) -> None:
        """A request has come."""
        episode = waiting.episode
        if waiting.is_gone or episode.is_over:
            waiting.give(ChatError("the episode is over", status=401, code="invalid_api_key"))
            return
        if waiting.request.ignored:
            self.owner.tell(IGNORED)
        try:
            waiting.pending = episode.session.ask(waiting.request)
        except ChatError as error:
            waiting.give(error)
            return
        episode.waits(+1)
        self._open[waiting] = None
        pending = waiting.pending
        if not pending.room:
            self._took(waiting, ([], [], "length"))
            return
        key = turn_key(episode.key, pending.key)
        waiting.ask = Ask(
            pending.read_ids,
            (key,),
            pending.room,
            lambda _, sampled, spans=(): self._took(waiting, sampled, spans),
        )
        self.loop.hold((episode.position, episode.index, pending.read_ids), waiting.ask)

    def forgotten(self, waiting: _WaitingRequest) -> None:
        """Nobody waits for an answer any more: it is as if nothing had been asked."""
        waiting.is_over = True
        if waiting in self._open and waiting.pending is not None:
            del self._open[waiting]
            if waiting.ask is not None:
                self.loop.drop(waiting.ask)
            waiting.episode.session.forget(waiting.pending)
            waiting.episode.waits(-1)

    def _took(self, waiting: _WaitingRequest, sampled: Sampled, spans: Sequence[tuple[int, int]] = ()) -> None:
        """The policy wrote a turn."""
        if waiting.is_gone:
            self.forgotten(waiting)
        if waiting not in self._open:
            return
        check_finite(sampled[1], waiting.episode.prompt, self.loop.version)
        del self._open[waiting]
        waiting.is_over = True
        waiting.episode.waits(-1)
        waiting.give(waiting.episode.session.took(_of(waiting), sampled, spans))

    def _end_late(self) -> None:
        now = time.monotonic()
        for episode in [running for running in self._running if running.seconds(now) > self.setup.limits.agent_seconds]:
            episode.stop()
            late = f"it took more than {self.setup.limits.agent_seconds:g} s (rollouts.episodes.agent_seconds)"
            self._end(episode, None, Failure("agent_timeout", late))

    def _gave(self, episode: _Episode, result: Any) -> None:
        """An agent has ended by itself."""
        if episode.is_over:
            return
        reward = None
        if not isinstance(result, Failure) and result is not None:
            value = result
            result = attempt(lambda: reward_of(value))
            reward = None if isinstance(result, Failure) else result
            if not self.setup.takes_reward:
                self.owner.tell(UNPAID)
        failure = None
        if isinstance(result, Failure):
            kind = "agent_limit" if episode.session.limit is not None else "agent_crashed"
            failure = replace(result, error=kind)
        elif not episode.session.ordered():
            failure = Failure("agent_silent", "it ended without asking the policy anything")
        elif reward is None and self.setup.needs_reward:
            failure = Failure("agent_no_reward", "it gave no reward, and the recipe has no other (rewards)")
        self._end(episode, reward, failure)

    def _end(self, episode: _Episode, reward: Reward | None, failure: Failure | None) -> None:
        """An episode is over; its group may be whole."""
        episode.is_over = True
        self.endpoint.remove(episode.api_key)
        del self._running[episode]
        for waiting in [request for request in self._open if request.episode is episode]:
            waiting.give(ChatError("the episode is over", status=401, code="invalid_api_key"))
            self.forgotten(waiting)
        self.loop.end(episode.position, episode.index, self._completion(episode, reward, failure))

    def _completion(self, episode: _Episode, reward: Reward | None, failure: Failure | None) -> Completion:
        rows = [
            completion_of(row, version=self.loop.version, index=episode.index, text=self.loop.text(row.token_ids))
            for row in episode.session.ordered()
        ]
        facts: dict[str, Any] = {"environment_reward": reward, "waiting_seconds": episode.seconds(time.monotonic())}
        if failure is not None:
            facts |= {"failure": failure.error, "failure_detail": failure.detail, "finish_reason": "failed"}
            facts["environment_reward"] = Reward(value=None, error=failure.error, detail=failure.detail)
        elif episode.session.limit is not None:
            facts["finish_reason"] = episode.session.limit
        if not rows:
            prompt = episode.prompt
            rows = [Completion(prompt.prompt_ids, (), "", (), "failed", self.loop.version, episode.index)]
        return replace(rows[0], branches=tuple(rows[1:]), **facts)

    def _decode(self, ids: Sequence[int]) -> str:
        return exact_text(self.loop.tokenizer, ids)


def _of(waiting: _WaitingRequest) -> PendingTurn:
    assert waiting.pending is not None
    return waiting.pending


def _nothing() -> None:
    """An agent that does not run has nothing to end."""
