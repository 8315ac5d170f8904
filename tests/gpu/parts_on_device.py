"""Training with weights in parts on a pretend GPU, as the first of two processes, of which the second is not there."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from oncurve.core.batch import Batch, collate
from oncurve.core.records import Completion, Group, Prompt
from oncurve.core.sampler import SamplingRequest
from oncurve.policy.distributed import Processes
from oncurve.recipe.load import parse_config
from oncurve.run.builder import make_policy, make_sampler

RECIPE = """
model: embedded
data: {{type: word_problems}}
rewards: [{{type: r1_zero}}]
algorithm: {{type: grpo, group_size: 4, kl_coef: {kl_coef}}}
policy: {{device: cuda, parallel: fsdp, {policy}}}
rollouts: {{type: servers, servers: ["http://127.0.0.1:1"]}}
"""


def join() -> Processes:
    """Two processes. What the other one would give is what this one has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    _fsdp_param.free_storage = lambda tensor: None  # type: ignore[assignment]  # a pretend tensor keeps its memory
    return Processes(0, 2)


def batch() -> Batch:
    """Two groups of random tokens, of different length."""
    draw, groups = random.Random(0), []
    for index in range(2):
        prompt = Prompt("", tuple(draw.randrange(5, 200) for _ in range(20 + 10 * index)), index)
        ids = [tuple(draw.randrange(5, 200) for _ in range(draw.randint(3, 9))) for _ in range(4)]
        logprobs = [tuple(-1.0 for _ in row) for row in ids]
        groups.append(
            Group(
                prompt,
                tuple(
                    Completion(prompt.prompt_ids, row, "", of_row, "stop", 0, place)
                    for place, (row, of_row) in enumerate(zip(ids, logprobs, strict=True))
                ),
            )
        )
    return collate(groups, torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2))


def update(policy: str, kl_coef: float) -> dict[str, Any]:
    """How a policy of a recipe trains, and one update of it."""
    processes = join()
    made = make_policy(
        parse_config(RECIPE.format(policy=policy, kl_coef=kl_coef)),
        with_reference=bool(kl_coef),
        processes=processes,
    )
    fixed = made.annotate(batch(), old=True, entropy=False, reference=bool(kl_coef))
    gaps = []
    for part in made.microbatches(fixed):
        logprobs, _ = made.logprobs(part)
        assert part.old_logprobs is not None
        gaps.append(float((logprobs.detach() - part.old_logprobs.to(logprobs.device))[part.mask].abs().max()))
        made.backward((logprobs * part.advantages[:, None].to(logprobs.device)).sum() / 100)
    parts = {parameter.device.type for parameter in made.trained_model.parameters() if parameter.ndim > 1}
    have_gradients = all(parameter.grad is not None for parameter in made.trained_model.parameters())
    made.update()  # gradients that the other process had no part in are no numbers, and nothing moves
    return {
        "packed": made.is_packed,
        "road": str(made.scoring_path),
        "places": parts,
        "gradients": have_gradients,
        "gaps": gaps,
    }


def served(model: str) -> dict[str, float]:
    """Bytes per weight of a model that is only sampled from, before and while it samples one short completion."""
    config = parse_config(
        "{data: {type: word_problems}}",
        [f"model={model}", "policy.device=cuda", "rollouts.type=engine", "rollouts.max_completion_tokens=2"],
    )
    before = torch.cuda.memory_allocated()
    policy = make_policy(config, is_trained=False)
    weights = sum(weight.numel() for weight in policy.model.parameters())
    loaded = torch.cuda.memory_allocated() - before
    sampler = make_sampler(config)
    sampler.load_weights(policy, 0)
    torch.cuda.reset_peak_memory_stats()
    sampler.sample(SamplingRequest([Prompt("", (5, 6, 7), 0)], 1))
    return {"loaded": loaded / weights, "sampling": (torch.cuda.max_memory_allocated() - before) / weights}
