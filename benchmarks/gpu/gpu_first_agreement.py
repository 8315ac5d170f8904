"""The engine and the trainer on a GPU beside the same on a CPU, with the embedded model.

As a script, with the name of a device: one recorded decode step and one packed backward pass, for a memory checker.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_first_probe import Answer, Setting, judged

from oncurve.core.batch import collate
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.policy.distributed import ALONE
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import parse_config
from oncurve.run.builder import make_policy
from oncurve.sample.engine import InProcessEngine

TIE = 1e-3
"""Where greedy tokens of two devices part, their log-probabilities may differ by so much: a tie, up to rounding."""
MEAN, KL = 0.05, 0.01
"""Largest mean difference of log-probabilities between sampler and trainer, and largest KL, that rounding explains."""


class Heard(logging.Handler):
    """Keeps what oncurve logs: proofs that failed, and numbers of proofs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        logger = logging.getLogger("oncurve")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


@dataclass(frozen=True)
class Gaps:
    """Sampler's against trainer's log-probabilities of the same tokens."""

    mean: float
    largest: float
    kl: float
    """By the estimator that ``mismatch/kl`` takes: mean of ratio - 1 - log ratio."""
    tokens: int


def policy_of(device: str, compute_type: str, model: str = "embedded", **policy: Any) -> TrainedPolicy:
    """A policy to train and to sample from, as a recipe makes it."""
    import yaml

    recipe = {
        "model": model,
        "data": {"type": "word_problems"},
        "rewards": [{"type": "r1_zero"}],
        "policy": {"device": device, "compute_type": compute_type, **policy},
    }
    config = parse_config(yaml.safe_dump(recipe), source="a first hour on a GPU")
    return make_policy(config, processes=ALONE)


def questions(policy: TrainedPolicy, count: int) -> list[Prompt]:
    """Word problems as the recipe writes them, of several lengths."""
    texts = [f"User: Tom has {n} apples and buys {7 * n} more{' each day' * (n % 3)}. How many does Tom have?"
             f"\nAssistant: <think>" for n in range(3, 3 + count)]  # fmt: skip
    return [Prompt(text, tuple(policy.tokenizer(text)["input_ids"]), place, {}) for place, text in enumerate(texts)]


def sample(
    policy: TrainedPolicy, prompts: Sequence[Prompt], group: int, params: SamplingParams, **engine: Any
) -> list[Group]:
    """Completions of the engine."""
    sampler = InProcessEngine(params, **engine)
    sampler.load_weights(policy, version=0)
    return list(sampler.sample(SamplingRequest(prompts, group)))


def gaps(policy: TrainedPolicy, groups: Sequence[Group]) -> Gaps:
    """What the trainer makes of sampled tokens."""
    batch = collate(groups, torch.ones(len(groups), len(groups[0].completions)))
    with torch.no_grad():
        parts = [(part, policy.logprobs(part)[0].float().cpu()) for part in policy.microbatches(batch)]
    ratios = torch.cat([(found - part.sampler_logprobs)[part.mask] for part, found in parts])
    kl = float((ratios.exp() - 1 - ratios).mean())
    return Gaps(float(ratios.abs().mean()), float(ratios.abs().max()), kl, len(ratios))


def compare(setting: Setting) -> Answer:
    """Greedy in float32 on both devices; sampled in bfloat16 against the trainer."""
    heard = Heard()
    count, most = (4, 16) if setting.tiny else (64, 96)
    there, here = (policy_of(device, "float32") for device in (setting.device, "cpu"))
    greedy = SamplingParams(temperature=0.0, max_completion_tokens=most)
    prompts = questions(here, count)
    pairs = list(zip(*(sample(policy, prompts, 1, greedy) for policy in (there, here)), strict=True))
    parted = [gap for one, other in pairs if (gap := parting(one.completions[0], other.completions[0])) is not None]
    drawn = SamplingParams(max_completion_tokens=most)
    found: dict[str, Gaps] = {}
    for kind in ("float32", "bfloat16"):
        policy = policy_of(setting.device, kind)
        found[kind] = gaps(policy, sample(policy, prompts, 2 if setting.tiny else 8, drawn))
    limit = {"float32": (1e-3, 1e-4), "bfloat16": (MEAN, KL)}
    wrong = [
        f"{kind}: sampler and trainer differ by {one.mean:.2g} on average, KL {one.kl:.2g}"
        for kind, one in found.items()
        if not (one.mean <= limit[kind][0] and one.kl <= limit[kind][1])
    ]
    wrong += [f"greedy tokens part where log-probabilities differ by {gap:.2g}" for gap in parted if gap > TIE]
    said = "; ".join(wrong) or (
        f"{count - len(parted)} of {count} greedy completions equal to the CPU's, others part at a tie; sampled: "
        + ", ".join(f"KL {one.kl:.1e} in {kind}" for kind, one in found.items())
    )
    return judged(not wrong, said, gaps={kind: vars(one) for kind, one in found.items()}, log=heard.lines)


def parting(one: Completion, other: Completion) -> float | None:
    """The difference of log-probabilities at the first token that differs; None where there is none."""
    if one.token_ids == other.token_ids:
        return None
    both = zip(one.token_ids, other.token_ids, one.sampler_logprobs, other.sampler_logprobs, strict=False)
    return next((abs(p - q) for token, there, p, q in both if token != there), float("inf"))


def passes(device: str) -> None:
    """A few decode steps and a packed pass with its backward pass, in the types of a run on the device."""
    kind = "bfloat16" if device.startswith("cuda") else "float32"
    policy = policy_of(device, kind)
    groups = sample(policy, questions(policy, 2), 2, SamplingParams(max_completion_tokens=6))
    batch = collate(groups, torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    logprobs, entropy = policy.logprobs(batch)
    policy.backward(-(logprobs * batch.advantages[:, None].to(logprobs)).mean() - 0.01 * entropy.mean())
    norm = float(policy.update()["policy/gradient_norm"].value)
    if not norm > 0:
        raise SystemExit(f"the gradient has a norm of {norm}")
    print(f"decoded and trained on {device}: gradient norm {norm:.3g}")


if __name__ == "__main__":
    passes(sys.argv[1])
