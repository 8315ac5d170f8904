"""The engine: batched sampling inside the training process.

Each prompt is read once for its group, finished rows leave at once and waiting ones enter. The weights are the
policy's own, so there is nothing to synchronize; the memory for keys and values is given back after each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from oncurve.errors import SamplerError
from oncurve.model.allocator import give_back
from oncurve.model.out_of_memory import Shortage, release
from oncurve.model.weights import Backbone
from oncurve.records import Group, Prompt
from oncurve.rollouts.base import PolicyView, Sampled, SamplingParams, end_token_ids, make_group
from oncurve.rollouts.engine.budget import RowBudget, call_of
from oncurve.rollouts.engine.fused import FusedSampling
from oncurve.rollouts.engine.generic import ModuleSampling
from oncurve.rollouts.engine.proof import Proof
from oncurve.rollouts.engine.streams import stream_keys
from oncurve.rollouts.episodes.turns import EngineTurns, Turns

Finish = Callable[[int, list[Sampled]], None]
"""Takes the place of a prompt, and its completions."""


@dataclass(frozen=True)
class Asked:
    """Groups that are to be sampled."""

    prompts: list[tuple[int, ...]]
    group_size: int
    keys: np.ndarray
    """The random stream of each completion, group after group."""
    params: SamplingParams
    end_ids: tuple[int, ...]

    def of(self, places: list[int]) -> Asked:
        """Some of the groups."""
        keys = self.keys.reshape(len(self.prompts), self.group_size)[places].reshape(-1)
        return replace(self, prompts=[self.prompts[place] for place in places], keys=keys)


class InProcessEngine:
    """Samples in process from the policy's own weights."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_rows: int | None = None,
        kv_tokens: int | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        """``max_rows`` completions run at one time, their keys and values in at most ``kv_tokens`` positions.

        Where None is given, a GPU takes what fits into the memory that is free when it samples, other devices the
        usual number of rows and any number of positions.

        Without ``cuda_graphs`` a GPU samples through the model's modules.
        """
        self.params = params
        self.budget = RowBudget(max_rows, kv_tokens)
        self.on_group: Callable[[Group], None] | None = None
        self._policy: PolicyView | None = None
        self._proof = Proof(on_gpu=cuda_graphs)
        self._version = 0

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the policy: its module holds the current weights already."""
        self._policy, self._version = policy, version

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = None

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, *, step: int = 0, params: SamplingParams | None = None
    ) -> list[Group]:
        """One group per prompt. A prompt that occurs twice gets different completions each time."""
        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        if not prompts:
            return []
        params = params or self.params
        policy, model = self._policy, self._policy.model
        end_ids = end_token_ids(model, policy.tokenizer)
        numbers = np.repeat(np.array([prompt.index for prompt in prompts], dtype=np.int64), group_size)
        indices = np.array(occurrence_indices(prompts, group_size)).reshape(-1)
        keys = stream_keys(params.seed, step, numbers, indices)
        groups: dict[int, Group] = {}

        def finish(place: int, sampled: list[Sampled]) -> None:
            groups[place] = make_group(
                prompts[place], sampled, tokenizer=policy.tokenizer, end_ids=end_ids, version=self._version
            )
            if self.on_group is not None:
                self.on_group(groups[place])

        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode(), policy.compute():
                self._sample(
                    Asked([prompt.prompt_ids for prompt in prompts], group_size, keys, params, end_ids), finish
                )
        finally:
            model.train(was_training)
            give_back()
        return [groups[place] for place in range(len(prompts))]

    def turns(self, params: SamplingParams, *, step: int, post: Callable[[Callable[[], None]], None]) -> Turns:
        """Turns of the current weights; they happen in the thread that advances them."""
        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        return EngineTurns(self._policy, params, self.budget, self._proof)

    def _sample(self, asked: Asked, finish: Finish) -> None:
        """All completions, by the way that the model allows; each group to ``finish`` when it is whole.

        Where memory runs out, those of groups that are not whole yet are sampled again, fewer at a time: streams name
        them, so they are the same.
        """
        assert self._policy is not None
        backbone = self._proof.backbone(self._policy)
        left = list(range(len(asked.prompts)))
        while left:
            now = asked.of(left)
            call = call_of([len(prompt) for prompt in now.prompts], now.group_size, now.params)
            rows = min(call.rows, self.budget.rows(self._policy.model, backbone, call))
            if backbone is not None:
                rows = self.budget.capacity(call, rows).slots
            places = list(left)

            def give(place: int, sampled: list[Sampled], places: list[int] = places) -> None:
                finish(places[place], sampled)
                left.remove(places[place])

            with Shortage() as shortage:
                if backbone is not None:
                    self._by_backbone(backbone, now, give, rows)
                else:
                    self._by_module(now, give, rows)
            if shortage.reason is not None:
                release()
                self.budget.shrink(rows, shortage.reason, call)

    def _by_backbone(self, backbone: Backbone, asked: Asked, finish: Finish, rows: int) -> None:
        assert self._policy is not None
        fused = FusedSampling(
            self._policy,
            backbone,
            asked.params,
            end_ids=asked.end_ids,
            max_rows=rows,
            kv_tokens=self.budget.kv_tokens,
        )
        fused.run(asked.prompts, asked.group_size, asked.keys, finish)

    def _by_module(self, asked: Asked, finish: Finish, rows: int) -> None:
        assert self._policy is not None
        group_size = asked.group_size
        at_once, share = max(1, rows // group_size), min(group_size, rows)
        for first in range(0, len(asked.prompts), at_once):
            part = asked.prompts[first : first + at_once]
            sampled: list[list[Sampled]] = [[] for _ in part]
            for start in range(0, group_size, share):  # a group larger than the limit comes in parts
                count = min(share, group_size - start)
                chosen = [
                    (first + place) * group_size + start + index for place in range(len(part)) for index in range(count)
                ]
                module = ModuleSampling(self._policy, asked.params, asked.keys[chosen], asked.end_ids)
                for number, row in enumerate(module.run(part, count)):
                    sampled[number // count].append((row.token_ids, row.logprobs, row.finish_reason or "abort"))
            for place, completions in enumerate(sampled):
                finish(first + place, completions)


def occurrence_indices(prompts: Sequence[Prompt], group_size: int) -> list[list[int]]:
    """The numbers of each prompt's completions in its random streams; a repeated prompt continues the count."""
    seen: Counter[int] = Counter()
    indices: list[list[int]] = []
    for prompt in prompts:
        first = seen[prompt.index] * group_size
        indices.append(list(range(first, first + group_size)))
        seen[prompt.index] += 1
    return indices
