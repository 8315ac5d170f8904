"""The engine: batched sampling inside the training process.

Each prompt is read once for its group, finished rows leave at once and waiting ones enter. The weights are the
policy's own, so there is nothing to synchronize; the memory for keys and values is given back after each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from oncurve.core.errors import SamplerError
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.requests import Request
from oncurve.core.sampler import PolicyView, Sampled, end_token_ids, make_group
from oncurve.core.scheduler import RowScheduler
from oncurve.model.allocator import give_back
from oncurve.sample.budget import RowBudget
from oncurve.sample.layer_decoders import LayerDecoders
from oncurve.sample.proof import Proof
from oncurve.sample.settings import SamplingKeys
from oncurve.sample.streams import stream_keys
from oncurve.sample.turns import EngineTurns, Turns


class InProcessEngine:
    """Samples in process from the policy's own weights."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_rows: int | None = None,
        kv_tokens: int | None = None,
        cuda_graphs: bool = True,
        own_layers: bool = True,
    ) -> None:
        """``max_rows`` completions run at one time, their keys and values in at most ``kv_tokens`` positions.

        Where None is given, a GPU takes what fits into the memory that is free when it samples, other devices the
        usual number of rows and any number of positions.

        Without ``cuda_graphs`` a GPU samples through the model's modules; without ``own_layers`` every device does.
        """
        self.params = params
        self.decoders = LayerDecoders(
            RowBudget(max_rows, kv_tokens), Proof(on_cpu=own_layers, on_gpu=own_layers and cuda_graphs)
        )
        self.on_group: Callable[[Group], None] | None = None
        self._policy: PolicyView | None = None
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
        keys = stream_keys(params.seed, step, numbers, indices).reshape(len(prompts), group_size)
        groups: dict[int, Group] = {}

        def finish(place: int, sampled: list[Sampled]) -> None:
            groups[place] = make_group(
                prompts[place], sampled, tokenizer=policy.tokenizer, end_ids=end_ids, version=self._version
            )
            if self.on_group is not None:
                self.on_group(groups[place])

        scheduler = RowScheduler(policy, self.decoders, is_closed=True)
        for place, prompt in enumerate(prompts):
            scheduler.add(Request(prompt.prompt_ids, keys[place], params, end_ids, on_done=partial(finish, place)))
        was_training = model.training
        model.eval()
        try:
            scheduler.run()
        finally:
            scheduler.forget()
            model.train(was_training)
            give_back()
        return [groups[place] for place in range(len(prompts))]

    def turns(self, params: SamplingParams, *, step: int, post: Callable[[Callable[[], None]], None]) -> Turns:
        """Turns of the current weights; they happen in the thread that advances them."""
        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        return EngineTurns(self._policy, params, self.decoders)


def make_engine(section: SamplingKeys, *, seed: int) -> InProcessEngine:
    """The engine that a recipe's section asks for."""
    return InProcessEngine(
        section.sampling(seed),
        max_rows=None if section.max_rows == "auto" else section.max_rows,
        kv_tokens=section.kv_tokens,
        cuda_graphs=section.cuda_graphs,
        own_layers=section.type != "transformers",
    )


def occurrence_indices(prompts: Sequence[Prompt], group_size: int) -> list[list[int]]:
    """The numbers of each prompt's completions in its random streams; a repeated prompt continues the count."""
    seen: Counter[int] = Counter()
    indices: list[list[int]] = []
    for prompt in prompts:
        first = seen[prompt.index] * group_size
        indices.append(list(range(first, first + group_size)))
        seen[prompt.index] += 1
    return indices
