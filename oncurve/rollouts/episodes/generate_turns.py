"""Turns with ``transformers``: all that wait are generated together, and the slowest of them is waited for."""

from __future__ import annotations

from oncurve.records import Prompt
from oncurve.rollouts.base import Sampler, SamplingParams
from oncurve.rollouts.episodes.turns import Ask, Sampled, with_limit

ROUNDS = 4096
"""Rounds of one step at most, so that each has random numbers of its own."""


class GenerateTurns:
    """Whole rounds of ``model.generate``, whose random numbers depend on the round and on who is in it."""

    def __init__(self, sampler: Sampler, params: SamplingParams, *, step: int) -> None:
        self._sampler, self._params, self._step = sampler, params, step
        self._waiting: list[Ask] = []
        self._round = 0

    def ask(self, asked: Ask) -> None:
        """Sample this in the next round of its size."""
        self._waiting.append(asked)

    def advance(self) -> bool:
        """One round: those that wait and ask for as many turns as the first of them."""
        if not self._waiting:
            return False
        count = len(self._waiting[0].keys)
        now = [asked for asked in self._waiting if len(asked.keys) == count]
        self._waiting = [asked for asked in self._waiting if len(asked.keys) != count]
        prompts = [Prompt("", asked.token_ids, place) for place, asked in enumerate(now)]
        params = with_limit(self._params, max(asked.max_tokens for asked in now))
        groups = self._sampler.sample(prompts, count, step=self._step * ROUNDS + self._round % ROUNDS, params=params)
        self._round += 1
        for asked, group in zip(now, groups, strict=True):
            for place, completion in enumerate(group.completions):
                ids, logprobs = list(completion.token_ids), list(completion.sampler_logprobs)
                sampled: Sampled = (ids, logprobs, "stop" if not completion.is_truncated else "length")
                if len(ids) > asked.max_tokens:
                    sampled = (ids[: asked.max_tokens], logprobs[: asked.max_tokens], "length")
                asked.deliver(place, sampled)
        return True

    def close(self) -> None:
        """Forget what waits."""
        self._waiting = []
