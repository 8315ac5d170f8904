"""Completions of a past run sampled again, under weights that may have changed in their middle.

The record says which version took over at which token. The same training gives the weights of each version once more;
while it has them, every row is continued as far as they went. Keys and values stay what they were, as in the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from oncurve.core.draw import GOLDEN, stream_keys
from oncurve.core.errors import DataError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.requests import Request, RowState, Sampled
from oncurve.core.sampler import PolicyView, Sampler, SamplingRequest, end_token_ids
from oncurve.core.scheduler import RowScheduler
from oncurve.history.past import PastRun
from oncurve.model.layer_decoders import LayerDecoders
from oncurve.model.ops_native import NativeOps, operations
from oncurve.model.row_budget import RowMemory
from oncurve.model.weights import supports
from oncurve.observe.step_record import read_step
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.schema import Config


def samples_alike(config: Config, policy: TrainedPolicy) -> bool:
    """Completions of our servers for a recipe have the same bits here: they had all digits of the weights, and compiled
    kernels on a CPU, with which a row does not depend on those beside it."""
    rollouts, model = config.rollouts, policy.trained_model
    is_ours = rollouts.own_servers > 0 and not rollouts.servers and rollouts.registry is None
    is_plain = not rollouts.has_episodes and rollouts.deltas is None and config.policy.lora is None
    is_here = model.device.type == "cpu" and supports(policy.model) and policy.processes.count == 1
    has_kernels = all(isinstance(operations(kind, "cpu"), NativeOps) for kind in (torch.float32, torch.bfloat16))
    return is_ours and is_plain and is_here and has_kernels and config.run.refill_rounds == 0


@dataclass(eq=False)
class _Row:
    """A completion as far as it is sampled again."""

    state: RowState = field(default_factory=RowState)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, index: int, sampled: Sampled) -> None:
        """Append the tokens that the next weights sampled."""
        self.token_ids += sampled[0]
        self.logprobs += sampled[1]


class RecordedSampler:
    """The completions that a run recorded, step by step."""

    def __init__(self, run: PastRun, measuring: Sampler) -> None:
        """``measuring`` samples for measurements."""
        self.run, self.measuring = run, measuring

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """For measurements alone: the tokens of training are known."""
        self.measuring.load_weights(policy, version)

    def sample(self, request: SamplingRequest) -> list[Group]:
        """The groups of a step; completions of a measurement are sampled."""
        if request.params is not None:
            return self.measuring.sample(request)
        return self.groups_of(request.step, request.prompts)

    def groups_of(self, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        """The recorded groups of a step, counted from 0. Raises DataError where they are not those of the prompts."""
        groups = self.record_of(step)
        if [group.prompt.index for group in groups] != [prompt.index for prompt in prompts]:
            raise DataError(f"{self.run.path}: the record of step {step + 1} holds other prompts than its data")
        return list(groups)

    def record_of(self, step: int) -> Sequence[Group]:
        """The record of a step, from its file."""
        return read_step(self.run.path, step + 1).groups

    def close(self) -> None:
        """Give the memory back."""
        self.measuring.close()


class AgainSampler(RecordedSampler):
    """Samples the completions of steps ``first`` to ``last`` again, counted from 0. Those that older weights began than
    those of ``first`` are taken from the record."""

    def __init__(self, run: PastRun, params: SamplingParams, measuring: Sampler, *, first: int, last: int) -> None:
        """``measuring`` samples for measurements."""
        super().__init__(run, measuring)
        self.params, self.first, self.last = params, first, last
        self.num_again = self.num_recorded = 0
        """Completions of the steps that were asked for."""
        self._steps = {step: read_step(run.path, step + 1).groups for step in range(first, last + 1)}
        self._rows: dict[tuple[int, int, int], _Row] = {}
        self._version = first - 1
        self._scheduler: RowScheduler | None = None

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Continue every row that these weights continued."""
        self.measuring.load_weights(policy, version)
        if version <= self._version:
            return
        self._version = version
        was_training = policy.model.training
        policy.model.eval()
        if self._scheduler is None:
            self._scheduler = RowScheduler(policy, LayerDecoders(memory=RowMemory(2**62)), version=str(version))
            all_of = [
                completion for groups in self._steps.values() for group in groups for completion in group.completions
            ]
            longest = max(len(completion.token_ids) for completion in all_of)
            self._scheduler.expect(max(len(completion.prompt_ids) for completion in all_of), longest + 1)
        else:
            self._scheduler.renew(str(version))
        end_ids = end_token_ids(policy.model, policy.tokenizer)
        for step in range(version, self.last + 1):
            indices = self._as_requested(step).completion_indices()
            for index, group in enumerate(self._steps[step]):
                for completion in group.completions:
                    self._continue(step, index, completion, group.prompt, indices[index][completion.index], end_ids)
        self._scheduler.run()
        policy.model.train(was_training)

    def _as_requested(self, step: int) -> SamplingRequest:
        groups = self._steps[step]
        return SamplingRequest([group.prompt for group in groups], len(groups[0].completions), step)

    def _continue(
        self, step: int, index: int, completion: Completion, prompt: Prompt, number: int, end_ids: tuple[int, ...]
    ) -> None:
        spans = completion.versions or ((0, completion.policy_version),)
        matching = [at for at, (_, version) in enumerate(spans) if version == self._version]
        if not matching or completion.policy_version < self.first or not completion.token_ids:
            return
        row = self._rows.setdefault((step, index, completion.index), _Row())
        start, is_last = spans[matching[0]][0], matching[0] == len(spans) - 1
        end = len(completion.token_ids) if is_last else spans[matching[0] + 1][0]
        if len(row.token_ids) != start:  # it is another one by now, which will be said
            return
        key = stream_keys(self.params.seed, step, np.array([prompt.index]), np.array([number]))
        least = max(0, self.params.min_completion_tokens - start)
        params = replace(self.params, min_completion_tokens=least).limited_to(end - start)
        assert self._scheduler is not None
        self._scheduler.add(
            Request(
                (*completion.prompt_ids, *row.token_ids),
                key + np.uint64(int(GOLDEN) * start % 2**64),  # the numbers of its stream from there on
                params,
                end_ids,
                on_row=row.take,
                rows=(row.state,),
                keeps=not is_last,
            )
        )

    def groups_of(self, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        """The groups of a step with the tokens that were sampled again. Take them once: what they held is freed."""
        again, groups = partial(self._again, step), super().groups_of(step, prompts)
        return [
            Group(prompt, tuple(again(index, completion) for completion in group.completions))
            for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        ]

    def record_of(self, step: int) -> Sequence[Group]:
        """The record of a step, as it was read at the beginning."""
        return self._steps[step]

    def _again(self, step: int, index: int, completion: Completion) -> Completion:
        row = self._rows.pop((step, index, completion.index), None)
        if row is None:
            self.num_recorded += 1
            return completion
        self.num_again += 1
        row.state.end()
        return replace(completion, token_ids=row.token_ids, sampler_logprobs=row.logprobs)

    def close(self) -> None:
        """Give the memory back."""
        if self._scheduler is not None:
            self._scheduler.forget()
        super().close()


def oldest_version(run: PastRun, step: int) -> int:
    """The oldest weights that sampled a token of a step, counted from 1."""
    groups = read_step(run.path, step).groups
    return min((completion.policy_version for group in groups for completion in group.completions), default=step - 1)
