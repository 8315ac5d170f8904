"""Is the gradient of rft on sampled groups that of a supervised stage on the correct completions? In float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from doubles import in_double

from oncurve.algorithm.presets import build
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, collate
from oncurve.core.records import Completion, Group, Prompt
from oncurve.core.sampler import SamplingRequest
from oncurve.data.demonstrations import render_demonstrations
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.demonstrated import DemonstrationSampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = {"aab": ("b", "cc b", "abc"), "c": ("aaaa", "ca", "b b b b"), "bca": ("c", "a", "bb")}
CORRECT = {("aab", "cc b"), ("aab", "b"), ("c", "ca")}


def gradient(policy: TrainedPolicy, algorithm: Algorithm, batch: Batch) -> dict[str, torch.Tensor]:
    for microbatch in policy.microbatches(batch):
        loss, _ = algorithm.loss(*policy.logprobs(microbatch), microbatch)
        policy.backward(loss)
    weights = dict(policy.trained_model.named_parameters())
    found = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    policy.trained_model.zero_grad()
    return found


def test_they_differ_by_the_share_of_correct_tokens_alone(
    make_policy: Callable[..., TrainedPolicy], tiny_model: Callable[..., PreTrainedModel], tokenizer: Any
) -> None:
    policy = make_policy(in_double(tiny_model("qwen2")), compute_type="float64", tokens_per_microbatch=24)
    groups, rewards, rows = [], [], []
    for place, (prompt, texts) in enumerate(SAMPLED.items()):
        ids = tuple(tokenizer(prompt)["input_ids"])
        completions = []
        for index, text in enumerate(texts):
            tokens = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
            nothing = (0.0,) * len(tokens)
            completions.append(Completion(ids, tokens, text, nothing, "stop", 0, index))
            if (prompt, text) in CORRECT:
                rows.append({"prompt": prompt, "question": prompt, "completion": text})
        groups.append(Group(Prompt(prompt, ids, place), tuple(completions)))
        rewards.append([float((prompt, text) in CORRECT) for text in texts])
    rft = build("rft", group_size=3, max_completion_tokens=8)
    everything = collate(groups, torch.tensor(rewards))
    shown, _ = render_demonstrations(rows, tokenizer)
    stage = build("rft", group_size=1, max_completion_tokens=8)
    request = SamplingRequest([one.prompt for one in shown], 1)
    correct = collate(DemonstrationSampler(shown).sample(request), torch.ones(len(shown), 1))
    assert len(shown) == 3
    share = correct.size.num_tokens / everything.size.num_tokens
    sampled, supervised = gradient(policy, rft, everything), gradient(policy, stage, correct)
    assert sampled.keys() == supervised.keys()
    for name, slope in sampled.items():
        assert (slope - share * supervised[name]).abs().max() < 1e-12, name
        assert supervised[name].abs().max() > 0
