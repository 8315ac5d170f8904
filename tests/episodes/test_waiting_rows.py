"""Do rows that wait for an answer keep what they computed, with the same bits where it had to make room?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_environments import Echoing

from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.requests import PromptState, RowState
from oncurve.core.sampler import SamplingRequest
from oncurve.episodes.dialects import TagDialect
from oncurve.episodes.environments import Kind
from oncurve.episodes.episode_sampler import EpisodeSampler
from oncurve.episodes.episode_setup import EpisodeSetup
from oncurve.episodes.settings import EpisodeSection
from oncurve.model import layer_decoders
from oncurve.model.decoding import LayerDecoder
from oncurve.model.ops_native import NativeOps, operations
from oncurve.model.row_budget import RowMemory
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePrompts = Callable[..., list[Prompt]]
PARAMS = SamplingParams(max_completion_tokens=60, stop=("a", "e", "1", " "), seed=5)


class Deterministic(Echoing):
    """Rows wait for each other at every turn."""

    deterministic = True


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


def sample(policy: TrainedPolicy, prompts: list[Prompt], factory: type, *, max_rows: int = 64) -> list[Group]:
    """Episodes of the in-process engine whose environment answers every turn."""
    setup = EpisodeSetup(
        tools={},
        kinds={"echo": Kind.of("echo", factory)},
        make_dialect=lambda tokenizer: TagDialect(tokenizer, turn="\nU: {user}\nA:"),
        rerender=lambda tokenizer, prompt, words: (prompt.text, prompt.prompt_ids),
        limits=EpisodeSection(max_turns=6),
    )
    sampler = EpisodeSampler(InProcessEngine(PARAMS, max_rows=max_rows), PARAMS, setup)
    sampler.load_weights(policy, version=1)
    groups = sampler.sample(SamplingRequest(prompts, 4, step=2))
    sampler.close()
    return groups


def tokens(groups: list[Group]) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.segments, one.finish_reason) for group in groups for one in group.completions]


def logprobs(groups: list[Group]) -> list[float]:
    return [value for group in groups for one in group.completions for value in one.sampler_logprobs]


@pytest.mark.parametrize("factory", [Deterministic, Echoing])
@pytest.mark.parametrize("limit", ["none", "some"])
def test_rows_that_had_to_make_room_get_the_same_bits(
    limit: str,
    factory: type,
    policy: TrainedPolicy,
    make_prompts: MakePrompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = make_prompts(*(f"prompt {place}" for place in range(6)))
    read: list[int] = []
    prefill, put_row = LayerDecoder.prefill, LayerDecoder.put_row

    def counted(self: LayerDecoder, prompts: Any, slots: Any) -> Any:
        read.extend(map(len, prompts))
        return prefill(self, prompts, slots)

    given: list[int] = []

    def put(self: LayerDecoder, slot: int, held: Any) -> None:
        given.append(slot)
        put_row(self, slot, held)

    prompt, prompt_bytes = LayerDecoder.prompt, []

    def measured(self: LayerDecoder, slot: int) -> Any:
        held = prompt(self, slot)
        prompt_bytes.append(sum(keys.nbytes + values.nbytes for keys, values in held))
        return held

    monkeypatch.setattr(LayerDecoder, "prefill", counted)
    monkeypatch.setattr(LayerDecoder, "prompt", measured)
    monkeypatch.setattr(LayerDecoder, "put_row", put)
    kept = sample(policy, prompts, factory)
    returns = sum(sum(part.is_policy for part in one.segments) - 1 for group in kept for one in group.completions)
    assert returns > 15
    assert len(given) == returns
    assert sorted(read) == sorted(4 * [len(prompt.prompt_ids) for prompt in prompts]), "no turn is read again"
    given.clear()
    one_row = sum(part.nbytes for part in _largest_row(policy)) + max(prompt_bytes)
    monkeypatch.setattr(layer_decoders, "RowMemory", partial(RowMemory, 0 if limit == "none" else 4 * one_row))
    again = sample(policy, prompts, factory)
    assert len(given) == 0 if limit == "none" else 0 < len(given) < returns
    assert tokens(again) == tokens(kept)
    if isinstance(operations(torch.float32), NativeOps) and factory is Deterministic:
        assert logprobs(again) == logprobs(kept)
    else:  # who is in the batch decides how the products with the vocabulary are rounded
        assert logprobs(again) == pytest.approx(logprobs(kept), abs=1e-5)


def test_a_prompt_is_kept_until_its_last_row_is_over() -> None:
    prompt, rows = PromptState((1, 2)), [RowState(), RowState()]
    memory = RowMemory()
    for row in rows:
        row.begin(prompt)
        memory.keep(row, [torch.zeros(2)], 1)
    prompt.copies = [(torch.zeros(4), torch.zeros(4))]
    for _ in range(2):
        rows[0].end()
    assert prompt.copies
    rows[1].end()
    assert not prompt.copies


def _largest_row(policy: TrainedPolicy) -> list[torch.Tensor]:
    """As much as the keys and values of 32 tokens."""
    config = policy.model.config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return [torch.zeros(2, 32, width) for _ in range(config.num_hidden_layers)]


def test_few_slots_for_many_rows_change_nothing(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    prompts = make_prompts(*(f"prompt {place}" for place in range(6)))
    many, few = (sample(policy, prompts, Deterministic, max_rows=rows) for rows in (64, 3))
    assert tokens(few) == tokens(many)
    assert logprobs(few) == pytest.approx(logprobs(many), abs=1e-5)
