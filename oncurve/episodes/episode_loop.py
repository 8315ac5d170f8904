"""The loop of one call of a sampler of episodes: streams, turns that wait for each other, groups that become whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.requests import Sampled
from oncurve.core.sampler import PolicyView, SamplingRequest, check_finite, end_token_ids, exact_text
from oncurve.sample.turns import Ask, Turns


class EpisodeLoop:
    """The common loop of episodes, whoever answers the policy in them; it runs in the thread that samples."""

    turns: Turns

    def __init__(
        self, policy: PolicyView, params: SamplingParams, version: int, on_group: Callable[[Group], None] | None
    ) -> None:
        self.params, self.version, self.on_group = params, version, on_group
        self.tokenizer = policy.tokenizer
        self.end_ids = end_token_ids(policy.model, policy.tokenizer)
        self._waiting: list[tuple[tuple[Any, ...], Ask]] = []
        """Turns that are not asked for yet, and their order."""
        self._done: dict[int, list[Completion | None]] = {}
        self._prompts: dict[int, Prompt] = {}
        self._groups: dict[int, Group] = {}

    def keys(self, request: SamplingRequest) -> Iterator[tuple[int, Prompt, list[int]]]:
        """The place of each prompt, and the random streams of its episodes."""
        streams = request.stream_keys(self.params.seed).tolist()
        for position, (prompt, keys) in enumerate(zip(request.prompts, streams, strict=True)):
            self._prompts[position], self._done[position] = prompt, [None] * len(keys)
            yield position, prompt, keys

    def run(self, *, is_ready: Callable[[bool], bool], collect: Callable[[bool], None]) -> list[Group]:
        """Turns until every group is whole.

        ``is_ready`` is told whether the sampler had something to do, and says whether the turns that are held may be
        asked for. ``collect`` does what other threads have asked for, and is told whether to wait for something.
        """
        while len(self._groups) < len(self._done):
            is_busy = self.turns.advance()
            if self._waiting and is_ready(is_busy):
                self._ask_waiting()
            else:
                collect(not is_busy and len(self._groups) < len(self._done))
        return [self._groups[position] for position in range(len(self._done))]

    def hold(self, order: tuple[Any, ...], ask: Ask) -> None:
        """Ask for a turn with all others that wait by then, in an order that does not depend on how long anything took.

        Who is in the batch decides how sums are rounded, so that the same run twice must have the same batches.
        """
        self._waiting.append((order, ask))

    def drop(self, ask: Ask) -> None:
        """Nobody wants a turn any more that was held."""
        self._waiting = [pair for pair in self._waiting if pair[1] is not ask]

    def took(self, prompt: Prompt, sampled: Sampled) -> str:
        """The text of what the policy wrote. Raises SamplerError for a log-probability that is not finite."""
        check_finite(sampled[1], prompt, self.version)
        return self.text(sampled[0])

    def end(self, position: int, index: int, completion: Completion) -> None:
        """An episode is over; its group may be whole."""
        done = self._done[position]
        done[index] = completion
        if all(episode is not None for episode in done):
            self._groups[position] = group = Group(
                self._prompts[position], tuple(episode for episode in done if episode is not None)
            )
            if self.on_group is not None:
                self.on_group(group)

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text, without the end token behind them."""
        return exact_text(self.tokenizer, ids, self.end_ids)

    def _ask_waiting(self) -> None:
        """Ask for the turns that wait. Those that keep no cache and begin with the same tokens are one request."""
        waiting, self._waiting = sorted(self._waiting, key=lambda pair: pair[0]), []
        alike: dict[Any, list[Ask]] = {}
        for number, (_, ask) in enumerate(waiting):
            alike.setdefault(number if ask.rows else (ask.token_ids, ask.max_tokens), []).append(ask)
        for together in alike.values():
            self.turns.ask(together[0] if len(together) == 1 else _joined(together))


def _joined(asks: list[Ask]) -> Ask:
    owners = [(ask, index) for ask in asks for index in range(len(ask.keys))]

    def deliver(index: int, sampled: Sampled, spans: Sequence[tuple[int, int]] = ()) -> None:
        ask, own = owners[index]
        ask.deliver(own, sampled, spans)

    keys = tuple(key for ask in asks for key in ask.keys)
    return Ask(asks[0].token_ids, keys, asks[0].max_tokens, deliver)
