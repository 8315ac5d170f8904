"""What every sampler promises: one suite for all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from sampled_groups import ENDS, TEXTS, completions, ending, sampled, tokens
from served import ThroughServers
from torch import Tensor

from oncurve.core.errors import SamplerError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import Sampler, SamplingRequest, TellsGroups
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]
MakeSampler = Callable[[SamplingParams], Sampler]

samplers = pytest.mark.parametrize(
    "make_sampler",
    [InProcessEngine, partial(InProcessEngine, own_layers=False), ThroughServers],
    ids=["engine", "transformers", "servers"],
)
architectures = pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])


@pytest.fixture(autouse=True)
def servers_end() -> Iterator[None]:
    yield
    ThroughServers.close_all()


@pytest.fixture
def policy(make_policy: MakePolicy) -> TrainedPolicy:
    return ending(make_policy("qwen2"))


def teacher_forced(model: PreTrainedModel, completion: Completion, temperature: float) -> Tensor:
    """Log-probabilities of a completion's tokens by one forward pass over the whole sequence."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.proves("F71", "D13", "D45")
@samplers
@architectures
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_a_teacher_forced_pass_at_the_temperature(
    make_sampler: MakeSampler, architecture: str, temperature: float, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy = ending(make_policy(architecture))
    params = SamplingParams(temperature=temperature, max_completion_tokens=24, top_k=200, top_p=0.95, min_p=0.001)
    for completion in completions(sampled(make_sampler(params), policy, make_prompts(*TEXTS))):
        expected = teacher_forced(policy.model, completion, temperature)
        torch.testing.assert_close(
            torch.tensor(completion.sampler_logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0
        )


@samplers
def test_greedy_log_probabilities_are_at_temperature_one_and_those_under_a_minimum_are_whole(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    params = SamplingParams(temperature=0, max_completion_tokens=12, min_completion_tokens=6)
    for completion in completions(sampled(make_sampler(params), policy, make_prompts(*TEXTS), 2)):
        expected = teacher_forced(policy.model, completion, 1.0)
        torch.testing.assert_close(
            torch.tensor(completion.sampler_logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0
        )


@pytest.mark.proves("F1")
@samplers
def test_groups_come_in_the_order_of_the_prompts_with_everything_that_belongs_to_them(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = make_prompts(*TEXTS, first_index=40)
    groups = sampled(make_sampler(SamplingParams(max_completion_tokens=24)), policy, prompts, 3, version=7)
    assert [group.prompt for group in groups] == prompts
    for group in groups:
        assert [completion.index for completion in group.completions] == [0, 1, 2]
        for completion in group.completions:
            assert completion.prompt_ids == group.prompt.prompt_ids
            assert completion.policy_version == 7
            ends = (tokenizer.eos_token_id, *ENDS)
            shown = [token for token in completion.token_ids if token not in ends]
            assert completion.text == tokenizer.decode(shown)


@pytest.mark.proves("F24", "D38")
@samplers
def test_a_completion_ends_with_its_end_token_or_is_known_to_be_truncated(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    params = SamplingParams(max_completion_tokens=12)
    found = completions(sampled(make_sampler(params), policy, make_prompts(*TEXTS), 8))
    ends = {policy.tokenizer.eos_token_id, *ENDS}
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    for completion in found:
        assert not ends & set(completion.token_ids[:-1])
        if completion.is_truncated:
            assert len(completion.token_ids) == 12
            assert completion.token_ids[-1] not in ends
        else:
            assert completion.token_ids[-1] in ends


@samplers
def test_an_end_token_in_the_last_place_is_no_truncation(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    found = completions(sampled(make_sampler(SamplingParams(max_completion_tokens=1)), policy, make_prompts("Hi"), 64))
    ended = [completion for completion in found if completion.token_ids[0] in ENDS]
    assert ended
    assert all((completion.finish_reason == "stop") == (completion in ended) for completion in found)


@pytest.mark.proves("F71")
@samplers
def test_a_stop_string_ends_a_completion_and_stays_in_its_text_and_tokens(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = make_prompts(*TEXTS)
    free = completions(sampled(make_sampler(SamplingParams(temperature=0, max_completion_tokens=12)), policy, prompts))
    ids = free[0].token_ids
    stop = tokenizer.decode(ids[1:3])
    params = SamplingParams(temperature=0, max_completion_tokens=12, stop=(stop, "never there"))
    stopped = completions(sampled(make_sampler(params), policy, prompts))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == ids[:3]
    assert stopped.text.endswith(stop)


@pytest.mark.proves("F71")
@samplers
def test_nothing_ends_a_completion_before_its_minimum(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts, tokenizer: PreTrainedTokenizerFast
) -> None:
    common = tuple("abcdefghijklmnopqrstuvwxyz ")
    params = SamplingParams(max_completion_tokens=16, min_completion_tokens=9, stop=common)
    found = completions(sampled(make_sampler(params), policy, make_prompts(*TEXTS), 8))
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    for completion in found:
        assert len(completion.token_ids) >= 9
        assert not set(completion.token_ids[:9]) & {tokenizer.eos_token_id, *ENDS}
        by_string = completion.finish_reason == "stop" and completion.token_ids[-1] not in ENDS
        assert not by_string or completion.text.endswith(common)


@samplers
def test_a_stop_string_cannot_begin_in_the_prompt(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = make_prompts("Why?")
    greedy = SamplingParams(temperature=0, max_completion_tokens=6)
    free = completions(sampled(make_sampler(greedy), policy, prompts, 1))[0]
    crossing = "?" + tokenizer.decode(free.token_ids[:1])
    again = completions(sampled(make_sampler(replace(greedy, stop=(crossing,))), policy, prompts, 1))[0]
    assert again.token_ids == free.token_ids


@samplers
def test_a_prompt_that_comes_twice_in_a_step_gets_different_completions(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    [prompt] = make_prompts("Hi")
    groups = sampled(make_sampler(SamplingParams(max_completion_tokens=16)), policy, [prompt, prompt], 4)
    assert len({completion.token_ids for completion in completions(groups)}) == 8


@pytest.mark.proves("F33", "D39")
@samplers
def test_seed_and_step_decide_what_is_sampled(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    prompts, params = make_prompts(*TEXTS), SamplingParams(max_completion_tokens=8, seed=3)
    first = sampled(make_sampler(params), policy, prompts, step=5)
    torch.manual_seed(99)
    assert tokens(sampled(make_sampler(params), policy, prompts, step=5)) == tokens(first)
    assert tokens(sampled(make_sampler(params), policy, prompts, step=6)) != tokens(first)
    assert tokens(sampled(make_sampler(replace(params, seed=4)), policy, prompts, step=5)) != tokens(first)


@samplers
def test_params_of_a_call_replace_the_usual_ones_for_that_call(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler, prompts = make_sampler(SamplingParams(max_completion_tokens=9)), make_prompts("Hi")
    sampler.load_weights(policy, version=0)
    once = sampler.sample(SamplingRequest(prompts, 2, params=SamplingParams(temperature=0, max_completion_tokens=3)))
    assert {len(completion.token_ids) for completion in completions(once)} <= {1, 2, 3}
    assert len({completion.token_ids for completion in completions(once)}) == 1
    usual = completions(sampler.sample(SamplingRequest(prompts, 16)))
    assert max(len(completion.token_ids) for completion in usual) == 9


@pytest.mark.proves("F1", "D39")
@samplers
def test_the_latest_weights_are_sampled_from(
    make_sampler: MakeSampler, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy = make_policy("qwen2", optimizer=OptimizerSettings(learning_rate=0.1))
    sampler, prompts = make_sampler(SamplingParams(temperature=0, max_completion_tokens=8)), make_prompts(*TEXTS)
    before = sampled(sampler, policy, prompts, 1)
    policy.model.get_input_embeddings().weight.sum().backward()
    policy.update()
    after = sampled(sampler, policy, prompts, 1, version=1)
    assert [c.token_ids for c in completions(after)] != [c.token_ids for c in completions(before)]
    assert {c.policy_version for c in completions(after)} == {1}


@samplers
def test_sampling_leaves_the_model_and_the_random_numbers_of_others_alone(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    policy.model.train()
    state, settings = torch.random.get_rng_state(), policy.model.generation_config
    sampled(make_sampler(SamplingParams(max_completion_tokens=4)), policy, make_prompts(*TEXTS))
    assert policy.model.training
    assert policy.model.generation_config is settings
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.proves("D13")
@samplers
def test_generation_settings_that_come_with_a_model_have_no_say(
    make_sampler: MakeSampler, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy, params = make_policy("qwen2"), SamplingParams(max_completion_tokens=8)
    plain = sampled(make_sampler(params), policy, make_prompts(*TEXTS))
    settings = policy.model.generation_config
    assert settings is not None
    used = sorted({token for completion in completions(plain) for token in completion.token_ids})
    settings.update(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=9.0, max_new_tokens=2,
        no_repeat_ngram_size=1, suppress_tokens=used, num_beams=3, max_length=3,
    )  # fmt: skip
    assert tokens(sampled(make_sampler(params), policy, make_prompts(*TEXTS))) == tokens(plain)


@samplers
def test_a_model_without_an_end_token_samples_to_the_limit(
    make_sampler: MakeSampler,
    make_prompts: MakePrompts,
    tiny_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    policy = TrainedPolicy(tiny_model("llama"), endless, optimizer=OptimizerSettings())
    assert policy.model.generation_config is not None
    policy.model.generation_config.eos_token_id = None
    found = completions(sampled(make_sampler(SamplingParams(max_completion_tokens=5)), policy, make_prompts(*TEXTS)))
    assert {(len(completion.token_ids), completion.finish_reason) for completion in found} == {(5, "length")}


@samplers
def test_broken_weights_are_an_error_and_no_completions(
    make_sampler: MakeSampler, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy = make_policy("qwen2")
    with torch.no_grad():
        next(policy.model.parameters()).fill_(math.nan)
    with pytest.raises(SamplerError, match="not finite"):
        sampled(make_sampler(SamplingParams(temperature=0, max_completion_tokens=3)), policy, make_prompts("Hi"), 1)


@samplers
def test_sampling_without_weights_is_refused(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(SamplingParams())
    with pytest.raises(SamplerError, match="load_weights"):
        sampler.sample(SamplingRequest(make_prompts("Hi"), 2))
    sampler.load_weights(policy, version=0)
    sampler.close()
    with pytest.raises(SamplerError, match="load_weights"):
        sampler.sample(SamplingRequest(make_prompts("Hi"), 2))


@samplers
def test_no_prompts_give_no_groups(make_sampler: MakeSampler, policy: TrainedPolicy) -> None:
    assert sampled(make_sampler(SamplingParams()), policy, []) == []


@pytest.mark.parametrize("make_sampler", [InProcessEngine, ThroughServers], ids=["engine", "servers"])
def test_groups_are_told_when_they_are_whole(
    make_sampler: MakeSampler, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    told: list[Group] = []
    sampler = make_sampler(SamplingParams(max_completion_tokens=24))
    sampler.load_weights(policy, version=0)
    listening = sampler.sampler if isinstance(sampler, ThroughServers) else sampler
    assert isinstance(listening, TellsGroups)
    listening.on_group = told.append
    groups = sampler.sample(SamplingRequest(make_prompts(*TEXTS), 4))
    assert sorted(map(id, told)) == sorted(map(id, groups)), "the very groups, each once"
    told.clear()
    listening.on_group = None
    assert tokens(sampler.sample(SamplingRequest(make_prompts(*TEXTS), 4))) == tokens(groups)
    assert told == []
