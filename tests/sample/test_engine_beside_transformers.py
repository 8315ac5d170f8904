"""Does the engine sample what transformers sample, and what the model's probabilities say?"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lanes import gate
from sampled_groups import ENDS, TEXTS, completions, ending, sampled, tokens
from transformers import GenerationConfig

from oncurve.core.records import Prompt, SamplingParams
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]
architectures = pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])


@pytest.fixture
def policy(make_policy: MakePolicy) -> TrainedPolicy:
    return ending(make_policy("qwen2"))


def generated(
    policy: TrainedPolicy, prompts: Sequence[Prompt], params: SamplingParams
) -> list[tuple[tuple[int, ...], list[float]]]:
    """The greedy tokens of transformers' generate and their log-probabilities, up to the first stop string."""
    generate: Any = policy.model.generate
    assert policy.model.generation_config is not None
    ends = policy.model.generation_config.eos_token_id
    found = []
    for prompt in prompts:
        output = generate(
            input_ids=torch.tensor([prompt.prompt_ids]),
            attention_mask=torch.ones(1, len(prompt.prompt_ids), dtype=torch.long),
            generation_config=GenerationConfig(
                max_new_tokens=params.max_completion_tokens,
                min_new_tokens=params.min_completion_tokens or None,
                eos_token_id=ends,
                pad_token_id=0,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
        ids = output.sequences[0, len(prompt.prompt_ids) :].tolist()
        logprobs = [float(row[0].log_softmax(-1)[token]) for row, token in zip(output.logits, ids, strict=True)]
        length = next(
            (n for n in range(max(params.min_completion_tokens, 1), len(ids)) if ends_in_stop(policy, ids[:n], params)),
            len(ids),
        )
        found.append((tuple(ids[:length]), logprobs[:length]))
    return found


def ends_in_stop(policy: TrainedPolicy, ids: list[int], params: SamplingParams) -> bool:
    """The last token has finished a stop string."""
    now, before = (policy.tokenizer.decode(part) for part in (ids, ids[:-1]))
    return any(now.rfind(text) > before.rfind(text) for text in params.stop)


@pytest.mark.proves("F26", "F57")
@architectures
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_completion_tokens=40),
        SamplingParams(temperature=0, max_completion_tokens=24, min_completion_tokens=10, stop=("a", "e", "t", " ")),
    ],
    ids=["free", "minimum_and_stops"],
)
@pytest.mark.parametrize("max_rows", gate([256, 4], 4))
def test_engine_and_transformers_agree_token_for_token_under_greedy(
    architecture: str, params: SamplingParams, max_rows: int, make_policy: MakePolicy, make_prompts: MakePrompts
) -> None:
    policy = ending(make_policy(architecture))
    prompts = make_prompts(*TEXTS, *(f"{'word ' * number}{number} + {number} =" for number in range(12)))
    reference = generated(policy, prompts, params)
    for own_layers in (True, False):
        engine = sampled(InProcessEngine(params, max_rows=max_rows, own_layers=own_layers), policy, prompts, 2)
        for group, (ids, logprobs) in zip(engine, reference, strict=True):
            for completion in group.completions:
                assert completion.token_ids == ids
                assert completion.sampler_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert "stop" in {completion.finish_reason for completion in completions(engine)}


@pytest.mark.parametrize("architecture", gate(["qwen2", "llama", "gpt2"], "qwen2"))
def test_two_hundred_prompts_get_the_greedy_tokens_of_transformers(architecture: str, make_policy: MakePolicy) -> None:
    """Prompts of random tokens and lengths through fewer rows than there are prompts."""
    policy, draw = ending(make_policy(architecture)), random.Random(3)
    prompts = [
        Prompt("", tuple(draw.randrange(256) for _ in range(draw.randint(1, 24))), index, {}) for index in range(200)
    ]
    params = SamplingParams(temperature=0, max_completion_tokens=16)
    engine = sampled(InProcessEngine(params, max_rows=48), policy, prompts, 1)
    assert tokens(engine) == [ids for ids, _ in generated(policy, prompts, params)]
    assert len({len(ids) for ids in tokens(engine)}) > 3, "ragged"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_follow_the_models_exact_distribution(
    temperature: float, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    """Pearson's chi-square of the first token, and of the second behind the most frequent first one."""
    [prompt] = make_prompts("the an")
    params = SamplingParams(max_completion_tokens=2, temperature=temperature, seed=1)
    drawn = tokens(sampled(InProcessEngine(params, max_rows=1000), policy, [prompt], 6000))
    first = Counter(ids[0] for ids in drawn)
    [(common, _)] = Counter({token: count for token, count in first.items() if token not in ENDS}).most_common(1)
    second = Counter(ids[1] for ids in drawn if ids[0] == common)
    for counts, before in ((first, ()), (second, (common,))):
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt.prompt_ids, *before]])).logits[0, -1].double()
        expected = torch.softmax(logits / temperature, dim=-1) * counts.total()
        found = torch.tensor([float(counts[token]) for token in range(len(expected))], dtype=torch.float64)
        often = expected >= 5
        expected = torch.cat([expected[often], expected[~often].sum()[None]])
        found = torch.cat([found[often], found[~often].sum()[None]])
        degrees = len(expected) - 1
        statistic = float(((found - expected).square() / expected).sum())
        assert degrees >= 8
        assert statistic < degrees + 4 * math.sqrt(2 * degrees), (statistic, degrees)
